// Laws 1-3 with thread ranks that share one GPU (or the emulated one). The odd model's losses and gradients
// are computed on the host from copies, so these tests compare only the engine's own work on the device.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <utility>

#include "device/cuda_probe.h"
#include "odd_model.h"
#include "same_bits.h"
#include "tests/core/rounds.h"
#include "tests/device/as_on_gpu.h"
#include "tranche/core/random.h"

namespace tranche::test {
namespace {

using ::testing::Each;

class GpuLaws : public ::testing::Test {
 protected:
  void SetUp() override {
    const detail::CudaProbe probe = detail::probe_cuda();
    if (probe.devices.empty()) GTEST_SKIP() << probe.problem;
  }
};

OddRun on_gpu() {
  OddRun run;
  run.device = DeviceKind::cuda;
  run.steps = 3;  // memory is dynamic in the first step, recorded in the second, planned in the third
  return run;
}

TEST_F(GpuLaws, SameBitsOverStages) {
  int point = 0;
  for (const int ranks : {1, 2, 3, 4}) {
    for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
      for (const ReductionPolicy policy : {ReductionPolicy::boundary, ReductionPolicy::micro_batch}) {
        if (!swept(point++, 3)) continue;
        OddRun run = on_gpu();
        run.ranks = ranks;
        run.dtype = dtype;
        run.policy = policy;
        run.accumulation = 2;
        const OddResult expected = train_odd(run);
        ASSERT_LT(expected.steps.back().loss, expected.steps.front().loss) << "the odd model does not learn";
        for (run.stage = 1; run.stage <= 3; ++run.stage) expect_same(expected, train_odd(run), run);
      }
    }
  }
}

TEST_F(GpuLaws, SameBitsOverSettings) {
  const RandomKey key{22, RandomPurpose::test, 3};
  std::uint64_t draw = 0;
  const auto pick = [&](std::uint32_t n) { return static_cast<int>(random_bits(key, draw++) % n); };
  for (int i = 0; i < 12; ++i) {
    OddRun run = on_gpu();
    run.ranks = 1 + pick(4);
    run.accumulation = 1 + pick(2);
    run.dtype = std::array{DataType::float32, DataType::bfloat16,
                           DataType::float16}[static_cast<std::size_t>(pick(3))];
    run.policy = pick(2) == 0 ? ReductionPolicy::boundary : ReductionPolicy::micro_batch;
    run.reduction_group = 1 + pick(4);
    run.optimizer = std::array{"AdamW", "Adam", "SGD", "Lion", "Lamb", "LARS", "Adagrad", "RMSprop", "Muon"}
        [static_cast<std::size_t>(pick(9))];
    run.quantized_gradients = run.dtype != DataType::float16 && i % 3 == 0;
    run.quantized_weights = run.dtype != DataType::float16 && i % 4 < 2;
    if (run.dtype == DataType::bfloat16) {
      run.master = std::array{MasterFormat::none, MasterFormat::split,
                              MasterFormat::fp32}[static_cast<std::size_t>(i % 3)];
      run.stochastic_rounding = run.master == MasterFormat::none && i % 2 == 0;
    }
    OddRun plain = run;
    plain.overlap = false;
    plain.plan_memory = false;
    run.stage = pick(4);
    run.depth = 1 + pick(4);
    run.reduce_bucket = 256 + pick(4000);
    run.gather_bucket = 256 + pick(4000);
    run.poison = pick(2) == 0;
    run.faults = {pick(2) * 0.0003, static_cast<std::uint64_t>(i)};
    if (swept(i, 4)) expect_same(train_odd(plain), train_odd(run), run);
  }
}

TEST_F(GpuLaws, WholeMatricesHaveTheSameBitsOverStagesTiersMeshesAndTransports) {
  const auto expect_bits_and_traffic = [](const OddResult& expected, const OddRun& run) {
    const OddResult result = train_odd(run);
    expect_same(expected, result, run);
    EXPECT_EQ(result.wire_elements, result.formula_elements) << run.to_string();
    EXPECT_EQ(result.wire_bytes, result.formula_bytes) << run.to_string();
    OddRun plan = run;
    plan.device = DeviceKind::meta;
    const OddResult predicted = train_odd(plan);
    EXPECT_EQ(predicted.wire_elements[0], result.wire_elements[0]) << run.to_string();
    EXPECT_EQ(predicted.wire_bytes[0], result.wire_bytes[0]) << run.to_string();
  };
  int point = 0;
  for (const int ranks : {1, 2, 3, 4}) {
    OddRun run = on_gpu();
    run.ranks = ranks;
    run.dtype = DataType::bfloat16;
    run.policy = ReductionPolicy::micro_batch;
    run.optimizer = "Muon";
    run.offload.tile_elements = 4096;
    run.offload.nvme_path = ::testing::TempDir();
    const OddResult expected = train_odd(run);
    for (int stage = 0; stage <= 3; ++stage) {
      for (const OffloadTier tier : {OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme}) {
        if (stage == 0 && tier != OffloadTier::none) continue;
        run.stage = stage;
        run.offload.optimizer = tier;
        run.overlap = point % 2 == 0;
        if (swept(point++, 3)) expect_bits_and_traffic(expected, run);
      }
    }
    // A matrix update uses GEMMs, which the CPU sums in another order.
    run.device = DeviceKind::cpu;
    const OddResult cpu = train_odd(run);
    for (std::size_t s = 0; s < cpu.steps.size(); ++s) {
      EXPECT_NEAR(expected.steps[s].loss, cpu.steps[s].loss, 1e-5 * cpu.steps[s].loss) << run.to_string();
      EXPECT_NEAR(expected.steps[s].gradient_norm, cpu.steps[s].gradient_norm,
                  1e-5 * cpu.steps[s].gradient_norm);
    }
  }
  for (const Replicate replicate : {Replicate::all, Replicate::parameters}) {
    OddRun run = on_gpu();
    run.ranks = 4;
    run.stage = 2;
    run.reduction_group = 2;
    run.optimizer = "Muon";
    const OddResult expected = train_odd(run);
    run.mesh = "replicate=2, shard=2";
    run.replicate = replicate;
    expect_bits_and_traffic(expected, run);
  }
  OddRun by_transport = on_gpu();
  by_transport.ranks = 3;
  by_transport.optimizer = "Muon";
  const OddResult expected = train_odd(by_transport);
  for (const char* const transport : {"staged", "nccl"}) {
    if (transport == std::string("nccl") && detail::probe_cuda().devices.size() < 3) continue;
    by_transport.stage = 2;
    by_transport.device_transport = transport;
    expect_bits_and_traffic(expected, by_transport);
  }
  OddRun any = on_gpu();
  any.optimizer = "Muon";
  any.offload.tile_elements = 4096;
  expect_the_same_on_any_ranks(any, 4);
}

TEST_F(GpuLaws, TheEnginesOwnWorkGivesTheCpusBits) {
  // Sums in rank order, casts and updates have the same arithmetic on both devices, and so do drawn weights
  // except for the logarithm and cosine of normal numbers. Therefore the tied unit's uniform tensor is
  // compared, and a few steps of everything else, with every gradient taken from the host.
  for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
    for (const std::string optimizer : {"AdamW", "SGD", "Lion", "Lamb", "LARS", "Adagrad", "RMSprop",
                                        "with blocks", "split", "at random"}) {
      const bool split = optimizer == "split", at_random = optimizer == "at random";
      if ((split || at_random) && dtype != DataType::bfloat16) continue;
      OddRun run = on_gpu();
      run.ranks = 3;
      run.stage = 2;
      run.dtype = dtype;
      run.quantized_gradients = run.quantized_weights = optimizer == "with blocks";
      run.master = split ? MasterFormat::split : at_random ? MasterFormat::none : MasterFormat::fp32;
      run.stochastic_rounding = at_random;
      run.optimizer = run.quantized_weights || split || at_random ? "AdamW" : optimizer;
      const OddResult gpu = train_odd(run);
      run.device = DeviceKind::cpu;
      const OddResult cpu = train_odd(run);
      if (!test::as_on_gpu()) {
        expect_same(cpu, gpu, run);
      } else {
        for (std::size_t s = 0; s < cpu.steps.size(); ++s) {
          EXPECT_NEAR(gpu.steps[s].loss, cpu.steps[s].loss, 1e-6 * std::abs(cpu.steps[s].loss));
          EXPECT_NEAR(gpu.steps[s].gradient_norm, cpu.steps[s].gradient_norm,
                      1e-6 * cpu.steps[s].gradient_norm);
        }
      }
    }
  }
}

