#pragma once
/// The plan of messages that WholeMatrices follows: which elements of matrices each rank sends. Private to
/// engine/.

#include <cstdint>
#include <functional>
#include <vector>

#include "engine/data_groups.h"
#include "engine/flat_updater.h"
#include "engine/state_store.h"
#include "partition/placement.h"
#include "tranche/comm/communicator.h"
#include "tranche/optim/optimizer.h"
#include "tranche/partition/mesh.h"

namespace tranche::detail {

/// The messages of a flat buffer, as this rank has them.
struct MatrixExchange {
  /// Elements of one tensor, in order, and their place in the message.
  struct Piece {
    ElementRange range;  ///< of the flat buffer
    std::int64_t offset = 0;
  };
  /// A part of a matrix, as the ranks that hold it send it to the owner.
  struct Part {
    std::int64_t offset = 0;  ///< among the matrices that the owner receives
    Box box;                  ///< its place in the matrix
  };
  struct Matrix {
    int tensor = 0;  ///< of the engine
    std::int64_t elements = 0;
    std::vector<Part> parts;  ///< one, which is all of it, unless the axis `tensor` cuts it
  };
  FlatBuffer* flat = nullptr;
  int buffer = 0;  ///< of the placement
  DataGroups::MatrixRanks ranks;
  bool cut = false;                    ///< by the axis `tensor`: ranks of the group have different parts
  bool everywhere = false;             ///< every rank keeps all state of its part
  std::vector<Piece> pieces;           ///< of what this rank keeps, by the owner of their matrix
  std::vector<Matrix> owned;           ///< in the buffer's order
  std::vector<RankElements> messages;  ///< by rank: this rank's pieces of its matrices
  std::vector<RankElements> matrices;  ///< by rank: its pieces of this rank's matrices
  // The same on the way to the owners, where of ranks with equal pieces one alone sends.
  std::vector<RankElements> given, received;
  std::int64_t message_elements = 0, owned_elements = 0, largest_piece = 0, scratch_bytes = 0;
  std::int64_t largest_matrix = 0;  ///< elements of the largest that is put together of parts

  Communicator& group() const { return *ranks.group; }
  /// Every rank of the group keeps the whole matrices: nothing is sent to the owner, and it tells all of
  /// them.
  bool all_have_all() const { return everywhere && !cut; }
  std::int64_t elements_sent() const;
};

struct MatrixPlan {
  std::vector<MatrixExchange> exchanges;  ///< of the buffers that this rank holds
  /// The greatest load of a rank of this one's groups over the mean.
  double load_ratio = 1;
};

/// DataGroups::of_matrices(), which says among which ranks the matrices of a buffer have owners.
using MatrixRanksOf = std::function<DataGroups::MatrixRanks(const Placement& placement, int buffer)>;

/// The plan depends on the placement and on `ranks_of`, whose errors it passes on.
MatrixPlan plan_exchanges(const StateStore& store, const FlatUpdater& updater, const Optimizer& optimizer,
                          const MatrixRanksOf& ranks_of);

}  // namespace tranche::detail
