#pragma once
/// Units' full parameters: which are in memory, which come next. Private to engine/.

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/exposed_time.h"
#include "engine/state_store.h"
#include "tranche/device/step_arena.h"

namespace tranche::detail {

/// The kinds of passes that a rank runs. Each has an order of units and a memory of its own.
enum class Program { train, evaluate, infer };
inline constexpr std::size_t program_count = 3;

/// How far ahead units are gathered, and how long they are kept.
struct GatherOptions {
  explicit GatherOptions(const Config& config)
      : overlap(config.overlap),
        keep_for_step(config.gather_for == GatherFor::step),
        depth(config.depth),
        prefetch_elements(config.prefetch_elements),
        max_live_elements(config.max_live_elements) {}
  bool overlap, keep_for_step;
  int depth;  ///< units that are held or gathered ahead at once
  std::int64_t prefetch_elements, max_live_elements;
};

/// Gathers units (stage 3) on demand, and ahead of their use in the order that the first sequence of requests
/// of a program had. A sequence is what its caller says it is: a micro-batch, or several in one order.
/// Training with GatherFor::step keeps a gathered unit for the sequences that follow, up to end_step().
/// Gathers are collective over each buffer's group; all ranks of it make the same calls in the same order.
class ParameterGatherer {
 public:
  /// All arguments outlive it.
  ParameterGatherer(StateStore& store, const GatherOptions& options, StepArena& arena, Stream& compute,
                    ExposedTime& exposed);
  /// Waits for gathers into slots that it still has.
  ~ParameterGatherer();
  ParameterGatherer(const ParameterGatherer&) = delete;
  ParameterGatherer& operator=(const ParameterGatherer&) = delete;

  /// `another_follows`: a sequence of the same program begins right after this one.
  void begin_sequence(Program program, bool another_follows);
  /// Ends the sequence. If its order differed from the recorded one, the new order is recorded.
  void end_sequence();
  /// The sequence was given up: nothing is recorded, and prefetched units are released.
  void abandon_sequence();
  bool in_sequence() const { return in_sequence_; }
  /// The step's gradients are complete: frees what GatherFor::step kept. No unit is held.
  void end_step();

  /// Makes the unit's parameters whole; the compute stream waits for them. Throws LogicError, naming the
  /// holders, when more units than the configured depth would be held at once; GatherFor::step has no such
  /// bound.
  void acquire(int unit);
  /// Gathering ahead after a release. Where an exception lets the unit go it is not known whether the rank
  /// goes on: what would be gathered now is gathered by the next call (catch_up), so that the ranks'
  /// sequences stay equal if it does.
  enum class Ahead { now, later, never };
  /// Throws what gathering ahead throws.
  void release(int unit, Ahead ahead);
  void catch_up();
  int holders(int unit) const { return states_[static_cast<std::size_t>(unit)].holders; }

  /// A tensor of a unit that is held. Throws InvalidArgument when the unit has no such index.
  ConstTensorView view(int unit, int index) const;
  /// Padded elements of the gathers since the last call.
  std::int64_t take_gathered_elements();
  /// The part of these elements that were rounded on the way. Ask for it before take_gathered_elements().
  std::int64_t take_quantized_elements();

 private:
  /// The gather of a unit that is not kept whole.
  struct UnitGather {
    bool resident = false;            ///< gathered, or being gathered
    bool kept = false;                ///< read before, not held now, and kept for the step
    int holders = 0;                  ///< handles
    std::vector<StepBuffer> buffers;  ///< the whole buffers while resident, by flat buffer
  };
  /// The order in which units were asked for, recorded in the first sequence of a program.
  struct Order {
    std::vector<int> units;
    bool known = false;
    std::size_t position = 0;  ///< next expected request
  };
  bool keeps() const { return program_ == Program::train && options_.keep_for_step; }
  Order& order() { return orders_[static_cast<std::size_t>(program_)]; }
  UnitGather& at(int unit) { return states_[static_cast<std::size_t>(unit)]; }
  void issue(int unit);
  void gather_ahead();
  void drop_unused();
  void free_unit(int unit, bool read) noexcept;

  StateStore& store_;
  const GatherOptions options_;
  StepArena& arena_;
  Stream& compute_;
  ExposedTime& exposed_;
  std::vector<UnitGather> states_;
  bool gathers_ = false;  ///< some unit must be gathered
  std::array<Order, program_count> orders_;
  Program program_ = Program::train;
  bool in_sequence_ = false, another_follows_ = false;
  std::vector<int> observed_;  ///< requests of the open sequence
  int resident_units_ = 0;     ///< held or gathered ahead; those that are kept apart
  bool owes_gathers_ = false;
  std::int64_t gathered_elements_ = 0, quantized_elements_ = 0;
};

}  // namespace tranche::detail
