#include "comm/rank_names.h"

#include <fmt/format.h>

#include <utility>

#include "tranche/core/error.h"
#include "tranche/partition/mesh.h"

namespace tranche::comm {

RankNames::RankNames(std::string mesh, int ranks) : mesh_(std::move(mesh)), ranks_(ranks) {}

std::string RankNames::of(int rank) const {
  try {
    if (!mesh_.empty()) return Mesh::parse(mesh_, ranks_).name_of_rank(rank);
  } catch (const Error&) {  // the start refuses such a mesh; until then a rank is named by its number
  }
  return fmt::format("rank {}", rank);
}

}  // namespace tranche::comm
