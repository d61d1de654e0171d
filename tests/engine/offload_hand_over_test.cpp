// The steps after a save hand it the tiles of the host optimizer's state, with and without overlap, on the
// CPU and on a GPU (or the emulated one). Training and checkpoint have the bits of a run whose state never
// left the device.

#include <gtest/gtest.h>

#include "device/cuda_probe.h"
#include "offload_saving_fixture.h"
#include "tests/core/rounds.h"

namespace tranche::test {
namespace {

class OffloadHandOver : public OffloadSaving {
 protected:
  void expect_same_bits(DeviceKind device, bool overlap, OffloadTier tier, int stage) {
    OddRun run = setup(2, stage, tier, stage == 3 ? tier : OffloadTier::none);
    run.device = device;
    run.overlap = overlap;
    run.offload.ratio = stage == 3 ? 1.0 : 0.5;
    run.accumulation = stage == 3 ? 1 : 2;
    const std::string what = run.to_string();
    const std::string folder = path("saves" + std::to_string(number_++));
    OddRun never = run;
    never.overlap = true;
    const std::vector<kernels::Digest> expected = undisturbed(never, 4, 2);
    ASSERT_NE(expected[1], expected[4]);
    on_tiled_ranks(run, [&](Engine& engine, Runtime& runtime) {
      (void)one_step(engine, runtime);
      engine.save(folder);
      EXPECT_TRUE(one_step(engine, runtime).applied) << what;
      engine.save(folder);
      // A skipped step hands over its tiles unchanged.
      EXPECT_FALSE(one_step(engine, runtime, "prime.c").applied) << what;
      (void)one_step(engine, runtime);
      EXPECT_EQ(engine.state_digest(), expected[4]) << what;
      (void)engine.finish_saving();  // does nothing if the save ended during the steps
    });
    EXPECT_EQ(stored(run, folder + "/step-00000001"), expected[1]) << what;
    EXPECT_EQ(stored(run, folder + "/step-00000002"), expected[2]) << what;
  }
  void expect_same_bits_of_all(DeviceKind device) {
    int point = 0;
    for (const bool overlap : {true, false}) {
      for (const OffloadTier tier : {OffloadTier::cpu, OffloadTier::nvme}) {
        for (const int stage : {0, 2, 3}) {
          if (!swept(point++, 5)) continue;
          expect_same_bits(device, overlap, tier, stage);
          if (HasFailure()) return;
        }
      }
    }
  }

 private:
  int number_ = 0;
};

#if defined(TRANCHE_ENGINE_TESTS_ON_GPU)
TEST_F(OffloadHandOver, OnAGpu) {
  const detail::CudaProbe probe = detail::probe_cuda();
  if (probe.devices.empty()) GTEST_SKIP() << probe.problem;
  expect_same_bits_of_all(DeviceKind::cuda);
}
#else
TEST_F(OffloadHandOver, OnTheCpu) {
  expect_same_bits_of_all(DeviceKind::cpu);
}
#endif

}  // namespace
}  // namespace tranche::test
