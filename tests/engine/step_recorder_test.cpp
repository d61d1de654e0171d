// Passes, times and traffic of a step, recorded without running one.
#include "engine/step_recorder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/clock.h"
#include "tests/core/error_text.h"
#include "tranche/comm/backends.h"
#include "tranche/device/device.h"
#include "tranche/device/memory_resources.h"

namespace tranche::test {
namespace {

using detail::Program;
using detail::StepRecorder;

struct Bench {
  explicit Bench(bool plan_memory = true) : recorder(arena, device->compute_stream(), plan_memory) {}
  Ledger ledger;
  std::unique_ptr<Device> device = make_device({.kind = DeviceKind::cpu, .threads = 1});
  TrackingResource memory{device->memory(Tier::device), ledger};
  StepArena arena{memory, ledger};
  StepRecorder recorder;
};

// The memory of a program's second pass is packed; passes of other programs do not count.
TEST(StepRecorder, TheSecondPassOfAProgramIsPacked) {
  Bench bench;
  const auto pass = [&](Program program) {
    bench.recorder.begin_pass(program);
    { const StepBuffer buffer = bench.arena.acquire(1000, Category::activations, "x"); }
    bench.recorder.end_pass();
    if (program == Program::train) {
      StepResult result;
      bench.recorder.end_step({}, result);
    }
  };
  pass(Program::train);
  pass(Program::evaluate);
  EXPECT_EQ(bench.arena.block_bytes(), 0);
  pass(Program::train);
  EXPECT_GT(bench.arena.block_bytes(), 0);
  EXPECT_GT(bench.arena.live_peak("train"), 0);
  EXPECT_EQ(bench.arena.live_peak("evaluate"), 0);
  EXPECT_EQ(bench.recorder.passes(Program::train), 2);
  bench.recorder.forget_passes();
  EXPECT_EQ(bench.recorder.passes(Program::train), 1);
  pass(Program::train);
  EXPECT_GT(bench.arena.live_peak("train"), 0);
}

TEST(StepRecorder, WithoutPlansNothingIsPacked) {
  Bench bench(false);
  for (int pass = 0; pass < 3; ++pass) {
    bench.recorder.begin_pass(Program::infer);
    { const StepBuffer buffer = bench.arena.acquire(1000, Category::activations, "x"); }
    bench.recorder.end_pass();
  }
  EXPECT_EQ(bench.arena.block_bytes(), 0);
}

TEST(StepRecorder, APassThatWasGivenUpIsRecordedAnew) {
  Bench bench;
  bench.recorder.begin_pass(Program::infer);
  const StepBuffer held = bench.arena.acquire(1000, Category::activations, "x");
  EXPECT_THROW(bench.recorder.end_pass(), LogicError);
  EXPECT_TRUE(bench.recorder.pass_open());
  bench.recorder.abandon_pass(Program::infer);
  EXPECT_FALSE(bench.recorder.pass_open());
  EXPECT_EQ(bench.recorder.passes(Program::infer), 0);
}

TEST(StepRecorder, TellsTimesAndTraffic) {
  Bench bench;
  const auto alone = make_self_communicator();
  double sum = 1;
  const OperationLabel label{"x", "test", Traffic::control, Tier::host};
  alone->all_reduce(&sum, 1, DataType::float64, ReduceOperation::sum, label).wait();
  bench.recorder.begin_pass(Program::train);
  Communicator* const groups[] = {alone.get()};
  bench.recorder.begin_step(groups);
  alone->all_reduce(&sum, 1, DataType::float64, ReduceOperation::sum, label).wait();
  const double began = detail::seconds_now();
  bench.recorder.end_pass();
  StepResult result;
  bench.recorder.end_step(groups, result);
  bench.recorder.stamp(result, began);
  ASSERT_EQ(bench.recorder.traffic().control().size(), 1u);
  EXPECT_EQ(bench.recorder.traffic().control().begin()->second.calls, 1)
      << "the call before the step is not of it";
  EXPECT_TRUE(bench.recorder.traffic().data().empty());
  EXPECT_GE(result.seconds, result.update_seconds);
  EXPECT_GE(result.update_seconds, 0);
  EXPECT_GE(result.between_seconds, 0);
  EXPECT_EQ(result.exposed_gather_seconds, 0);
}

}  // namespace
}  // namespace tranche::test
