#pragma once
/// The plan of messages for WholeMatrices: the matrix elements that each rank sends. Private to engine/.

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

/// The messages of a flat buffer, from the view of this rank.
struct MatrixExchange {
  /// Elements of one tensor, and their place in the message.
  struct Piece {
    ElementRange range;  ///< of the flat buffer
    std::int64_t offset = 0;
  };
  /// A part of a matrix, in the form in which the ranks that hold it send it to the owner.
  struct Part {
    std::int64_t offset = 0;  ///< offset in the memory for received matrices
    Box box;                  ///< its position in the matrix
  };
  struct Matrix {
    int tensor = 0;  ///< index in the engine
    std::int64_t elements = 0;
    std::vector<Part> parts;  ///< one part, the whole matrix, unless the axis `tensor` cuts it
  };
  FlatBuffer* flat = nullptr;
  int buffer = 0;  ///< index in the placement
  DataGroups::MatrixRanks ranks;
  bool cut = false;           ///< the axis `tensor` cuts it, so that ranks of the group have different parts
  bool everywhere = false;    ///< every rank keeps all state of its part
  std::vector<Piece> pieces;  ///< the elements that this rank keeps, ordered by the owner of their matrix
  std::vector<Matrix> owned;  ///< this rank's matrices, in the buffer's order
  std::vector<RankElements> messages;  ///< by rank: this rank's elements of that rank's matrices
  std::vector<RankElements> matrices;  ///< by rank: that rank's elements of this rank's matrices
  // The same for the messages to the owners, in which only one of the ranks with equal elements sends.
  std::vector<RankElements> given, received;
  std::int64_t message_elements = 0, owned_elements = 0, largest_piece = 0, scratch_bytes = 0;
  std::int64_t largest_matrix = 0;  ///< elements of the largest matrix that is assembled from parts

  Communicator& group() const { return *ranks.group; }
  /// True if every rank of the group keeps the whole matrices: nothing is sent to the owner, and the owner
  /// sends the result to all.
  bool all_have_all() const { return everywhere && !cut; }
  std::int64_t elements_sent() const;
};

struct MatrixPlan {
  std::vector<MatrixExchange> exchanges;  ///< for the buffers that this rank holds
  /// The largest load of a rank of this rank's groups divided by the mean.
  double load_ratio = 1;
};

/// DataGroups::of_matrices(), which returns the ranks that divide a buffer's matrices among themselves.
using MatrixRanksOf = std::function<DataGroups::MatrixRanks(const Placement& placement, int buffer)>;

/// Computes the plan from the placement and `ranks_of`, whose errors it passes on.
MatrixPlan plan_exchanges(const StateStore& store, const FlatUpdater& updater, const Optimizer& optimizer,
                          const MatrixRanksOf& ranks_of);

}  // namespace tranche::detail