TEST_F(GpuLaws, MemoryIsPlannedAndStepsAllocateNothing) {
  for (int stage = 0; stage <= 3; ++stage) {
    OddRun run = on_gpu();
    run.ranks = 2;
    run.stage = stage;
    run.dtype = DataType::bfloat16;
    run.accumulation = 2;
    run.steps = 5;
    OddRun plan = run;
    plan.device = DeviceKind::meta;
    const OddResult measured = train_odd(run);
    const OddResult predicted = train_odd(plan);
    EXPECT_THAT(measured.memory_calls_per_late_step, Each(0)) << run.to_string();
    for (const TierAccount& account : measured.accounts) EXPECT_EQ(account.at_peak.total(), account.peak);
    for (const Category category : all_categories) {
      // The communicator's staging buffers differ between transports.
      if (category == Category::communication) continue;
      EXPECT_EQ(predicted.accounts[0].category_peak[category], measured.accounts[0].category_peak[category])
          << name_of(category) << " " << run.to_string();
    }
    EXPECT_EQ(predicted.wire_elements[0], measured.wire_elements[0]) << run.to_string();
    EXPECT_EQ(measured.formula_elements[0], measured.wire_elements[0]) << run.to_string();
  }
}

TEST_F(GpuLaws, SameBitsAndBytesWhereverTheStateLives) {
  int point = 0;
  for (const int ranks : {1, 2}) {
    for (const auto& [dtype, master] :
         {std::pair(DataType::float32, MasterFormat::fp32), std::pair(DataType::bfloat16, MasterFormat::fp32),
          std::pair(DataType::bfloat16, MasterFormat::split),
          std::pair(DataType::bfloat16, MasterFormat::none)}) {
      OddRun run = on_gpu();
      run.ranks = ranks;
      run.dtype = dtype;
      run.master = master;
      run.stochastic_rounding = master == MasterFormat::none;
      run.policy = ReductionPolicy::micro_batch;
      run.accumulation = ranks;  // with one micro-batch a step gradients are temporary, with two they persist
      run.stage = 3;
      const OddResult expected = train_odd(run);
      for (const OffloadTier optimizer : {OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme}) {
        for (const OffloadTier parameters : {OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme}) {
          run.offload = {};
          run.offload.optimizer = optimizer;
          run.offload.parameters = parameters;
          run.offload.tile_elements = 4096;
          run.offload.nvme_path = ::testing::TempDir();
          if (!run.offload.any() || !swept(point++, 3)) continue;
          const OddResult offloaded = train_odd(run);
          expect_same(expected, offloaded, run);
          OddRun plan = run;
          plan.device = DeviceKind::meta;
          const OddResult predicted = train_odd(plan);
          const OffloadTraffic moved = offloaded.steps.back().offload_traffic;
          const OffloadTraffic planned = predicted.steps.back().offload_traffic;
          EXPECT_EQ(planned.to_host, moved.to_host) << run.to_string();
          EXPECT_EQ(planned.from_host, moved.from_host) << run.to_string();
          EXPECT_EQ(planned.nvme_read, moved.nvme_read) << run.to_string();
          EXPECT_EQ(planned.nvme_written, moved.nvme_written) << run.to_string();
        }
      }
    }
  }
}

TEST_F(GpuLaws, AnInfiniteGradientIsNamedAndSkipped) {
  OddRun run = on_gpu();
  const Config config = odd_config(run);
  run_thread_ranks(2, [&](int rank, const CommunicatorFactory& factory) {
    Config own = config;
    own.train_batch_size *= 2;
    own.stage = 2;
    RuntimeOptions options = RuntimeOptions::from(own);
    options.device = DeviceKind::cuda;
    options.log_level = LogLevel::off;
    Runtime runtime(options, factory);
    Engine engine(runtime, odd_model(), own);
    odd_micro_batch(engine, 3 * rank, 3, rank == 1 ? "prime.c" : "");
    const auto before = engine.weights_digest();
    const StepResult step = engine.step();
    EXPECT_FALSE(step.applied);
    EXPECT_THAT(step.skipped_because, ::testing::HasSubstr("prime.c at element 2"));
    EXPECT_EQ(engine.weights_digest(), before);
  });
}

}  // namespace
}  // namespace tranche::test
