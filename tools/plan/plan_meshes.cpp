#include "tools/plan/plan_meshes.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <ostream>
#include <set>
#include <utility>
#include <vector>

#include "core/output_file.h"
#include "tools/files.h"
#include "tools/plan/plan.h"
#include "tools/train/settings.h"
#include "tranche/core/error.h"
#include "tranche/partition/mesh.h"
#include "tranche/planner/all_meshes.h"
#include "tranche/planner/mesh_search_text.h"
#include "tranche/planner/plan_text.h"
#include "tranche/planner/projection.h"
#include "tranche/planner/schedule_choice.h"
#include "tranche/planner/stage_plans.h"

namespace tranche::tools {

namespace {

std::string quoted(const std::string& word) {
  const bool plain = !word.empty() && word.find_first_not_of(
                                          "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                          "0123456789_-./=:,") == std::string::npos;
  if (plain) return word;
  std::string text = "'";
  for (const char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return text + "'";
}

void check_flags(const Options& options) {
  if (!options.fit) {
    throw ConfigurationError(
        "--mesh search finds the axes for a budget: give --fit SIZE, or name the axes of the mesh");
  }
  if (options.rank) {
    throw ConfigurationError(
        "--rank is not for --mesh search, which plans a rank of each kind; leave it out");
  }
  if (!options.trace.empty()) {
    throw ConfigurationError(
        "--trace is not for --mesh search; give the mesh that it finds to see its simulated step");
  }
}

/// Sizes from DeepSpeed's keys apply if the command line gives none.
std::string axes_of(const std::string& given, const Config& config) {
  std::string axes = given;
  const auto add = [&](MeshAxis axis, int size) {
    if (size > 1 && given.find(std::string(name_of(axis))) == std::string::npos) {
      axes += fmt::format("{}{}={}", axes.empty() ? "" : ", ", name_of(axis), size);
    }
  };
  add(MeshAxis::pipeline, config.pipeline_stages);
  add(MeshAxis::shard, config.shard_size);
  add(MeshAxis::context, config.context_ranks);
  add(MeshAxis::tensor, config.tensor_ranks);
  return axes;
}

/// The rates of the machine's ranks if all share one copy of the model; each mesh replaces the links by its
/// own.
planner::CostModel rates_of_ranks(planner::ProjectionRequest at) {
  Config& config = at.plan.config;
  config.mesh.clear();
  config.shard_size = config.pipeline_stages = config.context_ranks = config.tensor_ranks = 0;
  config.pipeline_chunks = 0;
  config.shard_size_key.clear();
  config.layout.clear();
  config.pipeline_schedule = "1f1b";
  config.world_size_invariant = false;
  config.accumulation_steps = 1;
  config.train_batch_size = config.micro_batch_size * at.plan.ranks;
  return planner::machine_rates(at);
}

/// The request on the simplest mesh whose data ranks can share the samples of a step; sets `options.mesh` to
/// it. If no mesh can, it throws the error of the simplest mesh.
planner::PlanRequest request_on_some_mesh(Options& options, const std::string& axes) {
  const int ranks = static_cast<int>(options.ranks);
  const std::vector<std::string> meshes = planner::all_meshes(ranks, axes);
  options.mesh.reset();
  if (!axes.empty()) options.mesh = meshes.front();
  try {
    return plan_request(options);
  } catch (const ConfigurationError&) {
    std::set<int> tried;
    for (const std::string& mesh : meshes) {
      if (!tried.insert(Mesh::parse(mesh, ranks).data_ranks()).second) continue;
      options.mesh = mesh;
      try {
        return plan_request(options);
      } catch (const ConfigurationError&) {
        continue;  // a mesh with another number of data ranks may be accepted
      }
    }
    throw;
  }
}

bool has_several_kinds(const Config& config, int ranks) {
  const Mesh mesh = config.mesh_of(ranks);
  return mesh.size(MeshAxis::pipeline) > 1 || mesh.size(MeshAxis::tensor) > 1;
}

}  // namespace

std::string training_command(const Options& options, const Config& config, std::int64_t budget) {
  std::vector<std::string> words{"mpirun",  "-n",         std::to_string(options.ranks), "tranche", "train",
                                 "--model", options.model};
  const auto flag = [&](const char* name, const std::string& value) {
    words.insert(words.end(), {name, value});
  };
  const auto set = [&](const std::string& text) { flag("--set", text); };
  if (options.write.empty()) {
    if (!options.config.empty()) flag("--config", options.config);
    if (options.dtype) flag("--dtype", *options.dtype);
    for (const std::string& given : options.set) set(given);
    flag("--mesh", config.mesh);
    flag("--stage", std::to_string(config.stage));
    flag("--micro-batch", std::to_string(config.micro_batch_size));
    flag("--accumulate", std::to_string(config.accumulation_steps));
    set(fmt::format("tranche.reduction={}", name_of(config.reduction)));
    if (has_several_kinds(config, static_cast<int>(options.ranks)) && config.pipeline_schedule != "1f1b") {
      set(fmt::format("tranche.pipeline_schedule={}", config.pipeline_schedule));
    }
    set(fmt::format("tranche.activation_checkpointing={}", config.activation_checkpointing));
    if (config.activation_checkpointing)
      set(fmt::format("tranche.checkpoint_every={}", config.checkpoint_every));
    if (config.vocabulary_chunk > 0) set(fmt::format("tranche.vocabulary_chunk={}", config.vocabulary_chunk));
    flag("--offload-optimizer", std::string(name_of(config.offload.optimizer)));
    flag("--offload-param", std::string(name_of(config.offload.parameters)));
    if (config.offload.activations) words.emplace_back("--offload-activations");
    if (!config.offload.nvme_path.empty()) flag("--nvme-path", config.offload.nvme_path);
    if (config.offload.uses_nvme() && config.offload.host_state >= 0) {
      flag("--host-state", std::to_string(config.offload.host_state));
    }
    if (options.host_memory) flag("--host-memory", *options.host_memory);
    if (options.nvme_space) flag("--nvme-space", *options.nvme_space);
    if (options.offload_ratio) flag("--offload-ratio", fmt::format("{}", *options.offload_ratio));
    if (options.threads) flag("--threads", std::to_string(*options.threads));
  } else {
    flag("--config", options.write);
  }
  if (options.sequence) flag("--sequence", std::to_string(*options.sequence));
  if (options.device != "cpu") flag("--device", options.device);
  flag("--device-memory", std::to_string(budget));
  flag("--data", "TEXT");
  std::string line;
  for (const std::string& word : words) line += (line.empty() ? "" : " ") + quoted(word);
  return line;
}

int run_mesh_search(const Options& given, const std::string& axes, const Output& output) {
  check_flags(given);
  Options options = given;
  const planner::PlanRequest plan = request_on_some_mesh(options, axes);
  planner::MeshSearchRequest request;
  request.fit = fit_request(options, plan);
  request.axes = axes_of(axes, plan.config);
  request.machine = projection_request(options, plan);
  if (request.machine) request.fit.rates = rates_of_ranks(*request.machine);
  request.fit.plan.rates = request.fit.rates;
  if (!options.write.empty()) require_writable(options.write, "--write");
  const planner::MeshSearchResult result = planner::search_meshes(request);

  planner::PlanRequest chosen = request.fit.plan;
  chosen.config = result.config;
  chosen.rank = result.rank;
  const std::int64_t budget = request.fit.budget;
  const std::string command = training_command(options, result.config, budget);
  const bool stages = has_several_kinds(result.config, chosen.ranks);
  std::vector<planner::StagePlan> plans;
  if (stages) plans = planner::plan_stages(chosen, budget, options.json);
  if (options.json) {
    const std::string text =
        stages ? planner::stage_plans_json(plans, budget) : planner::plan_json(chosen, result.plan, budget);
    output.out << planner::with_search(text, request, result, command);
  } else {
    output.out << planner::mesh_search_text(request, result, command)
               << (stages ? planner::stage_plans_text(plans, budget)
                          : planner::plan_text(chosen, result.plan, budget));
    const OffloadConfig& offload = chosen.config.offload;
    if (stages && offload.uses_nvme() && offload.host_state >= 0) {
      output.out << "tranche.host_state is " << format_bytes(offload.host_state) << offload.host_state_reason
                 << "\n";
    }
  }
  if (!options.write.empty() && result.fits) {
    Config written = result.config;
    // The number of steps that plan_request() assumed must not end a training's schedule.
    written.total_steps_hint = read_config(options, chosen.ranks).total_steps_hint;
    detail::write_output_file(options.write, written.to_json() + "\n");
    if (!options.json) output.out << "configuration: " << options.write << "\n";
  }
  output.out.flush();
  return static_cast<int>(result.fits ? ExitStatus::success : ExitStatus::out_of_memory);
}

}  // namespace tranche::tools
