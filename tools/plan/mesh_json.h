#pragma once
#include <nlohmann/json_fwd.hpp>

#include "tranche/partition/mesh.h"

namespace tranche::tools {

/// {"axes": "replicate=2, shard=4", "coordinates": [{"replicate": 0, "shard": 0}, ...]}, with one coordinate
/// per rank.
nlohmann::ordered_json mesh_json(const Mesh& mesh);

}  // namespace tranche::tools
