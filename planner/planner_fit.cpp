// The cost of a step, and the search for the cheapest configuration that fits.

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "engine/offload_share.h"
#include "engine/residency.h"
#include "engine/state_layout.h"
#include "models/language_head.h"
#include "optim/state_format.h"
#include "partition/placement.h"
#include "planner/planned_run.h"
#include "tranche/core/error.h"
#include "tranche/core/shape.h"
#include "tranche/kernels/quantization.h"
#include "tranche/partition/mesh.h"
#include "tranche/planner/planner.h"

namespace tranche::planner {

namespace {

/// Micro-batches of a step that a trial runs: the first, one between, the last. The choice is run whole.
constexpr std::int64_t trial_micro_batches = 3;
/// A configuration that fits is run once more with this many before it is compared, since more may pack a
/// little worse.
constexpr std::int64_t most_run_micro_batches = 32;
/// The chunked head is tried with this many columns where the vocabulary has at least twice as many.
constexpr std::int64_t tried_chunk = 8192;

/// Where a machine's seconds decide, the formula is trusted with what it has for so many times as dear.
constexpr double too_dear = 1.5;

/// The sizes of a model that the formulas use.
struct Sizes {
  double padded = 0;           ///< elements of all flat buffers
  double shard = 0;            ///< of this rank's shards
  double gathered_a_pass = 0;  ///< stage 3, without recomputation
  double block = 0;            ///< of a language model's first block
};

/// Ranks that share one copy of the state.
int shards_of(const Config& config, int ranks) {
  return config.mesh_of(ranks).size(MeshAxis::shard);
}

/// Ranks that share the gradients and the optimizer's state.
int owners_of(const Config& config, int ranks) {
  return config.replicate == Replicate::parameters && config.stage > 0 ? config.data_ranks(ranks)
                                                                       : shards_of(config, ranks);
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
    // A list's units are gathered for each use, and once more for backward.
    sizes.gathered_a_pass +=
        padded * (language ? gathers[index] : 1 + spec.units()[index].uses_per_micro_batch);
    if (index == 1) sizes.block = padded;
  }
  return sizes;
}

double beyond(double seconds, double hidden_behind) {
  return std::max(0.0, seconds - hidden_behind);
}

/// Operations a token that are done a second time.
struct Again {
  double blocks = 0, head = 0;
};

Again again_of(const models::LanguageModel& model, const Config& config, std::int64_t tokens_per_sample) {
  const models::ModelShape shape = model.shape();
  Again again;
  if (config.activation_checkpointing) {
    // Only the activations of a group's last block are computed again.
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

int tensor_ranks_of(const PlanRequest& request, const Config& config) {
  return config.mesh_of(request.ranks).size(MeshAxis::tensor);
}

/// Seconds of a micro-batch in which layers wait for the rows of the axis `tensor`.
double seconds_of_rows(const PlanRequest& request, const Config& config, const ModelSpec& spec,
                       const CostModel& rates) {
  const int ranks = tensor_ranks_of(request, config);
  if (ranks == 1 || !spec.tensor_messages) return 0;
  const TensorMessages sent = spec.tensor_messages(config, 0, static_cast<int>(spec.forward.size()),
                                                   [](std::string_view) { return false; });
  const std::int64_t tokens = config.micro_batch_size * spec.tokens_per_sample;
  const std::int64_t rows = divide_round_up(tokens, ranks) * spec.residual_width * sent.rows;
  const std::int64_t bytes =
      rows * size_of(config.precision.compute) + tokens * sent.numbers * size_of(DataType::float32);
  return static_cast<double>((ranks - 1) * bytes) / rates.network;
}

/// The work of a micro-batch that offloading can hide behind, unit by unit.
std::vector<UnitVisit> visits_of(const PlanRequest& request, const Config& config, const ModelSpec& spec) {
  std::vector<UnitVisit> visits;
  const auto count = static_cast<int>(spec.units().size());
  if (!request.model.language) {
    double uses = 0;  // elements, as often as they are used
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
  // Recomputation of a group that does not stay gathered asks for its blocks on its own.
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

OffloadCost offload_cost_of(const PlanRequest& request, const Config& config, const ModelSpec& spec,
                            const CostModel& rates) {
  OffloadSchedule schedule;
  const int shards = shards_of(config, request.ranks),
            replicas = config.mesh_of(request.ranks).size(MeshAxis::replicate);
  const int copies = shards == owners_of(config, request.ranks) ? 1 : replicas;
  const detail::Placement placement = detail::place(spec, config, request.ranks);
  std::vector<std::int64_t> trainable;  // padded elements of each trainable buffer
  std::vector<std::size_t> unit_of;     // and its unit
  std::vector<std::int64_t> kept;       // and the elements of it whose state this rank keeps
  std::vector<std::int64_t> on_device;  // and those of them whose weights are whole on the device
  detail::PersistentBuffers persistent(config);
  for (std::size_t u = 0; u < spec.units().size(); ++u) {
    OffloadUnit& of = schedule.units.emplace_back();
    int number = placement.first_buffer(static_cast<int>(u));
    for (const auto& buffer : placement.buffers_of_unit(static_cast<int>(u))) {
      const detail::FlatLayout& layout = placement.layout(number, request.rank);
      const std::int64_t whole = layout.padded_elements(), shard = layout.shard_elements();
      if (!placement.holds(number++, request.rank)) continue;  // another stage of a pipeline does
      if (buffer.empty()) continue;
      const bool keeps =
          persistent.keeps(layout) || (config.stage == 3 && (buffer.stages.size() > 1 || buffer.sharers > 1));
      if (!buffer.frozen) {
        kept.push_back(config.stage == 0 ? whole : shard / copies);
        on_device.push_back(keeps ? kept.back() : 0);
        // Ranks of the axis tensor, whose parts may differ in size, decide alike (Residency::assign_tiers).
        std::int64_t largest = whole;
        for (const detail::FlatLayout& part : buffer.layouts) {
          largest = std::max(largest, part.padded_elements());
        }
        trainable.push_back(largest);
        unit_of.push_back(u);
      }
      if (keeps) continue;
      of.shard += shard;
      of.gathered += whole;
    }
  }
  // A unit counts as one that moves when any of its buffers does; it keeps what moves, then, beside what stays.
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
  const std::unique_ptr<Optimizer> optimizer = make_optimizer(config);
  schedule.state_bytes = (config.precision.master == MasterFormat::none ? 2.0 : 4.0) +
                         detail::state_bytes_of_element(*optimizer);
  if (optimizer->sums({}) > 0) schedule.passes = 2;  // those of the sums, and of the update
  schedule.visits = visits_of(request, config, spec);
  for (UnitVisit& visit : schedule.visits) visit.operations /= tensor_ranks_of(request, config);
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
  const auto tokens = static_cast<double>(config.micro_batch_size * spec.tokens_per_sample);
  return offload_cost(schedule, config, tokens, rates);
}

StepCost cost_without_rows(const PlanRequest& request, const Config& config, const ModelSpec& spec,
                           const Sizes& sizes, const CostModel& rates) {
  const auto micro_batches = static_cast<double>(config.accumulation_steps);
  const double tokens = static_cast<double>(config.micro_batch_size * spec.tokens_per_sample) * micro_batches;
  StepCost cost;
  const double operations = rates.operations * tensor_ranks_of(request, config);  // of all ranks of `tensor`
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
    return sizes.shard * among_replicas * static_cast<double>(size_of(dtype)) / rates.network;
  };
  const double hides = config.overlap ? 1 : 0;
  const double forward = cost.compute / 3 / micro_batches * hides;
  const double backward = (cost.compute * 2 / 3 + cost.recompute) / micro_batches * hides;
  const int owners = owners_of(config, request.ranks);
  const bool boundary = config.effective_reduction(owners) == ReductionPolicy::boundary;
  // Replicas add their sums in fp32 each time, or once, and take each other's parts once a step: the sums, or
  // the new weights.
  const bool each_time = config.replica_sum == ReplicaSum::micro_batch;
  const double sum_of_replicas = over_replicas(DataType::float32);
  const double reduction = seconds(sizes.padded, config.precision.communication, config.quantized_gradients) +
                           (each_time ? sum_of_replicas : 0);
  const double whole_sums =
      over_replicas(owners == shards ? config.precision.accumulation : config.precision.compute) +
      (each_time ? 0 : sum_of_replicas);
  const double reductions_before_last = boundary ? 0 : micro_batches - 1;
  if (config.stage == 3 && config.gather_for == GatherFor::step) {
    // All of it in the first forward pass.
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

StepCost cost_of(const PlanRequest& request, const Config& config, const ModelSpec& spec, const Sizes& sizes,
                 const CostModel& rates) {
  StepCost cost = cost_without_rows(request, config, spec, sizes, rates);
  cost.exposed +=
      static_cast<double>(config.accumulation_steps) * seconds_of_rows(request, config, spec, rates);
  return cost;
}

/// Everything that is searched but the micro-batch.
struct Levers {
  int stage = 0;
  ReductionPolicy reduction = ReductionPolicy::boundary;
  int checkpoint_every = 0;
  std::int64_t vocabulary_chunk = 0;
  OffloadTier optimizer = OffloadTier::none, parameters = OffloadTier::none;
  bool activations = false;
};

/// Bytes of a rank at their peaks.
struct Peaks {
  std::int64_t device = 0, host = 0, nvme = 0;
};

class Search {
 public:
  explicit Search(const FitRequest& request)
      : request_(request), base_(request.plan.config), spec_(planned_spec(request.plan)) {
    validate_config(base_, request.plan.ranks);
    shards_ = shards_of(base_, request.plan.ranks);
    // Ranks of the axis `tensor` may hold parts of different sizes, all of which have to fit.
    const std::vector<int> parts =
        base_.mesh_of(request.plan.ranks).group({MeshAxis::tensor}, request.plan.rank);
    for (const std::vector<int>& alike : equal_ranks(request.plan, parts)) {
      ranks_.push_back(parts[static_cast<std::size_t>(alike.front())]);
    }
    sizes_ = sizes_of(spec_, request.plan.model.covers_activations(), base_, request.plan.ranks);
    if (request.keep_micro_batch || base_.world_size_invariant) {
      micro_batches_.push_back(base_.micro_batch_size);
      return;
    }
    const std::int64_t samples = base_.micro_batch_size * base_.accumulation_steps;
    for (std::int64_t b = 1; b * b <= samples; ++b) {
      if (samples % b != 0) continue;
      micro_batches_.push_back(b);
      if (b * b != samples) micro_batches_.push_back(samples / b);
    }
    std::sort(micro_batches_.begin(), micro_batches_.end());
  }

  FitResult run() {
    std::vector<std::pair<double, Levers>> candidates;
    for (const Levers& levers : all_levers()) {
      candidates.emplace_back(cost(config_of(levers, micro_batches_.back())).total(), levers);
    }
    // Candidates of equal cost are tried from the simplest on.
    std::stable_sort(candidates.begin(), candidates.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
    FitResult result;
    double least_found = std::numeric_limits<double>::infinity();
    std::set<std::tuple<int, ReductionPolicy, OffloadTier, OffloadTier>> hopeless;
    for (const auto& [least_cost, levers] : candidates) {
      if (least_cost >= (request_.seconds ? too_dear : 1) * least_found) break;
      const std::tuple key(levers.stage, levers.reduction, levers.optimizer, levers.parameters);
      if (hopeless.count(key) > 0) continue;
      // Where the formula gives the order alone, none that is left may be taken for dearer by it.
      if (request_.seconds && std::isfinite(least_found) && !may_take_less(levers, least_found)) continue;
      result.ladder.push_back(attempt(levers));
      FitTrial& trial = result.ladder.back();
      // State that lives beside the device is the same with any micro-batch, checkpointing and head.
      const Peaks beside{0, trial.host, trial.nvme};
      if (trial.state_alone || (!levers.activations && !within(beside))) hopeless.insert(key);
      if (request_.seconds) trial.cost = trial.fits ? seconds_of(levers, trial.micro_batch) : StepCost{};
      if (trial.fits) least_found = std::min(least_found, trial.cost.total());
    }
    // Whole steps of the choice have the last word, as many as it takes.
    for (;;) {
      result.chosen = best_of(result.ladder);
      FitTrial& chosen = result.ladder[result.chosen];
      result.config = config_of(levers_of(chosen), chosen.micro_batch);
      std::tie(result.plan, result.rank) = plan(result.config, std::numeric_limits<std::int64_t>::max());
      const Peaks peaks = peaks_of(result.plan);
      result.fits = chosen.fits && within(peaks);
      result.missing = std::max<std::int64_t>(0, peaks.device - request_.budget);
      chosen.host = peaks.host;
      chosen.nvme = peaks.nvme;
      if (result.fits == chosen.fits) return result;
      chosen.fits = false;
      chosen.peak = peaks.device;
    }
  }

 private:
  /// Bytes beyond the budgets.
  std::int64_t excess(const Peaks& peaks) const {
    const auto over = [](std::int64_t bytes, std::int64_t budget) {
      return budget == 0 ? 0 : std::max<std::int64_t>(0, bytes - budget);
    };
    return over(peaks.device, request_.budget) + over(peaks.host, request_.plan.host_memory.bytes) +
           over(peaks.nvme, request_.nvme_budget);
  }

  /// The cheapest that fits, the first of equals; else the nearest to it that was run.
  std::size_t best_of(const std::vector<FitTrial>& ladder) const {
    const auto rank = [this](const FitTrial& trial) {
      const auto beyond_all = static_cast<double>(excess({trial.peak, trial.host, trial.nvme}));
      const double order = trial.fits ? trial.cost.total() : beyond_all;
      return std::tuple(!trial.fits, trial.state_alone, order);
    };
    const auto best = std::min_element(ladder.begin(), ladder.end(),
                                       [&](const auto& a, const auto& b) { return rank(a) < rank(b); });
    return static_cast<std::size_t>(best - ladder.begin());
  }

  static Levers levers_of(const FitTrial& trial) {
    return {trial.stage,     trial.reduction,  trial.checkpoint_every, trial.vocabulary_chunk,
            trial.optimizer, trial.parameters, trial.activations};
  }
  static Peaks peaks_of(const PlanResult& plan) {
    return {plan.tier(Tier::device).peak, plan.tier(Tier::host).peak, plan.tier(Tier::nvme).peak};
  }
  bool within(const Peaks& peaks) const { return excess(peaks) == 0; }

  /// The tiers in which state may live, simplest first.
  std::vector<OffloadTier> tiers(bool keep, OffloadTier given) const {
    if (keep) return {given};
    std::vector<OffloadTier> tiers{OffloadTier::none, OffloadTier::cpu};
    if (!base_.offload.nvme_path.empty()) tiers.push_back(OffloadTier::nvme);
    return tiers;
  }

  std::vector<ReductionPolicy> all_policies() const {
    if (base_.reduction != ReductionPolicy::automatic) return {base_.reduction};
    // On one rank nothing is ever less with the other.
    if (request_.plan.ranks == 1) return {ReductionPolicy::boundary};
    return {ReductionPolicy::boundary, ReductionPolicy::micro_batch};
  }

  /// The values of each lever that are worth a trial, simplest first.
  std::vector<Levers> all_levers() const {
    // Ranks of the axis `tensor` share the state of tensors that it does not cut.
    const bool several =
        owners_of(base_, request_.plan.ranks) > 1 || tensor_ranks_of(request_.plan, base_) > 1;
    // Stage 0 and offloaded parameters are refused with replicas that share gradients and optimizer state.
    const bool shared =
        shards_ < base_.data_ranks(request_.plan.ranks) && base_.replicate == Replicate::parameters;
    std::vector<int> stages{base_.stage};
    if (several && !request_.keep_stage) stages = shared ? std::vector{1, 2, 3} : std::vector{0, 1, 2, 3};
    const std::vector<ReductionPolicy> policies = all_policies();
    std::vector<int> every{base_.activation_checkpointing ? base_.checkpoint_every : 0};
    std::vector<std::int64_t> chunks{base_.vocabulary_chunk};
    if (const auto& model = request_.plan.model.language) {
      const models::ModelShape shape = model->shape();
      const int given = every.front();
      every = {0, 1};
      for (int k = 2; static_cast<std::int64_t>(k) * k <= shape.layers; k *= 2) every.push_back(k);
      if (std::find(every.begin(), every.end(), given) == every.end()) every.push_back(given);
      if (chunks.front() == 0 && shape.vocabulary >= 2 * tried_chunk) chunks.push_back(tried_chunk);
    }
    // An optimizer that looks at all of its state before it updates is not read from a disk twice.
    std::vector<OffloadTier> optimizer_tiers = tiers(request_.keep_optimizer_tier, base_.offload.optimizer);
    if (!request_.keep_optimizer_tier && make_optimizer(base_)->sums({}) > 0) {
      std::erase(optimizer_tiers, OffloadTier::nvme);
    }
    const std::vector<OffloadTier> parameters_tiers =
        tiers(request_.keep_parameters_tier || shared, base_.offload.parameters);
    std::vector<Levers> all;
    for (const int stage : stages) {
      for (const ReductionPolicy policy : policies) {
        for (const int k : every) {
          for (const std::int64_t chunk : chunks) {
            for (const OffloadTier optimizer : optimizer_tiers) {
              for (const OffloadTier parameters : parameters_tiers) {
                // Parameters leave the device in stage 3 alone, which is as good as any on one rank.
                const bool leave = parameters != OffloadTier::none;
                if (leave && several && stage != 3) continue;
                if (leave && !several && stage != 3 && request_.keep_stage) continue;
                const Levers levers{leave ? 3 : stage, policy, k, chunk, optimizer, parameters};
                if (!base_.offload.activations || k == 0) all.push_back(levers);
                if (k == 0) continue;
                all.push_back(levers);
                all.back().activations = true;
              }
            }
          }
        }
      }
    }
    return all;
  }

  Config config_of(const Levers& levers, std::int64_t micro_batch) const {
    Config config = base_;
    config.stage = levers.stage;
    config.reduction = levers.reduction;
    config.activation_checkpointing = levers.checkpoint_every > 0;
    config.checkpoint_every = std::max(1, levers.checkpoint_every);
    config.vocabulary_chunk = levers.vocabulary_chunk;
    config.offload.optimizer = levers.optimizer;
    config.offload.parameters = levers.parameters;
    config.offload.activations = levers.activations;
    config.accumulation_steps = base_.micro_batch_size * base_.accumulation_steps / micro_batch;
    config.micro_batch_size = micro_batch;
    return config;
  }

  StepCost cost(const Config& config) const {
    return cost_of(request_.plan, config, spec_, sizes_, request_.rates);
  }

  /// Seconds by FitRequest::seconds.
  StepCost seconds_of(const Levers& levers, std::int64_t micro_batch) const {
    PlanRequest candidate = request_.plan;
    candidate.config = config_of(levers, micro_batch);
    return request_.seconds(candidate);
  }

  /// True where a configuration takes less than `seconds` with its largest micro-batch. Offload hides neither
  /// what is computed nor what is waited for without it, so that few of those with offload are asked for.
  bool may_take_less(const Levers& levers, double seconds) {
    const std::int64_t largest = micro_batches_.back();
    Levers resident = levers;
    resident.optimizer = resident.parameters = OffloadTier::none;
    resident.activations = false;
    const bool one = config_of(levers, largest).accumulation_steps == 1;  // to both policies the same
    if (one) resident.reduction = all_policies().front();
    const auto [found, added] = resident_seconds_.try_emplace(
        {resident.stage, resident.reduction, resident.checkpoint_every, resident.vocabulary_chunk});
    if (added) found->second = seconds_of(resident, largest);
    const StepCost& least = found->second;
    if (least.total() - least.other >= seconds) return false;
    const bool offloads =
        levers.optimizer != OffloadTier::none || levers.parameters != OffloadTier::none || levers.activations;
    return (offloads ? seconds_of(levers, largest) : least).total() < seconds;
  }

  /// The plan of the rank that is furthest beyond the budgets or has most device memory, and its rank; with
  /// at most so many micro-batches to a step.
  std::pair<PlanResult, int> plan(const Config& config, std::int64_t micro_batches) const {
    std::pair<PlanResult, int> most;
    for (const int rank : ranks_) {
      PlanResult plan = plan_of(rank, config, micro_batches);
      const auto key = [&](const PlanResult& of) {
        return std::pair(excess(peaks_of(of)), of.tier(Tier::device).peak);
      };
      if (rank == ranks_.front() || key(most.first) < key(plan)) most = {std::move(plan), rank};
    }
    return most;
  }

  PlanResult plan_of(int rank, const Config& config, std::int64_t micro_batches) const {
    if (request_.give_up && request_.give_up()) throw Error("the search was given up");
    PlanRequest request = request_.plan;
    request.rank = rank;
    request.rates = request_.rates;
    request.config = config;
    if (config.accumulation_steps > micro_batches) {
      request.config.accumulation_steps = micro_batches;
      request.config.train_batch_size =
          config.micro_batch_size * micro_batches * config.data_ranks(request.ranks);
    }
    return plan_run(request);
  }

  /// Bytes that are held whatever a step does; less where tensors are frozen.
  std::int64_t least_bytes(const Levers& levers) const {
    const Config config = config_of(levers, 1);
    // Tensors that the axis `tensor` does not cut are sharded over more ranks than the others.
    const auto held = [&](bool whole, int among) {
      return whole ? sizes_.padded : sizes_.shard * shards_ / among;
    };
    const int owners = owners_of(config, request_.plan.ranks);
    const bool boundary = config.effective_reduction(owners) == ReductionPolicy::boundary;
    const DataType compute = config.precision.compute;
    double bytes = 0;
    if (levers.parameters == OffloadTier::none) {
      bytes = held(config.stage < 3, shards_) * static_cast<double>(size_of(compute));
    }
    // State that leaves the device takes the main gradient with it where one micro-batch makes the step.
    if (config.frozen.empty() && levers.optimizer == OffloadTier::none) {
      const bool beside = levers.parameters == OffloadTier::none;
      double optimizer = compute == DataType::float32 ? 0 : 4;
      if (config.precision.master == MasterFormat::split && beside) optimizer = 2;
      if (config.precision.master == MasterFormat::none) optimizer = beside ? 0 : 2;
      optimizer += detail::state_bytes_of_element(*make_optimizer(config));
      bytes += held(config.stage == 0 || boundary, owners) *
                   static_cast<double>(size_of(config.precision.accumulation)) +
               held(config.stage == 0, owners) * optimizer;
    }
    return static_cast<std::int64_t>(bytes) + config.workspace_bytes +
           (request_.plan.ranks == 1 ? 0 : config.staging_bytes);
  }

  FitTrial attempt(const Levers& levers) const {
    FitTrial trial;
    trial.stage = levers.stage;
    trial.reduction = levers.reduction;
    trial.checkpoint_every = levers.checkpoint_every;
    trial.vocabulary_chunk = levers.vocabulary_chunk;
    trial.optimizer = levers.optimizer;
    trial.parameters = levers.parameters;
    trial.activations = levers.activations;
    const auto set = [&](std::int64_t micro_batch, const Peaks& peaks) {
      const Config config = config_of(levers, micro_batch);
      trial.micro_batch = micro_batch;
      trial.accumulation = config.accumulation_steps;
      trial.peak = peaks.device;
      trial.host = peaks.host;
      trial.nvme = peaks.nvme;
      trial.fits = !trial.state_alone && within(peaks);
      trial.cost = cost(config);
    };
    const auto peaks_at = [&](std::int64_t micro_batch, std::int64_t micro_batches) {
      return peaks_of(plan(config_of(levers, micro_batch), micro_batches).first);
    };
    if (const std::int64_t least = least_bytes(levers); least > request_.budget) {
      trial.state_alone = true;
      set(micro_batches_.front(), {least, 0, 0});
      return trial;
    }
    set(micro_batches_.front(), peaks_at(micro_batches_.front(), trial_micro_batches));
    if (!trial.fits) return trial;
    // Memory grows with the micro-batch.
    std::size_t fitting = 0, beyond_budget = micro_batches_.size();
    while (beyond_budget - fitting > 1) {
      // The largest first: it is often the answer.
      const std::size_t middle =
          beyond_budget == micro_batches_.size() ? beyond_budget - 1 : (fitting + beyond_budget) / 2;
      const Peaks peaks = peaks_at(micro_batches_[middle], trial_micro_batches);
      if (!within(peaks)) {
        beyond_budget = middle;
      } else {
        fitting = middle;
        set(micro_batches_[middle], peaks);
      }
    }
    // More micro-batches than the trial's may pack a little worse.
    for (bool smaller = false;; smaller = true, --fitting) {
      const std::int64_t micro_batch = micro_batches_[fitting];
      if (smaller || config_of(levers, micro_batch).accumulation_steps > trial_micro_batches) {
        set(micro_batch, peaks_at(micro_batch, most_run_micro_batches));
      }
      if (trial.fits || fitting == 0) return trial;
    }
  }

  const FitRequest& request_;
  Config base_;
  ModelSpec spec_;
  int shards_ = 1;
  std::vector<int> ranks_;  ///< one of each class with equal plans
  Sizes sizes_;
  std::vector<std::int64_t> micro_batches_;  ///< ascending
  /// FitRequest::seconds with all on the device, by stage, policy, checkpointing and head.
  std::map<std::tuple<int, ReductionPolicy, int, std::int64_t>, StepCost> resident_seconds_;
};

}  // namespace

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

FitResult find_fit(const FitRequest& request) {
  if (const Mesh mesh = request.plan.config.mesh_of(request.plan.ranks); mesh.size(MeshAxis::pipeline) > 1) {
    throw ConfigurationError("--fit searches on replicate, shard and tensor; tranche.mesh \"" +
                             request.plan.config.mesh + "\" has a pipeline: plan its stages with --rank");
  }
  if (request.budget < 1) throw InvalidArgument("a budget of " + std::to_string(request.budget) + " bytes");
  return Search(request).run();
}

}  // namespace tranche::planner
