#include "tools/plan/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <utility>

#include "core/clock.h"
#include "core/output_file.h"
#include "tools/files.h"
#include "tools/plan/plan_meshes.h"
#include "tools/train/settings.h"
#include "tranche/core/error.h"
#include "tranche/planner/all_meshes.h"
#include "tranche/planner/host_state.h"
#include "tranche/planner/plan_text.h"
#include "tranche/planner/projection_text.h"
#include "tranche/planner/schedule_choice.h"
#include "tranche/planner/stage_plans.h"

namespace tranche::tools {

namespace {

/// Parses "100T" or "3e14" operations per second.
double parse_rate(const std::string& text, const char* flag) {
  const std::string suffixes = "kMGTPE";
  char* end = nullptr;
  double rate = std::strtod(text.c_str(), &end);
  if (end != text.c_str() && *end != '\0') {
    const std::size_t power = suffixes.find(*end);
    if (power != std::string::npos) {
      rate *= std::pow(1000.0, static_cast<double>(power + 1));
      ++end;
    }
  }
  if (end == text.c_str() || *end != '\0' || !(rate > 0) || !std::isfinite(rate)) {
    throw ConfigurationError(fmt::format(
        "{} '{}' is no rate; write a number above 0, also with k, M, G, T, P or E, like 100T", flag, text));
  }
  return rate;
}

std::int64_t parse_size(const std::string& text, const char* flag) {
  std::int64_t bytes = 0;
  try {
    bytes = parse_byte_size(text);
  } catch (const ConfigurationError& error) {
    throw ConfigurationError(fmt::format("{}: {}", flag, error.message()));
  }
  if (bytes < 1) throw ConfigurationError(fmt::format("{} is {}, but must be above 0", flag, text));
  return bytes;
}

/// Refuses a flag that has no effect, or contradicts the machine.
void check_speeds(const Options& options) {
  if (options.network && options.machine.empty() && !options.fit) {
    throw ConfigurationError("--network is for --fit SIZE or --machine FILE; give one of them");
  }
  for (const auto& [name, value] : options.flags) {
    const bool is_rate =
        name == "--flops" || name == "--host-link" || name == "--nvme-bandwidth" || name == "--host-update";
    if (is_rate && value != "not given" && !options.machine.empty()) {
      throw ConfigurationError(
          fmt::format("{} {} is not for --machine {}, whose own rates are taken; leave one of them out", name,
                      value, options.machine));
    }
  }
}

/// The rates from flags; a --machine replaces them.
planner::CostModel rates_of(const Options& options, const Config& config) {
  planner::CostModel rates;
  if (options.network && options.machine.empty()) {
    if (options.network->find(',') != std::string::npos) {
      throw ConfigurationError(fmt::format(
          "--network '{}' is RATE,LATENCY of a node, which goes with --machine; without it give the bytes "
          "that a rank sends in a second, like 12.5GB",
          *options.network));
    }
    rates.network = static_cast<double>(parse_size(*options.network, "--network"));
  }
  rates.operations = parse_rate(options.flops, "--flops");
  rates.host_link = static_cast<double>(parse_size(options.host_link, "--host-link"));
  rates.nvme = static_cast<double>(parse_size(options.nvme_bandwidth, "--nvme-bandwidth"));
  rates.host_update = options.host_update.empty() ? planner::core_update_rate * std::max(1, config.threads)
                                                  : parse_rate(options.host_update, "--host-update");
  return rates;
}

struct Projected {
  planner::ProjectionRequest request;
  planner::Projection projection;
};

std::optional<Projected> projected(const Options& options,
                                   const std::optional<planner::ProjectionRequest>& request) {
  if (!request) return std::nullopt;
  std::unique_ptr<TraceRecorder> trace;
  if (!options.trace.empty()) {
    require_writable(options.trace, "--trace");
    trace = std::make_unique<TraceRecorder>(request->plan.rank);
  }
  Projected result{*request, {}};
  result.projection = planner::project(result.request, trace.get());
  if (trace) trace->save(options.trace);
  return result;
}

int ranks_of_a_node(const planner::PlanRequest& request) {
  return request.ranks_per_node > 0 ? request.ranks_per_node : request.ranks;
}

/// True when ranks differ in the work that they do for a sample.
bool has_stages(const planner::PlanRequest& request) {
  const Mesh mesh = request.config.mesh_of(request.ranks);
  return mesh.size(MeshAxis::pipeline) > 1 || mesh.size(MeshAxis::tensor) > 1;
}

bool has_pipeline(const planner::PlanRequest& request) {
  return request.config.mesh_of(request.ranks).size(MeshAxis::pipeline) > 1;
}

int status_of(bool fits) {
  return static_cast<int>(fits ? ExitStatus::success : ExitStatus::out_of_memory);
}

}  // namespace

planner::PlanRequest plan_request(const Options& options) {
  if (options.ranks > planner::most_planned_ranks) {
    throw ConfigurationError(fmt::format("--ranks is {}, but a plan is for at most {}", options.ranks,
                                         planner::most_planned_ranks));
  }
  planner::PlanRequest request;
  request.ranks = static_cast<int>(options.ranks);
  const std::int64_t rank = options.rank.value_or(0);
  if (rank >= options.ranks) {
    throw ConfigurationError(fmt::format("--rank {} is not below --ranks {}", rank, options.ranks));
  }
  request.rank = static_cast<int>(rank);
  request.ranks_per_node = static_cast<int>(std::min(options.ranks_per_node, options.ranks));
  request.verbose = options.verbose;
  request.model = planner::load_plan_model(options.model, options.models);
  request.config = read_config(options, request.ranks);
  // A search may choose what keys need that have no effect in the configuration as it is given. It keeps the
  // mesh, and what a line such as "KEY: VALUE has no effect" is about has been reset.
  if (options.fit) {
    std::erase_if(request.config.notes, [](const std::string& note) {
      constexpr std::string_view idle = " has no effect";
      const std::size_t at = note.find(idle);
      return note.find(" no effect beside the other keys") != std::string::npos ||
             (at != std::string::npos && note.find(": ") == at + idle.size() &&
              note.find("the mesh has no axis") == std::string::npos);
    });
  }
  if (options.ranks_per_node > options.ranks) {
    request.config.notes.push_back(fmt::format("--ranks-per-node {} is taken as {}, the ranks of the run",
                                               options.ranks_per_node, options.ranks));
  }
  // Schedules may need the total number of steps; a plan does not depend on it.
  if (request.config.total_steps_hint == 0) request.config.total_steps_hint = 100;
  request.rates = rates_of(options, request.config);
  request.device = options.device == "cuda" ? DeviceKind::cuda : DeviceKind::cpu;
  // This machine's memory does not limit a plan for another one, and --host-memory 0 removes the limit.
  const std::int64_t host_limit = request.config.offload.host_memory_limit;
  if (host_limit > 0 || (!options.host_memory && options.machine.empty())) {
    request.host_memory = planner::host_memory_of(host_limit, ranks_of_a_node(request), options.system_root);
  }
  request.documents = options.documents;
  if (options.documents && (!request.model.language || !request.model.language->takes_documents())) {
    throw ConfigurationError(fmt::format(
        "--documents: {} does not use document boundaries, so they need no memory; leave the flag out",
        request.model.language ? request.model.language->architecture() : options.model));
  }
  if (request.model.language) {
    request.sequence = sequence_of(options.sequence, *request.model.language, request.config.notes);
    const std::vector<std::string> keys = notes_on_model(options.model, *request.model.language);
    request.config.notes.insert(request.config.notes.end(), keys.begin(), keys.end());
  } else if (options.sequence) {
    throw ConfigurationError(fmt::format(
        "--sequence: {} is a list of units, which has no sequences; write tokens_per_sample in it",
        options.model));
  }
  return request;
}

std::optional<planner::ProjectionRequest> projection_request(const Options& options,
                                                             const planner::PlanRequest& plan) {
  if (options.machine.empty()) return std::nullopt;
  planner::ProjectionRequest request;
  request.plan = plan;
  request.machine = planner::load_machine(options.machine);
  if (options.network) request.network = planner::parse_network(*options.network, "--network");
  return request;
}

planner::FitRequest fit_request(const Options& options, const planner::PlanRequest& plan) {
  planner::FitRequest fit;
  fit.plan = plan;
  fit.budget = parse_size(*options.fit, "--fit");
  fit.rates = plan.rates;
  fit.keep_optimizer_tier = options.offload_optimizer.has_value();
  fit.keep_parameters_tier = options.offload_parameters.has_value();
  fit.nvme_budget = plan.config.offload.nvme_limit;
  fit.keep_stage = options.stage.has_value();
  fit.keep_micro_batch = options.micro_batch.has_value();
  return fit;
}

std::string what_would_have_fitted(const planner::PlanRequest& request, double seconds) {
  planner::FitRequest fit;
  const detail::Stopwatch clock;
  fit.give_up = [&] { return clock.seconds() > seconds; };
  fit.plan = request;
  fit.budget = request.config.device_memory_limit;
  fit.plan.host_memory =
      planner::host_memory_of(request.config.offload.host_memory_limit, ranks_of_a_node(request));
  fit.nvme_budget = request.config.offload.nvme_limit;
  if (fit.budget < 1) return {};
  // A fit on stages of a pipeline is a search that keeps the given axes.
  const bool pipeline = request.config.mesh_of(request.ranks).size(MeshAxis::pipeline) > 1;
  const std::string command =
      fmt::format("tranche plan, with this run's other flags, --ranks {}{} --fit {}", request.ranks,
                  pipeline ? fmt::format(" --mesh 'search, {}'", request.config.mesh) : "", fit.budget);
  try {
    const planner::FitResult result = planner::find_fit(fit);
    const planner::FitTrial& trial = result.ladder[result.chosen];
    if (result.fits) {
      return fmt::format("\nwithin {} this would have fitted: {} ({} has all of it)",
                         format_bytes(fit.budget), describe(trial), command);
    }
    return fmt::format(
        "\nno stage, micro-batch, checkpointing or offload fits in {} on {} rank{}: the least, {}, takes {}",
        format_bytes(fit.budget), request.ranks, request.ranks == 1 ? "" : "s", describe(trial),
        format_bytes(trial.peak));
  } catch (const std::exception&) {  // the original error is reported
    return "\n" + command + " finds what would have fitted";
  }
}

int run_plan(const Options& options, const Output& output) {
  check_speeds(options);
  require_apart({{"--trace", options.trace}}, {{"--config", options.config}});
  require_apart({{"--write", options.write}, {"--trace", options.trace}},
                {{"--model", options.model}, {"--machine", options.machine}});
  if (options.mesh) {
    if (const auto axes = planner::searched_axes(*options.mesh))
      return run_mesh_search(options, *axes, output);
  }
  planner::PlanRequest request = plan_request(options);
  if (!options.fit) planner::resolve_host_state(request);
  std::optional<planner::ProjectionRequest> projection = projection_request(options, request);
  if (projection && (options.fit || request.config.offload.any())) {
    request.rates = planner::machine_rates(*projection);
  }
  const std::int64_t limit = request.config.device_memory_limit;
  if (!options.fit && !options.rank && has_stages(request) && (!projection || has_pipeline(request))) {
    const std::vector<planner::StagePlan> plans = planner::plan_stages(request, limit, options.json);
    const std::optional<Projected> step = projected(options, projection);
    std::function<double(const planner::PlanRequest&)> seconds;
    if (projection) {
      seconds = [at = *projection](const planner::PlanRequest& candidate) mutable {
        at.plan = candidate;
        return planner::project_step(at).total();
      };
    }
    const std::vector<planner::ScheduleChoice> choices =
        planner::schedule_choices(request, plans, limit, seconds);
    if (options.json) {
      const std::string text = planner::with_schedules(planner::stage_plans_json(plans, limit), choices);
      output.out << (step ? planner::with_projection(text, step->request, step->projection) : text);
    } else {
      output.out << planner::stage_plans_text(plans, limit) << planner::schedule_choices_text(choices)
                 << (step ? planner::projection_text(step->request, step->projection) : "");
    }
    output.out << std::flush;
    return status_of(planner::shortages(plans.front().request, plans.front().plan, limit).empty());
  }
  if (!options.fit) {
    const std::optional<Projected> step = projected(options, projection);
    planner::PlanResult result = planner::plan_run(request);
    result.other_gathering = planner::plan_other_gathering(request, result);
    if (options.json) {
      const std::string text = planner::plan_json(request, result, limit);
      output.out << (step ? planner::with_projection(text, step->request, step->projection) : text)
                 << std::flush;
    } else {
      output.out << planner::plan_text(request, result, limit)
                 << (step ? planner::projection_text(step->request, step->projection) : "") << std::flush;
    }
    return status_of(planner::shortages(request, result, limit).empty());
  }
  planner::FitRequest fit = fit_request(options, request);
  if (projection) {
    fit.seconds = [at = *projection](const planner::PlanRequest& candidate) mutable {
      at.plan = candidate;
      return planner::projected_cost(at);
    };
  }
  if (!options.write.empty()) require_writable(options.write, "--write");
  const planner::FitResult result = planner::find_fit(fit);
  planner::PlanRequest chosen = request;
  chosen.config = result.config;
  chosen.rank = result.rank;
  if (projection) projection->plan = chosen;
  const std::optional<Projected> step = projected(options, projection);
  if (options.json) {
    const std::string text = planner::fit_json(fit, result);
    output.out << (step ? planner::with_projection(text, step->request, step->projection) : text);
  } else {
    output.out << planner::fit_text(fit, result) << planner::plan_text(chosen, result.plan, fit.budget)
               << (step ? planner::projection_text(step->request, step->projection) : "");
  }
  if (!options.write.empty() && result.fits) {
    Config written = result.config;
    // The number of steps that plan_request() assumed must not end a training's schedule.
    written.total_steps_hint = read_config(options, request.ranks).total_steps_hint;
    detail::write_output_file(options.write, written.to_json() + "\n");
    if (!options.json) output.out << "configuration: " << options.write << "\n";
  }
  output.out.flush();
  return status_of(result.fits);
}

}  // namespace tranche::tools
