// Pinned memory: small requests share one registered block (the slab); each large request gets its own
// mapping.
#include <fmt/core.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>

#include "device/cuda/cuda_memory.h"
#include "device/range_placer.h"
#include "tranche/core/error.h"
#include "tranche/core/shape.h"
#include "tranche/device/ledger.h"

namespace tranche::cuda {
namespace {

constexpr std::int64_t huge_page = std::int64_t{2} << 20;
constexpr std::int64_t slab_bytes = 4 * huge_page;
// The largest request that the slab serves. Rounding a larger one to pages wastes less than a sixteenth.
constexpr std::int64_t largest_in_slab = 64 << 10;
constexpr std::int64_t largest_request = std::int64_t{1} << 60;

std::int64_t mapped_bytes(std::int64_t bytes) {
  return round_up(std::max<std::int64_t>(bytes, 1), static_cast<std::int64_t>(sysconf(_SC_PAGESIZE)));
}

// `bytes` is a multiple of the page size; from 2 MiB on aligned to huge pages, and advised to use them.
char* map_pages(std::int64_t bytes) {
  const bool large = bytes >= huge_page;
  const std::int64_t reserve = large ? bytes + huge_page : bytes;
  void* start = mmap(nullptr, static_cast<std::size_t>(reserve), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) return nullptr;
  if (!large) return static_cast<char*>(start);
  const auto address = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(start));
  const std::int64_t head = round_up(address, huge_page) - address;
  char* aligned = static_cast<char*>(start) + head;
  if (head > 0) munmap(start, static_cast<std::size_t>(head));
  if (const std::int64_t tail = huge_page - head; tail > 0)
    munmap(aligned + bytes, static_cast<std::size_t>(tail));
  madvise(aligned, static_cast<std::size_t>(bytes), MADV_HUGEPAGE);  // advice: failure costs speed only
  return aligned;
}

[[noreturn]] void refuse(const AllocationRequest& request, std::int64_t pinned, const std::string& reason) {
  throw OutOfMemory(
      fmt::format("'{}' ({}) asks for {} ({} B) of host memory, which could not be had or pinned: {}; this "
                  "rank has pinned {} "
                  "({} B); use more nodes, fewer ranks on each, or offload less",
                  request.tag, name_of(request.category), format_bytes(request.bytes), request.bytes, reason,
                  format_bytes(pinned), pinned));
}

}  // namespace

struct PinnedMemory::Impl : detail::PageSource {
  std::shared_ptr<CudaState> state;
  mutable std::mutex mutex;
  std::map<const char*, std::int64_t> regions;  // start -> bytes of each registration
  std::int64_t pinned = 0;
  char* slab = nullptr;
  std::unique_ptr<detail::RangePlacer> placer;  // places requests in the slab, which is its only page
  std::string reason;                           // why the last request was refused
  const bool exact = wants_plain_memory();      // cudaHostAlloc for every request

  std::int64_t page_bytes() const override { return slab_bytes; }
  std::int64_t pages() const override { return 1; }
  bool map(std::int64_t, std::int64_t) override { return (slab = take(slab_bytes)) != nullptr; }
  void unmap(std::int64_t, std::int64_t) noexcept override {
    drop(slab, slab_bytes);
    slab = nullptr;
  }

  void unregister(char* start, std::int64_t bytes) noexcept {
    state->make_current_quietly();
    for (std::int64_t done = 0; done < bytes; done += piece_bytes) cudaHostUnregister(start + done);
  }

  // Allocates and registers `bytes`, a multiple of the page size; returns null and sets the reason on
  // failure.
  char* take(std::int64_t bytes) {
    char* start = map_pages(bytes);
    if (start == nullptr) {
      reason = std::strerror(errno);
      return nullptr;
    }
    state->make_current();
    for (std::int64_t done = 0; done < bytes; done += piece_bytes) {
      const std::int64_t piece = std::min(piece_bytes, bytes - done);
      const cudaError_t error = cudaHostRegister(start + done, static_cast<std::size_t>(piece),
                                                 cudaHostRegisterPortable | cudaHostRegisterMapped);
      if (error == cudaSuccess) continue;
      cudaGetLastError();
      if (done > 0) unregister(start, done);
      munmap(start, static_cast<std::size_t>(bytes));
      if (error != cudaErrorMemoryAllocation)
        check(error, "cudaHostRegister", fmt::format("pinning {} B", bytes));
      reason = error_text(error, "cudaHostRegister", fmt::format("pinning {} B", bytes));
      return nullptr;
    }
    regions.emplace(start, bytes);
    pinned += bytes;
    return start;
  }

