#include "checkpoint/format.h"

#include <fmt/format.h>

#include <algorithm>
#include <unordered_set>

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

std::int64_t Layout::section_elements(int section, int rank) const {
  return unit_begin(section, static_cast<int>(units.size()), rank);
}

std::int64_t Layout::unit_begin(int section, int unit, int rank) const {
  const bool frozen = sections.at(static_cast<std::size_t>(section)).frozen;
  std::int64_t begin = 0;
  for (int u = 0; u < unit; ++u) {
    const auto& cuts = units.at(static_cast<std::size_t>(u)).cuts(frozen);
    begin += cuts.at(static_cast<std::size_t>(rank) + 1) - cuts.at(static_cast<std::size_t>(rank));
  }
  return begin;
}

detail::ElementRange Layout::shard_range(int section, int unit, int rank) const {
  const bool frozen = sections.at(static_cast<std::size_t>(section)).frozen;
  const auto& cuts = units.at(static_cast<std::size_t>(unit)).cuts(frozen);
  return {cuts.at(static_cast<std::size_t>(rank)), cuts.at(static_cast<std::size_t>(rank) + 1)};
}

detail::ElementRange ArrayRecord::range(int rank) const {
  if (per_rank) return {0, shape(rank).elements()};
  return {cuts.at(static_cast<std::size_t>(rank)), cuts.at(static_cast<std::size_t>(rank) + 1)};
}

int Layout::find_section(std::string_view kind, bool frozen) const {
  for (std::size_t s = 0; s < sections.size(); ++s) {
    if (sections[s].kind == kind && sections[s].frozen == frozen) return static_cast<int>(s);
  }
  return -1;
}

namespace {

/// HDF5 paths are parted by '/', and "." means "here".
void require_name(std::string_view what, std::string_view name) {
  bool good = !name.empty() && name.size() <= 1024 && name.find('\0') == std::string_view::npos;
  for (std::size_t begin = 0; good && begin <= name.size();) {
    const std::size_t end = std::min(name.find('/', begin), name.size());
    const std::string_view part = name.substr(begin, end - begin);
    good = !part.empty() && part != "." && part != "..";
    begin = end + 1;
  }
  if (!good) {
    throw InvalidArgument(
        fmt::format("{} '{}' cannot be shown as a path in an HDF5 file: parts between '/' must "
                    "not be empty, '.' or '..'",
                    what, name));
  }
}

void require_storable(std::string_view what, DataType dtype) {
  if (dtype != DataType::float32 && dtype != DataType::bfloat16 && dtype != DataType::float16) {
    throw InvalidArgument(
        fmt::format("{} of {}: checkpoints store fp32, bf16 and fp16", what, name_of(dtype)));
  }
}

std::vector<std::int64_t> cuts_of(const detail::FlatLayout& flat) {
  std::vector<std::int64_t> cuts{0};
  for (int rank = 0; rank < flat.ranks(); ++rank) cuts.push_back(flat.shard_range(rank).end);
  return cuts;
}

}  // namespace

Layout make_layout(const std::vector<UnitDescription>& units, const std::vector<StateDescription>& states,
                   DataType weight_dtype, DataType frozen_dtype, int world) {
  Layout layout;
  layout.world = world;
  std::unordered_set<std::string> names;
  std::unordered_set<std::string> unit_names;
  const auto claim = [&](std::string_view what, const std::string& name) {
    require_name(what, name);
    if (!names.insert(name).second) throw InvalidArgument(fmt::format("{} '{}' is there twice", what, name));
  };
  bool any_frozen = false;
  bool any_trainable = false;
  for (const UnitDescription& unit : units) {
    UnitRecord record{unit.name, unit.uses_per_micro_batch, {}, {}, {}};
    if (!unit_names.insert(unit.name).second)
      throw InvalidArgument(fmt::format("unit '{}' is there twice", unit.name));
    std::vector<std::int64_t> sizes[2];
    for (const TensorDescription& tensor : unit.tensors) {
      claim("tensor", tensor.name);
      for (const std::string& alias : tensor.aliases) claim("alias", alias);
      sizes[tensor.frozen ? 1 : 0].push_back(tensor.shape.elements());
      record.tensors.push_back({tensor.name, tensor.shape, tensor.frozen, tensor.aliases, 0});
      (tensor.frozen ? any_frozen : any_trainable) = true;
    }
    const detail::FlatLayout trainable(sizes[0], world);
    const detail::FlatLayout frozen(sizes[1], world);
    int next[2] = {0, 0};
    for (TensorRecord& tensor : record.tensors) {
      tensor.offset = (tensor.frozen ? frozen : trainable).tensor_offset(next[tensor.frozen ? 1 : 0]++);
    }
    record.trainable_cuts = cuts_of(trainable);
    record.frozen_cuts = cuts_of(frozen);
    layout.units.push_back(std::move(record));
  }
  require_storable("weights", weight_dtype);
  require_storable("frozen tensors", frozen_dtype);
  if (any_trainable) layout.sections.push_back({"weights", "weight", weight_dtype, false});
  if (any_frozen) layout.sections.push_back({"frozen", "weight", frozen_dtype, true});
  names = {"weight"};
  for (const StateDescription& state : states) {
    claim("optimizer state", state.name);
    require_storable("optimizer state " + state.name, state.dtype);
    if (any_trainable) layout.sections.push_back({"state/" + state.name, state.name, state.dtype, false});
  }
  return layout;
}

void add_arrays(Layout& layout, std::vector<ArrayRecord> arrays) {
  const auto ranks = static_cast<std::size_t>(layout.world);
  std::unordered_set<std::string> names;
  for (const ArrayRecord& array : arrays) {
    require_name("array", array.name);
    if (!names.insert(array.name).second) {
      throw InvalidArgument(fmt::format("array '{}' is there twice", array.name));
    }
    bool good = array.shapes.size() == (array.per_rank ? ranks : 1);
    if (array.per_rank) {
      good = good && array.cuts.empty();
    } else {
      good = good && array.cuts.size() == ranks + 1 && array.cuts.front() == 0 &&
             array.cuts.back() == array.shapes.front().elements() &&
             std::is_sorted(array.cuts.begin(), array.cuts.end());
    }
    if (!good) {
      throw InvalidArgument(
          fmt::format("array '{}' does not have the shapes or cuts of {} ranks", array.name, ranks));
    }
  }
  layout.arrays = std::move(arrays);
}

std::int64_t Manifest::bytes() const {
  std::int64_t sum = master.bytes;
  for (const ShardRecord& shard : shards) sum += shard.file.bytes;
  return sum;
}

}  // namespace tranche::checkpoint
