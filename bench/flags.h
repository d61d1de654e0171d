#pragma once
/// Command lines of benches: flags that each take a value.

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace tranche::bench {

struct Flag {
  std::string_view name;  ///< includes the dashes
  std::function<void(const std::string& value)> take;
  std::vector<std::string> choices = {};  ///< allowed values; empty: all that `take` accepts
};

/// A flag that sets `into`, which must outlive it. Numbers must be whole, not negative and within the range
/// of `into`; otherwise parse_flags() throws ConfigurationError.
Flag text_flag(std::string_view name, std::string& into);
Flag choice_flag(std::string_view name, std::string& into, std::vector<std::string> choices);
Flag number_flag(std::string_view name, int& into);
/// A number in units of 2^`shift`; 20 means that the flag counts MiB.
Flag number_flag(std::string_view name, std::int64_t& into, int shift = 0);
/// A decimal number, finite and not negative.
Flag number_flag(std::string_view name, double& into);

/// The parts of "a,b,c"; "" has one empty part.
std::vector<std::string> comma_list(const std::string& text);

/// Thrown for --help; contains one line for each flag.
struct HelpAsked {
  std::string text;
};

/// Reads `--name value` or `--name=value` pairs in order. Throws ConfigurationError for an unknown flag (with
/// the closest match), a missing value and an invalid value, and HelpAsked for --help.
void parse_flags(int argc, char** argv, const std::vector<Flag>& flags);

/// The error text for the unknown `word` of a command line; `known` has the existing flags.
std::string unknown_flag(const std::string& word, const std::vector<std::string>& known);

/// The body of main(): runs `body`, prints an Error in the program's format, or the help. Returns the exit
/// status.
int run_program(const char* name, const std::function<void()>& body);

}  // namespace tranche::bench
