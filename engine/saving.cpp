// Saving: what a rank keeps is copied once, and written by a thread behind the next steps. Ranks learn of
// each other's progress from the record that they exchange at every step's boundary anyway.

#include "engine/saving.h"

#include <nlohmann/json.hpp>
#include <random>
#include <span>

#include "checkpoint/shard_writer.h"
#include "core/clock.h"
#include "engine/offloading.h"
#include "engine/rank_texts.h"
#include "engine/saved_arrays.h"
#include "engine/sections.h"
#include "tranche/core/trace.h"

namespace tranche {

using nlohmann::ordered_json;

namespace {

/// A span of the trace for the work on files during its life.
class DiskSpan {
 public:
  DiskSpan(TraceRecorder* trace, std::string name)
      : trace_(trace), name_(std::move(name)), begin_(seconds_now()) {}
  ~DiskSpan() {
    if (trace_ == nullptr) return;
    try {
      trace_->span("disk", name_, begin_, seconds_now());
    } catch (...) {  // out of memory for a line of the trace
    }
  }
  DiskSpan(const DiskSpan&) = delete;
  DiskSpan& operator=(const DiskSpan&) = delete;

 private:
  TraceRecorder* trace_;
  std::string name_;
  double begin_;
};

/// Hands out memory that was taken before, in turn; all of it comes back at once.
class StagingMemory final : public MemoryResource {
 public:
  StagingMemory(std::span<std::byte> memory, MemoryResource& beyond) : memory_(memory), beyond_(beyond) {}
  Tier tier() const override { return Tier::host; }
  void* allocate(const AllocationRequest& request) override {
    const auto bytes = static_cast<std::size_t>(aligned_bytes(request.bytes));
    if (bytes > memory_.size() - used_) return beyond_.allocate(request);
    used_ += bytes;
    return memory_.data() + (used_ - bytes);
  }
  void deallocate(void* pointer, const AllocationRequest& request) noexcept override {
    const auto* byte = static_cast<const std::byte*>(pointer);
    if (byte >= memory_.data() && byte < memory_.data() + memory_.size()) return;
    beyond_.deallocate(pointer, request);
  }

 private:
  std::span<std::byte> memory_;
  MemoryResource& beyond_;
  std::size_t used_ = 0;
};

/// Writes a shard from a snapshot that is no image: what lives in memory and what comes by, in the order of
/// the file.
std::string write_pieces(const checkpoint::Storage& storage, const checkpoint::ShardPlan& plan,
                         const SnapshotLayout& layout, std::span<std::byte> snapshot, TileFeed& feed,
                         const std::string& folder) {
  StagingMemory staging(snapshot.subspan(static_cast<std::size_t>(layout.staging)), storage.memory);
  checkpoint::ShardWriter writer({storage.files, storage.io, staging}, plan, folder);
  const auto& sections = plan.layout().sections;
  std::vector<int> kept;  // sections of trainable tensors: weights, then states
  for (std::size_t s = 0; s < sections.size(); ++s) {
    if (!sections[s].frozen) kept.push_back(static_cast<int>(s));
  }
  auto part = layout.parts.begin();
  for (std::size_t u = 0; u < layout.tiles.size(); ++u) {
    for (; part != layout.parts.end() && part->piece.unit == static_cast<int>(u); ++part) {
      writer.put(part->piece.section, part->piece.unit, part->piece.range, snapshot.data() + part->offset);
    }
    std::int64_t missing = layout.tiles[u].size();
    const auto put = [&](const TileFeed::Tile& tile) {
      for (std::size_t i = 0; i < kept.size(); ++i) writer.put(kept[i], tile.unit, tile.range, tile.data[i]);
      missing -= tile.range.size();
    };
    while (missing > 0 && feed.take(put)) {
    }
  }
  for (std::size_t a = 0; a < layout.arrays.size(); ++a) {
    if (layout.arrays[a] >= 0) writer.put_array(static_cast<int>(a), snapshot.data() + layout.arrays[a]);
  }
  return checkpoint::to_text(writer.finish());  // which refuses when something never came
}

/// However the taking of tiles ends, nobody waits for it.
class FeedCloser {
 public:
  explicit FeedCloser(std::shared_ptr<TileFeed> feed) : feed_(std::move(feed)) {}
  ~FeedCloser() {
    if (feed_) feed_->close();
  }
  FeedCloser(const FeedCloser&) = delete;
  FeedCloser& operator=(const FeedCloser&) = delete;

