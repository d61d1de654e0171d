#pragma once
#include <optional>
#include <string>

#include "tranche/partition/mesh.h"

namespace tranche::tools {

/// Version, build, available backends, the kernels' algorithms on this machine, and the places of ranks on a
/// mesh; as a table or as JSON.
std::string info_text(bool json, const std::optional<Mesh>& mesh);

}  // namespace tranche::tools
