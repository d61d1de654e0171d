#pragma once
/// The differences between a run and the run that saved a checkpoint.

#include <string>
#include <string_view>
#include <vector>

#include "tools/train/run_identity.h"

namespace tranche::tools {

/// Compares two effective configurations (Config::to_json()) key by key; returns lines like
///     optimizer.params.lr is 0.0001, was 0.001: the command line wins
/// Keys without influence on results (threads, buckets, time-outs, prints ...) are left out, and so is
/// tranche.total_steps if the learning rate does not depend on it.
std::vector<std::string> configuration_changes(std::string_view saved, std::string_view present);

/// True for a key of config.json that does not change the identity of a model: dropout, and the epsilon of
/// norms.
bool is_adjustable(std::string_view key);
/// A line for each such key that differs; none when the architectures do.
std::vector<std::string> adjusted_model(const RunIdentity& saved, const RunIdentity& present);

/// The same for model (dropout and the like), sequence and data; it leaves out the differences that
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
