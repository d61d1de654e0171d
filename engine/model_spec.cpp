#include "tranche/engine/model_spec.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <unordered_set>

#include "core/closest_match.h"
#include "tranche/config/config.h"
#include "tranche/core/error.h"

namespace tranche {
namespace {

/// 64-bit FNV-1a over bytes. Texts are preceded by their length, so that different sequences have different
/// bytes.
class Hash {
 public:
  void add(std::int64_t value) {
    for (int shift = 0; shift < 64; shift += 8) add_byte(static_cast<std::uint64_t>(value) >> shift);
  }
  void add(const std::string& text) {
    add(static_cast<std::int64_t>(text.size()));
    for (const char c : text) add_byte(static_cast<unsigned char>(c));
  }
  std::uint64_t value() const { return value_; }

 private:
  void add_byte(std::uint64_t byte) { value_ = (value_ ^ (byte & 0xffu)) * 0x100000001b3u; }
  std::uint64_t value_ = 0xcbf29ce484222325u;
};

/// Throws InvalidArgument unless the tensor's dimensions, if it has any, divide its shape.
void require_dimensions(const UnitSpec& unit, const TensorSpec& tensor) {
  bool fits =
      tensor.dimensions.empty() || tensor.dimensions.size() == static_cast<std::size_t>(tensor.shape.rank());
  for (std::size_t d = 0; fits && d < tensor.dimensions.size(); ++d) {
    const Dimension& one = tensor.dimensions[d];
    const std::int64_t extent = tensor.shape.extents()[d];
    fits =
        one.blocks >= 1 && one.grain >= 1 && extent % one.blocks == 0 && extent / one.blocks % one.grain == 0;
  }
  if (fits) return;
  throw InvalidArgument(
      fmt::format("tensor '{}' of unit '{}' needs one dimension for each extent of its shape {}: its "
                  "blocks must divide the extent, and its grain must divide each block",
                  tensor.name, unit.name, tensor.shape.to_string()));
}

/// Throws InvalidArgument unless the numbers of the tensor's initializer can be drawn from.
void require_initializer(const UnitSpec& unit, const TensorSpec& tensor) {
  const Initializer& how = tensor.initializer;
  const auto refuse = [&](const std::string& what) {
    throw InvalidArgument(
        fmt::format("tensor '{}' of unit '{}' is initialized by {}", tensor.name, unit.name, what));
  };
  const bool finite = std::isfinite(how.a) && std::isfinite(how.b);
  if (how.kind == Initializer::Kind::constant && !finite) {
    refuse(fmt::format("constant({}), which is not finite", how.a));
  }
  if (how.kind == Initializer::Kind::normal && !(finite && how.b > 0)) {
    refuse(
        fmt::format("normal({}, {}); the order is (standard deviation, mean), both finite and the deviation "
                    "above 0; a constant is Initializer::constant",
                    how.b, how.a));
  }
  if (how.kind == Initializer::Kind::uniform && !(finite && how.a < how.b)) {
    refuse(fmt::format("uniform({}, {}); the order is (low, high), both finite and low below high", how.a,
                       how.b));
  }
}

}  // namespace

Initializer Initializer::from(std::string name, Fill fill) {
  if (name.empty() || !fill) {
    throw InvalidArgument(fmt::format("Initializer::from('{}') wants a name and a function", name));
  }
  return {Kind::custom, 0, 0, std::move(name), std::move(fill)};
}

const LowRankAdapter* UnitSpec::adapter_of(int weight) const {
  const auto found = std::find_if(adapters.begin(), adapters.end(),
                                  [&](const LowRankAdapter& adapter) { return adapter.weight == weight; });
  return found == adapters.end() ? nullptr : &*found;
}

UnitId ModelSpec::add_unit(UnitSpec unit) {
  if (unit.name.empty()) throw InvalidArgument("a unit has no name");
  if (unit.tensors.empty()) throw InvalidArgument(fmt::format("unit '{}' has no tensors", unit.name));
  if (unit.uses_per_micro_batch < 1) {
    throw InvalidArgument(fmt::format("unit '{}' is used {} times a micro-batch; it must be at least once",
                                      unit.name, unit.uses_per_micro_batch));
  }
  if (unit_names_.count(unit.name) > 0)
    throw InvalidArgument(fmt::format("there are two units '{}'", unit.name));
  std::unordered_set<std::string> names, aliases;
  for (const TensorSpec& tensor : unit.tensors) {
    if (tensor.name.empty())
      throw InvalidArgument(fmt::format("a tensor of unit '{}' has no name", unit.name));
    if (tensor.shape.elements() < 1) {
      throw InvalidArgument(fmt::format("tensor '{}' of unit '{}' has no elements (shape {})", tensor.name,
                                        unit.name, tensor.shape.to_string()));
    }
    if (tensor.matrices != 0) {
      const int outputs = tensor.linear == LinearLayout::in_out ? 1 : 0;
      if (tensor.matrices < 0 || tensor.shape.rank() != 2 || tensor.shape[outputs] % tensor.matrices != 0) {
        throw InvalidArgument(
            fmt::format("tensor '{}' of unit '{}', of shape {}, is not {} matrices side by side", tensor.name,
                        unit.name, tensor.shape.to_string(), tensor.matrices));
      }
    }
    require_dimensions(unit, tensor);
    require_initializer(unit, tensor);
    if (!names.insert(tensor.name).second)
      throw InvalidArgument(fmt::format("unit '{}' has two tensors '{}'", unit.name, tensor.name));
    if (const auto taken = tensor_units_.find(tensor.name); taken != tensor_units_.end()) {
      throw InvalidArgument(fmt::format("tensor '{}' of unit '{}' is in unit '{}' already", tensor.name,
                                        unit.name, units_[taken->second].name));
    }
    for (const std::string& alias : tensor.aliases) {
      if (alias.empty() || aliases_.count(alias) > 0 || !aliases.insert(alias).second) {
        throw InvalidArgument(
            fmt::format("alias '{}' of tensor '{}' is empty or there already", alias, tensor.name));
      }
    }
  }
  const auto refuse_both = [](const std::string& name) {
    throw InvalidArgument(fmt::format("'{}' is the name of one tensor and an alias of another", name));
  };
  for (const std::string& alias : aliases) {
    if (names.count(alias) > 0 || tensor_units_.count(alias) > 0) refuse_both(alias);
  }
  for (const std::string& name : names) {
    if (aliases_.count(name) > 0) refuse_both(name);
  }
  unit_names_.insert(unit.name);
  for (const std::string& name : names) tensor_units_.emplace(name, units_.size());
  aliases_.merge(aliases);
  units_.push_back(std::move(unit));
  return {static_cast<int>(units_.size()) - 1};
}

const UnitSpec& ModelSpec::unit(UnitId id) const {
  if (id.index < 0 || id.index >= static_cast<int>(units_.size())) {
    throw InvalidArgument(fmt::format("there is no unit {}; the model has {}", id.index, units_.size()));
  }
  return units_[static_cast<std::size_t>(id.index)];
}

UnitId ModelSpec::find_unit(std::string_view name) const {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < units_.size(); ++i) {
    if (units_[i].name == name) return {static_cast<int>(i)};
    names.push_back(units_[i].name);
  }
  const std::string closest = detail::closest_match(name, names);
  throw InvalidArgument(fmt::format("there is no unit '{}' among {}{}", name, names.size(),
                                    closest.empty() ? "" : fmt::format("; did you mean '{}'?", closest)));
}

