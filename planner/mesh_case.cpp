#include "planner/mesh_case.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "pipeline/schedule/generators.h"
#include "planner/planned_run.h"
#include "tranche/core/error.h"

namespace tranche::planner {

namespace {

class CaseMaker {
 public:
  CaseMaker(const MeshSearchRequest& request, const ModelSpec& spec)
      : request_(request), fit_(request.fit), spec_(spec) {
    Config given = fit_.plan.config;
    validate_config(given, fit_.plan.ranks);
    samples_ = given.train_batch_size;
    given_micro_batch_ = given.micro_batch_size;
  }

  std::vector<std::string> schedules_of(const std::string& mesh) const {
    const Config& config = fit_.plan.config;
    if (Mesh::parse(mesh, fit_.plan.ranks).size(MeshAxis::pipeline) == 1) return {""};
    if (config.pipeline_schedule != "1f1b" || config.pipeline_chunks > 0) return {config.pipeline_schedule};
    std::vector<std::string> names;
    for (const pipeline::NamedSchedule& named : pipeline::named_schedules()) names.emplace_back(named.name);
    // The default schedule is first, so that it wins among equals.
    std::stable_partition(names.begin(), names.end(), [](const std::string& name) { return name == "1f1b"; });
    return names;
  }

  MeshCase case_of(const std::string& mesh, const std::string& schedule) const {
    MeshCase one;
    one.mesh = mesh;
    one.schedule = schedule;
    one.base = fit_.plan.config;
    one.base.mesh = mesh;
    if (!schedule.empty()) one.base.pipeline_schedule = schedule;
    try {
      one.axes = one.base.mesh_of(fit_.plan.ranks);
      require_sequence_parts(one.axes.size(MeshAxis::context));
      take_batch(one);
      one.levers = all_levers(fit_, one.base);
      if (one.stages() > 1) {
        // Each micro-batch would gather the weights of a stage again, and several micro-batches are active at
        // once.
        std::erase_if(one.levers, [&](const Levers& levers) {
          return levers.activations || (levers.parameters != OffloadTier::none && !fit_.keep_parameters_tier);
        });
      }
      if (one.levers.empty()) throw ConfigurationError("no tier that is given goes with a pipeline");
      one.micro_batches = all_micro_batches(fit_, one.base);
      take_ranks(one);
      PlanRequest whole = fit_.plan;
      whole.config = one.base;
      one.alone = without_pipeline(whole);
      one.sizes = sizes_of(spec_, fit_.plan.model.covers_activations(), one.alone.config, one.alone.ranks);
      one.rates = fit_.rates;
      if (request_.machine) take_links(one, whole);
    } catch (const ConfigurationError& error) {
      one.refused = error.message();
    } catch (const InvalidArgument& error) {
      one.refused = error.message();
    }
    return one;
  }

 private:
  /// Throws for sequences that a run would refuse to cut at its start.
  void require_sequence_parts(int ranks) const {
    if (ranks == 1 || (spec_.sequence_parts && spec_.tokens_per_sample >= 2 * ranks)) return;
    throw ConfigurationError(spec_.sequence_parts
                                 ? fmt::format("sequences of {} tokens cannot be cut into {} parts",
                                               spec_.tokens_per_sample, 2 * ranks)
                                 : fmt::format("{} computes no parts of sequences",
                                               spec_.name.empty() ? "the model" : spec_.name));
  }

  /// Divides the samples of a step into the smallest micro-batches.
  void take_batch(MeshCase& one) const {
    one.base.train_batch_size = samples_;
    one.base.micro_batch_size = given_micro_batch_;
    one.base.accumulation_steps = 0;
    if (one.base.world_size_invariant) return validate_config(one.base, fit_.plan.ranks);
    const std::int64_t data_ranks = one.axes.data_ranks();
    const std::int64_t micro = fit_.keep_micro_batch ? given_micro_batch_ : 1;
    if (samples_ % (data_ranks * micro) != 0) {
      throw ConfigurationError(
          fmt::format("the {} samples of a step cannot be shared by {} data ranks{}", samples_, data_ranks,
                      micro > 1 ? fmt::format(" in micro-batches of {}", micro) : std::string()));
    }
    one.base.micro_batch_size = micro;
    one.base.accumulation_steps = samples_ / data_ranks / micro;
  }

  void take_ranks(MeshCase& one) const {
    PlanRequest request = fit_.plan;
    request.config = with_levers(one.base, one.levers.front(), one.micro_batches.front());
    std::vector<int> stage_ranks = one.axes.group({MeshAxis::pipeline}, 0);
    if (stage_ranks.size() > 2) std::swap(stage_ranks[1], stage_ranks.back());
    std::vector<int> first;  // index of the first rank of each stage
    for (const int rank : stage_ranks) {
      const std::vector<int> parts = one.axes.group({MeshAxis::tensor}, rank);
      first.push_back(static_cast<int>(one.ranks.size()));
      for (const std::vector<int>& alike : equal_ranks(request, parts)) {
        one.ranks.push_back(parts[static_cast<std::size_t>(alike.front())]);
      }
    }
    one.held = held_by(spec_, request.config, fit_.plan.ranks, one.ranks);
    if (one.stages() == 1) return;
    std::vector<double> elements;
    for (const int index : first) elements.push_back(one.held[static_cast<std::size_t>(index)].whole);
    one.shares = stage_shares(spec_, request.config, one.stages(), elements);
  }

  void take_links(MeshCase& one, const PlanRequest& whole) const {
    ProjectionRequest at = *request_.machine;
    at.plan = whole;
    for (const auto& [axis, rate] : {std::pair(MeshAxis::shard, &one.rates.network),
                                     std::pair(MeshAxis::replicate, &one.rates.over_replicate),
                                     std::pair(MeshAxis::context, &one.rates.over_context),
                                     std::pair(MeshAxis::tensor, &one.rates.over_tensor),
                                     std::pair(MeshAxis::pipeline, &one.rates.over_pipeline)}) {
      const bool several = axis == MeshAxis::shard ? one.axes.state_ranks() > 1 : one.axes.size(axis) > 1;
      if (several) *rate = axis_rate(at, axis);
    }
  }

  const MeshSearchRequest& request_;
  const FitRequest& fit_;
  const ModelSpec& spec_;
  std::int64_t samples_ = 0, given_micro_batch_ = 1;
};

}  // namespace

std::vector<MeshCase> mesh_cases(const MeshSearchRequest& request, const ModelSpec& spec) {
  const CaseMaker maker(request, spec);
  std::vector<MeshCase> cases;
  for (const std::string& mesh : all_meshes(request.fit.plan.ranks, request.axes)) {
    for (const std::string& schedule : maker.schedules_of(mesh))
      cases.push_back(maker.case_of(mesh, schedule));
  }
  return cases;
}

}  // namespace tranche::planner
