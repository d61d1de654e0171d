#pragma once
/// Manual pages in the form that man(1) reads.

#include <string>
#include <vector>

#include "tools/shell/command_description.h"

namespace tranche::tools {

/// The names of the pages: "tranche", and "tranche-train" for each command of `program`.
std::vector<std::string> man_page_names(const DescribedCommand& program);

/// The text of a page; commands below one of `program`'s are on its page. `version` is printed at the foot.
/// Throws ConfigurationError if there is no such page.
std::string man_page(const DescribedCommand& program, const std::string& name, const std::string& version);

}  // namespace tranche::tools