std::int64_t ModelSpec::parameters() const {
  std::int64_t sum = 0;
  for (const UnitSpec& unit : units_) {
    for (const TensorSpec& tensor : unit.tensors) sum = checked_add(sum, tensor.shape.elements());
  }
  return sum;
}

ModelSpec ModelSpec::without_units() const {
  ModelSpec spec = *this;
  spec.units_.clear();
  spec.unit_names_.clear();
  spec.aliases_.clear();
  spec.tensor_units_.clear();
  return spec;
}

std::string ModelSpec::name_of_uses(int begin, int end) const {
  const UnitUse &first = forward.at(static_cast<std::size_t>(begin)),
                &last = forward.at(static_cast<std::size_t>(end) - 1);
  const auto name = [&](const UnitUse& use) {
    return (use.use > 0 ? "the last use of " : "") + this->unit(use.unit).name;
  };
  return end - begin == 1 ? name(first) : name(first) + " to " + name(last);
}

std::int64_t ModelSpec::tokens_of_rank(int context_ranks) const {
  return context_ranks == 1 ? tokens_per_sample : 2 * divide_round_up(tokens_per_sample, 2 * context_ranks);
}

std::uint64_t ModelSpec::hash() const {
  Hash hash;
  hash.add(static_cast<std::int64_t>(units_.size()));
  hash.add(tokens_per_sample);
  for (const UnitSpec& unit : units_) {
    hash.add(unit.name);
    hash.add(unit.uses_per_micro_batch);
    hash.add(static_cast<std::int64_t>(unit.tensors.size()));
    for (const TensorSpec& tensor : unit.tensors) {
      hash.add(tensor.name);
      hash.add(tensor.shape.rank());
      for (const std::int64_t extent : tensor.shape.extents()) hash.add(extent);
      hash.add(static_cast<std::int64_t>(tensor.initializer.kind));
      hash.add(std::bit_cast<std::int32_t>(tensor.initializer.a));
      hash.add(std::bit_cast<std::int32_t>(tensor.initializer.b));
      hash.add(tensor.initializer.name);
      hash.add(static_cast<std::int64_t>(tensor.uses.size()));
      for (const int use : tensor.uses) hash.add(use);
      hash.add(static_cast<std::int64_t>(tensor.aliases.size()));
      for (const std::string& alias : tensor.aliases) hash.add(alias);
      hash.add(static_cast<std::int64_t>(tensor.dimensions.size()));
      for (const Dimension& dimension : tensor.dimensions) {
        hash.add(dimension.name);
        hash.add(dimension.blocks);
        hash.add(dimension.grain);
      }
      if (tensor.matrices == 0) continue;
      hash.add(tensor.matrices);
      hash.add(static_cast<std::int64_t>(tensor.linear));
    }
    for (const LowRankAdapter& adapter : unit.adapters) {
      for (const int index : {adapter.weight, adapter.a, adapter.b}) hash.add(index);
      for (const float value : {adapter.scale, adapter.dropout}) hash.add(std::bit_cast<std::int32_t>(value));
    }
  }
  hash.add(residual_width);
  for (const std::string& dimension : tensor_dimensions) hash.add(dimension);
  for (const UnitUse& use : forward) {
    hash.add(use.unit.index);
    hash.add(use.use);
  }
  return hash.value();
}

