#include "tranche/bench/flags.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstdio>

#include "tranche/core/error.h"

namespace tranche::bench {

Flag text_flag(std::string_view name, std::string& into) {
  return {name, [&into](const std::string& value) { into = value; }};
}

Flag number_flag(std::string_view name, int& into) {
  return {name, [&into](const std::string& value) { into = std::stoi(value); }};
}

Flag number_flag(std::string_view name, std::int64_t& into, int shift) {
  return {name, [&into, shift](const std::string& value) { into = std::stoll(value) << shift; }};
}

void parse_flags(int argc, char** argv, const std::vector<Flag>& flags) {
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (i + 1 == argc) throw ConfigurationError("'" + name + "' needs a value, or is unknown");
    const auto flag = std::find_if(flags.begin(), flags.end(),
                                   [&](const Flag& candidate) { return candidate.name == name; });
    if (flag == flags.end()) throw ConfigurationError("unknown flag '" + name + "'");
    flag->take(argv[++i]);
  }
}

int run_program(const char* name, const std::function<void()>& body) {
  try {
    body();
    return 0;
  } catch (const Error& error) {
    fmt::print(stderr, "{}: {}\n", name, error.message());
    return static_cast<int>(error.exit_status());
  }
}

}  // namespace tranche::bench
