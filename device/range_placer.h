#pragma once
/// Places requests in one range of addresses whose pages get physical memory only while they are needed.
/// Knows no device: the memory behind the pages is somebody else's (PageSource).

#include <cstdint>
#include <map>
#include <optional>

#include "tranche/device/memory.h"

namespace tranche::detail {

/// Physical memory for the pages of one range of addresses.
class PageSource {
 public:
  virtual ~PageSource() = default;
  /// Bytes of a page, a multiple of memory_alignment.
  virtual std::int64_t page_bytes() const = 0;
  virtual std::int64_t pages() const = 0;
  /// Backs `count` pages from `first` by one piece of memory; false when there is not enough. May throw on
  /// any other failure.
  virtual bool map(std::int64_t first, std::int64_t count) = 0;
  /// Takes the memory back from pages that one call of map() has backed.
  virtual void unmap(std::int64_t first, std::int64_t count) noexcept = 0;
};

/// First fit by address over coalesced free ranges, so placement depends on the sequence of requests alone.
/// A request that fits in memory that is mapped already goes there; else the lowest free addresses that are
/// long enough get their missing pages mapped, after every piece that is wholly free and not part of them was
/// unmapped. Freed memory is otherwise kept until trim(). Not thread-safe.
class RangePlacer {
 public:
  explicit RangePlacer(PageSource& source);
  /// Unmaps everything, whether placed or not.
  ~RangePlacer();
  RangePlacer(const RangePlacer&) = delete;
  RangePlacer& operator=(const RangePlacer&) = delete;

  /// Offset of a place for `bytes` (rounded as aligned_bytes does, at least one unit), or nothing when the
  /// addresses or the memory do not suffice; then nothing has changed but that free pieces may be unmapped.
  /// With `whole_piece` the request gets pages of its own from one call of map() (memory that is to be
  /// registered with a network must be one piece); the end of its last page serves later requests.
  std::optional<std::int64_t> place(std::int64_t bytes, bool whole_piece = false);
  /// Gives back what place() returned; `bytes` as given to it.
  void free(std::int64_t offset, std::int64_t bytes) noexcept;
  /// Unmaps every piece that is wholly free.
  void trim() noexcept;

  std::int64_t placed_bytes() const noexcept { return placed_; }
  std::int64_t mapped_bytes() const noexcept { return mapped_pages_ * page_; }

 private:
  struct Span {
    std::int64_t begin;
    std::int64_t end;
  };
  std::optional<std::int64_t> find_mapped(std::int64_t bytes) const;
  std::optional<std::int64_t> find_free(std::int64_t bytes) const;
  std::optional<std::int64_t> find_unmapped_pages(std::int64_t bytes) const;
  bool map_missing(std::int64_t begin, std::int64_t end);
  void unmap_free_pieces(Span keep) noexcept;
  void occupy(std::int64_t begin, std::int64_t end);
  bool is_free(std::int64_t begin, std::int64_t end) const noexcept;

  PageSource& source_;
  std::int64_t page_;
  std::int64_t end_;
  std::int64_t placed_ = 0;
  std::int64_t mapped_pages_ = 0;
  std::map<std::int64_t, std::int64_t> free_;    // begin -> end in bytes, coalesced
  std::map<std::int64_t, std::int64_t> pieces_;  // first page -> count
};

}  // namespace tranche::detail
