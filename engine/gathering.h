#pragma once
/// Which units' full parameters are there, and which come next (parameters.cpp). Private to engine/.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/engine_impl.h"

namespace tranche {

/// The order in which units were asked for in one micro-batch of a program (training, evaluation, inference),
/// recorded
/// in the first one.
struct GatherOrder {
  std::vector<int> units;
  bool known = false;
  std::size_t position = 0;  ///< next expected request
};

struct Engine::Impl::Gathering {
  explicit Gathering(Impl& engine_in) : engine(engine_in) {}

  void acquire(int unit);
  /// `unwinding`: an exception lets the unit go. Whether the rank goes on is not known then: what would be
  /// fetched ahead now is fetched by the next call, so that the ranks' sequences stay equal if it does.
  void release(int unit, bool unwinding) noexcept;
  void issue(int unit);
  void prefetch();
  void drop_prefetched();
  void free_gathered(UnitState& unit, bool read) noexcept;
  /// The micro-batch is over: its order is the next one's, where it was another than recorded.
  void end_micro_batch();
  /// It was given up: nothing is recorded, and what was fetched ahead goes.
  void forget_micro_batch();
  GatherOrder& order() {
    return engine.in_inference ? inference_order : engine.in_evaluation ? evaluation_order : train_order;
  }

  Impl& engine;
  GatherOrder train_order, evaluation_order, inference_order;
  std::vector<int> observed;  ///< requests of the open micro-batch
  int resident_units = 0;
  bool prefetch_owed = false;
  std::int64_t step_elements = 0;  ///< padded elements of stage 3 gathers since the step began
};

}  // namespace tranche
