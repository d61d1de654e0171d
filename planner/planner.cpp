#include "tranche/planner/planner.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <tuple>
#include <vector>

#include "engine/stages.h"
#include "engine/state_layout.h"
#include "partition/placement.h"
#include "planner/planned_run.h"
#include "planner/step_cost.h"
#include "tranche/optim/parameter_groups.h"
#include "tranche/partition/mesh.h"

namespace tranche::planner {

namespace {

std::map<std::string, TrafficCount> counts_of(const nlohmann::json& object) {
  std::map<std::string, TrafficCount> counts;
  for (const auto& [operation, count] : object.items()) {
    if (operation == "control" || !count.is_object()) continue;
    counts[operation] = {count["calls"].get<std::int64_t>(), count["elements"].get<std::int64_t>(),
                         count["bytes"].get<std::int64_t>()};
  }
  return counts;
}

/// The lines of Engine::summary() that are notes.
std::vector<std::string> notes_of(const std::string& summary) {
  std::vector<std::string> notes;
  std::istringstream lines(summary);
  for (std::string line, word; std::getline(lines, line);) {
    std::istringstream words(line);
    if (!(words >> word) || word != "note") continue;
    std::getline(words >> std::ws, word);
    notes.push_back(word);
  }
  return notes;
}

/// A number by the formula of traffic, which is null for chains over the axis `tensor`.
std::optional<std::int64_t> formula_in(const nlohmann::json& traffic, const char* key) {
  const nlohmann::json& found = traffic[key];
  return found.is_null() ? std::nullopt : std::optional(found.get<std::int64_t>());
}

/// Fills in the mesh, the traffic on each of its axes, and the part of it that leaves the node.
void take_axes(PlanResult& result, const PlanRequest& request, const Config& config,
               const nlohmann::json& by_axis) {
  result.mesh = Mesh::parse(config.mesh, request.ranks);
  int per_node = config.debug.ranks_per_host > 0 ? config.debug.ranks_per_host : request.ranks_per_node;
  if (per_node == 0) per_node = request.ranks;
  for (int a = 0; a < mesh_axes; ++a) {
    const auto axis = static_cast<MeshAxis>(a);
    const auto counts = std::find_if(by_axis.begin(), by_axis.end(),
                                     [&](const auto& each) { return each["axis"] == name_of(axis); });
    if (counts == by_axis.end()) continue;
    const auto number = [&](const char* key) { return (*counts)[key].get<std::int64_t>(); };
    AxisTraffic& sent = result.axes[axis];
    sent.elements = number("elements");
    sent.bytes = number("bytes");
    sent.formula_elements = formula_in(*counts, "formula_elements");
    sent.formula_bytes = formula_in(*counts, "formula_bytes");
    // State is sharded over the axis context as well.
    const MeshAxis beside = axis == MeshAxis::shard ? MeshAxis::context : axis;
    const std::vector<int> group = result.mesh.group({axis, beside}, request.rank);
    sent.group = static_cast<int>(group.size());
    sent.elsewhere = static_cast<int>(std::count_if(
        group.begin(), group.end(), [&](int other) { return other / per_node != request.rank / per_node; }));
    if (axis == MeshAxis::pipeline) {
      // Messages go to neighbours and between the ends of the pipeline; the part that crosses nodes is not
      // counted separately.
      if (sent.elsewhere > 0) {
        result.crossing_bytes += sent.bytes;
        result.crossing_exact = false;
      }
      continue;
    }
    result.crossing_bytes += sent.bytes_to_other_nodes();
    const bool alone = sent.elsewhere == sent.group - 1;
    // With NCCL's rings the ranks of a node share the bytes that cross.
    if (sent.elsewhere > 0 && !alone && request.device == DeviceKind::cuda) result.crossing_exact = false;
  }
}

/// True if the ranks of the node are in groups of one stage that cover the nodes alike, so that all send as
/// many bytes as the groups of this rank.
bool node_is_even(const Mesh& mesh, int ranks_per_node, int rank) {
  if (ranks_per_node < 1 || ranks_per_node >= mesh.ranks()) return true;  // nothing leaves the only node
  const int first = rank / ranks_per_node * ranks_per_node;
  const int end = std::min(first + ranks_per_node, mesh.ranks());
  // The members of a rank's group on its own node and, ascending, on the others.
  const auto cover = [&](std::vector<int> group) {
    std::sort(group.begin(), group.end());
    std::vector<int> counts;
    int node = -1;
    for (const int member : group) {
      if (member / ranks_per_node != node) counts.push_back(0);
      node = member / ranks_per_node;
      ++counts.back();
    }
    std::sort(counts.begin(), counts.end());
    counts.insert(counts.begin(), static_cast<int>(std::count_if(group.begin(), group.end(), [&](int member) {
                    return member >= first && member < end;
                  })));
    return counts;
  };
  using enum MeshAxis;
  for (const std::initializer_list<MeshAxis> axes : {std::initializer_list<MeshAxis>{replicate},
                                                     {shard},
                                                     {context},
                                                     {tensor},
                                                     {shard, context},
                                                     {shard, context, tensor},
                                                     {replicate, shard, context, tensor}}) {
    const std::vector<int> own = cover(mesh.group(axes, rank));
    std::set<int> met;  // ranks of the node whose groups have been compared
    for (int other = first; other < end; ++other) {
      if (mesh.coordinate(pipeline, other) != mesh.coordinate(pipeline, rank)) return false;
      if (met.contains(other)) continue;
      const std::vector<int> group = mesh.group(axes, other);
      if (cover(group) != own) return false;
      for (const int member : group) {
        if (member >= first && member < end) met.insert(member);
      }
    }
  }
  return true;
}

WorkCount difference(const WorkCount& after, const WorkCount& before) {
  return {after.kernels - before.kernels, after.floating_point_operations - before.floating_point_operations,
          after.bytes_read - before.bytes_read, after.bytes_written - before.bytes_written};
}

/// The elements of the buffers that engines of this configuration have.
void take_placement(PlanResult& result, const ModelSpec& model, const Config& config,
                    const PlanRequest& request) {
  const ParameterGroups groups(config.group_rules, config.frozen);
  const detail::StateClasses classes = detail::classify(model, groups, *make_optimizer(config));
  const Mesh mesh = config.mesh_of(request.ranks);
  const detail::Placement placement = detail::place(
      model, classes, mesh,
      detail::divide(model, config, mesh.size(MeshAxis::pipeline), mesh.size(MeshAxis::tensor)));
  result.padded_elements = placement.padded_elements();
  std::map<std::tuple<int, int, int>, PlacedState> placed;  // frozen tensors are last
  for (int number = 0; number < static_cast<int>(placement.buffers().size()); ++number) {
    const detail::Placement::Buffer& buffer = placement.buffer(number);
    if (buffer.empty() || !placement.holds(number, request.rank)) continue;
    const detail::FlatLayout& layout = placement.layout(number, request.rank);
    const int kind = buffer.frozen ? placement.state_classes() : buffer.state_class;
    const int holders = buffer.sharers * std::max(1, static_cast<int>(buffer.stages.size()));
    PlacedState& state = placed[{kind, layout.ranks(), holders}];
    state.elements += layout.padded_elements();
    state.state_bytes =
        buffer.frozen ? 0 : state_bytes_of(classes.classes[static_cast<std::size_t>(buffer.state_class)]);
    state.frozen = buffer.frozen;
    state.group = layout.ranks();
    state.holders = holders;
  }
  for (const auto& [key, state] : placed) result.placed.push_back(state);
}

/// The number of groups that an engine of this configuration creates beside the runtime's (DataGroups). One
/// is for ranks that share heads of keys and values, if there are fewer heads than ranks of the axis
/// `tensor`. One is for all ranks of a pipeline stage, which own whole matrices.
std::size_t groups_of_engine(const PlanRequest& request, const Config& config) {
  const Mesh mesh = config.mesh_of(request.ranks);
  if (mesh.size(MeshAxis::tensor) == 1) return 0;
  const ModelSpec spec = planned_spec(request);
  const detail::Placement placement = detail::place(spec, config, request.ranks);
  const bool shared_heads = std::any_of(
      placement.buffers().begin(), placement.buffers().end(),
      [](const auto& buffer) { return !buffer.empty() && buffer.sharers > 1 && buffer.parts() > 1; });
  const detail::StateClasses classes =
      detail::classify(spec, ParameterGroups(config.group_rules, config.frozen), *make_optimizer(config));
  const bool stage_of_matrices =
      config.stage > 0 && config.replicate == Replicate::parameters && mesh.size(MeshAxis::replicate) > 1 &&
      mesh.size(MeshAxis::pipeline) > 1 &&
      std::any_of(classes.classes.begin(), classes.classes.end(),
                  [](const detail::StateClass& one) { return one.whole_matrices; });
  return (shared_heads ? 1 : 0) + (stage_of_matrices ? 1 : 0);
}

}  // namespace

PlanResult plan_run(const PlanRequest& request) {
  Config config = checked_config(request);
  PlanResult result;
  result.config = config.to_json();
  config.debug.poison_memory = false;

  Runtime runtime = planned_runtime(request, meta_options(config, request.device));
  Buffer host_staging;
  std::vector<Buffer> group_staging;
  if (request.device == DeviceKind::cuda && request.ranks > 1) {
    // GPU ranks also have the communicator through which they were set up.
    host_staging =
        Buffer(runtime.memory(Tier::host), config.staging_bytes, Category::communication, "staging buffer");
    // With host staging each group has a staging buffer of its own, beside the one of all ranks.
    std::vector<const Communicator*> counted;
    // The pipeline group only carries messages, which need no staging buffer.
    for (const Communicator* group : {static_cast<const Communicator*>(&runtime.shard()),
                                      static_cast<const Communicator*>(runtime.replicas()),
                                      static_cast<const Communicator*>(runtime.pipeline_ends()),
                                      static_cast<const Communicator*>(runtime.context()),
                                      static_cast<const Communicator*>(runtime.tensor()),
                                      static_cast<const Communicator*>(runtime.tensor_and_shard()),
                                      static_cast<const Communicator*>(&runtime.of_stage())}) {
      if (group == nullptr || group == &runtime.all() || group->size() == 1) continue;
      if (std::find(counted.begin(), counted.end(), group) != counted.end()) continue;
      counted.push_back(group);
    }
    const std::size_t groups = counted.size() + groups_of_engine(request, config);
    for (std::size_t group = 0; group < groups; ++group) {
      group_staging.emplace_back(runtime.memory(Tier::device), config.staging_bytes, Category::communication,
                                 "staging buffer");
    }
  }
  PlannedRun run(runtime, request, config);
  Engine& engine = run.engine();
  Stream& compute = engine.compute_stream();
  for (int step = 0; step < run.steps(); ++step) {
    const WorkCount before = compute.work();
    run.micro_batches();
    result.offload_bytes = engine.step().offload_traffic;
    result.work = difference(compute.work(), before);
  }
  result.traffic = engine.traffic_report();
  engine.begin_evaluation();
  for (int pass = 0; pass < run.evaluations(); ++pass) run.evaluate();
  (void)engine.end_evaluation();
  // `tranche train` computes this digest at its end.
  (void)engine.weights_digest();
  (void)engine.state_digest();
  for (const Tier tier : all_tiers) {
    result.tiers[static_cast<std::size_t>(tier)] = runtime.ledger().account(tier);
  }
  result.memory = engine.memory_report();
  result.model = engine.model_report();
  result.state = engine.state_bytes();
  result.notes = notes_of(engine.summary(request.verbose));
  if (in_chains(config, request.ranks)) {
    result.notes.emplace_back(
        "tranche.tensor_sums chain is refused at the start where the machine's products do not add up in "
        "ascending "
        "order, or a part of a tensor begins at an odd element; the plan does not know the machine");
  }
  const auto traffic = nlohmann::json::parse(result.traffic);
  result.data = counts_of(traffic);
  result.control = counts_of(traffic["control"]);
  result.formula_elements = formula_in(traffic, "formula_elements");
  take_axes(result, request, config, traffic["by_axis"]);
  if (const auto crossing = engine.bytes_to_other_nodes(); crossing && request.device != DeviceKind::cuda) {
    result.crossing_bytes = crossing->rank;
    result.crossing_exact = true;
    const int declared = config.debug.ranks_per_host;
    if (node_is_even(result.mesh, declared > 0 ? declared : request.ranks_per_node, request.rank)) {
      result.node_crossing_bytes = crossing->node;
    }
  }
  result.tokens = config.micro_batch_size * config.accumulation_steps * engine.model().tokens_per_sample;
  result.model_operations = engine.model().flops_per_token * static_cast<double>(result.tokens);
  result.offload = step_offload_cost(request, request.rates);
  if (const Engine::StageUses stage = engine.stage(); stage.stages > 1) {
    for (const Engine::Chunk& chunk : stage.chunks) {
      result.units +=
          (result.units.empty() ? "" : ", ") + engine.model().name_of_uses(chunk.begin, chunk.end);
    }
  }
  take_placement(result, engine.model(), config, request);
  return result;
}

std::optional<OtherGathering> plan_other_gathering(const PlanRequest& request, const PlanResult& result) {
  const int shards = Mesh::parse(request.config.mesh, request.ranks).state_ranks();
  if (request.config.stage < 3 || shards == 1) return std::nullopt;
  if (result.tier(Tier::device).category_peak[Category::gathered] == 0) return std::nullopt;
  PlanRequest other = request;
  other.config.gather_for = request.config.gather_for == GatherFor::step ? GatherFor::use : GatherFor::step;
  const PlanResult plan = plan_run(other);
  OtherGathering price;
  price.gather_for = other.config.gather_for;
  price.peak = plan.tier(Tier::device).peak;
  for (const auto& [operation, count] : plan.data) {
    price.elements += count.elements;
    price.bytes += count.bytes;
  }
  return price;
}

}  // namespace tranche::planner
