#include "planner/step_cost.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <set>
#include <string_view>
#include <vector>

#include "engine/offload_share.h"
#include "engine/residency.h"
#include "engine/stages.h"
#include "engine/state_layout.h"
#include "models/language_head.h"
#include "optim/state_format.h"
#include "partition/placement.h"
#include "planner/planned_run.h"
#include "tranche/core/shape.h"
#include "tranche/device/memory.h"
#include "tranche/kernels/quantization.h"
#include "tranche/partition/mesh.h"

namespace tranche::planner {

int shards_of(const Config& config, int ranks) {
  return config.mesh_of(ranks).state_ranks();
}

int owners_of(const Config& config, int ranks) {
  const bool shared = config.replicate == Replicate::parameters && config.stage > 0;
  return shards_of(config, ranks) * (shared ? config.mesh_of(ranks).size(MeshAxis::replicate) : 1);
}

Sizes sizes_of(const ModelSpec& spec, bool language, const Config& config, int ranks) {
  Sizes sizes;
  const detail::Placement placement = detail::place(spec, config, ranks);
  const std::vector<int> gathers = language ? spec.gathers_per_micro_batch({}) : std::vector<int>{};
  for (std::size_t index = 0; index < spec.units().size(); ++index) {
    double padded = 0;
    for (const auto& buffer : placement.buffers_of_unit(static_cast<int>(index))) {
      padded += static_cast<double>(buffer.layout(0).padded_elements());
      sizes.shard += static_cast<double>(buffer.layout(0).shard_elements());
    }
    sizes.padded += padded;
    // A list of units, unlike a language model, gathers each unit for each use, and once more for backward.
    sizes.gathered_a_pass +=
        padded * (language ? gathers[index] : 1 + spec.units()[index].uses_per_micro_batch);
    if (index == 1) sizes.block = padded;
  }
  return sizes;
}

int tensor_ranks_of(const PlanRequest& request, const Config& config) {
  return config.mesh_of(request.ranks).size(MeshAxis::tensor);
}

namespace {

double beyond(double seconds, double hidden_behind) {
  return std::max(0.0, seconds - hidden_behind);
}

/// Operations of recomputation, for one token.
struct Again {
  double blocks = 0, head = 0;
};

Again again_of(const models::LanguageModel& model, const Config& config, std::int64_t tokens_per_sample) {
  const models::ModelShape shape = model.shape();
  Again again;
  if (config.activation_checkpointing) {
    // The last block of a group is recomputed only for its activations, so that operations which only its
    // output needs are skipped.
    const std::int64_t groups = divide_round_up(shape.layers, std::max(1, config.checkpoint_every));
    again.blocks = static_cast<double>(shape.layers) * model.block_operations(tokens_per_sample) -
                   static_cast<double>(groups) * model.skipped_operations();
  }
  if (config.vocabulary_chunk > 0 && config.vocabulary_chunk < shape.vocabulary) {
    const std::int64_t chunk = round_up(config.vocabulary_chunk, models::head_block_columns);
    const auto chunks = static_cast<double>(divide_round_up(shape.vocabulary, chunk));
    again.head =
        2 * static_cast<double>(shape.vocabulary) * static_cast<double>(shape.width) * (chunks - 1) / chunks;
  }
  return again;
}

/// The number of ranks that share the work of a sample, on the axes `context` and `tensor`.
int ranks_of_sample(const PlanRequest& request, const Config& config) {
  return config.mesh_of(request.ranks).size(MeshAxis::context) * tensor_ranks_of(request, config);
}

/// Tokens of a micro-batch that one rank computes.
std::int64_t tokens_of_rank(const PlanRequest& request, const Config& config, const ModelSpec& spec) {
  return config.micro_batch_size * spec.tokens_of_rank(config.mesh_of(request.ranks).size(MeshAxis::context));
}

/// Seconds of a micro-batch in which attention waits for exchanges on the axis `context`.
double seconds_of_sequences(const PlanRequest& request, const Config& config, const ModelSpec& spec,
                            const CostModel& rates) {
  const Mesh mesh = config.mesh_of(request.ranks);
  if (mesh.size(MeshAxis::context) == 1 || !spec.context_elements) return 0;
  const std::int64_t elements = spec.context_elements(config, mesh, 0, static_cast<int>(spec.forward.size()));
  return static_cast<double>(elements * size_of(config.precision.compute)) /
         (rates.over_context > 0 ? rates.over_context : rates.network);
}

/// Seconds of a micro-batch in which layers wait for exchanges of rows on the axis `tensor`.
double seconds_of_rows(const PlanRequest& request, const Config& config, const ModelSpec& spec,
                       const CostModel& rates) {
  const int ranks = tensor_ranks_of(request, config);
  if (ranks == 1 || !spec.tensor_messages) return 0;
  const TensorMessages sent = spec.tensor_messages(config, 0, static_cast<int>(spec.forward.size()),
                                                   [](std::string_view) { return false; });
  const std::int64_t tokens = tokens_of_rank(request, config, spec);
  const std::int64_t rows = divide_round_up(tokens, ranks) * spec.residual_width * sent.rows;
  const std::int64_t bytes =
      rows * size_of(config.precision.compute) + tokens * sent.numbers * size_of(DataType::float32);
  return static_cast<double>((ranks - 1) * bytes) /
         (rates.over_tensor > 0 ? rates.over_tensor : rates.network);
}

/// The computation of a micro-batch that can hide offloading, unit by unit.
std::vector<UnitVisit> visits_of(const PlanRequest& request, const Config& config, const ModelSpec& spec) {
  std::vector<UnitVisit> visits;
  const auto count = static_cast<int>(spec.units().size());
  if (!request.model.language) {
    double uses = 0;  // sum of elements times their uses
    const auto weight = [&](int u) {
      double elements = 0;
      for (const TensorSpec& tensor : spec.units()[static_cast<std::size_t>(u)].tensors) {
        elements += static_cast<double>(tensor.shape.elements());
      }
      return elements;
    };
    for (int u = 0; u < count; ++u) {
      uses += weight(u) * spec.units()[static_cast<std::size_t>(u)].uses_per_micro_batch;
    }
    const auto share = [&](int u) { return spec.flops_per_token * weight(u) / std::max(uses, 1.0); };
    for (int u = 0; u < count; ++u) visits.push_back({u, share(u) / 3, true, false});
    for (int u = 0; u < count; ++u) {
      for (int use = 1; use < spec.units()[static_cast<std::size_t>(u)].uses_per_micro_batch; ++use) {
        visits.push_back({u, share(u), true, false});
      }
    }
    for (int u = count - 1; u >= 0; --u) visits.push_back({u, share(u) * 2 / 3, true, true});
    return visits;
  }
  const models::LanguageModel& model = *request.model.language;
  const models::ModelShape shape = model.shape();
  const Again again = again_of(model, config, spec.tokens_per_sample);
  const auto layers = static_cast<double>(shape.layers);
  const int past_blocks = model.unit_of_block(shape.layers).index;
  const double head = 6 * static_cast<double>(shape.vocabulary) * static_cast<double>(shape.width);
  const double block = (spec.flops_per_token - head) / layers;
  visits.push_back({0, 0, true, false});
  for (int u = 1; u < past_blocks; ++u) visits.push_back({u, block / 3, true, false});
  visits.push_back({model.unit_of_head().index, head + again.head, true, !shape.tied_head});
  // If a group's weights do not stay gathered, recomputation gathers its blocks separately.
  const std::vector<int> gathers = spec.gathers_per_micro_batch(config);
  const int every = config.activation_checkpointing ? std::max(1, config.checkpoint_every) : 1;
  const double computed_again = again.blocks / layers;
  for (int begin = (past_blocks - 2) / every * every + 1; begin > 0; begin -= every) {
    const int end = std::min(begin + every, past_blocks);
    const auto apart = [&](int u) { return gathers[static_cast<std::size_t>(u)] > 2; };
    for (int u = begin; u < end; ++u) {
      if (apart(u)) visits.push_back({u, computed_again, true, false});
    }
    for (int u = end - 1; u >= begin; --u) {
      visits.push_back({u, block * 2 / 3 + (apart(u) ? 0 : computed_again), true, true});
    }
  }
  visits.push_back({0, 0, false, true});
  return visits;
}

/// A buffer as tranche.host_state sees it.
struct HomeSeeker {
  std::size_t unit = 0;
  std::int64_t elements = 0;  ///< of weights, that a gather brings; of state, that the rank keeps
  std::int64_t updated = 0;   ///< of weights, those that the rank updates
  std::int64_t bytes = 0;     ///< of all elements
};

/// Lets weights and state stay in host memory, as an engine does (Residency::choose_homes).
void choose_homes(const OffloadConfig& offload, const std::vector<HomeSeeker>& weights,
                  const std::vector<HomeSeeker>& states, std::vector<OffloadUnit>& units) {
  detail::HostHomes homes(offload);
  for (const HomeSeeker& one : weights) {
    if (offload.parameters != OffloadTier::nvme) break;
    if (!homes.take_weights(one.elements, one.bytes)) continue;
    units[one.unit].shard_in_host += one.elements;
    units[one.unit].updated_in_host += one.updated;
  }
  for (const HomeSeeker& one : states) {
    if (offload.optimizer != OffloadTier::nvme) break;
    if (homes.take_state(one.bytes)) units[one.unit].state_in_host += one.elements;
  }
}

OffloadCost offload_cost_of(const PlanRequest& request, const Config& config, const ModelSpec& spec,
                            const CostModel& rates) {
  OffloadSchedule schedule;
  const int shards = shards_of(config, request.ranks),
            replicas = config.mesh_of(request.ranks).size(MeshAxis::replicate);
  const int copies = shards == owners_of(config, request.ranks) ? 1 : replicas;
  const detail::Placement placement = detail::place(spec, config, request.ranks);
  std::vector<std::int64_t> trainable;  // padded elements of each trainable buffer
  std::vector<std::size_t> unit_of;     // the unit of each
  std::vector<std::int64_t> kept;       // elements of each whose state this rank keeps
  std::vector<std::int64_t> on_device;  // elements of `kept` whose weights are whole on the device
  std::vector<HomeSeeker> weights;      // of buffers that are not whole on the device
  std::vector<HomeSeeker> states;       // of each trainable buffer
  const std::unique_ptr<Optimizer> optimizer = make_optimizer(config);
  const detail::StateClasses classes =
      detail::classify(spec, ParameterGroups(config.group_rules, config.frozen), *optimizer);
  const double master = config.precision.master == MasterFormat::none ? 2.0 : 4.0;
  detail::PersistentBuffers persistent(config);
  for (std::size_t u = 0; u < spec.units().size(); ++u) {
    OffloadUnit& of = schedule.units.emplace_back();
    int number = placement.first_buffer(static_cast<int>(u));
    for (const auto& buffer : placement.buffers_of_unit(static_cast<int>(u))) {
      const detail::FlatLayout& layout = placement.layout(number, request.rank);
      const std::int64_t whole = layout.padded_elements(), shard = layout.shard_elements();
      if (!placement.holds(number++, request.rank)) continue;  // it belongs to another stage of the pipeline
      if (buffer.empty()) continue;
      const bool keeps =
          persistent.keeps(layout) || (config.stage == 3 && (buffer.stages.size() > 1 || buffer.sharers > 1));
      if (!buffer.frozen) {
        kept.push_back(config.stage == 0 ? whole : shard / copies);
        on_device.push_back(keeps ? kept.back() : 0);
        // The parts of a buffer may differ in size between ranks of the axis `tensor`, but all decide by the
        // largest (Residency::assign_tiers).
        std::int64_t largest = whole;
        for (const detail::FlatLayout& part : buffer.layouts) {
          largest = std::max(largest, part.padded_elements());
        }
        trainable.push_back(largest);
        unit_of.push_back(u);
        std::int64_t bytes = aligned_bytes(std::llround(static_cast<double>(kept.back()) * master));
        for (const OptimizerStateTensor& state :
             classes.classes[static_cast<std::size_t>(buffer.state_class)].states) {
          bytes += aligned_bytes(bytes_of(state.dtype, kept.back()));
        }
        states.push_back({u, kept.back(), 0, bytes});
      }
      if (keeps) continue;
      weights.push_back({u, shard, buffer.frozen ? 0 : kept.back(),
                         aligned_bytes(shard * size_of(config.precision.compute))});
      of.shard += shard;
      of.gathered += whole;
    }
  }
  // A unit counts as moving if any of its buffers moves. Then `kept` counts the buffers that move, and
  // `stays` the others.
  const std::vector<bool> moves = detail::units_that_move(trainable, config.offload.ratio);
  for (std::size_t b = 0; b < trainable.size(); ++b) {
    if (!moves[b] || config.offload.optimizer == OffloadTier::none) continue;
    schedule.units[unit_of[b]].moves = true;
    schedule.units[unit_of[b]].kept += kept[b];
    schedule.units[unit_of[b]].whole += on_device[b];
  }
  for (std::size_t b = 0; b < trainable.size(); ++b) {
    if (moves[b] && config.offload.optimizer != OffloadTier::none) continue;
    OffloadUnit& unit = schedule.units[unit_of[b]];
    if (unit.moves) {
      if (config.offload.parameters != OffloadTier::none) unit.stays += kept[b] - on_device[b];
      continue;
    }
    unit.kept += kept[b];
    unit.whole += on_device[b];
  }
  for (std::size_t b = 0; b < states.size(); ++b) {
    if (!moves[b]) states[b] = {};
  }
  choose_homes(config.offload, weights, states, schedule.units);
  schedule.state_bytes = master + detail::state_bytes_of_element(*optimizer);
  if (optimizer->sums({}) > 0) schedule.passes = 2;  // one pass for the sums, one for the update
  schedule.visits = visits_of(request, config, spec);
  for (UnitVisit& visit : schedule.visits) visit.operations /= ranks_of_sample(request, config);
  if (config.gather_for == GatherFor::step) {
    std::set<int> gathered;
    for (UnitVisit& visit : schedule.visits) {
      visit.gathers = visit.gathers && gathered.insert(visit.unit).second;
    }
  }
  if (request.model.language && config.activation_checkpointing) {
    const models::ModelShape shape = request.model.language->shape();
    schedule.kept_inputs = divide_round_up(shape.layers, std::max(1, config.checkpoint_every));
    schedule.input_bytes = shape.width * size_of(config.precision.compute);
    schedule.row_ranks = tensor_ranks_of(request, config);
  }
  const auto tokens = static_cast<double>(tokens_of_rank(request, config, spec));
  return offload_cost(schedule, config, tokens, rates);
}

StepCost cost_without_rows(const PlanRequest& request, const Config& config, const ModelSpec& spec,
                           const Sizes& sizes, const CostModel& rates) {
  const auto micro_batches = static_cast<double>(config.accumulation_steps);
  const double tokens = static_cast<double>(config.micro_batch_size * spec.tokens_per_sample) * micro_batches;
  StepCost cost;
  const double operations = rates.operations * ranks_of_sample(request, config);
  cost.compute = tokens * spec.flops_per_token / operations;
  double gathered = sizes.gathered_a_pass;
  if (request.model.language) {
    const Again again = again_of(*request.model.language, config, spec.tokens_per_sample);
    cost.recompute = tokens * (again.blocks + again.head) / operations;
    // Only blocks are gathered more than twice.
    if (config.activation_checkpointing) {
      for (const int gathers : spec.gathers_per_micro_batch(config))
        gathered += sizes.block * std::max(0, gathers - 2);
    }
  }
  if (config.offload.any()) cost.offload = offload_cost_of(request, config, spec, rates).exposed;
  if (request.ranks == 1) return cost;

  const int shards = shards_of(config, request.ranks),
            replicas = config.mesh_of(request.ranks).size(MeshAxis::replicate);
  const double share = (shards - 1.0) / shards, among_replicas = (replicas - 1.0) / replicas;
  const auto seconds = [&](double elements, DataType dtype, bool quantized = false) {
    constexpr double of_blocks =
        kernels::quantized_block_bytes / static_cast<double>(kernels::quantized_block);
    return elements * share * (quantized ? of_blocks : static_cast<double>(size_of(dtype))) / rates.network;
  };
  const auto weights = [&](double elements) {
    return seconds(elements, config.precision.compute, config.quantized_weights);
  };
  const auto over_replicas = [&](DataType dtype) {
    return sizes.shard * among_replicas * static_cast<double>(size_of(dtype)) /
           (rates.over_replicate > 0 ? rates.over_replicate : rates.network);
  };
  const double hides = config.overlap ? 1 : 0;
  const double forward = cost.compute / 3 / micro_batches * hides;
  const double backward = (cost.compute * 2 / 3 + cost.recompute) / micro_batches * hides;
  const int owners = owners_of(config, request.ranks);
  const bool boundary = config.effective_reduction(owners) == ReductionPolicy::boundary;
  // Replicas add their gradients in fp32 for each micro-batch or once a step. Once a step they also exchange
  // their parts: the sums, or the new weights.
  const bool each_time = config.replica_sum == ReplicaSum::micro_batch;
  const double sum_of_replicas = over_replicas(DataType::float32);
  const double reduction = seconds(sizes.padded, config.precision.communication, config.quantized_gradients) +
                           (each_time ? sum_of_replicas : 0);
  const double whole_sums =
      over_replicas(owners == shards ? config.precision.accumulation : config.precision.compute) +
      (each_time ? 0 : sum_of_replicas);
  const double reductions_before_last = boundary ? 0 : micro_batches - 1;
  if (config.stage == 3 && config.gather_for == GatherFor::step) {
    // All gathers are in the first forward pass.
    cost.exposed = beyond(weights(sizes.padded), config.depth > 1 ? forward : 0) +
                   reductions_before_last * beyond(reduction, backward) +
                   beyond(reduction + whole_sums, backward);
    return cost;
  }
  if (config.stage == 3) {
    const double gather = weights(gathered);
    const double window = config.depth > 1 ? forward + backward : 0;
    cost.exposed = reductions_before_last * beyond(gather + reduction, window) +
                   (micro_batches - 1 - reductions_before_last) * beyond(gather, window) +
                   beyond(gather + reduction + whole_sums, window);
    return cost;
  }
  const double sums =
      whole_sums + (config.stage == 0 ? seconds(sizes.padded, config.precision.accumulation) : 0);
  cost.exposed = reductions_before_last * beyond(reduction, backward) + beyond(reduction + sums, backward);
  if (config.stage > 0) cost.exposed += beyond(weights(sizes.padded), forward);
  return cost;
}

}  // namespace

StepCost cost_of(const PlanRequest& request, const Config& config, const ModelSpec& spec, const Sizes& sizes,
                 const CostModel& rates) {
  StepCost cost = cost_without_rows(request, config, spec, sizes, rates);
  cost.exposed +=
      static_cast<double>(config.accumulation_steps) *
      (seconds_of_rows(request, config, spec, rates) + seconds_of_sequences(request, config, spec, rates));
  return cost;
}

double state_bytes_of(const detail::StateClass& one) {
  double bytes = 0;
  for (const OptimizerStateTensor& state : one.states) {
    bytes += static_cast<double>(bytes_of(state.dtype, detail::shard_multiple_elements)) /
             detail::shard_multiple_elements;
  }
  return bytes;
}

std::vector<HeldState> held_by(const ModelSpec& spec, const Config& config, int ranks,
                               const std::vector<int>& which) {
  const ParameterGroups groups(config.group_rules, config.frozen);
  const detail::StateClasses classes = detail::classify(spec, groups, *make_optimizer(config));
  const Mesh mesh = config.mesh_of(ranks);
  const detail::Placement placement =
      detail::place(spec, classes, mesh,
                    detail::divide(spec, config, mesh.size(MeshAxis::pipeline), mesh.size(MeshAxis::tensor)));
  std::vector<HeldState> all;
  for (const int rank : which) {
    HeldState& held = all.emplace_back();
    for (int number = 0; number < static_cast<int>(placement.buffers().size()); ++number) {
      const detail::Placement::Buffer& buffer = placement.buffer(number);
      if (buffer.empty() || !placement.holds(number, rank)) continue;
      const detail::FlatLayout& layout = placement.layout(number, rank);
      const auto whole = static_cast<double>(layout.padded_elements()),
                 shard = static_cast<double>(layout.shard_elements());
      held.whole += whole;
      held.shard += shard;
      if (buffer.frozen) continue;
      const double state = state_bytes_of(classes.classes[static_cast<std::size_t>(buffer.state_class)]);
      held.trained_whole += whole;
      held.trained_shard += shard;
      held.state_whole += whole * state;
      held.state_shard += shard * state;
    }
  }
  return all;
}

std::int64_t least_state_bytes(const Config& config, int ranks, const HeldState& held) {
  const int owners = owners_of(config, ranks), shards = shards_of(config, ranks);
  const bool boundary = config.effective_reduction(owners) == ReductionPolicy::boundary;
  const DataType compute = config.precision.compute;
  double bytes = 0;
  if (config.offload.parameters == OffloadTier::none) {
    bytes = (config.stage < 3 ? held.whole : held.shard) * static_cast<double>(size_of(compute));
  }
  // If one micro-batch makes the step, offloaded state takes the main gradient off the device.
  if (config.offload.optimizer == OffloadTier::none) {
    const bool beside = config.offload.parameters == OffloadTier::none;
    double master = compute == DataType::float32 ? 0 : 4;
    if (config.precision.master == MasterFormat::split && beside) master = 2;
    if (config.precision.master == MasterFormat::none) master = beside ? 0 : 2;
    // More ranks may share gradients and optimizer state than share the weights.
    const double part = static_cast<double>(shards) / owners;
    bytes += (config.stage == 0 || boundary ? held.trained_whole : held.trained_shard * part) *
             static_cast<double>(size_of(config.precision.accumulation));
    bytes += config.stage == 0 ? held.trained_whole * master + held.state_whole
                               : (held.trained_shard * master + held.state_shard) * part;
  }
  return static_cast<std::int64_t>(bytes) + config.workspace_bytes + (ranks == 1 ? 0 : config.staging_bytes);
}

StepCost step_cost(const PlanRequest& request, const CostModel& rates) {
  Config config = request.config;
  validate_config(config, request.ranks);
  const ModelSpec spec = planned_spec(request);
  return cost_of(request, config, spec,
                 sizes_of(spec, request.model.covers_activations(), config, request.ranks), rates);
}

OffloadCost step_offload_cost(const PlanRequest& request, const CostModel& rates) {
  Config config = request.config;
  validate_config(config, request.ranks);
  const ModelSpec spec = planned_spec(request);
  return offload_cost_of(request, config, spec, rates);
}

}  // namespace tranche::planner
