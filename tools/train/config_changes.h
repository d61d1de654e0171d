#pragma once
/// The differences of a run from the one that a checkpoint is from.

#include <string>
#include <string_view>
#include <vector>

#include "tools/train/run_identity.h"

namespace tranche::tools {

/// Compares two effective configurations (Config::to_json()) key by key; a line each:
///     optimizer.params.lr is 0.0001, was 0.001: the command line wins
/// Keys without influence on results (threads, buckets, time-outs, prints ...) are left out, and so is
/// tranche.total_steps where the learning rate does not follow it.
std::vector<std::string> configuration_changes(std::string_view saved, std::string_view present);

/// The same for model (dropout and the like), sequence and data; what require_same_model() refuses is not
/// here.
std::vector<std::string> identity_changes(const RunIdentity& saved, const RunIdentity& present);

/// A line for each property of the model that require_same_model() refuses.
std::vector<std::string> model_changes(const RunIdentity& saved, const RunIdentity& present);

/// Throws CheckpointError, naming both sides, when the weights of `checkpoint` are of a model of another
/// shape.
void require_same_model(const RunIdentity& saved, const RunIdentity& present, std::string_view checkpoint);
/// The same when its tokens meant something else.
void require_same_tokenizer(const RunIdentity& saved, const RunIdentity& present,
                            std::string_view checkpoint);

}  // namespace tranche::tools
