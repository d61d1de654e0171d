#pragma once
/// Checks and notes about the values of flags, which the parser does not make.

#include <cstddef>
#include <functional>
#include <initializer_list>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tranche/core/dtype.h"

namespace CLI {
class App;
}

namespace tranche::tools {

/// A line for each flag of the command that was given several times, of which only the last value counts.
std::vector<std::string> repeated_flags(const CLI::App& command);

/// How many values of --set stand in front of each flag of the command, of its last value. Flags in front of
/// all of them are left out.
std::map<std::string, std::size_t, std::less<>> sets_before_flags(const CLI::App& command);

/// Throws ConfigurationError when a flag was given with an empty value, as an unset variable leaves it; a
/// prompt and a stop text may be empty.
void refuse_empty(const CLI::App& command);
/// Throws ConfigurationError for a path that begins with ~, which the shell left as it is: it would be a
/// folder of that name.
void refuse_home_sign(const CLI::App& command);

/// The value of --dtype, under any name that a configuration takes for it. Throws ConfigurationError unless
/// it is one of `allowed`.
DataType dtype_of_flag(std::string_view text, std::initializer_list<DataType> allowed = {
                                                  DataType::float32, DataType::bfloat16, DataType::float16});

}  // namespace tranche::tools
