#pragma once
/// The step arena: memory whose use repeats every step. It records one step, packs the recorded lifetimes
/// into one block, and replays: the k-th acquire gets the k-th offset. Steps of other sizes replay too,
/// because a plan has room for the largest k-th request that it has seen.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tranche/core/shape.h"
#include "tranche/device/event.h"
#include "tranche/device/ledger.h"
#include "tranche/device/memory.h"
#include "tranche/device/memory_resources.h"

namespace tranche {

class StepArena;
class Stream;

/// Move-only owner of memory of the step, returned at the end of its scope. ready() holds the events to wait
/// for before the memory is accessed. A caller that releases it while work is pending passes the event of
/// that work to release(), or the stream to used_on(). If the arena (the engine) ends first, it takes back
/// the memory, and the release does nothing.
class StepBuffer {
 public:
  StepBuffer() = default;
  ~StepBuffer() { release(); }
  StepBuffer(StepBuffer&& other) noexcept;
  StepBuffer& operator=(StepBuffer&& other) noexcept;
  StepBuffer(const StepBuffer&) = delete;
  StepBuffer& operator=(const StepBuffer&) = delete;

  void* data() const noexcept { return data_; }
  std::int64_t bytes() const noexcept { return bytes_; }
  /// Events of the previous owners of this memory; wait for them (stream.wait) before the first write.
  const std::vector<Event>& ready() const noexcept { return ready_; }
  /// Declares that work on `stream` (which outlives the buffer) uses the memory: the destructor and release()
  /// then free it for reuse after all work issued to the stream. Without this call they free it at once.
  void used_on(Stream& stream) noexcept { stream_ = &stream; }
  void release() noexcept;
  /// Returns the memory; it may be reused once `after` has passed. No-op when empty.
  void release(const Event& after) noexcept;
  /// False for a buffer without memory, also because its arena has ended.
  explicit operator bool() const noexcept { return arena_ != nullptr && *arena_ != nullptr; }

 private:
  friend class StepArena;
  std::shared_ptr<StepArena*> arena_;  ///< points to null once the arena has ended
  void* data_ = nullptr;
  std::int64_t bytes_ = 0;
  std::int64_t slot_ = -1;
  Stream* stream_ = nullptr;
  std::vector<Event> ready_;
};

/// Used by one thread, the issuing thread. Programs ("train", "evaluate") are packed separately and share one
/// block, which is as large as the largest needs. Passes of a program with equally many requests, of the same
/// categories and in the same order, share one plan, whatever their sizes; others have their own plans.
///
///     idle --begin(), a plan has room----------------> planned --a request does not fit--> fallen_back
///     idle --begin(), `record`, or plans lack room---> recording
///     idle --begin(), the program was never recorded-> dynamic
///     each of these --end()------> idle, where recording and fallen_back make or widen a plan
///     each of these --abandon()--> idle, and no plan is made
class StepArena {
 public:
  /// The number of shapes of a program that are remembered. A plan that none of them uses is dropped.
  static constexpr std::size_t most_shapes = 64;

  /// Memory comes from `resource`; occupancy is tracked in `ledger` under the resource's tier.
  StepArena(MemoryResource& resource, Ledger& ledger);
  ~StepArena();
  StepArena(const StepArena&) = delete;
  StepArena& operator=(const StepArena&) = delete;

  /// Begins one pass of `program`, the name of a kind of pass: the engine makes one pass for a training step,
  /// for an evaluation's micro-batch and for an inference scope. `record` asks that this pass be recorded and
  /// packed at its end; a pass that is neither recorded nor planned allocates each buffer from the resource.
  ///
  /// The sizes of the pass's requests are functions of `shape`: none grows where no extent does. `shape`
  /// therefore decides before the first request whether the pass can be replayed: with an extent beyond those
  /// of its plan, the block is freed first and the pass is recorded. Without a shape the pass is replayed as
  /// far as it fits.
  void begin(std::string_view program, bool record, const Shape& shape = {});
  /// Adds the next micro-batch's shape to the pass. If its requests will not fit the plan, the rest of the
  /// pass comes from the resource, and the block is freed if no slot occupies it.
  void also(const Shape& shape);
  /// Ends the pass. All its buffers must have been released (LogicError names the holders). A pass that was
  /// recorded or did not fit its plan is packed here, and the block is taken from the resource.
  void end();
  /// Abandons the pass after an error; outstanding buffers stay valid until they are released.
  void abandon() noexcept;
  /// True between begin and end/abandon.
  bool active() const noexcept;
  /// Takes `bytes` for `category`. In a planned pass the request must have the recorded category and at most
  /// the recorded bytes; else the rest of the pass falls back to the resource and the plan is made anew at
  /// its end. Outside a pass the buffer comes from the resource.
  StepBuffer acquire(std::int64_t bytes, Category category, std::string_view tag);
  /// True when the program's next pass, if it is like the last, will not call the memory resource.
  bool planned(std::string_view program) const;
  /// The number of plans made; dropped() counts those dropped because more than most_shapes shapes came after
  /// their last use.
  std::int64_t packings() const noexcept;
  std::int64_t dropped() const noexcept;
  /// Forgets all programs and frees the block (after an intended change of the step's layout).
  void forget();

  std::int64_t block_bytes() const noexcept;
  /// The highest sum of live bytes in the program's recorded passes; 0 when none was recorded.
  std::int64_t live_peak(std::string_view program) const;
  /// Fills buffers with 0xff bytes on acquire and release, each time after the host has waited for the work
  /// that still uses the memory (tests). For memory that the host may access.
  void set_poison(bool poison) noexcept;
  /// The same with `fill` (make_poison_fill); an empty function ends it.
  void poison_with(PoisonFill fill) noexcept;

 private:
  friend class StepBuffer;
  void give_back(std::int64_t slot, const Event& after) noexcept;
  struct Impl;
  std::unique_ptr<Impl> impl_;
  std::shared_ptr<StepArena*> self_;  ///< shared with the buffers
};

}  // namespace tranche
