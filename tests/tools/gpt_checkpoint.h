#pragma once
/// Checkpoints of a tiny GPT by any number of ranks, as `tranche train` leaves them, without training.

#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/format.h"
#include "tools/train/run_identity.h"
#include "tranche/models/gpt_config.h"

namespace tranche::tools::test {

/// Two layers, odd widths; `vocabulary` 256 is that of bytes.
models::GptConfig tiny_gpt(std::int64_t vocabulary = 256);
RunIdentity tiny_identity(std::int64_t vocabulary = 256);

/// The value of an element of a tensor: needs all bits of fp32.
float sample_value(std::string_view kind, std::string_view tensor, std::int64_t element, int variant = 0);

struct SampleOptions {
  int world = 1;
  std::string mesh = {};  ///< of these ranks; empty: all shard
  std::int64_t step = 7;
  int variant = 0;
  int stage = 2;
  std::string user = {};                             ///< empty: tiny_identity() of the model's vocabulary
  std::vector<checkpoint::ArrayRecord> arrays = {};  ///< of a program's own; all of them zeros
};
/// Saves weights, exp_avg and exp_avg_sq into a run's folder; returns the checkpoint's path.
std::string save_gpt(const std::string& folder, const models::GptConfig& model,
                     const SampleOptions& options = {});

/// Turns a bit of a byte of a file around.
void flip(const std::string& path, std::int64_t byte);

}  // namespace tranche::tools::test
