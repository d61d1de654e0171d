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
  std::vector<std::string> choices = {};  ///< the only values; empty: any that `take` does not refuse
};

/// A flag that sets `into`, which outlives it. Numbers are whole and not negative, in `into`'s range; else
/// parse_flags() throws ConfigurationError.
Flag text_flag(std::string_view name, std::string& into);
Flag choice_flag(std::string_view name, std::string& into, std::vector<std::string> choices);
Flag number_flag(std::string_view name, int& into);
/// In units of 2^`shift`: 20 where the flag counts MiB.
Flag number_flag(std::string_view name, std::int64_t& into, int shift = 0);
/// A decimal number, finite and not negative.
Flag number_flag(std::string_view name, double& into);

/// The parts of "a,b,c"; of "" one that is empty.
std::vector<std::string> comma_list(const std::string& text);

/// Thrown for --help: the flags, a line each.
struct HelpAsked {
  std::string text;
};

/// Takes `--name value` pairs (or `--name=value`) in their order. Throws ConfigurationError for a flag that
/// is not among them, naming the nearest that is, for one without a value, and for a value that is none;
/// HelpAsked for --help.
void parse_flags(int argc, char** argv, const std::vector<Flag>& flags);

/// The text with which `word` of a command line is refused, `known` being the flags that there are.
std::string unknown_flag(const std::string& word, const std::vector<std::string>& known);

/// The body of main(): runs it, and prints an Error as the program's, or the help; the exit status.
int run_program(const char* name, const std::function<void()>& body);

}  // namespace tranche::bench
