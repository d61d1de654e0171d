// Offloading overlaps: gates would never open if one operation waited for another.

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <thread>

#include "odd_model.h"
#include "on_ranks.h"
#include "tranche/core/trace.h"

namespace tranche::test {
namespace {

constexpr int patience_seconds = 20;

/// Waits until `condition` holds; returns false after a time that only a deadlock explains.
bool eventually(const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(patience_seconds);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

OddRun offloaded_run(OffloadTier tier) {
  OddRun run;
  run.stage = 3;
  run.dtype = DataType::bfloat16;
  run.frozen = false;
  run.offload.optimizer = tier;
  run.offload.tile_elements = 4096;
  run.offload.nvme_path = std::filesystem::temp_directory_path().string();
  return run;
}

/// One micro-batch without arithmetic; the hooks run after gather() of a unit in forward, and before a unit's
/// gradients are submitted.
void idle_micro_batch(Engine& engine, const std::function<void(int unit)>& in_forward,
                      const std::function<void(int unit)>& in_backward) {
  const auto units = static_cast<int>(engine.model().units().size());
  engine.begin_micro_batch();
  for (int unit = 0; unit < units; ++unit) {
    const GatheredUnit weights = engine.gather({unit});
    if (in_forward) in_forward(unit);
  }
  for (int unit = units - 1; unit >= 0; --unit) {
    for (int use = 0; use < engine.model().units()[static_cast<std::size_t>(unit)].uses_per_micro_batch;
         ++use) {
      UnitGradients gradients = engine.gradients({unit});
      if (in_backward) in_backward(unit);
      std::move(gradients).reduce();
    }
  }
  end_with(engine, 1.0, 1);
}

TEST(OffloadOverlap, GradientsLeaveWhileBackwardGoesOn) {
  for (const OffloadTier tier : {OffloadTier::cpu, OffloadTier::nvme}) {
    on_ranks(
        offloaded_run(tier),
        [&](Engine& engine, Runtime& runtime) {
          bool left = false;
          idle_micro_batch(engine, {}, [&](int unit) {
            if (unit > 0) return;
            left = left || eventually([&] {
                     return runtime.trace()->to_json().find("copy to host") != std::string::npos;
                   });
          });
          EXPECT_TRUE(left) << "no gradient had left when backward came to the first unit";
          (void)engine.step();
        },
        [](Config&, RuntimeOptions& options) { options.trace = true; });
  }
}

/// Plain descent in which the update of the model's last unit waits until the gate opens.
class Gated final : public Optimizer {
 public:
  explicit Gated(std::atomic<bool>& open, std::atomic<bool>& late) : open_(open), late_(late) {}
  std::string name() const override { return "Gated"; }
  std::vector<OptimizerStateTensor> state(const TrainableTensor&) const override {
    return {{"seen", DataType::float32, 0}};
  }
  void apply(Stream& stream, const OptimizerStep& step, const UpdateRange& range) const override {
    if (!step.apply) return;
    for (const TensorSegment& segment : range.segments) {
      const bool last = segment.tensor->name.starts_with("mixed");
      stream.enqueue("apply", [this, part = range.part(segment), last] {
        if (last && !eventually([this] { return open_.load(); })) late_ = true;
        for (std::int64_t i = 0; i < part.master.elements(); ++i) {
          part.master.as<float>()[i] += 1.0f;
          part.state[0].as<float>()[i] += 1.0f;
          if (part.weight.data != nullptr) {
            part.weight.as<bfloat16>()[i] = to_bfloat16(part.master.as<float>()[i]);
          }
        }
      });
    }
  }
  std::string describe() const override { return "{}"; }

 private:
  std::atomic<bool>& open_;
  std::atomic<bool>& late_;
};

TEST(OffloadOverlap, UpdatesRunBehindTheNextForward) {
  for (const OffloadTier tier : {OffloadTier::cpu, OffloadTier::nvme}) {
    for (const OffloadTier parameters : {OffloadTier::none, tier}) {
      std::atomic<bool> open = true, late = false;
      OddRun run = offloaded_run(tier);
      run.offload.parameters = parameters;
      run_thread_ranks(1, [&](int, const CommunicatorFactory& factory) {
        const Config config = odd_config(run);
        RuntimeOptions options = RuntimeOptions::from(config);
        options.log_level = LogLevel::off;
        Runtime runtime(options, factory);
        Engine engine(runtime, odd_model(), config, std::make_unique<Gated>(open, late));
        for (int step = 0; step < 4; ++step) {
          int seen = -1;
          idle_micro_batch(engine,
                           [&](int unit) {
                             // Units before the last one are available although the last one's update has not
                             // ended.
                             if (unit == 2) open = true;
                             seen = unit;
                           },
                           {});
          EXPECT_EQ(seen, 3);
          open = step == 3;
          EXPECT_TRUE(engine.step().applied);
        }
        EXPECT_FALSE(late) << "forward waited for updates that it did not need yet";
        EXPECT_EQ(engine.read_optimizer_state("mixed.f", "seen")[0], 4.0f);
        EXPECT_EQ(engine.read_optimizer_state("tied.a", "seen")[0], 4.0f);
      });
    }
  }
}

}  // namespace
}  // namespace tranche::test
