#pragma once
/// Names of ranks in error texts. Private to comm/.

#include <string>

namespace tranche::comm {

/// Formats the ranks of a job for error texts, with their coordinates in the job's mesh.
class RankNames {
 public:
  RankNames() = default;
  /// `mesh`: the text of CommunicatorOptions::mesh; it is parsed only when a name is needed.
  RankNames(std::string mesh, int ranks);
  /// "rank 3 (replicate 1, shard 1)"; "rank 3" where the mesh has one axis, or the text is not a mesh of the
  /// job.
  std::string of(int rank) const;

 private:
  std::string mesh_;
  int ranks_ = 0;
};

}  // namespace tranche::comm
