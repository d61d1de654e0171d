#include "tranche/planner/projection_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <tuple>

namespace tranche::planner {

namespace {

using nlohmann::ordered_json;

constexpr std::size_t listed_parts = 6;

std::string row(std::string_view name, const std::string& value) {
  return fmt::format("  {:<22} {}\n", name, value);
}

}  // namespace

std::string seconds_text(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.3g} us", seconds * 1e6);
  if (seconds < 1) return fmt::format("{:.3g} ms", seconds * 1e3);
  return fmt::format("{:.4g} s", seconds);
}

std::string projection_text(const ProjectionRequest& request, const Projection& projection) {
  const Machine& machine = request.machine;
  const StepBreakdown& step = projection.step;
  std::string text =
      fmt::format("\nstep time on {}, {}\n", machine.name,
                  machine.measured() ? "calibrated" + (machine.taken.empty() ? "" : ": " + machine.taken)
                                     : "datasheet figures, not measured");
  text += row("step", seconds_text(step.total()));
  const bool stages = request.plan.config.mesh_of(request.plan.ranks).size(MeshAxis::pipeline) > 1;
  for (const auto& [name, seconds] :
       {std::pair("  compute", step.compute), std::pair("  exposed gather", step.exposed_gather),
        std::pair("  exposed reduce", step.exposed_reduce),
        std::pair("  exposed message", step.exposed_message),
        std::pair("  exposed offload", step.exposed_offload), std::pair("  optimizer", step.optimizer),
        std::pair("  other", step.other)}) {
    if (!stages && seconds == 0 && name == std::string_view("  exposed message")) continue;
    text += row(name, fmt::format("{:<10} {:5.1f} %", seconds_text(seconds), 100 * seconds / step.total()));
  }
  text += row("tokens a second", fmt::format("{:.4g}", projection.tokens_per_second));
  if (projection.node_bytes > 0) {
    text += row("sent between nodes",
                fmt::format("{} of a node, for all its ranks: what is gathered crosses once for them",
                            format_bytes(std::llround(projection.node_bytes))));
  }
  if (request.plan.ranks > 1) {
    text += row("efficiency",
                fmt::format("{:.1f} % of a rank that is alone, which updates all of the state in {} "
                            "(here: a rank's part in {})",
                            100 * projection.efficiency, seconds_text(projection.alone_optimizer),
                            seconds_text(step.optimizer)));
  }
  std::string path;
  for (std::size_t i = 0; i < std::min(listed_parts, projection.critical_path.size()); ++i) {
    const auto& [name, seconds] = projection.critical_path[i];
    path += fmt::format("{}{} {}", path.empty() ? "" : ", ", name, seconds_text(seconds));
  }
  text += row("critical path", path);
  for (const std::string& note : projection.notes) text += row("note", note);
  return text;
}

std::string with_projection(const std::string& plan_json, const ProjectionRequest& request,
                            const Projection& projection) {
  ordered_json document = ordered_json::parse(plan_json);
  const StepBreakdown& step = projection.step;
  ordered_json path = ordered_json::array();
  for (const auto& [name, seconds] : projection.critical_path) {
    path.push_back({{"name", name}, {"seconds", seconds}});
  }
  document["projection"] = {{"machine", request.machine.name},
                            {"source", request.machine.source},
                            {"step_seconds", step.total()},
                            {"compute_seconds", step.compute},
                            {"exposed_gather_seconds", step.exposed_gather},
                            {"exposed_reduce_seconds", step.exposed_reduce},
                            {"exposed_message_seconds", step.exposed_message},
                            {"exposed_offload_seconds", step.exposed_offload},
                            {"optimizer_seconds", step.optimizer},
                            {"other_seconds", step.other},
                            {"tokens_per_second", projection.tokens_per_second},
                            {"node_bytes", projection.node_bytes},
                            {"efficiency", projection.efficiency},
                            {"alone_optimizer_seconds", projection.alone_optimizer},
                            {"critical_path", std::move(path)},
                            {"notes", projection.notes}};
  return document.dump(1) + "\n";
}

}  // namespace tranche::planner
