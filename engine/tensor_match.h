#pragma once
/// The tensors that a model takes from a checkpoint. Private to engine/.

#include <string>
#include <vector>

#include "checkpoint/reader.h"
#include "engine/state_store.h"
#include "tranche/engine/saved_state.h"

namespace tranche::detail {

struct TensorMatch {
  /// For each of StateStore::tensors(): the checkpoint's; null where it has none, and the model's stays.
  std::vector<const checkpoint::StoredTensor*> stored;
  std::vector<std::string> differences;  ///< a line each: renamed, missing, extra tensors

  /// The tensor that a piece of a flat buffer is read from; null where `kind` of it stays as it is.
  const checkpoint::StoredTensor* source(const FlatBuffer& flat, const TensorPiece& piece,
                                         const std::string& kind) const;
};

/// Holds the model against a checkpoint. Throws CheckpointError for a tensor of another shape, for optimizer
/// state that `optimizer` (its name) needs and that is not there, for renames that fit nothing or give two
/// tensors one name, and, unless options.partial, for tensors that are missing or too many.
TensorMatch match_tensors(const StateStore& store, const checkpoint::Reader& reader,
                          const LoadOptions& options, const std::string& optimizer);

}  // namespace tranche::detail
