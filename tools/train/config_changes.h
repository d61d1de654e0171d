#pragma once
/// The differences between a run and the run that saved a checkpoint.

#include <string>
#include <string_view>
#include <vector>

#include "tools/train/run_identity.h"

namespace tranche::tools {

/// True for a key of config.json that does not change the identity of a model: dropout, and the epsilon of
/// norms.
bool is_adjustable(std::string_view key);
/// True for the number of a token, which matters only to a tokenizer.
bool is_token_id(std::string_view key);
/// A line for each adjustable key that differs; none when the architectures do.
std::vector<std::string> adjusted_model(const RunIdentity& saved, const RunIdentity& present);

/// A line for each difference of the model (dropout and the like), sequence and data, except for those that
/// require_same_model() refuses.
std::vector<std::string> identity_changes(const RunIdentity& saved, const RunIdentity& present);

/// A line for each property of the model that require_same_model() refuses.
std::vector<std::string> model_changes(const RunIdentity& saved, const RunIdentity& present);

/// Throws CheckpointError, naming both sides, when the weights in `checkpoint` belong to a model of another
/// shape.
void require_same_model(const RunIdentity& saved, const RunIdentity& present, std::string_view checkpoint);
/// The same when its tokens have another meaning.
void require_same_tokenizer(const RunIdentity& saved, const RunIdentity& present,
                            std::string_view checkpoint);

}  // namespace tranche::tools
