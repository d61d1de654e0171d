#pragma once
/// Loading: the checkpoint that is taken, the state that is read from it, and what the run goes on with.
/// Private to engine/.

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

/// All calls are collective, and no save is in progress.
class CheckpointLoader {
 public:
  /// All arguments outlive it. `optimizer`: its name.
  CheckpointLoader(const Runtime& runtime, const Config& config, StateStore& store, std::string optimizer,
                   CheckpointSession& session, RunProgress& progress, FrozenBase& base, RunRecord& run);

  /// Implements Engine::load(). Throws CheckpointError on all ranks.
  LoadResult load(const std::string& path, const LoadOptions& options);
  /// Implements Engine::load_arrays().
  void load_arrays(const std::string& path, const std::vector<ArrayTarget>& targets);
  /// Throws LogicError, which names `call`, where a load has failed half-way: the state is no run's.
  void require_whole_state(const char* call) const;

 private:
  /// The tensors that are taken from a checkpoint: of adapters beside a frozen base it may hold both, the
  /// base or the adapters.
  enum class Part : std::uint8_t { whole, base, adapters };
  /// The checkpoint that all ranks agreed to load. Nothing of the engine has changed when it is known.
  struct Found {
    std::string folder;
    std::unique_ptr<checkpoint::Reader> reader;
    Part part = Part::whole;
    TensorMatch match;
    std::unique_ptr<checkpoint::Reader> base;  ///< of adapters alone; null: it was drawn
    checkpoint::Companions companions;         ///< on rank 0
  };
  /// Throws CheckpointError where the model has no use for what it holds.
  Part part_of(const checkpoint::Reader& reader, const LoadOptions& options) const;
  /// Its frozen tensors. Throws CheckpointError where one is missing or of another shape.
  TensorMatch match_base(const checkpoint::Reader& base) const;
  /// The checkpoint of the base; null where that was drawn.
  std::unique_ptr<checkpoint::Reader> open_base(const checkpoint::Reader& adapters,
                                                const LoadOptions& options,
                                                const checkpoint::Storage& storage);
  /// The checkpoint at `path`, or the newest in it that is not `damaged`.
  Found find(const std::string& path, const LoadOptions& options, const checkpoint::Storage& storage,
             std::vector<std::string>& notes, const std::vector<std::string>& damaged);
  void read(Found& found, bool weights_only);
  /// find() and read(), and again where what was found is damaged.
  Found find_and_read(const std::string& path, const LoadOptions& options, const checkpoint::Storage& storage,
                      LoadResult& result);
  /// Makes the base of what was read the engine's, and sees that it is the right one.
  void settle_base(const Found& found, const LoadOptions& options, std::vector<std::string>& notes);
  void describe(const Found& found, const std::string& path, LoadResult& result) const;
  /// States that were saved and that the optimizer has no use for.
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
  std::string half_loaded_;  ///< the checkpoint whose load failed in between
};

}  // namespace tranche::detail
