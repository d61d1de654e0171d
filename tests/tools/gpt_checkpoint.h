#pragma once
/// Checkpoints of a tiny GPT by any number of ranks in the form that `tranche train` writes, without
/// training.

#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/format.h"
#include "tools/train/run_identity.h"
#include "tranche/models/gpt_config.h"

namespace tranche::tools::test {

/// Two layers with odd widths; a `vocabulary` of 256 means bytes.
models::GptConfig tiny_gpt(std::int64_t vocabulary = 256);
RunIdentity tiny_identity(std::int64_t vocabulary = 256);

/// The value of a tensor's element, which uses all bits of fp32.
float sample_value(std::string_view kind, std::string_view tensor, std::int64_t element, int variant = 0);

struct SampleOptions {
  int world = 1;
  std::string mesh = {};  ///< mesh of these ranks; empty: all shard
  std::int64_t step = 7;
  int variant = 0;
  int stage = 2;
  std::string user = {};                             ///< empty: tiny_identity() of the model's vocabulary
  std::vector<checkpoint::ArrayRecord> arrays = {};  ///< arrays of a program's own, filled with zeros
};
/// Saves weights, exp_avg and exp_avg_sq into a run's folder; returns the checkpoint's path.
std::string save_gpt(const std::string& folder, const models::GptConfig& model,
                     const SampleOptions& options = {});

/// Flips a bit in a byte of a file.
void flip(const std::string& path, std::int64_t byte);

}  // namespace tranche::tools::test