std::vector<std::string> ModelSpec::describe() const {
  constexpr std::array<const char*, 4> kinds{"constant", "normal", "uniform", "custom"};
  std::vector<std::string> lines{fmt::format("samples of {} tokens", tokens_per_sample)};
  for (const UnitSpec& unit : units_) {
    lines.push_back(fmt::format("unit {} ({} uses a micro-batch)", unit.name, unit.uses_per_micro_batch));
    for (const TensorSpec& tensor : unit.tensors) {
      const Initializer& initial = tensor.initializer;
      std::string line = fmt::format("tensor {} {} of unit {}, initialized {}({}, {})", tensor.name,
                                     tensor.shape.to_string(), unit.name,
                                     kinds[static_cast<std::size_t>(initial.kind)], initial.a, initial.b);
      if (!initial.name.empty()) line += fmt::format(" by '{}'", initial.name);
      for (const int use : tensor.uses) line += fmt::format(", read by use {}", use);
      for (const std::string& alias : tensor.aliases) line += fmt::format(", also named {}", alias);
      for (const Dimension& one : tensor.dimensions) {
        line += fmt::format(", dimension '{}' of {} blocks in grains of {}", one.name, one.blocks, one.grain);
      }
      if (tensor.matrices != 0) {
        line +=
            fmt::format(", {} matrices (linear layout {})", tensor.matrices, static_cast<int>(tensor.linear));
      }
      lines.push_back(std::move(line));
    }
    for (const LowRankAdapter& adapter : unit.adapters) {
      lines.push_back(fmt::format("adapter of unit {} on its tensor {} by {} and {} (scale {}, dropout {})",
                                  unit.name, adapter.weight, adapter.a, adapter.b, adapter.scale,
                                  adapter.dropout));
    }
  }
  for (const std::string& dimension : tensor_dimensions) lines.push_back("cut by tensor: " + dimension);
  if (residual_width > 0) lines.push_back(fmt::format("{} elements a token between units", residual_width));
  for (const UnitUse& use : forward) {
    lines.push_back(fmt::format("then use {} of unit {}", use.use, unit(use.unit).name));
  }
  lines.emplace_back("no more units");
  return lines;
}

}  // namespace tranche
