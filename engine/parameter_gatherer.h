#pragma once
/// Gathers units' full parameters, and tracks which are in memory and which are next. Private to engine/.
///
/// Note: the life of a gather slot, the step memory that holds one unit's gathered parameters in stage 3.
///
///     free --issue(): by acquire() or gather_ahead()--> resident, the gather may still run
///     resident --acquire(): the compute stream waits for gather_done--> held
///     held --last handle released--> free             memory reused after the compute stream's present work
///     held --last handle, GatherFor::step--> kept     until end_step(), or held again
///     resident, never held --drop_unused()--> free    memory reused after the gather itself
///     kept --end_step()--> free
///
/// At most `depth` units are resident or held, except that GatherFor::step does not limit held ones; kept
/// ones do not count. gather_ahead() issues units in the order recorded for the program, one after another. A
/// request in another order discards the recorded order and releases the units gathered ahead.

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/exposed_time.h"
#include "engine/state_store.h"
#include "tranche/device/step_arena.h"

namespace tranche::detail {

/// The kinds of passes that a rank runs. Each has its own order of units and its own memory.
enum class Program { train, evaluate, infer };
inline constexpr std::size_t program_count = 3;

/// Limits how far ahead units are gathered, and determines how long they are kept.
struct GatherOptions {
  explicit GatherOptions(const Config& config)
      : overlap(config.overlap),
        keep_for_step(config.gather_for == GatherFor::step),
        depth(config.depth),
        prefetch_elements(config.prefetch_elements),
        max_live_elements(config.max_live_elements) {}
  bool overlap, keep_for_step;
  int depth;  ///< the most units held or gathered ahead at once
  std::int64_t prefetch_elements, max_live_elements;
};

/// Gathers units (stage 3) on demand, and ahead of their use in the order that was recorded in the first
/// sequence of a program. The caller defines a sequence: a micro-batch, or several in one order. Training
/// with GatherFor::step keeps a gathered unit for later sequences until end_step(). Gathers are collective
/// over each buffer's group; all its ranks make the same calls in the same order.
class ParameterGatherer {
 public:
  /// All arguments must outlive it.
  ParameterGatherer(StateStore& store, const GatherOptions& options, StepArena& arena, Stream& compute,
                    ExposedTime& exposed);
  /// Waits for gathers into its remaining slots.
  ~ParameterGatherer();
  ParameterGatherer(const ParameterGatherer&) = delete;
  ParameterGatherer& operator=(const ParameterGatherer&) = delete;

  /// `another_follows`: a sequence of the same program begins directly after this one.
  void begin_sequence(Program program, bool another_follows);
  /// Ends the sequence. If its order differed from the recorded one, the new order is recorded.
  void end_sequence();
  /// Ends a sequence that was abandoned: nothing is recorded, and units gathered ahead are released.
  void abandon_sequence();
  bool in_sequence() const { return in_sequence_; }
  /// Called when the step's gradients are complete: frees the units kept by GatherFor::step. No unit may be
  /// held.
  void end_step();

  /// Gathers the unit's parameters; the compute stream waits for them. Throws LogicError, naming the units
  /// that are held, when more units than the configured depth would be held at once; GatherFor::step has no
  /// such limit.
  void acquire(int unit);
  /// When to gather ahead after a release. If an exception causes the release, it is unknown whether the rank
  /// continues. Then the gathers are postponed to the next call (catch_up()), so that the ranks' sequences
  /// stay equal if it continues.
  enum class Ahead { now, later, never };
  /// Throws errors of gathering ahead.
  void release(int unit, Ahead ahead);
  void catch_up();
  int holders(int unit) const { return states_[static_cast<std::size_t>(unit)].holders; }

  /// A tensor of a unit that is held. Throws InvalidArgument when the unit has no such index.
  ConstTensorView view(int unit, int index) const;
  /// Padded elements gathered since the last call.
  std::int64_t take_gathered_elements();
  /// How many of these elements were rounded for sending. Must be called before take_gathered_elements().
  std::int64_t take_quantized_elements();

 private:
  /// The gather slots of a unit (see the note above).
  struct UnitGather {
    bool resident = false;            ///< gathered, or being gathered
    bool kept = false;                ///< was held, is not held now, and is kept for the step
    int holders = 0;                  ///< the number of handles
    std::vector<StepBuffer> buffers;  ///< the gathered buffers while resident, by flat buffer
  };
  /// The order in which units were requested, recorded in the first sequence of a program.
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
  std::vector<int> observed_;  ///< requests in the open sequence
  int resident_units_ = 0;     ///< held or gathered ahead; kept units are not counted
  bool owes_gathers_ = false;
  std::int64_t gathered_elements_ = 0, quantized_elements_ = 0;
};

}  // namespace tranche::detail
