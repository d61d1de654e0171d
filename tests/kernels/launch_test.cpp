// A program's own kernels.
#include "tranche/kernels/launch.h"

#include <limits>
#include <string>
#include <vector>

#include "device/work_recorder.h"
#include "tranche/kernels/elementwise.h"
#include "vector_test_support.h"

namespace tranche::kernels::testing {
namespace {

constexpr KernelCost cost{30, 40, 20};

TEST(OwnKernel, RunsBehindWhatTheStreamWasGivenAndIsCounted) {
  if (on_gpu) GTEST_SKIP() << "the CPU's work";
  TestStream stream(1, DeviceKind::cpu, true);
  std::vector<int> order;
  stream.enqueue("before", [&] { order.push_back(1); });
  launch(stream, "swish", cost, {.cpu = [&] { order.push_back(2); }, .cuda = {}});
  EXPECT_TRUE(order.empty());
  stream.run();
  EXPECT_EQ(order, (std::vector<int>{1, 2}));
  EXPECT_EQ(stream.names, (std::vector<std::string>{"before", "swish"}));
  EXPECT_EQ(stream.work(), (WorkCount{1, 30, 40, 20}));
}

TEST(OwnKernel, OnMetaIsCountedAndRecordedByItsNameButNotRun) {
  TestStream stream(1, DeviceKind::meta);
  const auto recorder = detail::WorkRecorder::make(false);
  stream.set_recorder(recorder.get(), recorder->add_lane("compute"));
  launch(stream, "swish", cost, {.cpu = [] { FAIL(); }, .cuda = [](void*) { FAIL(); }});
  EXPECT_EQ(stream.work(), (WorkCount{1, 30, 40, 20}));
  ASSERT_EQ(recorder->work().size(), 1u);
  EXPECT_EQ(recorder->work()[0].name, "swish");
  EXPECT_EQ(recorder->work()[0].kind, detail::WorkKind::kernel);
  EXPECT_EQ(recorder->work()[0].operations, 30);
  EXPECT_EQ(recorder->work()[0].bytes_read, 40);
  EXPECT_EQ(recorder->work()[0].bytes_written, 20);
}

TEST(OwnKernel, OnAGpuLaunchesOnTheStreamItself) {
  if (!on_gpu) GTEST_SKIP() << "no GPU";
  Device& device = test_gpu();
  Stream& stream = device.compute_stream();
  Guarded numbers(DataType::float32, 100);
  const WorkCount before = stream.work();
  int calls = 0;
  fill_constant(stream, numbers.view(), 1);
  launch(stream, "doubled", cost,
         {.cpu = [] { FAIL(); },
          .cuda =
              [&](void* cuda_stream) {
                ++calls;
                EXPECT_EQ(cuda_stream, stream.native_handle());
                EXPECT_NE(cuda_stream, nullptr);
                // Stands for a program's <<<>>> launch on that stream, after the fill.
                add(stream, numbers.view(), numbers.view(), numbers.view());
              }});
  stream.synchronize();
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(numbers.get(99), 2);
  EXPECT_EQ(stream.work().kernels - before.kernels, 3);
}

TEST(OwnKernel, RefusesByName) {
  const auto of = [](DeviceKind kind, std::string_view name, const KernelCost& price,
                     const KernelWork& work) {
    return refusal([&] {
      TestStream stream(1, kind);
      launch(stream, name, price, work);
    });
  };
  const KernelWork none;
  EXPECT_EQ(of(DeviceKind::meta, "", cost, none),
            "kernels::launch: the name is empty; traces and plans show it");
  EXPECT_EQ(of(DeviceKind::meta, "swish", {-1, 0, 0}, none),
            "swish: the cost has numbers that are negative or not finite");
  EXPECT_EQ(of(DeviceKind::meta, "swish", {0, std::numeric_limits<double>::quiet_NaN(), 0}, none),
            "swish: the cost has numbers that are negative or not finite");
  EXPECT_EQ(of(DeviceKind::cpu, "swish", cost, none),
            "swish: the kernel has no work for cpu streams; set KernelWork::cpu");
  EXPECT_EQ(of(DeviceKind::cuda, "swish", cost, {.cpu = [] {}, .cuda = {}}),
            "swish: the kernel has no work for cuda streams; set KernelWork::cuda");
  EXPECT_EQ(of(DeviceKind::meta, "swish", cost, none), "nothing was thrown");
}

}  // namespace
}  // namespace tranche::kernels::testing
