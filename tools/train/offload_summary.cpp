#include "tools/train/offload_summary.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

namespace tranche::tools {

namespace {

constexpr double first_steps = 2;

std::string in_milliseconds(double seconds) {
  const double value = seconds * 1e3;
  return fmt::format("{:.{}f}", value, value < 10 ? 2 : value < 100 ? 1 : 0);
}

}  // namespace

void OffloadSummary::Sums::add(const StepResult& result) {
  steps += 1;
  seconds += result.seconds;
  exposed += result.exposed_offload_seconds;
  compute += std::max(0.0, result.seconds - result.exposed_gather_seconds - result.exposed_reduce_seconds -
                               result.exposed_offload_seconds);
  to_host += result.offload.to_host;
  from_host += result.offload.from_host;
  host_update += result.offload.host_update;
  disk += result.offload.disk;
  disk_idle.nothing_asked += result.disk_idle.nothing_asked;
  disk_idle.no_buffer += result.disk_idle.no_buffer;
  disk_idle.norm += result.disk_idle.norm;
}

std::string OffloadSummary::Sums::text() const {
  if (steps == 0) return "offload: no steps";
  const std::array<std::pair<const char*, double>, 5> roads{{{"compute", compute / steps},
                                                             {"copies out", to_host / steps},
                                                             {"copies back", from_host / steps},
                                                             {"host update", host_update / steps},
                                                             {"disk", disk / steps}}};
  double bound = 0;
  std::string text;
  for (const auto& [name, mean] : roads) {
    bound = std::max(bound, mean);
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name, in_milliseconds(mean));
  }
  const double idle = disk_idle.nothing_asked + disk_idle.no_buffer + disk_idle.norm;
  if (idle > 0) {
    const auto percent = [&](double part) { return 100 * part / (disk + idle); };
    text += fmt::format(
        "; disk idle {:.1f}% of the time: nothing asked for {:.1f}%, no buffer free {:.1f}%, waiting for the "
        "norm {:.1f}%",
        percent(idle), percent(disk_idle.nothing_asked), percent(disk_idle.no_buffer),
        percent(disk_idle.norm));
  }
  return fmt::format("offload: {} ms of a step of {} ms exposed ({:.1f}%); bound {} ms, the longest of {}",
                     in_milliseconds(exposed / steps), in_milliseconds(seconds / steps),
                     seconds > 0 ? 100 * exposed / seconds : 0.0, in_milliseconds(bound), text);
}

void OffloadSummary::add(const StepResult& result) {
  (first_.steps < first_steps ? first_ : others_).add(result);
}

std::string OffloadSummary::line() const {
  return (others_.steps > 0 ? others_ : first_).text();
}

std::string OffloadSummary::line_of(const StepResult& result) {
  Sums sums;
  sums.add(result);
  return sums.text();
}

}  // namespace tranche::tools
