#pragma once
/// Names of ranks in error texts. Private to comm/.

#include <string>

namespace tranche::comm {

/// Ranks of a job as error texts name them: with their coordinates in the mesh the job was started with.
class RankNames {
 public:
  RankNames() = default;
  /// `mesh`: the text of CommunicatorOptions::mesh; it is read only when a name is wanted.
  RankNames(std::string mesh, int ranks);
  /// "rank 3 (replicate 1, shard 1)"; "rank 3" where one axis says it all, or the text is no mesh of the job.
  std::string of(int rank) const;

 private:
  std::string mesh_;
  int ranks_ = 0;
};

}  // namespace tranche::comm
