#pragma once
/// Loading a checkpoint: finds it, reads the state, and restores the run's counters. Private to engine/.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/companions.h"
#include "checkpoint/reader.h"
#include "checkpoint/storage.h"
#include "engine/checkpoint_session.h"
#include "engine/frozen_base.h"
#include "engine/run_progress.h"
#include "engine/run_record.h"
#include "engine/state_store.h"
#include "engine/tensor_match.h"
#include "tranche/engine/runtime.h"
#include "tranche/engine/saved_state.h"

namespace tranche::detail {

/// All calls are collective, and require that no save is in progress.
class CheckpointLoader {
 public:
  /// All arguments must outlive it. `optimizer` is the optimizer's name.
  CheckpointLoader(const Runtime& runtime, const Config& config, StateStore& store, std::string optimizer,
                   CheckpointSession& session, RunProgress& progress, FrozenBase& base, RunRecord& run);

  /// Implements Engine::load(). Throws CheckpointError on all ranks.
  LoadResult load(const std::string& path, const LoadOptions& options);
  /// Implements Engine::load_arrays().
  void load_arrays(const std::string& path, const std::vector<ArrayTarget>& targets);
  /// Throws LogicError naming `call` if a load has failed after it began to replace state, which is then a
  /// mixture.
  void require_whole_state(const char* call) const;

 private:
  /// The tensors that are loaded from a checkpoint. With adapters beside a frozen base it may hold both, only
  /// the base, or only the adapters.
  enum class Part : std::uint8_t { whole, base, adapters };
  /// The checkpoint that all ranks agreed to load. Finding it does not change the engine.
  struct Found {
    std::string folder;
    std::unique_ptr<checkpoint::Reader> reader;
    Part part = Part::whole;
    TensorMatch match;
    std::unique_ptr<checkpoint::Reader> base;  ///< the adapters' base; null: it is drawn
    checkpoint::Companions companions;         ///< on rank 0
    std::vector<std::string> damaged;          ///< newer checkpoints that were passed over
  };
  /// Throws CheckpointError if the model cannot use the checkpoint's contents.
  Part part_of(const checkpoint::Reader& reader, const LoadOptions& options) const;
  /// Matches the frozen tensors. Throws CheckpointError if one is missing or has another shape.
  TensorMatch match_base(const checkpoint::Reader& base) const;
  /// The checkpoint of the base; null if the base is drawn.
  std::unique_ptr<checkpoint::Reader> open_base(const checkpoint::Reader& adapters,
                                                const LoadOptions& options,
                                                const checkpoint::Storage& storage);
  /// The checkpoint at `path`, or the newest in it that is not `damaged`.
  Found find(const std::string& path, const LoadOptions& options, const checkpoint::Storage& storage,
             std::vector<std::string>& notes, const std::vector<std::string>& damaged);
  void read(Found& found, bool weights_only);
  /// Calls find() and read(), and repeats them if the checkpoint is damaged and options allow another one.
  Found find_and_read(const std::string& path, const LoadOptions& options, const checkpoint::Storage& storage,
                      LoadResult& result);
  /// Makes the loaded base the engine's, and verifies that it is the right one.
  void settle_base(const Found& found, const LoadOptions& options, std::vector<std::string>& notes);
  void describe(const Found& found, const std::string& path, LoadResult& result) const;
  /// Adds notes about saved states that the optimizer does not use.
  void note_dropped_states(const Found& found, LoadResult& result) const;
  bool simulated() const { return runtime_.device().kind() == DeviceKind::meta; }

  const Runtime& runtime_;
  const Config& config_;
  StateStore& store_;
  std::string optimizer_;
  CheckpointSession& session_;
  RunProgress& progress_;
  FrozenBase& base_;
  RunRecord& run_;
  std::string half_loaded_;  ///< the checkpoint whose load failed after it had begun to replace state
};

}  // namespace tranche::detail
