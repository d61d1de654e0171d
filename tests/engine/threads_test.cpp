// Calls of a rank may come from any thread, one at a time, for example from an autograd library's backward.

#include <gtest/gtest.h>

#include <thread>

#include "on_ranks.h"

namespace tranche::test {
namespace {

TEST(EngineThreads, AnyThreadMayCallAsLongAsItIsOneAtATime) {
  OddRun run;
  run.ranks = 2;
  run.stage = 3;
  run.accumulation = 2;
  run.dtype = DataType::bfloat16;
  kernels::Digest expected, found;
  for (const bool threads : {false, true}) {
    on_ranks(run, [&](Engine& engine, Runtime& runtime) {
      const auto call = [&](const std::function<void()>& what) {
        if (!threads) return what();
        std::thread(what).join();
      };
      // The first pass records the order of units, the second prefetches, and the others use packed memory.
      for (std::int64_t step = 0; step < 4; ++step) {
        for (std::int64_t m = 0; m < 2; ++m) {
          call([&] { odd_micro_batch(engine, ((step * 2 + m) * 2 + runtime.rank()) * 3, 3); });
        }
        call([&] { (void)engine.step(); });
      }
      call([&] {
        const kernels::Digest digest = engine.weights_digest();
        if (runtime.rank() == 0) (threads ? found : expected) = digest;
      });
    });
  }
  EXPECT_EQ(found, expected);
}

}  // namespace
}  // namespace tranche::test
