// A user's optimizer that needs a statistic over all shards of a tensor.

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>

#include "on_ranks.h"
#include "saving_fixture.h"

namespace tranche::test {
namespace {

/// Divides each tensor's gradient by its norm, which needs all shards; records the distance.
class NormalizedDescent : public Optimizer {
 public:
  explicit NormalizedDescent(std::map<std::string, double>& seen) : seen_(seen) {}
  std::string name() const override { return "NormalizedDescent"; }
  std::vector<OptimizerStateTensor> state(const TrainableTensor&) const override {
    return {{"travelled", DataType::float32, 0.5f}};
  }
  int sums(const TrainableTensor&) const override { return 2; }
  void prepare(Stream& stream, const OptimizerStep&, const UpdateRange& range) const override {
    for (const TensorSegment& segment : range.segments) {
      stream.enqueue("prepare", [gradient = range.part(segment).gradient, sums = segment.partial] {
        for (std::int64_t i = 0; i < gradient.elements(); ++i) {
          const double value = gradient.as<float>()[i];
          sums[0].add(value * value);
          sums[1].add(1.0);
        }
      });
    }
  }
  void apply(Stream& stream, const OptimizerStep& step, const UpdateRange& range) const override {
    seen_["momentum"] = step.momentum;
    seen_["step"] = static_cast<double>(step.step);
    for (const TensorSegment& segment : range.segments) {
      const double* sums = segment.sums;
      seen_[std::string(segment.tensor->name)] =
          sums[0] * static_cast<double>(step.gradient_scale) * static_cast<double>(step.gradient_scale);
      EXPECT_EQ(sums[1], static_cast<double>(segment.tensor->shape.elements())) << segment.tensor->name;
      if (!step.apply) continue;
      const auto factor = static_cast<float>(step.learning_rate / std::sqrt(sums[0]));
      stream.enqueue("apply", [part = range.part(segment), factor] {
        for (std::int64_t i = 0; i < part.gradient.elements(); ++i) {
          const float change = part.gradient.as<float>()[i] * factor;
          part.master.as<float>()[i] -= change;
          part.state[0].as<float>()[i] += std::abs(change);
          if (part.weight.data != nullptr) {
            part.weight.as<bfloat16>()[i] = to_bfloat16(part.master.as<float>()[i]);
          }
        }
      });
    }
  }
  std::string describe() const override { return "{}"; }

 private:
  std::map<std::string, double>& seen_;
};

TEST(OptimizerSums, AreSummedOverAllShardsOnce) {
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
            // Ranks that own nothing of a tensor are not called for it.
            if (const auto found = seen.find(name); found != seen.end()) {
              EXPECT_NEAR(found->second, squares, 1e-6 * squares) << name << " " << run.to_string();
            }
          }
        }
        const kernels::Digest digest = engine.state_digest();
        if (rank == 0) digests.push_back(digest);
      });
      // The sums are exact, so their bits do not depend on the partition.
      EXPECT_EQ(digests.back(), digests[digests.size() - 1 - static_cast<std::size_t>(run.stage)])
          << run.to_string();
    }
  }
}

constexpr float decay = 0.25f;

/// Momentum and a trust ratio like those of LARS and LAMB. State advances before the sums are known, and the
/// sums combine the unscaled gradient with the weight.
class TrustRatio final : public Optimizer {
 public:
  /// `last_bits`: updates depend on the last bits of the sums, which otherwise vanish in an fp32 rate.
  explicit TrustRatio(bool last_bits = false) : last_bits_(last_bits) {}
  std::string name() const override { return "TrustRatio"; }
  std::vector<OptimizerStateTensor> state(const TrainableTensor&) const override {
    return {{"momentum_buffer", DataType::float32, 0}};
  }
  int sums(const TrainableTensor& tensor) const override { return tensor.name == "tiny.e" ? 0 : 2; }
  void prepare(Stream& stream, const OptimizerStep& step, const UpdateRange& range) const override {
    for (const TensorSegment& segment : range.segments) {
      stream.enqueue("prepare", [part = range.part(segment), sums = segment.partial, step] {
        for (std::int64_t i = 0; i < part.master.elements(); ++i) {
          const float w = part.master.as<float>()[i];
          float& m = part.state[0].as<float>()[i];
          if (step.apply) m = 0.5f * m + (part.gradient.as<float>()[i] * step.gradient_scale + decay * w);
          if (sums == nullptr) continue;
          sums[0].add_square(w);
          sums[1].add_square(m);
        }
      });
    }
  }
  void apply(Stream& stream, const OptimizerStep& step, const UpdateRange& range) const override {
    if (!step.apply) return;
    for (const TensorSegment& segment : range.segments) {
      stream.enqueue("apply", [part = range.part(segment), sums = segment.sums, step, bits = last_bits_] {
        auto by = static_cast<float>(step.learning_rate * (sums != nullptr ? ratio(sums[0], sums[1]) : 1));
        if (bits && sums != nullptr) {
          by *=
              1 + static_cast<float>(
                      (std::bit_cast<std::uint64_t>(sums[0]) ^ std::bit_cast<std::uint64_t>(sums[1])) % 16) /
                      64;
        }
        for (std::int64_t i = 0; i < part.master.elements(); ++i) {
          float& w = part.master.as<float>()[i];
          w -= by * part.state[0].as<float>()[i];
          if (part.weight.data == nullptr) continue;
          if (part.weight.dtype == DataType::float32) {
            part.weight.as<float>()[i] = w;
          } else {
            part.weight.as<bfloat16>()[i] = to_bfloat16(w);
          }
        }
      });
    }
  }
  std::string describe() const override { return "{}"; }
  static double ratio(double weights, double updates) {
    return weights > 0 && updates > 0 ? std::sqrt(weights / updates) : 1;
  }

