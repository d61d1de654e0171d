#pragma once
/// What Engine::save and Engine::load take and tell.

#include <cstdint>
#include <string>
#include <vector>

namespace tranche {

struct SaveOptions {
  std::string user = "{}";      ///< the caller's own JSON object, at most 1 MiB; from rank 0
  int keep_last = 0;            ///< checkpoints that stay: the newest so many (0: all) ...
  std::int64_t keep_every = 0;  ///< ... and those whose step is a multiple
  /// Return when the checkpoint is durable; else once this rank's shard is copied.
  bool wait = false;
};

struct LoadOptions {
  /// Only weights: optimizer state, step and loss scale stay as they are.
  bool weights_only = false;
};

/// What was loaded, and what is not as it was when it was saved.
struct LoadResult {
  std::string folder;  ///< the checkpoint
  std::int64_t step = 0, applied_steps = 0, samples = 0, tokens = 0;
  int world = 1, stage = 0;        ///< of the run that saved
  std::string user = "{}";         ///< what SaveOptions held
  std::string config = "{}";       ///< the effective configuration of that run
  std::string optimizer;           ///< as Optimizer::describe() put it
  std::int64_t bytes_read = 0;     ///< by this rank
  std::vector<std::string> notes;  ///< one line for each difference that changes bits or was passed over
};

}  // namespace tranche
