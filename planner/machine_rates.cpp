// A machine's figures as the few rates that the formulas of a search and of offload take.

#include <algorithm>

#include "tranche/core/dtype.h"
#include "tranche/partition/mesh.h"
#include "tranche/planner/projection.h"

namespace tranche::planner {

namespace {

/// Bytes of a collective from which the rate of a rank is taken: a transformer block's weights, say.
constexpr double block_bytes = 256e6;
/// Bytes that an update in host memory reads and writes for a parameter (docs/internals/offload.md).
constexpr double update_bytes = 30;

/// Bytes a second that a rank sends, both in gathers and in reductions.
double network_rate(const ProjectionRequest& request, const Config& config) {
  const int ranks = Mesh::parse(config.mesh, request.plan.ranks).size(MeshAxis::shard);
  const int per_node = request.plan.ranks_per_node > 0 ? request.plan.ranks_per_node : request.plan.ranks;
  const LinkRate network =
      request.network ? *request.network : request.machine.network.value_or(LinkRate{1, 0});
  const auto seconds = [&](const char* operation, DataType dtype) {
    return collective_seconds(request.machine, network, operation, ranks, per_node,
                              static_cast<int>(size_of(dtype)), block_bytes, config.collectives == "nccl",
                              std::max(1, per_node / std::min(ranks, per_node)));
  };
  return 2 * block_bytes * (ranks - 1) / ranks /
         (seconds("all_gather", config.precision.compute) +
          seconds("reduce_scatter", config.precision.communication));
}

}  // namespace

CostModel machine_rates(const ProjectionRequest& request) {
  Config config = request.plan.config;
  validate_config(config, request.plan.ranks);
  const Machine& machine = request.machine;
  CostModel rates;
  rates.machine = machine.name;
  // Small kernels and those that wait for memory are slower than large products: the simulated step has both.
  const StepCost operations = step_cost(request.plan, {.operations = 1});
  rates.operations = (operations.compute + operations.recompute) / project_step(request).compute;
  if (Mesh::parse(config.mesh, request.plan.ranks).size(MeshAxis::shard) > 1) {
    rates.network = network_rate(request, config);
  }
  rates.host_link = machine.host_link.bytes_per_second;
  rates.host_update = machine.host_bytes_per_second / update_bytes;
  if (machine.disk) rates.nvme = machine.disk->bytes_per_second;
  return rates;
}

StepCost projected_cost(const ProjectionRequest& request) {
  const StepBreakdown step = project_step(request);
  // The simulation does not tell what is computed again: it has that share of the time which it has of the
  // operations.
  const StepCost operations = step_cost(request.plan, {.operations = 1});
  StepCost cost;
  cost.recompute = step.compute * operations.recompute / (operations.compute + operations.recompute);
  cost.compute = step.compute - cost.recompute;
  cost.exposed = step.exposed_gather + step.exposed_reduce + step.exposed_message;
  cost.offload = step.exposed_offload;
  cost.other = step.optimizer + step.other;
  return cost;
}

}  // namespace tranche::planner
