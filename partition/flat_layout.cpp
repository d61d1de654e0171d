#include "partition/flat_layout.h"

#include <algorithm>
#include <limits>

#include "tranche/core/error.h"
#include "tranche/core/shape.h"

namespace tranche::detail {

namespace {

/// The largest buffer: its bytes, with 8-byte elements, and its rounded positions still fit 64-bit integers.
constexpr std::int64_t max_buffer_elements = std::numeric_limits<std::int64_t>::max() / 8;

[[noreturn]] void refuse_size(std::size_t tensors, int ranks) {
  throw InvalidArgument("flat buffer of " + std::to_string(tensors) + " tensors over " +
                        std::to_string(ranks) + " ranks would pass " + std::to_string(max_buffer_elements) +
                        " elements; split the unit in smaller ones");
}

std::string text_of(ElementRange range) {
  return "[" + std::to_string(range.begin) + ", " + std::to_string(range.end) + ")";
}

void require_same_tensors(const FlatLayout& from, const FlatLayout& to) {
  if (from.tensors() != to.tensors()) {
    throw InvalidArgument("layouts of different tensors cannot overlap: one has " +
                          std::to_string(from.tensors()) + " tensors, the other " +
                          std::to_string(to.tensors()));
  }
  for (int tensor = 0; tensor < from.tensors(); ++tensor) {
    if (from.tensor_elements(tensor) == to.tensor_elements(tensor)) continue;
    throw InvalidArgument("layouts of different tensors cannot overlap: tensor " + std::to_string(tensor) +
                          " has " + std::to_string(from.tensor_elements(tensor)) + " elements in one, " +
                          std::to_string(to.tensor_elements(tensor)) + " in the other");
  }
}

/// Appends a range, or extends the last one if the new range continues it. The source and destination ranges
/// cover the same list of elements, so a range that continues in the source also continues in the
/// destination.
void append_merged(std::vector<OverlapPiece>& result, const OverlapPiece& piece) {
  if (!result.empty()) {
    OverlapPiece& last = result.back();
    if (last.source_rank == piece.source_rank && last.source_begin + last.elements == piece.source_begin) {
      last.elements += piece.elements;
      return;
    }
  }
  result.push_back(piece);
}

}  // namespace

ElementRange intersect(ElementRange a, ElementRange b) {
  const std::int64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

FlatLayout::FlatLayout(std::span<const std::int64_t> tensor_elements, int ranks, int parts,
                       std::int64_t alignment)
    : sizes_(tensor_elements.begin(), tensor_elements.end()), ranks_(ranks) {
  if (ranks < 1) {
    throw InvalidArgument("flat layout over " + std::to_string(ranks) + " ranks; at least 1 is needed");
  }
  if (parts < 1) {
    throw InvalidArgument("shards of a flat layout in " + std::to_string(parts) +
                          " parts; at least 1 is needed");
  }
  if (sizes_.size() > static_cast<std::size_t>(std::numeric_limits<int>::max())) {
    refuse_size(sizes_.size(), ranks);
  }
  offsets_.reserve(sizes_.size());
  std::int64_t end = 0;
  for (std::size_t i = 0; i < sizes_.size(); ++i) {
    if (sizes_[i] < 1) {
      throw InvalidArgument("tensor " + std::to_string(i) + " of a flat layout has " +
                            std::to_string(sizes_[i]) + " elements; at least 1 is needed");
    }
    const std::int64_t offset = round_up(end, alignment);
    if (offset > max_buffer_elements || sizes_[i] > max_buffer_elements - offset) {
      refuse_size(sizes_.size(), ranks);
    }
    offsets_.push_back(offset);
    end = offset + sizes_[i];
    elements_ += sizes_[i];
  }
  const std::int64_t owners = ranks_ * parts;
  const std::int64_t part = round_up(divide_round_up(end, owners), shard_multiple_elements);
  if (part > max_buffer_elements / owners) refuse_size(sizes_.size(), ranks);
  shard_ = part * parts;
}

void FlatLayout::require_tensor(int tensor) const {
  if (tensor >= 0 && tensor < tensors()) return;
  throw InvalidArgument("flat layout has " + std::to_string(tensors()) + " tensors; there is no tensor " +
                        std::to_string(tensor));
}

std::int64_t FlatLayout::tensor_offset(int tensor) const {
  require_tensor(tensor);
  return offsets_[static_cast<std::size_t>(tensor)];
}

std::int64_t FlatLayout::tensor_elements(int tensor) const {
  require_tensor(tensor);
  return sizes_[static_cast<std::size_t>(tensor)];
}

ElementRange FlatLayout::shard_range(int rank) const {
  if (rank < 0 || rank >= ranks_) {
    throw InvalidArgument("flat layout is over " + std::to_string(ranks_) + " ranks; there is no rank " +
                          std::to_string(rank));
  }
  return {rank * shard_, (rank + 1) * shard_};
}

std::int64_t FlatLayout::owned_elements(int rank) const {
  std::int64_t owned = 0;
  for (const TensorPiece& piece : shard_pieces(rank)) owned += piece.elements;
  return owned;
}

std::vector<TensorPiece> FlatLayout::pieces(ElementRange range) const {
  std::vector<TensorPiece> result;
  if (range.empty()) return result;
  if (range.begin < 0 || range.end > padded_elements()) {
    throw InvalidArgument("range " + text_of(range) + " leaves the flat buffer of " +
                          std::to_string(padded_elements()) + " elements");
  }
  // The last tensor that starts at or before the range may overlap it; all later ones start inside.
  const auto after = std::upper_bound(offsets_.begin(), offsets_.end(), range.begin);
  auto i = static_cast<std::size_t>(after - offsets_.begin());
  if (i > 0) --i;
  for (; i < sizes_.size() && offsets_[i] < range.end; ++i) {
    const ElementRange held = intersect(range, {offsets_[i], offsets_[i] + sizes_[i]});
    if (held.empty()) continue;
    result.push_back({static_cast<int>(i), held.begin - offsets_[i], held.begin, held.size()});
  }
  return result;
}

TensorPiece FlatLayout::locate(std::int64_t buffer_element) const {
  if (buffer_element < 0 || buffer_element >= padded_elements()) {
    throw InvalidArgument("element " + std::to_string(buffer_element) + " lies outside the flat buffer of " +
                          std::to_string(padded_elements()) + " elements");
  }
  const auto found = pieces({buffer_element, buffer_element + 1});
  return found.empty() ? TensorPiece{-1, 0, buffer_element, 0} : found.front();
}

std::vector<OverlapPiece> overlaps(const FlatLayout& from, const FlatLayout& to, int destination_rank) {
  require_same_tensors(from, to);
  const std::int64_t shard_begin = to.shard_range(destination_rank).begin;
  const std::int64_t source_shard = from.shard_elements();
  std::vector<OverlapPiece> result;
  for (const TensorPiece& piece : to.shard_pieces(destination_rank)) {
    // A tensor's offset does not depend on the number of ranks, so one position is valid in both buffers.
    const std::int64_t end = piece.buffer_begin + piece.elements;
    for (std::int64_t begin = piece.buffer_begin; begin < end;) {
      const std::int64_t source_rank = begin / source_shard;
      const std::int64_t stop = std::min(end, (source_rank + 1) * source_shard);
      append_merged(result, {static_cast<int>(source_rank), begin - source_rank * source_shard,
                             begin - shard_begin, stop - begin});
      begin = stop;
    }
  }
  return result;
}

std::vector<ElementRange> bucket_ranges(const FlatLayout& layout, std::int64_t bucket_elements) {
  if (bucket_elements < 1) {
    throw InvalidArgument("bucket of " + std::to_string(bucket_elements) + " elements; at least 1 is needed");
  }
  const std::int64_t per_shard = bucket_elements / layout.ranks();
  const std::int64_t size =
      std::max(shard_multiple_elements, per_shard / shard_multiple_elements * shard_multiple_elements);
  const std::int64_t shard = layout.shard_elements();
  std::vector<ElementRange> result;
  for (std::int64_t begin = 0; begin < shard;) {
    const std::int64_t end = shard - begin > size ? begin + size : shard;
    result.push_back({begin, end});
    begin = end;
  }
  return result;
}

}  // namespace tranche::detail
