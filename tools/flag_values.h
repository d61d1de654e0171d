#pragma once
/// Checks and notes about the values of flags, which the parser does not make.

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace tranche::tools {

/// A line for each flag of the command that was given several times, of which only the last value counts.
std::vector<std::string> repeated_flags(const CLI::App& command);

/// Throws ConfigurationError when a flag was given with an empty value, as an unset variable leaves it; a
/// prompt and a stop text may be empty.
void refuse_empty(const CLI::App& command);
/// Throws ConfigurationError for a path that begins with ~, which the shell left as it is: it would be a
/// folder of that name.
void refuse_home_sign(const CLI::App& command);

}  // namespace tranche::tools
