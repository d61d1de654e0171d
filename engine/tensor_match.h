#pragma once
/// The tensors that a model takes from a checkpoint. Private to engine/.

#include <cstdint>
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

/// The tensors of the model that are looked for; of adapters beside a frozen base either may be alone.
enum class TensorsTaken : std::uint8_t { all, frozen, trainable };

/// Holds the model, or those of its tensors that are `taken`, against a checkpoint. Throws CheckpointError
/// for a tensor of another shape, for optimizer state that `optimizer` (its name) needs and that is not
/// there or, unless options.convert_state, in another format, for renames that fit nothing or give two
/// tensors one name, and, unless options.partial, for tensors that are missing or too many.
TensorMatch match_tensors(const StateStore& store, const checkpoint::Reader& reader,
                          const LoadOptions& options, const std::string& optimizer,
                          TensorsTaken taken = TensorsTaken::all);

}  // namespace tranche::detail