 private:
  std::shared_ptr<TileFeed> feed_;
};

constexpr OperationLabel save_label{"checkpoint", "save", Traffic::control, Tier::host};
/// Between two looks at the others while waiting: well below any time-out of collectives.
constexpr double look_around_seconds = 0.5;

}  // namespace

void Engine::Impl::Saving::prepare() {
  if (engine.config.save_buffer) reserve_snapshot(checkpoint::ShardPlan(whole_layout(), engine.rank, 0));
}

checkpoint::Layout Engine::Impl::Saving::whole_layout() const {
  return checkpoint_layout(engine.units, engine.tensors, engine.state_tensors,
                           engine.config.precision.compute, engine.ranks);
}

void Engine::Impl::Saving::describe_run(checkpoint::Manifest& described, const SaveOptions& options) const {
  const LossScalerState& scale = engine.scaler.state();
  described.stage = engine.stage;
  described.numerics = engine.runtime.numerics_fingerprint();
  described.reduction_group = engine.reduction_group;
  described.run.step = engine.steps_done;
  described.run.applied = engine.applied_steps;
  described.run.samples = engine.samples_done;
  described.run.tokens = engine.tokens_done;
  described.run.random = ordered_json{{"seed", engine.config.seed}}.dump();
  if (engine.config.loss_scaling) {
    described.run.loss_scaler = ordered_json{
        {"scale", scale.scale},
        {"clean_steps", scale.clean_steps},
        {"hysteresis_left",
         scale.hysteresis_left}}.dump();
  }
  described.run.schedule = engine.rule_to_save();
  described.run.optimizer = engine.optimizer->describe();
  described.run.config = engine.config.to_json();
  described.run.user = options.user;
}

std::string Engine::Impl::Saving::save(const std::string& into, const SaveOptions& options) {
  engine.require(!engine.in_step && !engine.in_micro_batch && !engine.in_evaluation,
                 "save() inside a step or an evaluation; save between step() and the next micro-batch");
  engine.require_whole_state("save()");
  (void)finish();
  checkpoint::Layout stored = whole_layout();
  checkpoint::add_arrays(stored, agree_on_arrays(engine.shard, options.arrays, engine.simulated()));
  engine.set_phase("save");
  if (token == 0) {
    std::int64_t drawn = 0;
    if (engine.rank == 0) {
      std::random_device draw;
      while (drawn == 0) {
        drawn = static_cast<std::int64_t>(draw()) << 31 ^ static_cast<std::int64_t>(draw());
      }
    }
    engine.shard.broadcast(&drawn, 1, DataType::int64, 0, {}, save_label).wait();
    token = static_cast<std::uint64_t>(drawn);
  }
  directory = into;
  step = engine.steps_done;
  try {
    (void)together(engine.shard, save_label, [&]() -> std::string {
      if (!io) io = make_block_io();
      if (!folder || folder->parent() != into) {
        folder.emplace(checkpoint::Storage{files, *io, engine.runtime.memory(Tier::host)}, into, token,
                       ancestors);
      }
      plan = std::make_unique<checkpoint::ShardPlan>(stored, engine.rank, engine.steps_done);
      retention = {options.keep_last, options.keep_every};
      manifest = {};
      if (engine.rank == 0) {
        manifest.layout = plan->layout();
        describe_run(manifest, options);
      }
      take_snapshot(options.arrays);
      return {};
    });
  } catch (const CheckpointError& error) {
    engine.set_phase("idle");
    throw CheckpointError(text() + error.message());
  }
  const std::string path = folder->final_path(step);
  engine.set_phase("idle");
  if (engine.simulated()) return path;  // nothing to write
  start_writing();
  if (options.wait) (void)finish();
  return path;
}

void Engine::Impl::Saving::goes_on_from(const checkpoint::Manifest& loaded) {
  ancestors = loaded.lineage.empty() ? std::vector<std::uint64_t>{0} : loaded.lineage;
  if (token != 0 && ancestors.back() == token) ancestors.pop_back();  // one of its own
  folder.reset();                                                     // the next save is by the new lineage
}

std::string Engine::Impl::Saving::text() const {
  return "cannot save step " + std::to_string(step) + " to " + directory + ": ";
}

void Engine::Impl::Saving::start_writing() {
  phase = Phase::writing;
  open_tile_feed();
  work.start([this, rank = engine.rank, ranks = engine.ranks, &host = engine.runtime.memory(Tier::host),
              trace = engine.runtime.trace(), tiles = feed] {
    const DiskSpan span(trace, "write shard of step " + std::to_string(step));
    const FeedCloser closer(tiles);
    if (rank == 0) folder->prepare(step, plan->file_bytes() * ranks);
    const checkpoint::Storage storage{files, *io, host};
    const std::string written = folder->temporary(step);
    const std::span<std::byte> taken{static_cast<std::byte*>(snapshot.data()),
                                     static_cast<std::size_t>(snapshot.bytes())};
    if (tiles) return write_pieces(storage, *plan, layout, taken, *tiles, written);
    checkpoint::ShardWriter writer(storage, *plan, written);
    writer.write_image(taken);
    return checkpoint::to_text(writer.finish());
  });
}

std::string Engine::Impl::Saving::advance() {
  const Phase begun = phase;
  std::vector<std::string> results;
  try {
    results = together(engine.shard, save_label, [&]() -> std::string {
      return begun == Phase::writing || engine.rank == 0 ? work.take() : std::string();
    });
    if (begun == Phase::writing) {
      (void)together(engine.shard, save_label, [&]() -> std::string {
        if (engine.rank != 0) return {};
        for (std::size_t r = 0; r < results.size(); ++r) {
          manifest.shards.push_back(
              checkpoint::shard_record_from_text(results[r], "record of rank " + std::to_string(r)));
        }
        work.start([this, trace = engine.runtime.trace()] {
          const DiskSpan span(trace, "commit checkpoint of step " + std::to_string(step));
          std::string path = folder->commit(std::move(manifest));
          // The checkpoint is there: what fails from here on must not be told as its failure.
          warning = folder->take_warning();
          try {
            (void)folder->retain(retention);
          } catch (const std::exception& error) {
            warning += (warning.empty() ? "" : "; ") + std::string(error.what());
          }
          return path;
        });
        return {};
      });
      phase = Phase::committing;
      return {};
    }
  } catch (const CheckpointError& error) {
    phase = Phase::none;
    std::string told = error.message();
    // "rank 1: cannot save ...: no space": the rank said already what it could not do.
    if (const std::size_t said = told.find(text()); said != std::string::npos)
      told.erase(said, text().size());
    told.insert(0, text());
    if (engine.rank == 0) {
      try {
        folder->discard(step);
      } catch (const CheckpointError& left) {
        engine.runtime.log().warning(left.message());  // the next save clears it
      }
    }
    // A rank that leaves with an error may end the job: not before rank 0 has read the outcomes and cleared
    // up.
    try {
      engine.shard.barrier(save_label).wait();
    } catch (const Error&) {
      // The save's own failure is the one to tell.
    }
    throw CheckpointError(told);
  }
  phase = Phase::none;
  if (!warning.empty()) engine.runtime.log().warning(std::exchange(warning, {}));
  return results[0];
}

bool Engine::Impl::Saving::at_rest() const {
  return phase == Phase::none || work.at_rest();
}

void Engine::Impl::Saving::look_after(const std::vector<BoundaryRecord>& records, StepResult& result) {
  for (const BoundaryRecord& record : records) result.stop_requested |= record.stop_requested != 0;
  if (phase == Phase::none) return;
  for (const BoundaryRecord& record : records) {
    if (record.save_at_rest == 0) return;
  }
  try {
    result.saved = advance();
  } catch (const CheckpointError& error) {
    failure = error.message();
  }
}

void Engine::Impl::Saving::throw_failure() {
  if (failure.empty()) return;
  throw CheckpointError(std::exchange(failure, {}));
}

std::string Engine::Impl::Saving::finish() {
  engine.require(!engine.in_micro_batch && !engine.in_evaluation,
                 "finish_saving() inside a micro-batch or an evaluation");
  throw_failure();
  return drain();
}

std::string Engine::Impl::Saving::drain() {
  std::string path;
  while (phase != Phase::none) {
    // In short turns, so that a disk that is slower than a collective's time-out is no failure.
    std::int64_t all_at_rest = 0;
    while (all_at_rest == 0) {
      all_at_rest = hand_over_tiles(look_around_seconds) && work.wait_for(look_around_seconds) ? 1 : 0;
      engine.shard.all_reduce(&all_at_rest, 1, DataType::int64, ReduceOperation::minimum, save_label).wait();
    }
    path = advance();
  }
  return path;
}

void Engine::Impl::Saving::close() noexcept {
  try {
    if (!failure.empty()) {
      engine.runtime.log().error(failure);
    } else if (phase != Phase::none) {
      // Alone, what is under way can be finished at any moment; peers may be gone or somewhere else.
      const bool together =
          !engine.broken && !engine.unwinding() && !engine.in_micro_batch && !engine.in_evaluation;
      if (engine.ranks == 1 || together) {
        (void)drain();
      } else if (phase == Phase::committing && engine.rank == 0) {
        (void)work.take();  // throws when it has not become a checkpoint
      } else {
        // Files that were written without the others are no checkpoint, and the next save clears them.
        const bool lost = phase == Phase::writing;
        if (feed) feed->cancel();
        if (io) io->cancel();
        work.drop();
        if (lost) {
          engine.runtime.log().error(text() + "the engine ended before the checkpoint was complete");
        }
      }
    }
  } catch (const Error& error) {
    engine.runtime.log().error(error.message());
  } catch (...) {
    engine.runtime.log().error("a checkpoint could not be finished");
  }
  if (feed) feed->cancel();  // after an error: what writes does not wait for tiles
}

std::string Engine::save(const std::string& directory, const SaveOptions& options) {
  return impl_->guarded([&] { return impl_->saving->save(directory, options); });
}

std::string Engine::finish_saving() {
  return impl_->guarded([&] { return impl_->saving->finish(); });
}

bool Engine::saving() const {
  return impl_->saving->phase != Impl::Saving::Phase::none;
}

void Engine::request_stop() noexcept {
  impl_->stop_wanted.store(true, std::memory_order_relaxed);
}

}  // namespace tranche
