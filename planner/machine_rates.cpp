// The few rates that the formulas of a search and of offload need, derived from a machine's figures.

#include <algorithm>
#include <vector>

#include "tranche/core/dtype.h"
#include "tranche/core/error.h"
#include "tranche/partition/mesh.h"
#include "tranche/planner/projection.h"

namespace tranche::planner {

namespace {

/// Bytes of the collective from which a rank's rate is derived: about the weights of a transformer block.
constexpr double block_bytes = 256e6;
/// Bytes that a host update reads and writes for one parameter (docs/internals/offload.md).
constexpr double update_bytes = 30;

}  // namespace

double axis_rate(const ProjectionRequest& request, MeshAxis axis) {
  const Config& config = request.plan.config;
  const int ranks = request.plan.ranks;
  const int per_node = request.plan.ranks_per_node > 0 ? std::min(request.plan.ranks_per_node, ranks) : ranks;
  const Mesh mesh = config.mesh_of(ranks);
  // State is sharded over the axis context as well.
  std::vector<int> group =
      axis == MeshAxis::shard ? mesh.group({MeshAxis::shard, MeshAxis::context}, 0) : mesh.group({axis}, 0);
  const auto node_of = [&](int rank) { return rank / per_node; };
  if (group.size() == 1) throw InvalidArgument("the rate of an axis with one rank");
  auto size = static_cast<int>(group.size());
  auto inside = static_cast<int>(
      std::count_if(group.begin(), group.end(), [&](int rank) { return node_of(rank) == 0; }));
  const int groups = std::max(1, per_node / inside);
  if (axis == MeshAxis::pipeline) {
    // Messages pass from each stage to the next; the slowest pair of neighbours limits the rate of all.
    const auto crosses = [&](int one, int next) { return node_of(one) != node_of(next); };
    size = 2;
    inside = std::adjacent_find(group.begin(), group.end(), crosses) == group.end() ? 2 : 1;
  }
  const LinkRate network =
      request.network ? *request.network : request.machine.network.value_or(LinkRate{1, 0});
  const auto seconds = [&](const char* operation, DataType dtype) {
    return collective_seconds(request.machine, network, operation, size, inside,
                              static_cast<int>(size_of(dtype)), block_bytes, config.collectives == "nccl",
                              groups);
  };
  const double gather = seconds("all_gather", config.precision.compute);
  if (axis == MeshAxis::pipeline) return block_bytes / 2 / gather;
  return 2 * block_bytes * (size - 1) / size /
         (gather + seconds("reduce_scatter", config.precision.communication));
}

CostModel machine_rates(const ProjectionRequest& request) {
  Config config = request.plan.config;
  validate_config(config, request.plan.ranks);
  const Machine& machine = request.machine;
  CostModel rates;
  rates.machine = machine.name;
  // The simulated step includes small and memory-bound kernels, which are slower than large GEMMs.
  const StepCost operations = step_cost(request.plan, {.operations = 1});
  rates.operations = (operations.compute + operations.recompute) / project_step(request).compute;
  if (config.mesh_of(request.plan.ranks).state_ranks() > 1) {
    ProjectionRequest complete = request;
    complete.plan.config = config;
    rates.network = axis_rate(complete, MeshAxis::shard);
  }
  rates.host_link = machine.host_link.bytes_per_second;
  rates.host_update = machine.host_bytes_per_second / update_bytes;
  if (machine.disk) rates.nvme = machine.disk->bytes_per_second;
  return rates;
}

StepCost projected_cost(const ProjectionRequest& request) {
  const StepBreakdown step = project_step(request);
  // The simulation does not separate recomputation. Its share of the time is taken to be its share of the
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
