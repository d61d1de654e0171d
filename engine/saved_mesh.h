#pragma once
/// The mesh of a saved run. Private to the library.

#include <optional>
#include <string_view>

#include "tranche/partition/mesh.h"

namespace tranche::detail {

/// The mesh that an effective configuration (Config::to_json()) means, for the ranks that its batch is
/// divided among; nothing where the text says of no such mesh. Without the key, as in checkpoints of before
/// there were meshes, all ranks shard.
std::optional<Mesh> saved_mesh(std::string_view config_json);

}  // namespace tranche::detail
