#include "checkpoint/format.h"

#include <fmt/format.h>

#include "tranche/core/error.h"

namespace tranche::checkpoint {

std::string step_name(std::int64_t step) {
  if (step < 0) throw InvalidArgument(fmt::format("a checkpoint of step {}: steps start at 0", step));
  return fmt::format("step-{:08}", step);
}

std::string shard_name(int rank, int world) {
  if (rank < 0 || rank >= world) throw InvalidArgument(fmt::format("shard of rank {} of {}", rank, world));
  return fmt::format("shard-{:05}-of-{:05}.h5", rank, world);
}

std::int64_t parse_step_name(std::string_view name) {
  constexpr std::string_view prefix = "step-";
  if (!name.starts_with(prefix) || name.size() < prefix.size() + 8 || name.size() > prefix.size() + 18)
    return -1;
  std::int64_t step = 0;
  for (const char c : name.substr(prefix.size())) {
    if (c < '0' || c > '9') return -1;
    step = step * 10 + (c - '0');
  }
  return step_name(step) == name ? step : -1;
}

std::int64_t Manifest::bytes() const {
  std::int64_t sum = master.bytes;
  for (const ShardRecord& shard : shards) sum += shard.file.bytes;
  for (const FileRecord& companion : companions) sum += companion.bytes;
  return sum;
}

}  // namespace tranche::checkpoint
