// The ranks learn about each other's progress from the records that they exchange at the end of every step.

#include "engine/checkpoint_session.h"

#include <limits>
#include <random>
#include <span>

#include "checkpoint/shard_writer.h"
#include "core/clock.h"
#include "engine/rank_texts.h"
#include "engine/saved_arrays.h"
#include "engine/sections.h"
#include "tranche/core/trace.h"

namespace tranche::detail {

namespace {

/// A trace span for file operations, from construction to destruction.
class DiskSpan {
 public:
  DiskSpan(TraceRecorder* trace, std::string name)
      : trace_(trace), name_(std::move(name)), begin_(seconds_now()) {}
  ~DiskSpan() {
    if (trace_ == nullptr) return;
    try {
      trace_->span("disk", name_, begin_, seconds_now());
    } catch (...) {  // no memory for the trace's entry
    }
  }
  DiskSpan(const DiskSpan&) = delete;
  DiskSpan& operator=(const DiskSpan&) = delete;

 private:
  TraceRecorder* trace_;
  std::string name_;
  double begin_;
};

/// Allocates from memory that was reserved before, in ascending order; all of it is freed together.
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

/// Writes a shard from a snapshot that is not an image: ranges from the snapshot, and tiles from the feed, in
/// the order of the file.
std::string write_pieces(const checkpoint::Storage& storage, const checkpoint::ShardPlan& plan,
                         const SnapshotLayout& layout, std::span<std::byte> snapshot, TileFeed& feed,
                         const std::string& folder) {
  StagingMemory staging(snapshot.subspan(static_cast<std::size_t>(layout.staging)), storage.memory);
  checkpoint::ShardWriter writer({storage.files, storage.io, staging}, plan, folder);
  const checkpoint::Layout& stored = plan.layout();
  auto part = layout.parts.begin();
  const auto put_parts = [&](int up_to_unit) {
    for (; part != layout.parts.end() && part->piece.unit <= up_to_unit; ++part) {
      writer.put(part->piece, snapshot.data() + part->offset);
    }
  };
  for (const checkpoint::SectionPiece& tiles : layout.tiles) {
    std::int64_t missing = tiles.range.size();
    if (missing > 0) put_parts(tiles.unit);
    const auto put = [&](const TileFeed::Tile& tile) {
      const ShardSlice& slice = tile.slice;
      checkpoint::SectionPiece piece = layout.tiles[static_cast<std::size_t>(tile.buffer)];
      piece.range = slice.range;
      const checkpoint::BufferRecord& buffer =
          stored.units[static_cast<std::size_t>(piece.unit)].buffers[static_cast<std::size_t>(piece.buffer)];
      std::size_t state = 0;  // sections are the weights, then the states in their order
      for (std::size_t s = 0; s < stored.sections.size(); ++s) {
        if (stored.sections[s].kind_of() != buffer.kind_of()) continue;
        piece.section = static_cast<int>(s);
        writer.put(piece,
                   stored.sections[s].kind == "weight" ? slice.master.data : slice.state[state++].data);
      }
      missing -= slice.range.size();
    };
    while (missing > 0 && feed.take(put)) {
    }
  }
  put_parts(std::numeric_limits<int>::max());
  for (std::size_t a = 0; a < layout.arrays.size(); ++a) {
    if (layout.arrays[a] >= 0) writer.put_array(static_cast<int>(a), snapshot.data() + layout.arrays[a]);
  }
  return checkpoint::to_text(writer.finish());  // it throws if some range was never written
}

/// Closes the feed, however the taking of tiles ends, so that no giver waits.
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
/// The time between two checks of the other ranks while waiting: well below any time-out of collectives.
constexpr double look_around_seconds = 0.5;

}  // namespace

CheckpointSession::CheckpointSession(StateStore& store, const Config& config, Communicator& ranks,
                                     Device& device, MemoryResource& host_memory, FileSystem& files,
                                     const Logger& log, TraceRecorder* trace)
    : store_(store),
      config_(config),
      ranks_(ranks),
      device_(device),
      host_memory_(host_memory),
      files_(files),
      log_(log),
      trace_(trace),
      snapshot_(store, device, host_memory) {}

void CheckpointSession::reserve() {
  snapshot_.reserve(checkpoint::ShardPlan(saved_layout(), ranks_.rank(), 0));
}

checkpoint::Layout CheckpointSession::whole_layout() const {
  return checkpoint_layout(store_, config_.precision.compute, Mesh::parse(config_.mesh, ranks_.size()));
}

checkpoint::Layout CheckpointSession::saved_layout() const {
  return checkpoint_layout(store_, config_.precision.compute, Mesh::parse(config_.mesh, ranks_.size()),
                           !config_.lora.leaves_base_out());
}

std::string CheckpointSession::save(const std::string& directory, const SaveOptions& options,
                                    std::int64_t step, bool proven,
                                    const std::function<void(checkpoint::Manifest&)>& manifest) {
  checkpoint::require_pointer(options.keep_lowest);
  (void)finish();
  checkpoint::Layout stored = saved_layout();
  const bool simulated = device_.kind() == DeviceKind::meta;
  // Ranks that see the same samples, or hold the same state, pass the same part of an array.
  const bool replicas = stored.axis(MeshAxis::replicate) > 1 || stored.axis(MeshAxis::pipeline) > 1 ||
                        stored.axis(MeshAxis::context) > 1 || stored.axis(MeshAxis::tensor) > 1;
  checkpoint::add_arrays(stored, agree_on_arrays(ranks_, options.arrays, replicas, simulated));
  if (token_ == 0) {
    std::int64_t drawn = 0;
    if (ranks_.rank() == 0) {
      std::random_device draw;
      while (drawn == 0) {
        drawn = static_cast<std::int64_t>(draw()) << 31 ^ static_cast<std::int64_t>(draw());
      }
    }
    ranks_.broadcast(&drawn, 1, DataType::int64, 0, {}, save_label).wait();
    token_ = static_cast<std::uint64_t>(drawn);
  }
  directory_ = directory;
  step_ = step;
  proven_ = proven;
  provable_ = true;
  retention_waits_ = false;
  try {
    (void)together(ranks_, save_label, [&]() -> std::string {
      if (!io_) io_ = make_block_io();
      if (!folder_ || folder_->parent() != directory) {
        folder_.emplace(checkpoint::Storage{files_, *io_, host_memory_}, directory, token_, ancestors_,
                        branches_);
      }
      plan_ = std::make_unique<checkpoint::ShardPlan>(stored, ranks_.rank(), step);
      retention_ = {options.keep_last, options.keep_every, options.keep_lowest, false, damaged_};
      std::erase_if(retention_.damaged, [this](const std::string& one) { return is_being_saved(one); });
      manifest_ = {};
      if (ranks_.rank() == 0) {
        manifest_.layout = plan_->layout();
        manifest_.run.step = step;
        manifest(manifest_);
        if (!master_ && !simulated) master_ = checkpoint::make_master_image(manifest_.layout);
      }
      snapshot_.take(*plan_, options.arrays, ranks_.rank());
      return {};
    });
  } catch (const CheckpointError& error) {
    throw CheckpointError(text() + error.message());
  }
  const std::string path = folder_->final_path(step);
  if (simulated) return path;  // nothing to write
  start_writing();
  if (options.wait) (void)finish();
  return path;
}

void CheckpointSession::goes_on_from(const checkpoint::Manifest& loaded,
                                     const std::vector<std::string>& damaged) {
  damaged_.insert(damaged_.end(), damaged.begin(), damaged.end());
  ancestors_ = loaded.lineage.empty() ? std::vector<std::uint64_t>{0} : loaded.lineage;
  branches_ = loaded.branches;
  branches_.resize(ancestors_.size(), 0);
  branches_.push_back(loaded.run.applied);
  folder_.reset();  // the next save belongs to the new lineage
}

bool CheckpointSession::is_being_saved(const std::string& checkpoint) const {
  std::error_code ignored;
  return std::filesystem::equivalent(checkpoint, folder_->final_path(step_), ignored);
}

std::string CheckpointSession::text() const {
  return "cannot save step " + std::to_string(step_) + " to " + directory_ + ": ";
}

void CheckpointSession::start_writing() {
  phase_ = Phase::writing;
  snapshot_.open_tile_feed();
  work_.start([this, rank = ranks_.rank(), ranks = ranks_.size(), tiles = snapshot_.feed()] {
    const DiskSpan span(trace_, "write shard of step " + std::to_string(step_));
    const FeedCloser closer(tiles);
    if (rank == 0) folder_->prepare(step_, plan_->file_bytes() * ranks + checkpoint::bytes_of(companions_));
    const checkpoint::Storage storage{files_, *io_, host_memory_};
    const std::string written = folder_->temporary(step_);
    if (tiles) {
      return write_pieces(storage, *plan_, snapshot_.layout(), snapshot_.memory(), *tiles, written);
    }
    checkpoint::ShardWriter writer(storage, *plan_, written);
    writer.write_image(snapshot_.memory());
    return checkpoint::to_text(writer.finish());
  });
}

std::string CheckpointSession::advance() {
  const Phase begun = phase_;
  std::vector<std::string> results;
  try {
    results = together(ranks_, save_label, [&]() -> std::string {
      return begun == Phase::writing || ranks_.rank() == 0 ? work_.take() : std::string();
    });
    if (begun == Phase::writing) {
      (void)together(ranks_, save_label, [&]() -> std::string {
        if (ranks_.rank() != 0) return {};
        for (std::size_t r = 0; r < results.size(); ++r) {
          manifest_.shards.push_back(
              checkpoint::shard_record_from_text(results[r], "record of rank " + std::to_string(r)));
        }
        retention_.newest_is_proven = proven_;
        work_.start([this] {
          const DiskSpan span(trace_, "commit checkpoint of step " + std::to_string(step_));
          std::string path = folder_->commit(std::move(manifest_), *master_, companions_);
          // The checkpoint is complete: later errors must not be reported as its failure.
          warning_ = folder_->take_warning();
          retain();
          return path;
        });
        return {};
      });
      retention_waits_ = !proven_ && retention_.keep_last > 0;
      phase_ = Phase::committing;
      return {};
    }
  } catch (const CheckpointError& error) {
    phase_ = Phase::none;
    std::string told = error.message();
    // In "rank 1: cannot save ...: no space" the rank's text already has this prefix.
    if (const std::size_t said = told.find(text()); said != std::string::npos)
      told.erase(said, text().size());
    told.insert(0, text());
    if (ranks_.rank() == 0) {
      try {
        folder_->discard(step_);
      } catch (const CheckpointError& left) {
        log_.warning(left.message());  // the next save removes the files
      }
    }
    // A rank that leaves with an error may end the job, so all wait until rank 0 has read the outcomes and
    // removed the files.
    try {
      ranks_.barrier(save_label).wait();
    } catch (const Error&) {
      // The save's own failure is reported instead.
    }
    throw CheckpointError(told);
  }
  phase_ = Phase::none;
  if (begun == Phase::committing) {
    std::erase_if(damaged_, [this](const std::string& one) { return is_being_saved(one); });
  }
  if (!warning_.empty()) log_.warning(std::exchange(warning_, {}));
  return results[0];
}

void CheckpointSession::retain() {
  try {
    (void)folder_->retain(retention_);
  } catch (const std::exception&) {
    warning_ += (warning_.empty() ? "" : "; ") + message_of(std::current_exception());
  }
}

void CheckpointSession::settle() {
  if (phase_ != Phase::none || !retention_waits_ || !proven_) return;
  retention_waits_ = false;
  retention_.newest_is_proven = true;
  phase_ = Phase::retaining;
  if (ranks_.rank() != 0) return;
  work_.start([this] {
    const DiskSpan span(trace_, "remove checkpoints that are older than step " + std::to_string(step_));
    retain();
    return std::string();
  });
}

bool CheckpointSession::at_rest() const {
  return phase_ == Phase::none || work_.at_rest();
}

std::string CheckpointSession::advance_quietly() {
  try {
    return advance();
  } catch (const CheckpointError& error) {
    failure_ = error.message();
    return {};
  }
}

void CheckpointSession::throw_failure() {
  if (failure_.empty()) return;
  throw CheckpointError(std::exchange(failure_, {}));
}

std::string CheckpointSession::finish() {
  throw_failure();
  std::string path = drain();
  settle();
  (void)drain();
  return path;
}

std::string CheckpointSession::drain() {
  std::string path;
  while (phase_ != Phase::none) {
    // Collectives are repeated at short intervals, so that a disk slower than their time-out is not a
    // failure.
    std::int64_t all_at_rest = 0;
    while (all_at_rest == 0) {
      all_at_rest =
          snapshot_.hand_over_tiles(look_around_seconds) && work_.wait_for(look_around_seconds) ? 1 : 0;
      ranks_.all_reduce(&all_at_rest, 1, DataType::int64, ReduceOperation::minimum, save_label).wait();
    }
    path = advance();
  }
  return path;
}

void CheckpointSession::close(bool together) noexcept {
  const auto cancel_feed = [this] {
    if (snapshot_.feed()) snapshot_.feed()->cancel();
  };
  try {
    if (!failure_.empty()) {
      log_.error(failure_);
    } else if (phase_ != Phase::none) {
      // A single rank can always finish a save; with several, the peers may be gone or at another point.
      if (ranks_.size() == 1 || together) {
        (void)drain();
      } else if (phase_ != Phase::writing && ranks_.rank() == 0) {
        (void)work_.take();  // throws if it has not become a checkpoint
      } else {
        // Files written without the other ranks are not a checkpoint, and the next save removes them.
        const bool lost = phase_ == Phase::writing;
        cancel_feed();
        if (io_) io_->cancel();
        work_.drop();
        if (lost) {
          log_.error(text() + "the engine ended before the checkpoint was complete");
        }
      }
    }
  } catch (const Error& error) {
    log_.error(error.message());
  } catch (...) {
    log_.error("a checkpoint could not be finished");
  }
  cancel_feed();  // after an error, so that the writing thread does not wait for tiles
}

}  // namespace tranche::detail
