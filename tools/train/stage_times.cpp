#include "tools/train/stage_times.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <string>

namespace tranche::tools {

namespace {

/// The first steps plan memory.
constexpr std::int64_t planning_steps = 2;

bool waits_less(const StageTime& a, const StageTime& b) {
  return a.idle_share() < b.idle_share();
}

}  // namespace

void StageTimes::add(const StepResult& result) {
  StageTime& sums = ++steps_ <= planning_steps ? first_ : later_;
  sums.waited += result.exposed_message_seconds;
  sums.seconds += result.seconds;
}

std::vector<StageTime> StageTimes::by_stage(Communicator& ranks, const Mesh& mesh) const {
  const int count = mesh.size(MeshAxis::pipeline);
  if (count == 1) return {};
  const StageTime& own = later_.seconds > 0 ? later_ : first_;
  const auto stage = static_cast<std::size_t>(mesh.coordinate(MeshAxis::pipeline, ranks.rank()));
  std::vector<double> sums(2 * static_cast<std::size_t>(count));
  sums[2 * stage] = own.waited;
  sums[2 * stage + 1] = own.seconds;
  ranks
      .all_reduce(sums.data(), static_cast<std::int64_t>(sums.size()), DataType::float64,
                  ReduceOperation::sum, {"report", "stages", Traffic::control})
      .wait();
  std::vector<StageTime> stages;
  for (std::size_t s = 0; s < sums.size(); s += 2) stages.push_back({sums[s], sums[s + 1]});
  return stages;
}

std::string idle_line(const std::vector<StageTime>& stages, const Mesh& mesh) {
  const auto [slowest, fastest] = std::minmax_element(stages.begin(), stages.end(), waits_less);
  const bool context = mesh.size(MeshAxis::context) > 1, tensor = mesh.size(MeshAxis::tensor) > 1;
  const std::string others = context && tensor ? " and of ranks of context and tensor"
                             : context         ? " and of ranks of context"
                             : tensor          ? " and of ranks of tensor"
                                               : "";
  return fmt::format(
      "waiting for messages of other stages{}: {:.1f}% of a step on stage {}, the slowest, to {:.1f}% on "
      "stage {}, the fastest\n",
      others, 100 * slowest->idle_share(), slowest - stages.begin(), 100 * fastest->idle_share(),
      fastest - stages.begin());
}

}  // namespace tranche::tools
