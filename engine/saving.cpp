// Saving: what a rank keeps is copied once, and written by a thread behind the next steps. Ranks learn of
// each other's progress from the record that they exchange at every step's boundary anyway.

#include "tranche/engine/saving.h"

#include <nlohmann/json.hpp>
#include <random>
#include <span>

#include "tranche/checkpoint/shard_writer.h"
#include "tranche/core/clock.h"
#include "tranche/core/trace.h"
#include "tranche/engine/offloading.h"
#include "tranche/engine/rank_texts.h"

namespace tranche {

using nlohmann::ordered_json;

namespace {

/// What is done with files while it lives, as a span of the trace.
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

void Engine::Impl::prepare_saving() {
  saving = std::make_unique<Saving>(runtime.files());
  if (config.save_buffer) {
    reserve_snapshot(checkpoint::ShardPlan(checkpoint_layout(), rank, 0));
  }
}

void Engine::Impl::describe_run(checkpoint::Manifest& manifest, const SaveOptions& options) const {
  const LossScalerState& scale = scaler.state();
  manifest.stage = stage;
  manifest.numerics = runtime.numerics_fingerprint();
  manifest.reduction_group = reduction_group;
  manifest.run.step = steps_done;
  manifest.run.applied = applied_steps;
  manifest.run.samples = samples_done;
  manifest.run.tokens = tokens_done;
  manifest.run.random = ordered_json{{"seed", config.seed}}.dump();
  if (config.loss_scaling) {
    manifest.run.loss_scaler = ordered_json{
        {"scale", scale.scale},
        {"clean_steps", scale.clean_steps},
        {"hysteresis_left",
         scale.hysteresis_left}}.dump();
  }
  manifest.run.schedule = ordered_json{{"type", config.schedule.type},
                                       {"params", ordered_json::parse(config.schedule.parameters_json)},
                                       {"total_steps", config.total_steps_hint}}
                              .dump();
  manifest.run.optimizer = optimizer->describe();
  manifest.run.config = config.to_json();
  manifest.run.user = options.user;
}

std::string Engine::Impl::save(const std::string& directory, const SaveOptions& options) {
  require(!in_step && !in_micro_batch && !in_evaluation,
          "save() inside a step or an evaluation; save between step() and the next micro-batch");
  require_whole_state("save()");
  (void)finish_saving();
  set_phase("save");
  Saving& save = *saving;
  if (!save.has_token) {
    std::int64_t token = 0;
    if (rank == 0) {
      std::random_device draw;
      token = static_cast<std::int64_t>(draw()) << 31 ^ static_cast<std::int64_t>(draw());
    }
    shard.broadcast(&token, 1, DataType::int64, 0, {}, save_label).wait();
    save.token = static_cast<std::uint64_t>(token);
    save.has_token = true;
  }
  save.directory = directory;
  save.step = steps_done;
  try {
    (void)together(shard, save_label, [&]() -> std::string {
      if (!save.io) save.io = make_block_io();
      if (!save.folder || save.folder->parent() != directory) {
        save.folder.emplace(checkpoint::Storage{save.files, *save.io, runtime.memory(Tier::host)}, directory,
                            save.token);
      }
      save.plan = std::make_unique<checkpoint::ShardPlan>(checkpoint_layout(), rank, steps_done);
      save.retention = {options.keep_last, options.keep_every};
      save.manifest = {};
      if (rank == 0) {
        save.manifest.layout = save.plan->layout();
        describe_run(save.manifest, options);
      }
      take_snapshot();
      return {};
    });
  } catch (const CheckpointError& error) {
    set_phase("idle");
    throw CheckpointError(saving_text() + error.message());
  }
  const std::string path = save.folder->final_path(save.step);
  set_phase("idle");
  if (simulated()) return path;  // nothing to write
  start_writing();
  if (options.wait) (void)finish_saving();
  return path;
}

std::string Engine::Impl::saving_text() const {
  return "cannot save step " + std::to_string(saving->step) + " to " + saving->directory + ": ";
}

void Engine::Impl::start_writing() {
  saving->phase = Saving::Phase::writing;
  open_tile_feed();
  saving->work.start([&save = *saving, rank = rank, ranks = ranks, &host = runtime.memory(Tier::host),
                      trace = runtime.trace(), feed = saving->feed] {
    const DiskSpan span(trace, "write shard of step " + std::to_string(save.step));
    const FeedCloser closer(feed);
    if (rank == 0) save.folder->prepare(save.step, save.plan->file_bytes() * ranks);
    const checkpoint::Storage storage{save.files, *save.io, host};
    const std::string folder = save.folder->temporary(save.step);
    const std::span<std::byte> snapshot{static_cast<std::byte*>(save.snapshot.data()),
                                        static_cast<std::size_t>(save.snapshot.bytes())};
    if (feed) return write_pieces(storage, *save.plan, save.layout, snapshot, *feed, folder);
    checkpoint::ShardWriter writer(storage, *save.plan, folder);
    writer.write_image(snapshot);
    return checkpoint::to_text(writer.finish());
  });
}

/// Collective; no rank's work is running any more. Goes on to the next phase, with the path of the checkpoint
/// when it has become one. Throws CheckpointError on all ranks, with nothing under way.
std::string Engine::Impl::advance_saving() {
  Saving& save = *saving;
  const Saving::Phase phase = save.phase;
  std::vector<std::string> results;
  try {
    results = together(shard, save_label, [&]() -> std::string {
      return phase == Saving::Phase::writing || rank == 0 ? save.work.take() : std::string();
    });
    if (phase == Saving::Phase::writing) {
      (void)together(shard, save_label, [&]() -> std::string {
        if (rank != 0) return {};
        for (std::size_t r = 0; r < results.size(); ++r) {
          save.manifest.shards.push_back(
              checkpoint::shard_record_from_text(results[r], "record of rank " + std::to_string(r)));
        }
        save.work.start([&save, trace = runtime.trace()] {
          const DiskSpan span(trace, "commit checkpoint of step " + std::to_string(save.step));
          std::string path = save.folder->commit(std::move(save.manifest));
          // The checkpoint is there: what fails from here on must not be told as its failure.
          save.warning = save.folder->take_warning();
          try {
            (void)save.folder->retain(save.retention);
          } catch (const std::exception& error) {
            save.warning += (save.warning.empty() ? "" : "; ") + std::string(error.what());
          }
          return path;
        });
        return {};
      });
      save.phase = Saving::Phase::committing;
      return {};
    }
  } catch (const CheckpointError& error) {
    save.phase = Saving::Phase::none;
    std::string text = saving_text() + error.message();
    if (rank == 0) {
      try {
        save.folder->discard(save.step);
      } catch (const CheckpointError& left) {
        runtime.log().warning(left.message());  // the next save clears it
      }
    }
    throw CheckpointError(text);
  }
  save.phase = Saving::Phase::none;
  if (!save.warning.empty()) runtime.log().warning(std::exchange(save.warning, {}));
  return results[0];
}

bool Engine::Impl::save_at_rest() const {
  return saving->phase == Saving::Phase::none || saving->work.at_rest();
}

void Engine::Impl::look_after_saving(const std::vector<BoundaryRecord>& records, StepResult& result) {
  for (const BoundaryRecord& record : records) result.stop_requested |= record.stop_requested != 0;
  if (saving->phase == Saving::Phase::none) return;
  for (const BoundaryRecord& record : records) {
    if (record.save_at_rest == 0) return;
  }
  try {
    result.saved = advance_saving();
  } catch (const CheckpointError& error) {
    saving->failure = error.message();
  }
}

void Engine::Impl::throw_save_failure() {
  if (saving->failure.empty()) return;
  throw CheckpointError(std::exchange(saving->failure, {}));
}

std::string Engine::Impl::finish_saving() {
  require(!in_micro_batch && !in_evaluation, "finish_saving() inside a micro-batch or an evaluation");
  throw_save_failure();
  return drain_saving();
}

std::string Engine::Impl::drain_saving() {
  std::string path;
  while (saving->phase != Saving::Phase::none) {
    // In short turns, so that a disk that is slower than a collective's time-out is no failure.
    std::int64_t all_at_rest = 0;
    while (all_at_rest == 0) {
      all_at_rest =
          hand_over_tiles(look_around_seconds) && saving->work.wait_for(look_around_seconds) ? 1 : 0;
      shard.all_reduce(&all_at_rest, 1, DataType::int64, ReduceOperation::minimum, save_label).wait();
    }
    path = advance_saving();
  }
  return path;
}

void Engine::Impl::close_saving() noexcept {
  if (!saving) return;
  try {
    if (!saving->failure.empty()) {
      runtime.log().error(saving->failure);
    } else if (saving->phase != Saving::Phase::none) {
      // Alone, what is under way can be finished at any moment; peers may be gone or somewhere else.
      const bool together = !broken && std::uncaught_exceptions() == 0 && !in_micro_batch && !in_evaluation;
      if (ranks == 1 || together) {
        (void)drain_saving();
      } else if (saving->phase == Saving::Phase::committing && rank == 0) {
        (void)saving->work.take();  // throws when it has not become a checkpoint
      } else {
        // What was written without the others is no checkpoint, and the next save clears it.
        const bool lost = saving->phase == Saving::Phase::writing;
        if (saving->feed) saving->feed->cancel();
        if (saving->io) saving->io->cancel();
        saving->work.drop();
        if (lost) {
          runtime.log().error(saving_text() + "the engine ended before the checkpoint was complete");
        }
      }
    }
  } catch (const Error& error) {
    runtime.log().error(error.message());
  } catch (...) {
    runtime.log().error("a checkpoint could not be finished");
  }
  if (saving->feed) saving->feed->cancel();  // after an error: what writes does not wait for tiles
}

std::string Engine::save(const std::string& directory, const SaveOptions& options) {
  return impl_->guarded([&] { return impl_->save(directory, options); });
}

std::string Engine::finish_saving() {
  return impl_->guarded([&] { return impl_->finish_saving(); });
}

bool Engine::saving() const {
  return impl_->saving->phase != Impl::Saving::Phase::none;
}

void Engine::request_stop() noexcept {
  impl_->stop_wanted.store(true, std::memory_order_relaxed);
}

}  // namespace tranche
