#pragma once
/// Command lines of benches: flags with a value each.

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace tranche::bench {

struct Flag {
  std::string_view name;  ///< with its dashes
  std::function<void(const std::string& value)> take;
};

/// A flag that sets `into`, which outlives it.
Flag text_flag(std::string_view name, std::string& into);
Flag number_flag(std::string_view name, int& into);
/// In units of 2^`shift`: 20 where the flag counts MiB.
Flag number_flag(std::string_view name, std::int64_t& into, int shift = 0);

/// Takes `--name value` pairs in their order. Throws ConfigurationError for a flag that is not among them,
/// and for one without a value.
void parse_flags(int argc, char** argv, const std::vector<Flag>& flags);

/// What main() does: runs the body, and prints an Error as the program's; the exit status.
int run_program(const char* name, const std::function<void()>& body);

}  // namespace tranche::bench
