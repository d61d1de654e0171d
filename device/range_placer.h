#pragma once
/// Places requests in one range of addresses whose pages have physical memory only while they are needed. It
/// is independent of the device: PageSource provides the memory of the pages.

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
  /// Maps `count` pages from `first` to one allocation of physical memory; false when there is not enough.
  /// May throw on any other failure.
  virtual bool map(std::int64_t first, std::int64_t count) = 0;
  /// Unmaps pages that one call of map() has mapped, and frees their memory.
  virtual void unmap(std::int64_t first, std::int64_t count) noexcept = 0;
};

/// First fit by address over coalesced free ranges, so placement depends on the sequence of requests alone. A
/// request goes to memory that is mapped already, if it fits there. Otherwise it goes to the lowest free
/// addresses that are long enough: their missing pages are mapped, after every other mapping that is wholly
/// free was unmapped. Freed memory otherwise stays mapped until trim(). Not thread-safe.
class RangePlacer {
 public:
  explicit RangePlacer(PageSource& source);
  /// Unmaps everything, including placed memory.
  ~RangePlacer();
  RangePlacer(const RangePlacer&) = delete;
  RangePlacer& operator=(const RangePlacer&) = delete;

  /// The offset of a place for `bytes` (rounded as aligned_bytes does, at least one unit), or nothing when
  /// the addresses or the memory do not suffice; then at most free mappings have been unmapped. With
  /// `whole_piece` the request gets its own pages from one call of map(), because memory that is registered
  /// with a network must be one mapping; the end of its last page serves later requests.
  std::optional<std::int64_t> place(std::int64_t bytes, bool whole_piece = false);
  /// Frees the memory at place()'s result; `bytes` is the size given to place().
  void free(std::int64_t offset, std::int64_t bytes) noexcept;
  /// Unmaps every mapping that is wholly free.
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
