#include "tranche/config/check.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "config/reader.h"

namespace tranche {

ConfigCheck check_config(std::string_view json_text, int ranks, const std::vector<std::string>& overrides,
                         bool strict, const std::string& origin) {
  detail::Reading reading = detail::read_config_text(
      json_text, ranks > 0 ? std::optional(ranks) : std::nullopt, overrides, strict, origin);
  ConfigCheck check;
  check.ranks = reading.ranks;
  if (reading.problems.empty()) {
    // The end of the schedule has to do if the file does not tell how long the run is.
    const std::int64_t run = reading.config.total_steps_hint;
    const std::int64_t steps =
        run > 0 ? run : reading.values.integer("scheduler.params.total_num_steps").value_or(0);
    if (steps > 0) {
      const auto notes = detail::notes_on_schedule(reading.config, steps, run > 0 ? "run" : "schedule");
      reading.config.notes.insert(reading.config.notes.end(), notes.begin(), notes.end());
    }
  }
  check.ignored = std::move(reading.config.ignored);
  check.notes = std::move(reading.config.notes);
  check.refused = reading.problems.lines();
  const auto is_refused = [&](const std::string& key) {
    return std::any_of(check.refused.begin(), check.refused.end(), [&](const std::string& line) {
      return line.starts_with(key) &&
             (line.size() == key.size() || line[key.size()] == ':' || line[key.size()] == ' ');
    });
  };
  for (const std::string& key : reading.values.paths()) {
    if (!is_refused(key)) check.honoured.push_back({key, reading.values.json(key)->dump(), false});
  }
  for (const std::string& key : reading.values.automatic_paths()) {
    if (is_refused(key)) continue;
    // The table's default may be in words ("the optimizer's lr").
    const std::string value = detail::value_of_automatic(key, reading.config);
    check.honoured.push_back({key, detail::Json::accept(value) ? value : detail::Json(value).dump(), true});
  }
  std::sort(check.honoured.begin(), check.honoured.end(),
            [](const auto& a, const auto& b) { return a.key < b.key; });
  return check;
}

}  // namespace tranche
