// An optimizer of the user's own that needs a statistic over all of a tensor's shards.

#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "on_ranks.h"

namespace tranche::test {
namespace {

/// Divides each tensor's gradient by its norm, which only all shards together know; keeps how far it went.
class NormalizedDescent : public Optimizer {
 public:
  explicit NormalizedDescent(std::map<std::string, double>& seen) : seen_(seen) {}
  std::string name() const override { return "NormalizedDescent"; }
  std::vector<OptimizerStateTensor> state() const override {
    return {{"travelled", DataType::float32, 0.5f}};
  }
  int statistics_per_tensor() const override { return 2; }
  void statistics(Stream& stream, const OptimizerStep&, const ShardView& shard, double* sums) const override {
    const ConstTensorView gradient = shard.gradient;
    stream.enqueue("statistics", [=] {
      for (std::int64_t i = 0; i < gradient.elements(); ++i) {
        const double value = gradient.as<float>()[i];
        sums[0] += value * value;
        sums[1] += 1;
      }
    });
  }
  void apply(Stream& stream, const OptimizerStep& step, const ShardView& shard,
             std::span<const double> reduced) const override {
    seen_["momentum"] = step.momentum;
    seen_["step"] = static_cast<double>(step.step);
    seen_[std::string(shard.tensor)] =
        reduced[0] * static_cast<double>(step.gradient_scale) * static_cast<double>(step.gradient_scale);
    EXPECT_EQ(reduced[1], static_cast<double>(shard.tensor_elements)) << shard.tensor;
    if (!step.apply) return;
    const auto factor = static_cast<float>(step.learning_rate / std::sqrt(reduced[0]));
    const ShardView view = shard;
    stream.enqueue("apply", [=] {
      for (std::int64_t i = 0; i < view.gradient.elements(); ++i) {
        const float change = view.gradient.as<float>()[i] * factor;
        view.master.as<float>()[i] -= change;
        view.state[0].as<float>()[i] += std::abs(change);
        if (view.weight.data != nullptr) {
          view.weight.as<bfloat16>()[i] = to_bfloat16(view.master.as<float>()[i]);
        }
      }
    });
  }
  std::string describe() const override { return "{}"; }

 private:
  std::map<std::string, double>& seen_;
};

TEST(OptimizerStatistics, AreSummedOverAllShardsOnce) {
  for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
    OddRun run;
    run.ranks = 3;
    run.dtype = dtype;
    run.clipping = 0;
    run.policy = ReductionPolicy::micro_batch;
    std::vector<kernels::Digest> digests;
    for (run.stage = 0; run.stage <= 3; ++run.stage) {
      run_thread_ranks(run.ranks, [&](int rank, const CommunicatorFactory& factory) {
        std::map<std::string, double> seen;
        const Config config = odd_config(run);
        Runtime runtime(RuntimeOptions::from(config), factory);
        Engine engine(runtime, odd_model(), config, std::make_unique<NormalizedDescent>(seen));
        EXPECT_EQ(engine.read_optimizer_state("tied.b", "travelled"), std::vector<float>(192, 0.5f));
        for (int step = 0; step < 2; ++step) {
          whole_step(engine, runtime, step);
          std::map<std::string, double> expected;
          for (const TensorSpec& tensor : engine.model().units()[1].tensors) {
            for (const float g : engine.read_gradient(tensor.name)) {
              expected[tensor.name] += static_cast<double>(g) * g;
            }
          }
          EXPECT_TRUE(engine.step().applied);
          for (const auto& [name, squares] : expected) {
            // Ranks that own nothing of a tensor are not asked to apply it.
            if (const auto found = seen.find(name); found != seen.end()) {
              EXPECT_NEAR(found->second, squares, 1e-6 * squares) << name << " " << run.to_string();
            }
          }
        }
        const kernels::Digest digest = engine.state_digest();
        if (rank == 0) digests.push_back(digest);
      });
      // The sums' order is fixed (rank by rank), so the bits are too.
      EXPECT_EQ(digests.back(), digests[digests.size() - 1 - static_cast<std::size_t>(run.stage)])
          << run.to_string();
    }
  }
}

TEST(OptimizerStep, CarriesTheSchedulesMomentumAndCountsAppliedUpdates) {
  std::map<std::string, double> seen;
  Config config = odd_config({});
  config.schedule.type = "OneCycle";
  config.schedule.parameters_json =
      R"({"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": 4, "cycle_min_mom": 0.8,
          "cycle_max_mom": 0.9})";
  Runtime runtime(RuntimeOptions::from(config), make_self_communicator);
  Engine engine(runtime, odd_model(), config, std::make_unique<NormalizedDescent>(seen));
  const std::unique_ptr<Schedule> schedule = make_schedule(config);
  EXPECT_NE(schedule->momentum(1), schedule->momentum(2));
  for (int step = 0; step < 3; ++step) {
    whole_step(engine, runtime, step, step == 1 ? "prime.c" : "");
    engine.step();
    const std::int64_t expected = step == 0 ? 1 : 2;  // the second step is skipped
    EXPECT_EQ(seen["step"], static_cast<double>(expected));
    EXPECT_EQ(seen["momentum"], schedule->momentum(expected));
  }
}

}  // namespace
}  // namespace tranche::test
