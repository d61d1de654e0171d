#include "comm/window_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <random>
#include <string>

#include "comm/node/control_segment.h"
#include "device/memory_advice.h"
#include "tranche/core/error.h"
#include "tranche/core/shape.h"
#include "tranche/device/ledger.h"
#include "tranche/device/memory_resources.h"

namespace tranche::comm {

namespace {
/// Smaller tensors are copied, which costs less than a page each.
constexpr std::int64_t least_piece = 64 << 10;
constexpr std::int64_t huge_page = std::int64_t{2} << 20;
/// Allocations start at multiples of this, so that they can have huge pages.
constexpr std::int64_t piece_alignment = huge_page;

std::int64_t whole_pages(std::int64_t bytes) {
  return round_up(std::max<std::int64_t>(bytes, 1), static_cast<std::int64_t>(sysconf(_SC_PAGESIZE)));
}

/// Makes the whole 2 MiB blocks of a new allocation huge pages, if the system can; otherwise only speed is
/// lost.
void take_huge_pages(unsigned char* data, std::int64_t bytes) {
  const std::int64_t blocks = bytes / huge_page;
  if (blocks == 0) return;
  madvise(data, static_cast<std::size_t>(bytes), MADV_HUGEPAGE);
  constexpr int collapse = 25;  // MADV_COLLAPSE; older headers lack it
  // It works block by block: a block without any page cannot be collapsed. A system without free huge pages,
  // or without support, is asked only once.
  for (std::int64_t block = 0; block < blocks; ++block) {
    unsigned char* start = data + block * huge_page;
    *static_cast<volatile unsigned char*>(start) = 0;
    if (madvise(start, static_cast<std::size_t>(huge_page), collapse) != 0) return;
  }
}
}  // namespace

void* map_window(int file, std::int64_t offset, std::int64_t bytes, int protection) {
  const auto size = static_cast<std::size_t>(bytes);
  void* data = MAP_FAILED;
  if (bytes < huge_page) {
    data = mmap(nullptr, size, protection, MAP_SHARED, file, offset);
    return data == MAP_FAILED ? nullptr : data;
  }
  const std::size_t reserved = size + static_cast<std::size_t>(huge_page);
  void* start = mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return nullptr;
  const auto address = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(start));
  const auto head = static_cast<std::size_t>(round_up(address, huge_page) - address);
  unsigned char* place = static_cast<unsigned char*>(start) + head;
  data = mmap(place, size, protection, MAP_SHARED | MAP_FIXED, file, offset);
  if (data == MAP_FAILED) {
    const int reason = errno;
    munmap(start, reserved);
    errno = reason;
    return nullptr;
  }
  if (head > 0) munmap(start, head);
  if (const std::size_t tail = static_cast<std::size_t>(huge_page) - head; tail > 0)
    munmap(place + size, tail);
  return data;
}

WindowMemory::WindowMemory(Tier tier) : ordinary_(make_host_resource(tier)) {
  // The name appears in /proc/PID/maps of this process and of those that map it.
  file_ = memfd_create(("tranche window of " + std::to_string(getpid())).c_str(), MFD_CLOEXEC);
  if (file_ < 0) return;
  void* page = nullptr;
  constexpr std::int64_t segment_bytes = ControlSegment::file_bytes;
  if (ftruncate(file_, segment_bytes) == 0)
    page = map_window(file_, 0, segment_bytes, PROT_READ | PROT_WRITE);
  if (page == nullptr) {
    close(file_);
    file_ = -1;
    return;
  }
  segment_ = new (page) ControlSegment;
  std::random_device entropy;
  segment_->token = (std::uint64_t{entropy()} << 32) | entropy();
  end_ = piece_alignment;
}

WindowMemory::~WindowMemory() {
  if (segment_ != nullptr) munmap(segment_, ControlSegment::file_bytes);
  if (file_ >= 0) close(file_);
}

bool WindowMemory::in_window(const AllocationRequest& request) const {
  if (file_ < 0 || request.bytes <= 0) return false;
  switch (request.category) {
    case Category::communication:
      return true;
    case Category::parameters:
    case Category::gathered:
    case Category::gradients:
      return request.bytes >= least_piece;
    default:
      return request.tag == step_arena_tag && request.bytes >= least_piece;
  }
}

void* WindowMemory::allocate(const AllocationRequest& request) {
  if (!in_window(request)) return ordinary_->allocate(request);
  const std::int64_t bytes = whole_pages(request.bytes);
  const std::lock_guard lock(mutex_);
  void* data = nullptr;
  if (ftruncate(file_, end_ + bytes) == 0) data = map_window(file_, end_, bytes, PROT_READ | PROT_WRITE);
  if (data == nullptr) {
    const std::string reason = std::strerror(errno);
    throw OutOfMemory(
        "'" + std::string(request.tag) + "' (" + std::string(name_of(request.category)) + ") asks for " +
        format_bytes(request.bytes) + " (" + std::to_string(request.bytes) +
        " B) of memory shared with the ranks of this node, which the operating system refused: " + reason +
        "; " + std::string(detail::memory_advice(tier(), request.category)));
  }
  take_huge_pages(static_cast<unsigned char*>(data), bytes);
  allocations_.emplace(static_cast<const unsigned char*>(data), Allocation{end_, bytes});
  end_ = round_up(end_ + bytes, piece_alignment);
  return data;
}

void WindowMemory::deallocate(void* pointer, const AllocationRequest& request) noexcept {
  if (!in_window(request)) return ordinary_->deallocate(pointer, request);
  const std::lock_guard lock(mutex_);
  const auto found = allocations_.find(static_cast<const unsigned char*>(pointer));
  if (found == allocations_.end()) return;
  const auto [offset, bytes] = found->second;
  munmap(pointer, static_cast<std::size_t>(bytes));
  // The pages are freed although peers may still have them mapped. The file is not truncated: a peer that
  // reads late, after a failure, then reads zeros instead of past the end of the file, which would kill it by
  // a signal.
  (void)fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes);
  allocations_.erase(found);
}

std::int64_t WindowMemory::resident_bytes() const noexcept {
  struct stat status {};
  if (file_ < 0 || fstat(file_, &status) != 0) return 0;
  return std::int64_t{status.st_blocks} * 512;
}

std::optional<WindowMemory::Place> WindowMemory::find(const void* data, std::int64_t bytes) const {
  const auto* begin = static_cast<const unsigned char*>(data);
  const std::lock_guard lock(mutex_);
  auto found = allocations_.upper_bound(begin);
  if (found == allocations_.begin()) return std::nullopt;
  --found;
  const std::int64_t offset = begin - found->first;
  if (offset + bytes > found->second.bytes) return std::nullopt;
  return Place{found->second.offset, found->second.bytes, offset};
}

}  // namespace tranche::comm
