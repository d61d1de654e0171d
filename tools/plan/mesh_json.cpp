#include "tools/plan/mesh_json.h"

#include <nlohmann/json.hpp>
#include <utility>

namespace tranche::tools {

nlohmann::ordered_json mesh_json(const Mesh& mesh) {
  nlohmann::ordered_json coordinates = nlohmann::ordered_json::array();
  for (int rank = 0; rank < mesh.ranks(); ++rank) {
    coordinates.push_back({{"replicate", mesh.coordinate(MeshAxis::replicate, rank)},
                           {"shard", mesh.coordinate(MeshAxis::shard, rank)}});
    for (const MeshAxis axis : {MeshAxis::pipeline, MeshAxis::context, MeshAxis::tensor}) {
      if (mesh.size(axis) > 1) coordinates.back()[std::string(name_of(axis))] = mesh.coordinate(axis, rank);
    }
  }
  return {{"axes", mesh.to_string()}, {"coordinates", std::move(coordinates)}};
}

}  // namespace tranche::tools
