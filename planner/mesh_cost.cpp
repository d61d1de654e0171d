#include "planner/mesh_cost.h"

#include <algorithm>
#include <cstddef>
#include <string>

#include "engine/stages.h"
#include "pipeline/schedule/simulate.h"
#include "tranche/core/dtype.h"
#include "tranche/core/shape.h"
#include "tranche/partition/mesh.h"

namespace tranche::planner {

StageShares stage_shares(const ModelSpec& spec, const Config& config, int stages,
                         const std::vector<double>& held) {
  const detail::Stages cut = detail::divide(spec, config, stages);
  StageShares shares;
  shares.operations.assign(static_cast<std::size_t>(stages), 0);
  double all = 0;
  for (int chunk = 0; chunk < cut.chunks(); ++chunk) {
    for (int use = cut.begin(chunk); use < cut.end(spec, chunk); ++use) {
      const double operations = spec.forward[static_cast<std::size_t>(use)].operations;
      shares.operations[static_cast<std::size_t>(cut.stage_of(chunk))] += operations;
      all += operations;
    }
  }
  for (double& share : shares.operations) share = all > 0 ? share / all : 1.0 / stages;
  shares.most_operations = *std::max_element(shares.operations.begin(), shares.operations.end());
  double state = 0;
  for (const double elements : held) state += elements;
  if (state > 0) shares.most_state = *std::max_element(held.begin(), held.end()) / state;
  return shares;
}

StepCost pipelined(const StepCost& alone, const StageShares& shares,
                   const pipeline::PipelineSchedule& schedule, double message) {
  const std::size_t stages = shares.operations.size();
  const auto micro_batches = static_cast<double>(schedule.micro_batches);
  std::vector<double> residuals(stages, 0), gradients(stages, 0);  // that a stage receives in a micro-batch
  for (int chunk = 0; chunk < schedule.chunks(); ++chunk) {
    if (!schedule.crosses(chunk)) continue;
    gradients[static_cast<std::size_t>(schedule.rank_of_chunk[static_cast<std::size_t>(chunk)])] += 1;
    residuals[static_cast<std::size_t>(schedule.rank_of_chunk[static_cast<std::size_t>(chunk) + 1])] += 1;
  }
  // Forward takes a third of the model's operations; input gradients and weight gradients take a third each.
  const auto length = [&](double recompute, double each_message) {
    pipeline::StageTimes times;
    for (std::size_t stage = 0; stage < stages; ++stage) {
      const double third = shares.operations[stage] * alone.compute / 3 / micro_batches;
      times.forward.push_back(third + residuals[stage] * each_message);
      times.weight.push_back(third);
      times.input.push_back(third + shares.operations[stage] * recompute / micro_batches +
                            gradients[stage] * each_message);
    }
    return pipeline::simulate(schedule, times).length;
  };
  StepCost cost;
  cost.compute = length(0, 0);
  const double computed = length(alone.recompute, 0);
  cost.recompute = computed - cost.compute;
  cost.exposed = alone.exposed * shares.most_state + length(alone.recompute, message) - computed;
  cost.offload = alone.offload * shares.most_state;
  cost.other = alone.other * std::max(shares.most_state, shares.most_operations);
  return cost;
}

double least_pipelined(const StepCost& alone, const StageShares& shares) {
  return shares.most_operations * (alone.compute + alone.recompute) +
         shares.most_state * (alone.exposed + alone.offload) +
         alone.other * std::max(shares.most_state, shares.most_operations);
}

PlanRequest without_pipeline(const PlanRequest& request) {
  const Mesh mesh = request.config.mesh_of(request.ranks);
  const int stages = mesh.size(MeshAxis::pipeline);
  if (stages == 1) return request;
  PlanRequest alone = request;
  alone.rank = 0;
  alone.ranks = request.ranks / stages;
  alone.config.mesh.clear();
  for (const MeshAxis axis : {MeshAxis::replicate, MeshAxis::shard, MeshAxis::context, MeshAxis::tensor}) {
    if (mesh.size(axis) == 1 && axis != MeshAxis::shard) continue;
    alone.config.mesh += (alone.config.mesh.empty() ? "" : ", ") + std::string(name_of(axis)) + "=" +
                         std::to_string(mesh.size(axis));
  }
  alone.config.pipeline_stages = 0;
  const int per_node = request.ranks_per_node > 0 ? request.ranks_per_node : request.ranks;
  // The ranks of a stage are neighbours; the axis `pipeline` varies more slowly than theirs and faster than
  // `replicate`.
  const int of_stage =
      mesh.size(MeshAxis::shard) * mesh.size(MeshAxis::context) * mesh.size(MeshAxis::tensor);
  alone.ranks_per_node = std::min(alone.ranks, per_node <= of_stage           ? per_node
                                               : per_node < of_stage * stages ? of_stage
                                                                              : per_node / stages);
  return alone;
}

double message_seconds(const ModelSpec& spec, const Config& config, int ranks_of_sample,
                       const CostModel& rates) {
  const std::int64_t rows =
      divide_round_up(config.micro_batch_size * spec.tokens_per_sample, ranks_of_sample);
  const auto bytes = static_cast<double>(rows * spec.residual_width * size_of(config.precision.compute));
  return bytes / (rates.over_pipeline > 0 ? rates.over_pipeline : rates.network);
}

}  // namespace tranche::planner
