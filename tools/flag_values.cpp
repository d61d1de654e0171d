#include "tools/flag_values.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>

#include "core/output_file.h"
#include "tranche/core/error.h"

namespace tranche::tools {

std::vector<std::string> repeated_flags(const CLI::App& command) {
  std::vector<std::string> notes;
  for (const CLI::Option* option : command.get_options()) {
    const auto& values = option->results();
    const bool single = option->get_expected_max() == 1 &&
                        option->get_multi_option_policy() == CLI::MultiOptionPolicy::TakeLast;
    if (!single ||
        std::all_of(values.begin(), values.end(), [&](const auto& one) { return one == values[0]; }))
      continue;
    notes.push_back(fmt::format("{} was given {} times: {}, the last, is taken", option->get_name(),
                                values.size(), values.back()));
  }
  return notes;
}

std::map<std::string, std::size_t, std::less<>> sets_before_flags(const CLI::App& command) {
  std::map<std::string, std::size_t, std::less<>> before;
  std::size_t sets = 0;
  for (const CLI::Option* option : command.parse_order()) {
    const std::string name = option->get_name();
    if (name == "--set") {
      ++sets;
    } else if (sets > 0) {
      before[name] = sets;
    }
  }
  return before;
}

void refuse_empty(const CLI::App& command) {
  for (const CLI::Option* option : command.get_options()) {
    const std::string flag = option->get_name();
    if (flag == "--prompt" || flag == "--stop" || option->count() == 0) continue;
    for (const std::string& value : option->results()) {
      if (!value.empty()) continue;
      throw ConfigurationError(fmt::format(
          "{} has an empty value: is a variable unset? Leave the flag out, or give a value", flag));
    }
  }
}

void refuse_home_sign(const CLI::App& command) {
  for (const CLI::Option* option : command.get_options()) {
    const std::string type = option->get_type_name(), name = option->get_name();
    if (type.find("FILE") == std::string::npos && type.find("DIR") == std::string::npos) continue;
    for (const std::string& path : option->results()) {
      if (!detail::begins_at_home(path)) continue;
      throw ConfigurationError(fmt::format(
          "{} '{}': the shell replaces ~ by the home folder only at the beginning of a word that is "
          "not quoted, so that this would be a folder named ~; write {} {}, or ./{} if that is meant",
          name, path, name, path, path));
    }
  }
}

DataType dtype_of_flag(std::string_view text, std::initializer_list<DataType> allowed) {
  std::vector<std::string_view> names;
  for (const DataType dtype : allowed) names.push_back(name_of(dtype));
  try {
    const DataType dtype = parse_data_type(text);
    if (std::find(allowed.begin(), allowed.end(), dtype) != allowed.end()) return dtype;
  } catch (const ConfigurationError&) {
    // The error below names the values of the flag alone.
  }
  throw ConfigurationError(fmt::format("--dtype {} is not one of {}", text, fmt::join(names, ", ")));
}

}  // namespace tranche::tools
