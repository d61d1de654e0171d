#include "planner/levers.h"

#include <algorithm>

#include "planner/step_cost.h"
#include "tranche/partition/mesh.h"

namespace tranche::planner {

namespace {

/// Columns of the chunked head in trials, which are made if the vocabulary has at least twice as many.
constexpr std::int64_t tried_chunk = 8192;

/// The tiers in which state may live, simplest first.
std::vector<OffloadTier> tiers(const Config& base, bool keep, OffloadTier given) {
  if (keep) return {given};
  std::vector<OffloadTier> tiers{OffloadTier::none, OffloadTier::cpu};
  if (!base.offload.nvme_path.empty()) tiers.push_back(OffloadTier::nvme);
  return tiers;
}

}  // namespace

std::vector<ReductionPolicy> all_policies(const FitRequest& request, const Config& base) {
  if (base.reduction != ReductionPolicy::automatic) return {base.reduction};
  // On one rank the other policy never needs less memory or time.
  if (request.plan.ranks == 1) return {ReductionPolicy::boundary};
  return {ReductionPolicy::boundary, ReductionPolicy::micro_batch};
}

std::vector<Levers> all_levers(const FitRequest& request, const Config& base) {
  // Ranks of the axis `tensor` share the state of tensors that are not cut along it.
  const bool several = owners_of(base, request.plan.ranks) > 1 || tensor_ranks_of(request.plan, base) > 1;
  // A run refuses stage 0 and offloaded parameters if replicas share gradients and optimizer state.
  const bool shared = base.mesh_of(request.plan.ranks).size(MeshAxis::replicate) > 1 &&
                      base.replicate == Replicate::parameters;
  std::vector<int> stages{base.stage};
  if (several && !request.keep_stage) stages = shared ? std::vector{1, 2, 3} : std::vector{0, 1, 2, 3};
  const std::vector<ReductionPolicy> policies = all_policies(request, base);
  std::vector<int> every{base.activation_checkpointing ? base.checkpoint_every : 0};
  std::vector<std::int64_t> chunks{base.vocabulary_chunk};
  if (const auto& model = request.plan.model.language) {
    const models::ModelShape shape = model->shape();
    const int given = every.front();
    every = {0, 1};
    for (int k = 2; static_cast<std::int64_t>(k) * k <= shape.layers; k *= 2) every.push_back(k);
    if (std::find(every.begin(), every.end(), given) == every.end()) every.push_back(given);
    if (chunks.front() == 0 && shape.vocabulary >= 2 * tried_chunk) chunks.push_back(tried_chunk);
  }
  // An optimizer that needs sums over all of its state before the update would read it from nvme twice, so
  // nvme is not tried.
  std::vector<OffloadTier> optimizer_tiers = tiers(base, request.keep_optimizer_tier, base.offload.optimizer);
  if (!request.keep_optimizer_tier && make_optimizer(base)->sums({}) > 0) {
    std::erase(optimizer_tiers, OffloadTier::nvme);
  }
  const std::vector<OffloadTier> parameters_tiers =
      tiers(base, request.keep_parameters_tier || shared, base.offload.parameters);
  std::vector<Levers> all;
  for (const int stage : stages) {
    for (const ReductionPolicy policy : policies) {
      for (const int k : every) {
        for (const std::int64_t chunk : chunks) {
          for (const OffloadTier optimizer : optimizer_tiers) {
            for (const OffloadTier parameters : parameters_tiers) {
              // Only stage 3 moves parameters off the device; on one rank stage 3 costs no more than the
              // others.
              const bool leave = parameters != OffloadTier::none;
              if (leave && several && stage != 3) continue;
              if (leave && !several && stage != 3 && request.keep_stage) continue;
              const Levers levers{leave ? 3 : stage, policy, k, chunk, optimizer, parameters};
              if (!base.offload.activations || k == 0) all.push_back(levers);
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

Config with_levers(const Config& base, const Levers& levers, std::int64_t micro_batch) {
  Config config = base;
  config.stage = levers.stage;
  config.reduction = levers.reduction;
  config.activation_checkpointing = levers.checkpoint_every > 0;
  config.checkpoint_every = std::max(1, levers.checkpoint_every);
  config.vocabulary_chunk = levers.vocabulary_chunk;
  config.offload.optimizer = levers.optimizer;
  config.offload.parameters = levers.parameters;
  config.offload.activations = levers.activations;
  config.accumulation_steps = base.micro_batch_size * base.accumulation_steps / micro_batch;
  config.micro_batch_size = micro_batch;
  return config;
}

std::vector<std::int64_t> all_micro_batches(const FitRequest& request, const Config& base) {
  if (request.keep_micro_batch || base.world_size_invariant) return {base.micro_batch_size};
  std::vector<std::int64_t> all;
  const std::int64_t samples = base.micro_batch_size * base.accumulation_steps;
  for (std::int64_t b = 1; b * b <= samples; ++b) {
    if (samples % b != 0) continue;
    all.push_back(b);
    if (b * b != samples) all.push_back(samples / b);
  }
  std::sort(all.begin(), all.end());
  return all;
}

FitTrial trial_of(const Levers& levers) {
  FitTrial trial;
  trial.stage = levers.stage;
  trial.reduction = levers.reduction;
  trial.checkpoint_every = levers.checkpoint_every;
  trial.vocabulary_chunk = levers.vocabulary_chunk;
  trial.optimizer = levers.optimizer;
  trial.parameters = levers.parameters;
  trial.activations = levers.activations;
  return trial;
}

}  // namespace tranche::planner
