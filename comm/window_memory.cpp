#include "tranche/comm/window_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <random>
#include <string>

#include "tranche/core/error.h"
#include "tranche/core/shape.h"
#include "tranche/device/ledger.h"
#include "tranche/device/memory_resources.h"

namespace tranche {

namespace {
/// Smaller tensors are copied, which costs less than a page of their own.
constexpr std::int64_t least_piece = 64 << 10;
/// Pieces start at multiples of this, so that a system that has huge pages for such files can use them.
constexpr std::int64_t piece_alignment = std::int64_t{2} << 20;

std::int64_t whole_pages(std::int64_t bytes) {
  return round_up(std::max<std::int64_t>(bytes, 1), static_cast<std::int64_t>(sysconf(_SC_PAGESIZE)));
}
}  // namespace

WindowMemory::WindowMemory(Tier tier) : ordinary_(make_host_resource(tier)) {
  // The name is what /proc/PID/maps shows, in this process and in those that map it.
  file_ = memfd_create(("tranche window of " + std::to_string(getpid())).c_str(), MFD_CLOEXEC);
  if (file_ < 0) return;
  std::random_device entropy;
  token_ = (std::uint64_t{entropy()} << 32) | entropy();
  if (pwrite(file_, &token_, sizeof token_, 0) != static_cast<ssize_t>(sizeof token_)) {
    close(file_);
    file_ = -1;
  }
  end_ = piece_alignment;
}

WindowMemory::~WindowMemory() {
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
  void* data = MAP_FAILED;
  if (ftruncate(file_, end_ + bytes) == 0) {
    data = mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, file_, end_);
  }
  if (data == MAP_FAILED) {
    const std::string reason = std::strerror(errno);
    throw OutOfMemory(
        "'" + std::string(request.tag) + "' (" + std::string(name_of(request.category)) + ") asks for " +
        format_bytes(request.bytes) + " (" + std::to_string(request.bytes) +
        " B) of memory shared with the ranks of this host, which the operating system refused: " + reason +
        "; use a smaller micro-batch, a higher stage or more ranks");
  }
  madvise(data, static_cast<std::size_t>(bytes), MADV_HUGEPAGE);  // advice: failure costs speed only
  pieces_.emplace(static_cast<const unsigned char*>(data), Piece{end_, bytes});
  end_ = round_up(end_ + bytes, piece_alignment);
  return data;
}

void WindowMemory::deallocate(void* pointer, const AllocationRequest& request) noexcept {
  if (!in_window(request)) return ordinary_->deallocate(pointer, request);
  const std::lock_guard lock(mutex_);
  const auto found = pieces_.find(static_cast<const unsigned char*>(pointer));
  if (found == pieces_.end()) return;
  const auto [offset, bytes] = found->second;
  munmap(pointer, static_cast<std::size_t>(bytes));
  // The pages go although peers may have them mapped still. The file is not cut: a peer that reads late,
  // after a failure, then finds zeros and not the end of the file, which would end it by a signal.
  (void)fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes);
  pieces_.erase(found);
}

std::int64_t WindowMemory::resident_bytes() const noexcept {
  struct stat status {};
  if (file_ < 0 || fstat(file_, &status) != 0) return 0;
  return std::int64_t{status.st_blocks} * 512;
}

std::optional<WindowMemory::Place> WindowMemory::find(const void* data, std::int64_t bytes) const {
  const auto* begin = static_cast<const unsigned char*>(data);
  const std::lock_guard lock(mutex_);
  auto found = pieces_.upper_bound(begin);
  if (found == pieces_.begin()) return std::nullopt;
  --found;
  const std::int64_t offset = begin - found->first;
  if (offset + bytes > found->second.bytes) return std::nullopt;
  return Place{found->second.offset, found->second.bytes, offset};
}

}  // namespace tranche