 private:
  bool last_bits_;
};

/// The same in fp64 on whole tensors, from the gradients that the program reads (the mean, not clipped).
struct PlainTrustRatio {
  std::vector<double> weight, momentum;
  void update(std::span<const float> gradient, double clip, double rate, bool trusted) {
    double weights = 0, updates = 0;
    momentum.resize(weight.size());
    for (std::size_t i = 0; i < weight.size(); ++i) {
      momentum[i] = 0.5 * momentum[i] + (gradient[i] * clip + static_cast<double>(decay) * weight[i]);
      weights += weight[i] * weight[i];
      updates += momentum[i] * momentum[i];
    }
    const double ratio = trusted ? TrustRatio::ratio(weights, updates) : 1;
    for (std::size_t i = 0; i < weight.size(); ++i) weight[i] -= rate * ratio * momentum[i];
  }
};

TEST(OptimizerSums, SeeTheTrueScaleOfClippedGradientsInEveryStage) {
  for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
    for (const int ranks : {1, 2, 3}) {
      std::optional<kernels::Digest> digest;
      for (int stage = 0; stage <= 3; ++stage) {
        for (const OffloadTier tier : {OffloadTier::none, OffloadTier::cpu}) {
          OddRun run;
          run.ranks = ranks;
          run.stage = stage;
          run.dtype = dtype;
          run.clipping = 0.01;
          run.policy = ReductionPolicy::micro_batch;
          run.offload.optimizer = tier;
          run_thread_ranks(ranks, [&](int rank, const CommunicatorFactory& factory) {
            const Config config = odd_config(run);
            RuntimeOptions options = RuntimeOptions::from(config);
            options.log_level = LogLevel::off;
            Runtime runtime(options, factory);
            Engine engine(runtime, odd_model(), config, std::make_unique<TrustRatio>());
            std::map<std::string, PlainTrustRatio> plain;
            for (const UnitSpec& unit : engine.model().units()) {
              for (const TensorSpec& tensor : unit.tensors) {
                if (engine.frozen(tensor.name)) continue;
                const std::vector<float> weight = engine.read_weight(tensor.name);
                plain[tensor.name].weight.assign(weight.begin(), weight.end());
              }
            }
            for (int step = 0; step < 4; ++step) {
              whole_step(engine, runtime, step, step == 2 ? "prime.c" : "");
              std::map<std::string, std::vector<float>> gradients;
              for (const auto& [name, tensor] : plain) gradients[name] = engine.read_gradient(name);
              const StepResult result = engine.step();
              EXPECT_EQ(result.applied, step != 2);
              if (!result.applied) continue;
              EXPECT_LT(result.clip_coefficient, 1) << "nothing was clipped";
              for (auto& [name, tensor] : plain) {
                tensor.update(gradients[name], result.clip_coefficient, result.learning_rate,
                              name != "tiny.e");
              }
            }
            for (const auto& [name, tensor] : plain) {
              const std::vector<float> weight = engine.read_weight(name);
              // The error is a few fp32 roundings per step, for weights of order one.
              for (std::size_t i = 0; i < weight.size(); ++i) {
                ASSERT_NEAR(weight[i], tensor.weight[i], 2e-6) << name << " " << i << " " << run.to_string();
              }
            }
            const kernels::Digest state = engine.state_digest();
            if (rank != 0) return;
            if (!digest) digest = state;
            EXPECT_EQ(*digest, state) << run.to_string();
          });
        }
      }
    }
  }
}

