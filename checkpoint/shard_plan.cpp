#include "checkpoint/shard_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "tranche/core/error.h"

namespace tranche::checkpoint {

using detail::ElementRange;

namespace {

int checked_rank(const Layout& layout, int rank) {
  if (rank < 0 || rank >= layout.world) {
    throw InvalidArgument(fmt::format("a shard for rank {} of {}", rank, layout.world));
  }
  return rank;
}

}  // namespace

ShardPlan::ShardPlan(const Layout& layout, int rank, std::int64_t step)
    : layout_(layout), rank_(checked_rank(layout, rank)), image_(make_shard_image(layout, rank, step)) {
  for (std::size_t s = 0; s < layout.sections.size(); ++s) {
    const SectionRecord& section = layout.sections[s];
    const std::int64_t bytes = section.bytes(layout.section_elements(static_cast<int>(s), rank));
    if (bytes == 0) continue;
    payload_.push_back({image_.offsets[s], image_.offsets[s] + bytes});
    for (std::size_t u = 0; u < layout.units.size(); ++u) {
      const std::vector<BufferRecord>& buffers = layout.units[u].buffers;
      for (std::size_t b = 0; b < buffers.size(); ++b) {
        if (buffers[b].kind_of() != section.kind_of()) continue;
        for (std::size_t i = 0; i < buffers[b].instances.size(); ++i) {
          for (const StoredRange& range : buffers[b].instances[i].ranges) {
            if (range.rank != rank) continue;
            pieces_.push_back({static_cast<int>(s), static_cast<int>(u), static_cast<int>(b),
                               static_cast<int>(i), range.range()});
            offsets_.push_back(image_.offsets[s] + section.bytes(range.first));
          }
        }
      }
    }
  }
  for (std::size_t a = 0; a < layout.arrays.size(); ++a) {
    const std::int64_t bytes = array_bytes(static_cast<int>(a));
    if (bytes > 0) payload_.push_back({image_.array_offsets[a], image_.array_offsets[a] + bytes});
  }
  for (const ElementRange& bytes : payload_) payload_bytes_ += bytes.size();
}

std::int64_t ShardPlan::array_bytes(int array) const {
  const ArrayRecord& record = layout_.arrays.at(static_cast<std::size_t>(array));
  return record.range(rank_).size() * size_of(record.dtype);
}

std::int64_t ShardPlan::offset_of(const SectionPiece& part) const {
  const auto place = [](const SectionPiece& piece) {
    return std::tuple(piece.section, piece.unit, piece.buffer, piece.instance);
  };
  // The last piece that begins at or before `part`.
  const auto next = std::upper_bound(
      pieces_.begin(), pieces_.end(), part, [&](const SectionPiece& a, const SectionPiece& b) {
        return std::tuple(place(a), a.range.begin) < std::tuple(place(b), b.range.begin);
      });
  const auto piece = next - pieces_.begin() - 1;
  const std::int64_t width = part.section >= 0 && part.section < static_cast<int>(layout_.sections.size())
                                 ? layout_.sections[static_cast<std::size_t>(part.section)].block.elements
                                 : 1;
  if (piece < 0 || place(pieces_[static_cast<std::size_t>(piece)]) != place(part) ||
      part.range.end > pieces_[static_cast<std::size_t>(piece)].range.end ||
      part.range.end < part.range.begin || part.range.begin % width != 0 || part.range.end % width != 0) {
    throw InvalidArgument(fmt::format(
        "elements {} to {} of section {}, unit {}, buffer {}, instance {}: rank {} of {} does not store them",
        part.range.begin, part.range.end, part.section, part.unit, part.buffer, part.instance, rank_,
        layout_.world));
  }
  const auto found = static_cast<std::size_t>(piece);
  return offsets_[found] + layout_.sections[static_cast<std::size_t>(part.section)].bytes(
                               part.range.begin - pieces_[found].range.begin);
}

}  // namespace tranche::checkpoint