  void drop(char* start, std::int64_t bytes) noexcept {
    unregister(start, bytes);
    munmap(start, static_cast<std::size_t>(bytes));
    regions.erase(start);
    pinned -= bytes;
  }

  char* take_exactly(std::int64_t bytes) {
    state->make_current();
    void* start = nullptr;
    const cudaError_t error =
        cudaHostAlloc(&start, static_cast<std::size_t>(bytes), cudaHostAllocPortable | cudaHostAllocMapped);
    if (error != cudaSuccess) {
      cudaGetLastError();
      reason = error_text(error, "cudaHostAlloc", fmt::format("pinning {} B", bytes));
      return nullptr;
    }
    regions.emplace(static_cast<char*>(start), bytes);
    pinned += bytes;
    return static_cast<char*>(start);
  }

  void drop_exactly(char* start) noexcept {
    state->make_current_quietly();
    const auto region = regions.find(start);
    pinned -= region->second;
    regions.erase(region);
    cudaFreeHost(start);
  }

  bool in_slab(const char* pointer) const noexcept {
    return slab != nullptr && pointer >= slab && pointer < slab + slab_bytes;
  }
};

PinnedMemory::PinnedMemory(std::shared_ptr<CudaState> state) : impl_(std::make_unique<Impl>()) {
  impl_->state = std::move(state);
  impl_->placer = std::make_unique<detail::RangePlacer>(*impl_);
}

PinnedMemory::~PinnedMemory() {
  impl_->placer.reset();
}

void* PinnedMemory::allocate(const AllocationRequest& request) {
  if (request.bytes < 0) {
    throw InvalidArgument(fmt::format("allocation '{}' asks for {} bytes", request.tag, request.bytes));
  }
  std::lock_guard lock(impl_->mutex);
  if (impl_->exact && request.bytes <= largest_request) {
    char* const pointer = impl_->take_exactly(std::max<std::int64_t>(1, request.bytes));
    if (pointer == nullptr) refuse(request, impl_->pinned, impl_->reason);
    return pointer;
  }
  if (request.bytes <= largest_in_slab) {
    if (const auto offset = impl_->placer->place(request.bytes)) return impl_->slab + *offset;
  }
  if (request.bytes > largest_request) refuse(request, impl_->pinned, "no machine has this much");
  char* pointer = impl_->take(mapped_bytes(request.bytes));
  if (pointer == nullptr) refuse(request, impl_->pinned, impl_->reason);
  return pointer;
}

void PinnedMemory::deallocate(void* pointer, const AllocationRequest& request) noexcept {
  std::lock_guard lock(impl_->mutex);
  char* start = static_cast<char*>(pointer);
  if (impl_->exact) {
    impl_->drop_exactly(start);
  } else if (impl_->in_slab(start)) {
    impl_->placer->free(start - impl_->slab, request.bytes);
  } else {
    impl_->drop(start, mapped_bytes(request.bytes));
  }
}

std::int64_t PinnedMemory::bytes_in_registration(const void* pointer) const noexcept {
  const char* address = static_cast<const char*>(pointer);
  std::lock_guard lock(impl_->mutex);
  auto region = impl_->regions.upper_bound(address);
  if (region == impl_->regions.begin()) return 0;
  --region;
  const std::int64_t offset = address - region->first;
  if (offset >= region->second) return 0;
  return std::min(region->second, (offset / piece_bytes + 1) * piece_bytes) - offset;
}

std::int64_t PinnedMemory::pinned_bytes() const noexcept {
  std::lock_guard lock(impl_->mutex);
  return impl_->pinned;
}

}  // namespace tranche::cuda