TEST(OptimizerSums, AreThoseOfOneShardedModelOnAMesh) {
  std::optional<kernels::Digest> digest;
  for (const char* mesh : {"", "replicate=*, shard=4", "shard=4, replicate=2"}) {
    for (const Replicate replicate : {Replicate::all, Replicate::parameters}) {
      for (int stage = 1; stage <= 3; ++stage) {
        OddRun run;
        run.ranks = 8;  // four of them own parts of one tensor
        run.stage = stage;
        run.policy = ReductionPolicy::micro_batch;
        run.reduction_group = 4;
        run.mesh = mesh;
        run.replicate = replicate;
        run_thread_ranks(run.ranks, [&](int rank, const CommunicatorFactory& factory) {
          const Config config = odd_config(run);
          RuntimeOptions options = RuntimeOptions::from(config);
          options.log_level = LogLevel::off;
          Runtime runtime(options, factory);
          Engine engine(runtime, odd_model(), config, std::make_unique<TrustRatio>(true));
          // Each rank has the samples of the rank that has the same shards without a mesh.
          const int of_block = std::string(mesh).starts_with("shard") ? rank / 2 + rank % 2 * 4 : rank;
          for (int step = 0; step < 3; ++step) {
            odd_micro_batch(engine, (step * 8 + of_block) * 3, 3);
            EXPECT_TRUE(engine.step().applied);
          }
          const kernels::Digest state = engine.state_digest();
          if (rank != 0) return;
          if (!digest) digest = state;
          EXPECT_EQ(*digest, state) << run.to_string();
        });
      }
    }
  }
}

/// Descent with momentum for two-dimensional tensors; for others it also counts the steps.
class TwoClasses final : public Optimizer {
 public:
  std::string name() const override { return "TwoClasses"; }
  std::vector<OptimizerStateTensor> state(const TrainableTensor& tensor) const override {
    std::vector<OptimizerStateTensor> states{{"momentum_buffer", DataType::float32, 0}};
    if (tensor.shape.rank() < 2) states.insert(states.begin(), {"steps", DataType::float32, 1});
    return states;
  }
  void apply(Stream& stream, const OptimizerStep& step, const UpdateRange& range) const override {
    if (!step.apply) return;
    for (const TensorSegment& segment : range.segments) {
      stream.enqueue("apply", [part = range.part(segment), step] {
        for (std::int64_t i = 0; i < part.master.elements(); ++i) {
          float& w = part.master.as<float>()[i];
          float& m = part.state.back().as<float>()[i];
          m = 0.5f * m + part.gradient.as<float>()[i] * step.gradient_scale;
          w -= static_cast<float>(step.learning_rate) * m;
          if (part.state.size() > 1) part.state[0].as<float>()[i] += 1;
          if (part.weight.data != nullptr) part.weight.as<bfloat16>()[i] = to_bfloat16(w);
        }
      });
    }
  }
  std::string describe() const override { return "{}"; }
};

class StateClasses : public Saving {
 protected:
  /// Two steps after `begin`, then `end`; returns the digest of all state.
  kernels::Digest train(const OddRun& run, const std::function<void(Engine&)>& begin,
                        const std::function<void(Engine&, Runtime&)>& end) {
    kernels::Digest digest;
    run_thread_ranks(run.ranks, [&](int rank, const CommunicatorFactory& factory) {
      const Config config = odd_config(run);
      RuntimeOptions options = RuntimeOptions::from(config);
      options.log_level = LogLevel::off;
      Runtime runtime(options, factory);
      Engine engine(runtime, odd_model(), config, std::make_unique<TwoClasses>());
      begin(engine);
      for (int step = 0; step < 2; ++step) {
        whole_step(engine, runtime, step);
        EXPECT_TRUE(engine.step().applied);
      }
      end(engine, runtime);
      const kernels::Digest state = engine.state_digest();
      if (rank == 0) digest = state;
    });
    return digest;
  }
};

TEST_F(StateClasses, HaveBuffersOfTheirOwnAndTheSameBitsInEveryStageAndTier) {
  const auto nothing = [](Engine&) {};
  const auto look = [](Engine& engine, Runtime& runtime) {
    EXPECT_EQ(engine.read_optimizer_state("prime.c", "steps"), std::vector<float>(1009, 3.0f));
    EXPECT_NE(engine.read_optimizer_state("tied.b", "momentum_buffer"), std::vector<float>(192, 0.0f));
    std::string message;
    try {
      (void)engine.read_optimizer_state("tied.b", "steps");
    } catch (const InvalidArgument& error) {
      message = error.message();
    }
    EXPECT_EQ(message, "optimizer TwoClasses keeps no state 'steps'; it keeps momentum_buffer");
    const Engine::StateBytes bytes = engine.state_bytes();
    std::int64_t kept = 0;
    for (const Tier tier : {Tier::device, Tier::host, Tier::nvme}) {
      kept += runtime.ledger().account(tier).persistent[Category::optimizer];
    }
    // Tiles on the disk are whole blocks, and only counted there.
    if (runtime.ledger().account(Tier::nvme).persistent[Category::optimizer] == 0) {
      EXPECT_EQ(bytes.optimizer, kept);
    }
  };
  for (const int ranks : {1, 2, 3}) {
    std::optional<kernels::Digest> digest;
    for (int stage = 0; stage <= 3; ++stage) {
      for (const OffloadTier tier : {OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme}) {
        if (stage == 0 && tier != OffloadTier::none) continue;
        OddRun run;
        run.ranks = ranks;
        run.stage = stage;
        run.dtype = DataType::bfloat16;
        run.policy = ReductionPolicy::micro_batch;
        run.offload.optimizer = tier;
        run.offload.tile_elements = 4096;
        run.offload.nvme_path = std::filesystem::temp_directory_path().string();
        const kernels::Digest here = train(run, nothing, look);
        if (!digest) digest = here;
        EXPECT_EQ(*digest, here) << run.to_string();
      }
    }
  }
}

