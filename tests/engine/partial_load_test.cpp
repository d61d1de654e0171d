// Loads of a part of a checkpoint: renamed, missing and additional tensors, at every stage, mesh and tier,
// and refusals that change nothing.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <mutex>

#include "device/cuda_probe.h"
#include "on_ranks.h"
#include "saving_fixture.h"

namespace tranche::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// The odd model with a renamed tensor, one less, two new ones (one of them frozen), and one that becomes
/// trainable.
ModelSpec changed_model() {
  ModelSpec spec;
  spec.add_unit({"tied",
                 {{"tied.a", Shape{7}, Initializer::normal(0.5f)},
                  {"tied.b", Shape{64, 3}, Initializer::uniform(-1, 1)}},
                 2});
  spec.add_unit(
      {"first",
       {{"new.i", Shape{301}, Initializer::normal(1)}, {"first.c", Shape{1009}, Initializer::normal(1)}},
       1});
  spec.add_unit({"tiny", {{"tiny.e", Shape{3}, Initializer::constant(0.25f)}}, 1});
  spec.add_unit({"mixed",
                 {{"mixed.f", Shape{13, 11}, Initializer::normal(0.1f)},
                  {"new.frozen", Shape{97}, Initializer::normal(0.1f)},
                  {odd_frozen_tensor, Shape{131}, Initializer::normal(0.1f)},
                  {"mixed.g", Shape{300}, Initializer::normal(0.1f)}},
                 1});
  return spec;
}

/// The name that a tensor of the changed model has in the original odd model; empty if it is new.
std::string origin_of(const std::string& tensor) {
  if (tensor == "first.c") return "prime.c";
  return tensor.starts_with("new.") ? "" : tensor;
}

void on_spec(const OddRun& run, const ModelSpec& spec, const std::vector<std::string>& frozen,
             const std::function<void(Engine&, Runtime&)>& body) {
  run_thread_ranks(run.ranks, [&](int, const CommunicatorFactory& factory) {
    Config config = odd_config(run);
    config.frozen = frozen;
    RuntimeOptions options = RuntimeOptions::from(config);
    options.device = run.device;
    options.log_level = LogLevel::off;
    Runtime runtime(options, factory);
    Engine engine(runtime, spec, config);
    body(engine, runtime);
  });
}

/// Weight, exp_avg and exp_avg_sq of each tensor; only the weight of frozen ones.
using Values = std::map<std::string, std::vector<std::vector<float>>>;

Values values_of(Engine& engine) {
  Values values;
  for (const UnitSpec& unit : engine.model().units()) {
    for (const TensorSpec& tensor : unit.tensors) {
      auto& of = values[tensor.name];
      of.push_back(engine.read_weight(tensor.name));
      if (engine.frozen(tensor.name)) continue;
      for (const char* state : {"exp_avg", "exp_avg_sq"}) {
        of.push_back(engine.read_optimizer_state(tensor.name, state));
      }
    }
  }
  return values;
}

void step(Engine& engine, Runtime& runtime) {
  whole_step(engine, runtime, engine.steps());
  (void)engine.step();
}

class PartialLoad : public Saving {
 protected:
#ifdef TRANCHE_ENGINE_TESTS_ON_GPU
  void SetUp() override {
    const detail::CudaProbe probe = detail::probe_cuda();
    if (probe.devices.empty()) GTEST_SKIP() << probe.problem;
  }
#endif
  OddRun setup(int ranks, int stage, DataType dtype, const std::string& mesh = {},
               OffloadTier tier = OffloadTier::none) const {
    OddRun run;
    run.ranks = ranks;
    run.stage = stage;
    run.dtype = dtype;
    run.mesh = mesh;
    run.policy = ReductionPolicy::micro_batch;
    run.offload.optimizer = tier;
    if (stage == 3) run.offload.parameters = tier;
    run.offload.nvme_path = path("nvme");
    run.device = device;
    std::filesystem::create_directories(run.offload.nvme_path);
    return run;
  }
  /// Trains the odd model, with mixed.g frozen too, and saves it.
  Values save(DataType dtype, const std::string& to) {
    Values saved;
    on_spec(setup(1, 0, dtype), odd_model(), {odd_frozen_tensor, "mixed.g"},
            [&](Engine& engine, Runtime& runtime) {
              for (int i = 0; i < 3; ++i) step(engine, runtime);
              saved = values_of(engine);
              engine.save(to, {.wait = true});
            });
    return saved;
  }
#ifdef TRANCHE_ENGINE_TESTS_ON_GPU
  static constexpr DeviceKind device = DeviceKind::cuda;
#else
  static constexpr DeviceKind device = DeviceKind::cpu;
#endif
  const std::vector<std::string> frozen{odd_frozen_tensor, "new.frozen"};
  const LoadOptions partial{.partial = true, .renames = {{"prime.c", "first.c"}}};
};

