#pragma once
#include <string>

namespace tranche::tools {

/// Version, build, backends found, and how this machine computes; as a table or as JSON.
std::string info_text(bool json);

}  // namespace tranche::tools
