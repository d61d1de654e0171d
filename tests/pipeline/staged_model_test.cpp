// A user's model with schedules that have several chunks per rank.
#include "tranche/pipeline/staged_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>

#include "tests/core/error_text.h"
#include "tests/models/training_fixture.h"
#include "tranche/kernels/elementwise.h"

namespace tranche::pipeline {
namespace {

constexpr std::int64_t width = 4, rows = 3;

/// Counts of a rank's chunks: created, destroyed, and kept longer than necessary.
struct Seen {
  int made = 0, destroyed = 0;
  int orphans = 0;  ///< chunks that outlived their micro-batch
  int kept = 0;     ///< chunks that still exist although their weight gradients are done
  int most_kept = 0;
};

/// Passes its input on; its gradients are zero.
class Copy : public StagedChunk {
 public:
  Copy(Engine& engine, const Engine::Chunk& chunk, std::weak_ptr<int> micro_batch, Seen& seen)
      : engine_(engine), chunk_(chunk), micro_batch_(std::move(micro_batch)), seen_(seen) {
    ++seen_.made;
  }
  ~Copy() override {
    ++seen_.destroyed;
    if (micro_batch_.expired()) ++seen_.orphans;
    if (done_) --seen_.kept;
  }
  void forward(const ConstTensorView* input, const TensorView* output) override {
    if (output != nullptr) pass(input, *output);
  }
  void input_gradients(const ConstTensorView* output_gradient, const TensorView* input_gradient) override {
    if (input_gradient != nullptr) pass(output_gradient, *input_gradient);
  }
  void weight_gradients() override {
    seen_.most_kept = std::max(seen_.most_kept, seen_.kept);
    for (int use = chunk_.end - 1; use >= chunk_.begin; --use) {
      UnitGradients gradients =
          engine_.gradients(engine_.model().forward[static_cast<std::size_t>(use)].unit);
      std::move(gradients).reduce();
    }
    done_ = true;
    ++seen_.kept;
  }

 private:
  void pass(const ConstTensorView* from, const TensorView& to) {
    if (from != nullptr) return kernels::copy(engine_.compute_stream(), *from, to);
    std::memset(to.data, 0, static_cast<std::size_t>(to.elements() * size_of(to.dtype)));
  }
  Engine& engine_;
  Engine::Chunk chunk_;
  std::weak_ptr<int> micro_batch_;
  Seen& seen_;
  bool done_ = false;
};

class CopyMicroBatch : public StagedMicroBatch {
 public:
  CopyMicroBatch(Engine& engine, Seen& seen) : engine_(engine), seen_(seen) {
    engine.begin_micro_batch_beside();
  }
  Boundary boundary() const override { return {DataType::float32, {rows, width}}; }
  std::unique_ptr<StagedChunk> begin(const Engine::Chunk& chunk) override {
    return std::make_unique<Copy>(engine_, chunk, alive_, seen_);
  }
  void end() override {
    const std::int64_t count = engine_.stage().last() ? rows : 0;
    engine_.end_micro_batch({&loss_, DataType::float64, {}}, {&count, DataType::int64, {}});
  }

 private:
  Engine& engine_;
  Seen& seen_;
  std::shared_ptr<int> alive_ = std::make_shared<int>();
  double loss_ = 0;
};

class CopyModel : public StagedModel {
 public:
  explicit CopyModel(Seen& seen) : seen_(seen) {}
  std::unique_ptr<StagedMicroBatch> begin(Engine& engine, std::int64_t /*micro_batch*/,
                                          bool /*training*/) override {
    return std::make_unique<CopyMicroBatch>(engine, seen_);
  }

 private:
  Seen& seen_;
};

Config config_of(const std::string& mesh, const std::string& schedule, int micro_batches) {
  Config config = models::plain_config(1);
  config.train_batch_size = 0;
  config.micro_batch_size = 1;
  config.accumulation_steps = micro_batches;
  config.mesh = mesh;
  config.pipeline_schedule = schedule;
  return config;
}

/// Six layers, or four of which the last uses the first one's table again.
ModelSpec spec_of(bool tied) {
  ModelSpec spec;
  const Initializer zeros = Initializer::zeros();
  const int layers = tied ? 3 : 6;
  for (int layer = 0; layer < layers; ++layer) {
    const std::string name = tied && layer == 0 ? "table" : "layer" + std::to_string(layer);
    const UnitId unit = spec.add_unit({.name = name,
                                       .tensors = {{name + ".weight", {width, width}, zeros}},
                                       .uses_per_micro_batch = tied && layer == 0 ? 2 : 1});
    spec.forward.push_back({unit, 0, 1});
  }
  if (tied) spec.forward.push_back({{0}, 1, 1});
  spec.residual_width = width;
  return spec;
}

TEST(StagedModel, ChunksGoBehindTheirWeightGradientsAndBeforeTheirMicroBatch) {
  for (const char* const schedule : {"1f1b", "zb-h1", "interleaved", "breadth-first", "zb-v"}) {
    models::on_ranks(3, spec_of(false), config_of("pipeline=3", schedule, 6), [&](Engine& engine) {
      Seen seen;
      CopyModel model(seen);
      train_step(model, engine);
      (void)engine.step();
      EXPECT_EQ(seen.made, 6 * static_cast<int>(engine.stage().chunks.size())) << schedule;
      EXPECT_EQ(seen.destroyed, seen.made) << schedule;
      EXPECT_EQ(seen.orphans, 0) << schedule << ": a chunk was there when its micro-batch had gone";
      EXPECT_EQ(seen.most_kept, 0) << schedule << ": what a chunk kept for its backward was still there";
    });
  }
}

TEST(StagedModel, RefusesGradientsOfAnEarlierUseBeforeThoseOfTheLater) {
  const std::filesystem::path file =
      std::filesystem::temp_directory_path() / ("tranche-uses-" + std::to_string(::getpid()) + ".csv");
  const auto text_of = [&](const std::string& first_rank) {
    std::ofstream(file) << first_rank << "\n1F0,2F0,2I0,1I0,1W0,2W0\n";
    return test::message_of<ConfigurationError>([&] {
      models::on_ranks(2, spec_of(true), config_of("pipeline=2", file.string(), 1), [&](Engine& engine) {
        Seen seen;
        CopyModel model(seen);
        train_step(model, engine);
        (void)engine.step();
      });
    });
  };
  EXPECT_THAT(
      text_of("0F0,3F0,3I0,0I0,0W0,3W0"),
      testing::HasSubstr("0W0 of rank 0 stands before the weight gradients of chunk 3, which uses unit "
                         "table too: gradients of its later use have to come first"));
  EXPECT_EQ(text_of("0F0,3F0,3I0,0I0,3W0,0W0"), test::nothing_thrown);
  std::filesystem::remove(file);
}

}  // namespace
}  // namespace tranche::pipeline