TEST_F(PartialLoad, WhatIsInBothIsTakenAndTheRestStaysAtEveryStageMeshAndTier) {
  for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
    const std::string from = path(std::string(name_of(dtype)));
    const Values saved = save(dtype, from);
    const std::string folder = from + "/step-00000003";
    for (const OddRun& run :
         {setup(1, 0, dtype), setup(2, 1, dtype), setup(3, 2, dtype), setup(3, 3, dtype),
          setup(4, 3, dtype, "replicate=2, shard=2"), setup(2, 2, dtype, {}, OffloadTier::cpu),
          setup(2, 3, dtype, {}, OffloadTier::cpu), setup(2, 3, dtype, {}, OffloadTier::nvme)}) {
      for (const bool weights_only : {false, true}) {
        std::mutex mutex;
        on_spec(run, changed_model(), frozen, [&](Engine& engine, Runtime& runtime) {
          step(engine, runtime);  // distinguishes values that stay from those of a new engine
          const Values before = values_of(engine);
          LoadOptions options = partial;
          options.weights_only = weights_only;
          const LoadResult loaded = engine.load(from, options);
          const Values after = values_of(engine);
          step(engine, runtime);
          const std::lock_guard lock(mutex);
          const std::string what = run.to_string() + (weights_only ? " weights" : "");
          for (const auto& [tensor, values] : after) {
            const std::string origin = origin_of(tensor);
            for (std::size_t kind = 0; kind < values.size(); ++kind) {
              const bool stays = origin.empty() || (kind > 0 && (weights_only || origin == "mixed.g"));
              EXPECT_EQ(values[kind], stays ? before.at(tensor)[kind] : saved.at(origin)[kind])
                  << what << " " << tensor << " " << kind;
            }
          }
          std::vector<std::string> lines{
              "tensor prime.c of " + folder + ": renamed first.c",
              "tensor new.i is not in " + folder + ": it stays as it is",
              "tensor new.frozen is not in " + folder + ": it stays as it is",
              "tensor mixed.g was frozen in " + folder +
                  ": its weight is taken, exp_avg, exp_avg_sq of it stays as it is",
              "tensor prime.d of " + folder + ": passed over, the model has none of this name"};
          if (weights_only) lines.erase(lines.begin() + 3);
          EXPECT_EQ(loaded.differences, lines) << what;
          EXPECT_EQ(engine.steps(), weights_only ? 2 : 4) << what;
        });
      }
    }
  }
}

TEST_F(PartialLoad, TheModelAndItsDigestsAreThoseOfOneRankAtEveryOther) {
  (void)save(DataType::float32, path("saved"));
  std::vector<kernels::Digest> digests;
  for (const OddRun& run : {setup(1, 0, DataType::float32), setup(2, 3, DataType::float32),
                            setup(4, 2, DataType::float32, "replicate=2, shard=2")}) {
    std::mutex mutex;
    on_spec(run, changed_model(), frozen, [&](Engine& engine, Runtime&) {
      (void)engine.load(path("saved"), partial);
      const kernels::Digest state = engine.state_digest();
      const std::lock_guard lock(mutex);
      digests.push_back(state);
    });
  }
  ASSERT_EQ(digests.size(), 7u);
  EXPECT_THAT(digests, ::testing::Each(digests.front()));
}

TEST_F(PartialLoad, WithoutAnyDifferenceItIsALoad) {
  (void)save(DataType::float32, path("saved"));
  on_spec(setup(2, 3, DataType::float32), odd_model(), {odd_frozen_tensor, "mixed.g"},
          [&](Engine& engine, Runtime&) {
            (void)engine.load(path("saved"));
            const kernels::Digest whole = engine.state_digest();
            EXPECT_THAT(engine.load(path("saved"), {.partial = true}).differences, IsEmpty());
            EXPECT_EQ(engine.state_digest(), whole);
          });
}

