// The upstream resources: process memory and the simulated memory of the meta device.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "device/memory_advice.h"
#include "tranche/core/error.h"
#include "tranche/core/shape.h"
#include "tranche/device/memory_resources.h"

namespace tranche {
namespace {

constexpr std::int64_t mebibyte = std::int64_t{1} << 20;
constexpr std::int64_t huge_page = 2 * mebibyte;
// Requests from this size on use mmap, so that freeing them returns memory to the system at once. The address
// sanitizer detects overruns only in memory from malloc, so its threshold is higher.
#if defined(__SANITIZE_ADDRESS__)
constexpr std::int64_t map_threshold = 1024 * mebibyte;
#else
constexpr std::int64_t map_threshold = mebibyte;
#endif
// A size larger than any machine's memory; it keeps the rounding below from overflowing.
constexpr std::int64_t largest_request = std::int64_t{1} << 60;

void check_request(const AllocationRequest& request) {
  if (request.bytes < 0) {
    throw InvalidArgument("allocation '" + std::string(request.tag) + "' asks for " +
                          std::to_string(request.bytes) + " bytes");
  }
}

std::int64_t mapped_bytes(std::int64_t bytes) {
  return round_up(bytes, static_cast<std::int64_t>(sysconf(_SC_PAGESIZE)));
}

// Maps `bytes` (a multiple of the page size); from 2 MiB on the mapping is aligned to huge pages and madvise
// asks for them.
void* map_pages(std::int64_t bytes) {
  const bool large = bytes >= huge_page;
  const std::int64_t reserve = large ? bytes + huge_page : bytes;
  void* start = mmap(nullptr, static_cast<std::size_t>(reserve), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) return nullptr;
  if (!large) return start;
  const auto address = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(start));
  const std::int64_t head = round_up(address, huge_page) - address;
  char* aligned = static_cast<char*>(start) + head;
  if (head > 0) munmap(start, static_cast<std::size_t>(head));
  if (const std::int64_t tail = huge_page - head; tail > 0) {
    munmap(aligned + bytes, static_cast<std::size_t>(tail));
  }
  madvise(aligned, static_cast<std::size_t>(bytes), MADV_HUGEPAGE);  // advice: failure costs speed only
  return aligned;
}

class HostResource : public MemoryResource {
 public:
  explicit HostResource(Tier tier) : tier_(tier) {}
  Tier tier() const override { return tier_; }

  void* allocate(const AllocationRequest& request) override {
    check_request(request);
    void* pointer = nullptr;
    errno = ENOMEM;
    if (request.bytes < map_threshold) {
      // Every allocation takes at least one unit, so that empty ones have distinct addresses.
      const std::int64_t bytes = std::max(memory_alignment, aligned_bytes(request.bytes));
      pointer =
          std::aligned_alloc(static_cast<std::size_t>(memory_alignment), static_cast<std::size_t>(bytes));
    } else if (request.bytes <= largest_request) {
      pointer = map_pages(mapped_bytes(request.bytes));
    }
    if (pointer == nullptr) {
      const std::string reason = std::strerror(errno);
      throw OutOfMemory("'" + std::string(request.tag) + "' (" + std::string(name_of(request.category)) +
                        ") asks for " + format_bytes(request.bytes) + " (" + std::to_string(request.bytes) +
                        " B) of " + std::string(name_of(tier_)) +
                        " memory, which the operating system refused: " + reason + "; " +
                        std::string(detail::memory_advice(tier_, request.category)));
    }
    return pointer;
  }

  void deallocate(void* pointer, const AllocationRequest& request) noexcept override {
    if (request.bytes < map_threshold) {
      std::free(pointer);
    } else {
      munmap(pointer, static_cast<std::size_t>(mapped_bytes(request.bytes)));
    }
  }

 private:
  Tier tier_;
};

class MetaResource : public MemoryResource {
 public:
  explicit MetaResource(Tier tier) : tier_(tier) {}
  Tier tier() const override { return tier_; }

  void* allocate(const AllocationRequest& request) override {
    check_request(request);
    const std::int64_t bytes =
        std::max(memory_alignment, aligned_bytes(std::min(request.bytes, largest_request)));
    return reinterpret_cast<void*>(static_cast<std::intptr_t>(next_.fetch_add(bytes)));
  }
  void deallocate(void*, const AllocationRequest&) noexcept override {}

 private:
  Tier tier_;
  // Addresses beyond those of processors, so that an access faults; they increase, so that none is used
  // twice.
  std::atomic<std::int64_t> next_{std::int64_t{1} << 58};
};

}  // namespace

std::unique_ptr<MemoryResource> make_host_resource(Tier tier) {
  return std::make_unique<HostResource>(tier);
}

std::unique_ptr<MemoryResource> make_meta_resource(Tier tier) {
  return std::make_unique<MetaResource>(tier);
}

}  // namespace tranche
