#include "bench/flags.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <limits>
#include <utility>

#include "core/closest_match.h"
#include "tranche/core/error.h"

namespace tranche::bench {
namespace {

/// Parses the whole text as a number from 0 to `most`.
template <class T>
T number_of(std::string_view name, const std::string& value, T most, std::string_view kind) {
  T number{};
  const char* const end = value.data() + value.size();
  const auto [rest, problem] = std::from_chars(value.data(), end, number);
  if (problem != std::errc() || rest != end || !(number >= 0 && number <= most)) {
    throw ConfigurationError(fmt::format("{} '{}' is no {} from 0 to {}", name, value, kind, most));
  }
  return number;
}

std::string known_values(const Flag& flag) {
  return fmt::format("{}", fmt::join(flag.choices, ", "));
}

}  // namespace

Flag text_flag(std::string_view name, std::string& into) {
  return {name, [&into](const std::string& value) { into = value; }};
}

Flag choice_flag(std::string_view name, std::string& into, std::vector<std::string> choices) {
  return {name, [&into](const std::string& value) { into = value; }, std::move(choices)};
}

Flag number_flag(std::string_view name, int& into) {
  return {name, [name, &into](const std::string& value) {
            into = number_of(name, value, std::numeric_limits<int>::max(), "whole number");
          }};
}

Flag number_flag(std::string_view name, std::int64_t& into, int shift) {
  return {name, [name, &into, shift](const std::string& value) {
            into = number_of(name, value, std::numeric_limits<std::int64_t>::max() >> shift, "whole number")
                   << shift;
          }};
}

Flag number_flag(std::string_view name, double& into) {
  return {name, [name, &into](const std::string& value) {
            into = number_of(name, value, std::numeric_limits<double>::max(), "number");
          }};
}

std::vector<std::string> comma_list(const std::string& text) {
  std::vector<std::string> items;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t comma = std::min(text.find(',', at), text.size());
    items.push_back(text.substr(at, comma - at));
    at = comma + 1;
  }
  return items;
}

std::string unknown_flag(const std::string& word, const std::vector<std::string>& known) {
  if (!word.starts_with("-")) {
    return fmt::format("'{}' is no flag; values stand behind their flags, and --help lists those", word);
  }
  const std::string flag = word.substr(0, word.find('='));
  const std::string closest = detail::closest_match(flag, known);
  return fmt::format("unknown flag {}{}; --help lists the flags", flag,
                     closest.empty() ? "" : " (did you mean " + closest + "?)");
}

void parse_flags(int argc, char** argv, const std::vector<Flag>& flags) {
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const std::size_t equals = word.starts_with("-") ? word.find('=') : std::string::npos;
    const std::string name = word.substr(0, equals);
    if (name == "--help") {
      HelpAsked help{"flags, each with a value; bench/README.md and the program's source say more\n"};
      for (const Flag& flag : flags) {
        help.text +=
            fmt::format("  {}{}\n", flag.name, flag.choices.empty() ? "" : " one of " + known_values(flag));
      }
      throw help;
    }
    const auto flag = std::find_if(flags.begin(), flags.end(),
                                   [&](const Flag& candidate) { return candidate.name == name; });
    if (flag == flags.end()) {
      std::vector<std::string> known;
      for (const Flag& candidate : flags) known.emplace_back(candidate.name);
      throw ConfigurationError(unknown_flag(name, known));
    }
    if (equals == std::string::npos && i + 1 == argc) {
      throw ConfigurationError(fmt::format("{} needs a value behind it", name));
    }
    const std::string value = equals == std::string::npos ? argv[++i] : word.substr(equals + 1);
    if (!flag->choices.empty() &&
        std::find(flag->choices.begin(), flag->choices.end(), value) == flag->choices.end()) {
      throw ConfigurationError(fmt::format("{} '{}' is not one of {}", name, value, known_values(*flag)));
    }
    flag->take(value);
  }
}

int run_program(const char* name, const std::function<void()>& body) {
  try {
    body();
    return 0;
  } catch (const HelpAsked& help) {
    fmt::print("{}: {}", name, help.text);
    return 0;
  } catch (const Error& error) {
    fmt::print(stderr, "{}: {}\n", name, error.message());
    return static_cast<int>(error.exit_status());
  }
}

}  // namespace tranche::bench
