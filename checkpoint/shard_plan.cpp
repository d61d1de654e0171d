#include "checkpoint/shard_plan.h"

#include <fmt/format.h>

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
    std::int64_t begin = 0;
    for (std::size_t u = 0; u < layout.units.size(); ++u) {
      begins_.push_back(begin);
      begin += layout.shard_range(static_cast<int>(s), static_cast<int>(u), rank).size();
    }
    const std::int64_t bytes = begin * size_of(layout.sections[s].dtype);
    if (bytes > 0) payload_.push_back({image_.offsets[s], image_.offsets[s] + bytes});
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

std::vector<SectionPiece> ShardPlan::pieces() const {
  std::vector<SectionPiece> pieces;
  for (int s = 0; s < static_cast<int>(layout_.sections.size()); ++s) {
    for (int u = 0; u < static_cast<int>(layout_.units.size()); ++u) {
      const ElementRange range = layout_.shard_range(s, u, rank_);
      if (!range.empty()) pieces.push_back({s, u, range});
    }
  }
  return pieces;
}

std::int64_t ShardPlan::offset_of(int section, int unit, ElementRange range) const {
  if (section < 0 || section >= static_cast<int>(layout_.sections.size()) || unit < 0 ||
      unit >= static_cast<int>(layout_.units.size())) {
    throw InvalidArgument(fmt::format("section {}, unit {}: the checkpoint has {} sections and {} units",
                                      section, unit, layout_.sections.size(), layout_.units.size()));
  }
  const ElementRange mine = layout_.shard_range(section, unit, rank_);
  const auto s = static_cast<std::size_t>(section);
  const auto u = static_cast<std::size_t>(unit);
  if (range.begin < mine.begin || range.end > mine.end || range.end < range.begin) {
    throw InvalidArgument(fmt::format("elements {} to {} of {} of unit {}: rank {} of {} stores {} to {}",
                                      range.begin, range.end, layout_.sections[s].dataset,
                                      layout_.units[u].name, rank_, layout_.world, mine.begin, mine.end));
  }
  const std::int64_t element = begins_[s * layout_.units.size() + u] + range.begin - mine.begin;
  return image_.offsets[s] + element * size_of(layout_.sections[s].dtype);
}

}  // namespace tranche::checkpoint
