#pragma once
/// Helpers for the engine's tests of single calls.

#include <functional>
#include <string>

#include "odd_model.h"
#include "tests/comm/common_start.h"
#include "tests/core/error_text.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/kernels/reduction.h"

namespace tranche::test {

/// Runs body(engine, runtime) on thread ranks of the odd model, when all of them have their engines; `adjust`
/// may change their options.
inline void on_ranks(const OddRun& run, const std::function<void(Engine&, Runtime&)>& body,
                     const std::function<void(Config&, RuntimeOptions&)>& adjust = {}) {
  CommonStart start(run.ranks);
  run_thread_ranks(run.ranks, [&](int, const CommunicatorFactory& factory) {
    CommonStart::Rank started(start);
    Config config = odd_config(run);
    RuntimeOptions options = RuntimeOptions::from(config);
    options.log_level = LogLevel::off;
    if (adjust) adjust(config, options);
    Runtime runtime(options, factory);
    Engine engine(runtime, odd_model(run.single_unit, run.large), config);
    started.await_others();
    body(engine, runtime);
  });
}

/// The state digest of rank 0 after body has run on all ranks.
inline kernels::Digest digest_after(const OddRun& run, const std::function<void(Engine&, Runtime&)>& body) {
  kernels::Digest digest;
  on_ranks(run, [&](Engine& engine, Runtime& runtime) {
    body(engine, runtime);
    const kernels::Digest mine = engine.state_digest();
    if (runtime.rank() == 0) digest = mine;
  });
  return digest;
}

/// Runs all micro-batches of a step.
inline void whole_step(Engine& engine, Runtime& runtime, std::int64_t step, const std::string& poison = {},
                       bool reversed = false) {
  const OddRun defaults;
  for (std::int64_t m = 0; m < engine.config().accumulation_steps; ++m) {
    const std::int64_t block =
        (step * engine.config().accumulation_steps + m) * runtime.size() + runtime.rank();
    odd_micro_batch(engine, block * defaults.samples_per_micro_batch, defaults.samples_per_micro_batch,
                    poison, reversed);
  }
}

/// Ends a micro-batch with a loss and a token count computed on the host.
inline void end_with(Engine& engine, double loss, std::int64_t tokens) {
  StepBuffer scalars = engine.acquire(16, Category::activations, "scalars");
  auto* loss_sum = static_cast<double*>(scalars.data());
  auto* count = reinterpret_cast<std::int64_t*>(loss_sum + 1);
  engine.device().copy_from_host(engine.compute_stream(), loss_sum, &loss, sizeof(loss));
  engine.device().copy_from_host(engine.compute_stream(), count, &tokens, sizeof(tokens));
  engine.end_micro_batch({loss_sum, DataType::float64, Shape{1}}, {count, DataType::int64, Shape{1}});
}

}  // namespace tranche::test
