#include "engine/state_layout.h"

#include <fmt/core.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "checkpoint/layout.h"
#include "core/closest_match.h"
#include "tranche/core/error.h"

namespace tranche::detail {

namespace {

/// The properties of a tensor that optimizers use.
TrainableTensor facts_of(const TensorSpec& tensor, const ParameterGroups& groups) {
  return {tensor.name, tensor.shape, groups.resolve(tensor.name, tensor.shape.rank()), tensor.matrices,
          tensor.linear != LinearLayout::in_out};
}

void check_group(const Optimizer& optimizer, const TrainableTensor& tensor) {
  try {
    optimizer.check_group(tensor.group);
  } catch (const InvalidArgument& error) {
    throw ConfigurationError("tranche.parameter_groups, tensor " + std::string(tensor.name) + ": " +
                             error.message());
  }
}

std::string name_of(const UnitState& unit, const Placement::Buffer& buffer,
                    const std::vector<StateClass>& classes) {
  std::string name = unit.name;
  for (std::size_t i = 0; i < buffer.uses.size() && unit.uses_in_model > 1; ++i) {
    name += (i == 0 ? " use " : " and ") + std::to_string(buffer.uses[i]);
  }
  if (buffer.sharers > 1) name += buffer.parts() == 1 ? " whole" : " shared";
  if (buffer.frozen) return name + " frozen";
  if (buffer.state_class == 0) return name;
  const std::vector<OptimizerStateTensor>& states =
      classes[static_cast<std::size_t>(buffer.state_class)].states;
  return name + " " + (states.empty() ? "stateless" : states.front().name);
}

bool in_blocks(const StateClass& one) {
  return std::any_of(one.states.begin(), one.states.end(),
                     [](const OptimizerStateTensor& state) { return is_block(state.dtype); });
}

/// Throws ConfigurationError for state that ranks of the axis `tensor` cannot divide.
void require_cuttable(const ModelSpec& model, const StateClasses& classes, const Mesh& mesh,
                      const std::vector<TensorFacts>& facts) {
  const int ranks = mesh.size(MeshAxis::tensor);
  std::size_t t = 0;
  for (const UnitSpec& unit : model.units()) {
    for (const TensorSpec& tensor : unit.tensors) {
      const TensorFacts& of = facts[t++];
      if (of.frozen) continue;
      const StateClass& state_class = classes.classes[static_cast<std::size_t>(of.state_class)];
      if (!in_blocks(state_class) || of.cut.whole()) continue;
      for (int part = 0; part < ranks; ++part) {
        const Box box = slice_of(tensor.shape, of.cut, part, ranks);
        if (holds_whole_blocks(box, tensor.shape, block8_elements)) continue;
        std::int64_t begin = 0, run = 0;
        common_runs(
            tensor.shape, box, whole_box(tensor.shape), {0, elements_of(box)}, [&](const CommonRun& one) {
              if (run > 0 || (one.tensor % block8_elements == 0 && one.elements % block8_elements == 0))
                return;
              begin = one.tensor;
              run = one.elements;
            });
        throw ConfigurationError(fmt::format(
            "tranche.moments: with tranche.mesh \"{}\" a rank has elements {} to {} of tensor {}, "
            "which are not whole blocks of {}; keep the moments in fp32, or leave tensor out",
            mesh.to_string(), begin, begin + run - 1, tensor.name, block8_elements));
      }
    }
  }
}

}  // namespace

StateClasses classify(const ModelSpec& model, const ParameterGroups& groups, const Optimizer& optimizer) {
  StateClasses result;
  for (const UnitSpec& unit : model.units()) {
    for (const TensorSpec& tensor : unit.tensors) {
      if (tensor.frozen || groups.frozen(tensor.name)) {
        result.of_tensor.push_back(-1);
        continue;
      }
      const TrainableTensor facts = facts_of(tensor, groups);
      check_group(optimizer, facts);
      StateClass own{optimizer.state(facts), optimizer.needs_whole_matrices(facts)};
      const auto found = std::find(result.classes.begin(), result.classes.end(), own);
      result.of_tensor.push_back(static_cast<int>(found - result.classes.begin()));
      if (found == result.classes.end()) result.classes.push_back(std::move(own));
    }
  }
  return result;
}

Placement place(const ModelSpec& model, const StateClasses& classes, const Mesh& mesh, const Stages& stages) {
  std::vector<TensorFacts> facts;
  for (std::size_t u = 0; u < model.units().size(); ++u) {
    for (const TensorSpec& tensor : model.units()[u].tensors) {
      const int state_class = classes.of_tensor[facts.size()];
      const TensorUses of = stages.tensors.empty() ? TensorUses() : stages.tensors.at(facts.size());
      const TensorCut cut = stages.cuts.empty() ? TensorCut() : stages.cuts.at(facts.size());
      facts.push_back({tensor.shape, static_cast<int>(u), state_class < 0, std::max(state_class, 0),
                       of.stages, of.uses, cut});
    }
  }
  if (!stages.cuts.empty()) require_cuttable(model, classes, mesh, facts);
  std::vector<bool> block_classes;
  for (const StateClass& one : classes.classes) block_classes.push_back(in_blocks(one));
  return {mesh, static_cast<int>(model.units().size()), std::move(facts), block_classes};
}

Placement place(const ModelSpec& model, const Config& config, int ranks) {
  const ParameterGroups groups(config.group_rules, config.frozen);
  const Mesh mesh = config.mesh_of(ranks);
  return place(model, classify(model, groups, *make_optimizer(config)), mesh,
               divide(model, config, mesh.size(MeshAxis::pipeline), mesh.size(MeshAxis::tensor)));
}

namespace {

/// Gives the units their flat buffers, in the order of the placement.
void add_buffers(StateLayout& layout, int rank, const RanksOfBuffer& ranks_of) {
  for (std::size_t u = 0; u < layout.units.size(); ++u) {
    UnitState& unit = layout.units[u];
    int number = layout.placement.first_buffer(static_cast<int>(u));
    for (const Placement::Buffer& buffer : layout.placement.buffers_of_unit(static_cast<int>(u))) {
      const BufferRanks ranks = ranks_of(layout.placement, number++);
      const StateClass of =
          buffer.frozen ? StateClass() : layout.state_classes[static_cast<std::size_t>(buffer.state_class)];
      FlatBuffer& flat = unit.buffers.emplace_back(
          name_of(unit, buffer, layout.state_classes), !buffer.frozen, ranks.group, ranks.replicas,
          layout.placement.layout(number - 1, rank), buffer.tensors, of.states);
      flat.whole_matrices = of.whole_matrices;
      flat.stages = static_cast<int>(buffer.stages.size());
      flat.sharers = buffer.sharers;
      for (const FlatLayout& part : buffer.layouts) {
        flat.largest_part = std::max(flat.largest_part, part.padded_elements());
      }
      std::set_intersection(buffer.uses.begin(), buffer.uses.end(), unit.uses.begin(), unit.uses.end(),
                            std::back_inserter(flat.uses));
    }
  }
}

}  // namespace

StateLayout lay_out(const ModelSpec& model, const ParameterGroups& groups, const Optimizer& optimizer,
                    const Mesh& mesh, const Stages& stages, int rank, const RanksOfBuffer& ranks_of) {
  if (model.units().empty()) throw ConfigurationError("the model has no units");
  StateClasses classes = classify(model, groups, optimizer);
  StateLayout layout{place(model, classes, mesh, stages), {}, {}, {}};
  std::vector<std::string> names;
  std::size_t total = 0, adapters = 0;
  for (const UnitSpec& spec : model.units()) {
    total += spec.tensors.size();
    adapters += 2 * spec.adapters.size();
  }
  layout.tensors.reserve(total);
  // Adapters have the last indices, so that the model's other weights are drawn as without adapters.
  std::size_t next_index = 0, next_adapter_index = total - adapters;
  for (const UnitSpec& spec : model.units()) {
    UnitState unit;
    unit.name = spec.name;
    unit.uses_in_model = spec.uses_per_micro_batch;
    unit.uses = stages.uses_of(model, static_cast<int>(layout.units.size()),
                               mesh.coordinate(MeshAxis::pipeline, rank));
    const std::size_t own = spec.tensors.size() - 2 * spec.adapters.size();  // adapters follow these
    for (const TensorSpec& tensor : spec.tensors) {
      TensorState state;
      state.name = tensor.name;
      state.aliases = tensor.aliases;
      state.shape = tensor.shape;
      state.initializer = tensor.initializer;
      state.model_index = unit.tensors.size() < own ? next_index++ : next_adapter_index++;
      state.unit = static_cast<int>(layout.units.size());
      const auto number = static_cast<int>(layout.tensors.size());
      const int buffer = layout.placement.buffer_of(number);
      state.frozen = layout.placement.buffer(buffer).frozen;
      state.buffer = buffer - layout.placement.first_buffer(state.unit);
      state.flat_index = layout.placement.index_in_buffer(number);
      if (!layout.placement.tensor(number).cut.whole()) {
        state.box = layout.placement.box(number, layout.placement.part_of(buffer, rank));
      }
      state.local = state.cut() ? shape_of(state.box) : state.shape;
      const TrainableTensor facts = facts_of(tensor, groups);
      state.group = facts.group;
      state.matrices = facts.matrices;
      state.outputs_first = facts.outputs_first;
      unit.tensors.push_back(static_cast<int>(layout.tensors.size()));
      names.push_back(tensor.name);
      layout.tensors.push_back(std::move(state));
    }
    layout.units.push_back(std::move(unit));
  }
  const std::vector<std::string> unmatched = groups.unmatched(names);
  if (!unmatched.empty()) {
    std::string plain = unmatched.front();
    std::erase(plain, '*');
    const std::string closest = closest_match(plain, names);
    throw ConfigurationError("pattern '" + unmatched.front() + "' in " + groups.keys_of(unmatched.front()) +
                             " matches no tensor" +
                             (closest.empty() ? "; the first tensor is '" + names.front() + "'"
                                              : "; the closest match is '" + closest + "'"));
  }
  layout.state_classes = std::move(classes.classes);
  if (layout.state_classes.empty()) throw ConfigurationError("tranche.frozen leaves no tensor to train");
  if (layout.state_classes.size() > checkpoint::most_state_classes) {
    throw ConfigurationError(
        fmt::format("optimizer {} keeps {} different lists of states; at most {} are told apart",
                    optimizer.name(), layout.state_classes.size(), checkpoint::most_state_classes));
  }
  add_buffers(layout, rank, ranks_of);
  return layout;
}

StateLayout lay_out(const ModelSpec& model, const ParameterGroups& groups, const Optimizer& optimizer,
                    const Mesh& mesh, Communicator& group, Communicator* replicas) {
  return lay_out(model, groups, optimizer, mesh, {}, 0, [&](const Placement&, int) {
    return BufferRanks{&group, replicas};
  });
}

}  // namespace tranche::detail