TEST_F(StateClasses, GoOnFromACheckpointAtOtherRanksAndTiers) {
  OddRun run;
  run.ranks = 3;
  run.stage = 1;
  run.dtype = DataType::bfloat16;
  run.policy = ReductionPolicy::micro_batch;
  run.offload.tile_elements = 4096;
  run.offload.nvme_path = std::filesystem::temp_directory_path().string();
  for (const OffloadTier tier : {OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme}) {
    std::filesystem::remove_all(path());
    run.offload.optimizer = tier;
    const kernels::Digest saved = train(
        run, [](Engine&) {}, [&](Engine& engine, Runtime&) { engine.save(path(), {.wait = true}); });
    OddRun other = run;
    other.ranks = 2;
    other.stage = 3;
    other.offload.optimizer = OffloadTier::none;
    kernels::Digest loaded;
    train(
        other,
        [&](Engine& engine) {
          engine.load(path());
          const kernels::Digest digest = engine.state_digest();
          if (engine.runtime().rank() == 0) loaded = digest;
        },
        [](Engine&, Runtime&) {});
    EXPECT_EQ(saved, loaded);
  }
}

/// A rule that requests operations that engines do not support.
class Beyond final : public Optimizer {
 public:
  explicit Beyond(bool matrices) : matrices_(matrices) {}
  std::string name() const override { return "Beyond"; }
  std::vector<OptimizerStateTensor> state(const TrainableTensor& tensor) const override {
    if (tensor.shape.rank() == 1 || matrices_) return {};
    return {{"momentum_buffer", DataType::float32, 0}};
  }
  bool needs_whole_matrices(const TrainableTensor& tensor) const override {
    return matrices_ && tensor.shape.rank() == 2;
  }
  int sums(const TrainableTensor& tensor) const override { return needs_whole_matrices(tensor) ? 1 : 0; }
  std::vector<std::byte> numbers(const OptimizerStep& step, const GroupOptions&) const override {
    return std::vector<std::byte>(step.learning_rate > 0 ? 5 : 4);
  }
  void apply(Stream&, const OptimizerStep&, const UpdateRange&) const override {}
  std::string describe() const override { return "{}"; }

 private:
  bool matrices_;
};

TEST(OptimizerRule, WithSumsOfWholeMatricesIsRefusedAtTheStart) {
  const Config config = odd_config({});
  Runtime runtime(RuntimeOptions::from(config), make_self_communicator);
  const auto refusal = [&](bool matrices) -> std::string {
    try {
      Engine engine(runtime, odd_model(), config, std::make_unique<Beyond>(matrices));
    } catch (const ConfigurationError& error) {
      return error.message();
    }
    return "nothing was thrown";
  };
  EXPECT_EQ(refusal(true),
            "optimizer Beyond asks for sums of tensor tied.b, which it computes as a whole matrix; one rank "
            "has all "
            "of it then");
}

TEST(OptimizerRule, GivesAsManyNumbersInEveryStep) {
  OddRun run;
  run.frozen = false;
  const Config config = odd_config(run);
  Runtime runtime(RuntimeOptions::from(config), make_self_communicator);
  const ModelSpec model = [] {
    ModelSpec spec;
    spec.add_unit({"tied", {{"tied.a", Shape{7}, Initializer::normal(0.5f)}}, 1});
    return spec;
  }();
  Engine engine(runtime, model, config, std::make_unique<Beyond>(false));
  std::string message;
  try {
    engine.begin_micro_batch();
    engine.skip_gradients({0});
    end_with(engine, 1, 1);
    engine.step();
  } catch (const InvalidArgument& error) {
    message = error.message();
  }
  EXPECT_EQ(message, "optimizer Beyond gives 5 bytes of numbers where it gave 4 at the start");
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
