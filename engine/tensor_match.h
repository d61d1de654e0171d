#pragma once
/// Matches a model's tensors with a checkpoint's. Private to engine/.

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/reader.h"
#include "engine/state_store.h"
#include "tranche/engine/saved_state.h"

namespace tranche::detail {

struct TensorMatch {
  /// For each of StateStore::tensors(): the checkpoint's tensor; null if it has none, and the model's does
  /// not change.
  std::vector<const checkpoint::StoredTensor*> stored;
  std::vector<std::string> differences;  ///< a line for each renamed, missing or extra tensor

  /// The tensor from which a piece of a flat buffer is read; null if `kind` of it does not change.
  const checkpoint::StoredTensor* source(const FlatBuffer& flat, const TensorPiece& piece,
                                         const std::string& kind) const;
};

/// The tensors of the model to match; beside a frozen base, adapters or base may be matched alone.
enum class TensorsTaken : std::uint8_t { all, frozen, trainable };

/// Matches the model, or its tensors in `taken`, with a checkpoint. Throws CheckpointError for a tensor of
/// another shape, for optimizer state that `optimizer` (its name) needs and that is missing or, unless
/// options.convert_state, in another format, for renames that match nothing or give two tensors one name,
/// and, unless options.partial, for missing or extra tensors.
TensorMatch match_tensors(const StateStore& store, const checkpoint::Reader& reader,
                          const LoadOptions& options, const std::string& optimizer,
                          TensorsTaken taken = TensorsTaken::all);

}  // namespace tranche::detail