TEST_F(PartialLoad, RefusalsNameTheTensorAndTheWayOutAndChangeNothing) {
  (void)save(DataType::float32, path("saved"));
  const std::string folder = path("saved/step-00000003");
  const auto refusal = [&](const ModelSpec& spec, const LoadOptions& options,
                           const std::vector<std::string>& frozen_tensors,
                           const std::string& optimizer = "AdamW") {
    OddRun run = setup(2, 3, DataType::float32);
    run.optimizer = optimizer;
    std::string text;
    std::mutex mutex;
    on_spec(run, spec, frozen_tensors, [&](Engine& engine, Runtime&) {
      const kernels::Digest before = engine.state_digest();
      const std::string message = message_of<Error>([&] { engine.load(path("saved"), options); });
      EXPECT_EQ(engine.state_digest(), before);
      const std::lock_guard lock(mutex);
      text = message;
    });
    return text;
  };
  const std::vector<std::string> saved_frozen{odd_frozen_tensor, "mixed.g"};
  EXPECT_THAT(refusal(changed_model(), {.renames = {{"prime.c", "first.c"}}}, frozen),
              HasSubstr("checkpoint " + folder +
                        " has no tensor 'new.i'; a partial load (--partial) leaves it as it is"));
  EXPECT_THAT(refusal(odd_model(true), {}, {}),
              HasSubstr("holds tensor prime.c, which this model does not have; "
                        "a partial load (--partial) passes it over"));
  ModelSpec wide;
  wide.add_unit({"tied",
                 {{"tied.a", Shape{7}, Initializer::zeros()}, {"tied.b", Shape{65, 3}, Initializer::zeros()}},
                 2});
  EXPECT_THAT(refusal(wide, {.partial = true}, {}),
              HasSubstr("tensor tied.b has shape [64, 3] in " + folder +
                        ", but [65, 3] in this model; to leave it out of a partial load, give it an unused "
                        "name (--rename tied.b=unused.tied.b)"));
  ModelSpec none;
  none.add_unit({"alone", {{"alone.a", Shape{7}, Initializer::zeros()}}, 1});
  EXPECT_THAT(refusal(none, {.partial = true}, {}),
              HasSubstr("holds no tensor of this model: its first is tied.a, the model's is alone.a"));
  EXPECT_THAT(
      refusal(odd_model(), {.partial = true, .renames = {{"prime.c", "tied.a"}}}, saved_frozen),
      HasSubstr("tensors tied.a and prime.c of " + folder + " are both to be tied.a; rename one of them"));
  EXPECT_THAT(refusal(odd_model(), {.partial = true, .renames = {{"prime.e", "x"}}}, saved_frozen),
              AllOf(HasSubstr("rename prime.e=x"), HasSubstr("the closest match is 'prime.")));
  EXPECT_THAT(refusal(odd_model(), {.partial = true, .renames = {{"prime.c", "x*"}}}, saved_frozen),
              HasSubstr("rename prime.c=x*: the * of the new name"));
  EXPECT_THAT(refusal(odd_model(), {.partial = true}, saved_frozen, "SGD"),
              HasSubstr("optimizer SGD needs momentum_buffer of tensor tied.a"))
      << "the state of another optimizer is no difference of tensors";
}

TEST_F(PartialLoad, ATensorOfAnotherShapeIsLeftOutUnderAnotherName) {
  (void)save(DataType::float32, path("saved"));
  ModelSpec wide;
  wide.add_unit(
      {"tied",
       {{"tied.a", Shape{7}, Initializer::zeros()}, {"tied.b", Shape{65, 3}, Initializer::constant(3)}},
       2});
  on_spec(setup(2, 2, DataType::float32), wide, {}, [&](Engine& engine, Runtime&) {
    const LoadResult loaded =
        engine.load(path("saved"), {.partial = true, .renames = {{"tied.b", "unused.tied.b"}}});
    EXPECT_EQ(engine.read_weight("tied.b"), std::vector<float>(65 * 3, 3.0f));
    EXPECT_THAT(loaded.differences, ::testing::IsSupersetOf({HasSubstr("tensor tied.b is not in"),
                                                             HasSubstr("tensor tied.b of")}));
  });
}

#ifndef TRANCHE_ENGINE_TESTS_ON_GPU
TEST_F(PartialLoad, OnMetaItIsHeldAgainstTheModelAndNothingIsRead) {
  (void)save(DataType::float32, path("saved"));
  const OddRun run = setup(1, 0, DataType::float32);
  Config config = odd_config(run);
  config.frozen = frozen;
  RuntimeOptions options = RuntimeOptions::from(config);
  options.device = DeviceKind::meta;
  options.log_level = LogLevel::off;
  Runtime runtime(options, [](const CommunicatorOptions& o) { return make_meta_communicator(0, 1, 1, o); });
  Engine engine(runtime, changed_model(), config);
  EXPECT_THAT(message_of<CheckpointError>([&] { engine.load(path("saved")); }), HasSubstr("--partial"));
  EXPECT_EQ(engine.load(path("saved"), partial).differences.size(), 5u);
}
#endif

}  // namespace
}  // namespace tranche::test
