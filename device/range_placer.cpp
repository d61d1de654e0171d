#include "device/range_placer.h"

#include <algorithm>
#include <vector>

#include "tranche/core/error.h"
#include "tranche/core/shape.h"

namespace tranche::detail {
namespace {

std::int64_t unit_bytes(std::int64_t bytes) {
  return std::max(memory_alignment, aligned_bytes(bytes));
}

}  // namespace

RangePlacer::RangePlacer(PageSource& source)
    : source_(source), page_(source.page_bytes()), end_(source.pages() * source.page_bytes()) {
  if (page_ <= 0 || page_ % memory_alignment != 0 || source.pages() < 1) {
    throw InvalidArgument("a range of " + std::to_string(source.pages()) + " pages of " +
                          std::to_string(page_) + " bytes; pages are multiples of " +
                          std::to_string(memory_alignment) + " bytes");
  }
  free_.emplace(0, end_);
}

RangePlacer::~RangePlacer() {
  for (const auto& [first, count] : pieces_) source_.unmap(first, count);
}

std::optional<std::int64_t> RangePlacer::place(std::int64_t bytes, bool whole_piece) {
  // The first test keeps the rounding from overflowing.
  if (bytes < 0 || bytes > end_) return std::nullopt;
  bytes = unit_bytes(bytes);
  std::optional<std::int64_t> offset;
  if (whole_piece) {
    trim();
    offset = find_unmapped_pages(bytes);
  } else if (offset = find_mapped(bytes); !offset) {
    offset = find_free(bytes);
    if (offset) unmap_free_pieces({*offset, *offset + bytes});
  }
  if (!offset || !map_missing(*offset, *offset + bytes)) return std::nullopt;
  occupy(*offset, *offset + bytes);
  placed_ += bytes;
  return offset;
}

void RangePlacer::free(std::int64_t offset, std::int64_t bytes) noexcept {
  bytes = unit_bytes(bytes);
  std::int64_t end = offset + bytes;
  placed_ -= bytes;
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && next->first == end) {
    end = next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->second == offset) {
      before->second = end;
      return;
    }
  }
  free_.emplace_hint(next, offset, end);
}

void RangePlacer::trim() noexcept {
  unmap_free_pieces({0, 0});
}

// The lowest place inside memory that is both free and mapped. Adjacent mappings count as one range.
std::optional<std::int64_t> RangePlacer::find_mapped(std::int64_t bytes) const {
  auto piece = pieces_.begin();
  while (piece != pieces_.end()) {
    const std::int64_t begin = piece->first * page_;
    std::int64_t end = begin;
    for (; piece != pieces_.end() && piece->first * page_ == end; ++piece) end += piece->second * page_;
    auto range = free_.upper_bound(begin);
    if (range != free_.begin()) --range;
    for (; range != free_.end() && range->first < end; ++range) {
      const std::int64_t from = std::max(begin, range->first);
      if (std::min(end, range->second) - from >= bytes) return from;
    }
  }
  return std::nullopt;
}

std::optional<std::int64_t> RangePlacer::find_free(std::int64_t bytes) const {
  for (const auto& [begin, end] : free_) {
    if (end - begin >= bytes) return begin;
  }
  return std::nullopt;
}

// The lowest page boundary from which `bytes` are free and none of their pages is mapped.
std::optional<std::int64_t> RangePlacer::find_unmapped_pages(std::int64_t bytes) const {
  const std::int64_t whole = round_up(bytes, page_);
  for (const auto& [begin, end] : free_) {
    std::int64_t from = round_up(begin, page_);
    auto piece = pieces_.upper_bound(from / page_);
    if (piece != pieces_.begin()) --piece;
    for (; piece != pieces_.end() && piece->first * page_ < from + whole; ++piece) {
      const std::int64_t mapped_end = (piece->first + piece->second) * page_;
      if (mapped_end > from) from = mapped_end;
    }
    if (from + whole <= end) return from;
  }
  return std::nullopt;
}

// Maps the pages of [begin, end) that have no memory, with one mapping for each contiguous range; all or
// none.
bool RangePlacer::map_missing(std::int64_t begin, std::int64_t end) {
  std::int64_t page = begin / page_;
  const std::int64_t last = round_up(end, page_) / page_;
  std::vector<std::int64_t> made;
  const auto undo = [&] {
    for (const std::int64_t first : made) {
      const auto piece = pieces_.find(first);
      source_.unmap(first, piece->second);
      mapped_pages_ -= piece->second;
      pieces_.erase(piece);
    }
  };
  while (page < last) {
    auto next = pieces_.upper_bound(page);
    if (next != pieces_.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second > page) {
        page = before->first + before->second;
        continue;
      }
    }
    const std::int64_t stop = next == pieces_.end() ? last : std::min(last, next->first);
    const std::int64_t count = stop - page;
    try {
      made.reserve(made.size() + 1);
      pieces_.emplace(page, count);
      if (!source_.map(page, count)) {
        pieces_.erase(page);
        undo();
        return false;
      }
    } catch (...) {
      pieces_.erase(page);
      undo();
      throw;
    }
    made.push_back(page);
    mapped_pages_ += count;
    page = stop;
  }
  return true;
}

bool RangePlacer::is_free(std::int64_t begin, std::int64_t end) const noexcept {
  auto range = free_.upper_bound(begin);
  return range != free_.begin() && std::prev(range)->second >= end;
}

void RangePlacer::unmap_free_pieces(Span keep) noexcept {
  for (auto piece = pieces_.begin(); piece != pieces_.end();) {
    const std::int64_t begin = piece->first * page_;
    const std::int64_t end = begin + piece->second * page_;
    if ((begin < keep.end && keep.begin < end) || !is_free(begin, end)) {
      ++piece;
      continue;
    }
    source_.unmap(piece->first, piece->second);
    mapped_pages_ -= piece->second;
    piece = pieces_.erase(piece);
  }
}

void RangePlacer::occupy(std::int64_t begin, std::int64_t end) {
  const auto range = std::prev(free_.upper_bound(begin));
  const Span free{range->first, range->second};
  if (free.end > end) free_.emplace(end, free.end);
  if (free.begin < begin) {
    range->second = begin;
  } else {
    free_.erase(range);
  }
}

}  // namespace tranche::detail
