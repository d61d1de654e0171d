#include "cut_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "on_ranks.h"
#include "partition/slices.h"

namespace tranche::test {

namespace {

using detail::Box;

/// A rank's part of a tensor, and the number of neighbouring ranks with the same part.
struct Part {
  Box box;
  int sharers = 1;
};

Part part_of(const TensorSpec& tensor, const ModelSpec& model, const Config& config, int rank, int ranks) {
  for (std::size_t d = 0; d < tensor.dimensions.size(); ++d) {
    const Dimension& one = tensor.dimensions[d];
    if (config.leaves_whole(one.name) ||
        std::find(model.tensor_dimensions.begin(), model.tensor_dimensions.end(), one.name) ==
            model.tensor_dimensions.end()) {
      continue;
    }
    const detail::TensorCut cut{static_cast<int>(d), one.blocks, one.grain};
    return {detail::slice_of(tensor.shape, cut, rank, ranks),
            detail::sharers(detail::grains_of(tensor.shape, cut), ranks)};
  }
  return {detail::whole_box(tensor.shape), ranks};
}

}  // namespace

ModelSpec cut_model() {
  const Dimension width{"width"}, vocabulary{"vocabulary"}, heads{"heads", 1, 2}, fused{"heads", 3, 2},
      key_value{"key_value_heads", 1, 3}, inner{"inner"};
  const Initializer normal = Initializer::normal(0.5f), uniform = Initializer::uniform(-1, 1);
  const Initializer own = Initializer::from("own", [](std::int64_t first, std::span<float> values) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = 0.125f * static_cast<float>((first + static_cast<std::int64_t>(i)) % 17);
    }
  });
  ModelSpec model;
  model.tensor_dimensions = {"vocabulary", "heads", "key_value_heads", "inner"};
  model.whole_dimensions = {"inner", "vocabulary"};
  model.sequence_parts = true;
  model.tokens_per_sample = 8;
  model.add_unit(
      {"embedding",
       {{.name = "wte", .shape = {13, 6}, .initializer = normal, .dimensions = {vocabulary, width}},
        {.name = "wpe", .shape = {5, 6}, .initializer = normal, .uses = {0}},
        {.name = "table",
         .shape = {13, 3},
         .initializer = normal,
         .frozen = true,
         .dimensions = {vocabulary, width}},
        {.name = "still", .shape = {7}, .initializer = uniform, .frozen = true, .uses = {1}}},
       2});
  model.add_unit(
      {"block",
       {{.name = "norm", .shape = {6}, .initializer = Initializer::ones()},
        {.name = "qkv",
         .shape = {6, 24},
         .initializer = normal,
         .linear = LinearLayout::in_out,
         .matrices = 3,
         .dimensions = {width, fused}},
        {.name = "qkv.bias", .shape = {24}, .initializer = uniform, .dimensions = {fused}},
        {.name = "key", .shape = {6, 6}, .initializer = own, .matrices = 1, .dimensions = {key_value, width}},
        {.name = "projection",
         .shape = {8, 6},
         .initializer = normal,
         .linear = LinearLayout::in_out,
         .matrices = 1,
         .dimensions = {heads, width}},
        {.name = "projection.bias", .shape = {6}, .initializer = Initializer::zeros()},
        {.name = "up", .shape = {6, 11}, .initializer = own, .matrices = 1, .dimensions = {width, inner}},
        {.name = "even", .shape = {32, 256}, .initializer = normal, .dimensions = {inner, width}},
        {.name = "big", .shape = {11, 300}, .initializer = normal, .dimensions = {inner, width}}},
       1});
  model.add_unit({"whole",
                  {{.name = "whole.norm", .shape = {9}, .initializer = normal},
                   {.name = "whole.square", .shape = {5, 4}, .initializer = normal, .matrices = 1}},
                  1});
  model.forward = {{{0}, 0, 1}, {{1}, 0, 1}, {{2}, 0, 1}, {{0}, 1, 1}};
  return model;
}

void cut_step(Engine& engine, Runtime& runtime, std::int64_t step, const std::string& bad) {
  const Config& config = engine.config();
  const int tensor_rank = runtime.tensor() == nullptr ? 0 : runtime.tensor()->rank();
  const int tensor_ranks = runtime.tensor() == nullptr ? 1 : runtime.tensor()->size();
  const int context_rank = runtime.context() == nullptr ? 0 : runtime.context()->rank();
  const int context_ranks = runtime.context() == nullptr ? 1 : runtime.context()->size();
  const std::int64_t data_rank = runtime.mesh().data_rank(runtime.rank());
  const ModelSpec& model = engine.model();
  for (std::int64_t m = 0; m < config.accumulation_steps; ++m) {
    const std::int64_t count = config.micro_batch_size;
    const std::int64_t first = step * cut_samples + (data_rank * config.accumulation_steps + m) * count;
    engine.begin_micro_batch();
    const float scale = engine.loss_gradient_scale();
    const Engine::StageUses stage = engine.stage();
    const auto backward = [&](int place) {
      const Engine::Chunk& chunk = stage.chunks.front();
      if (stage.stages > 1 && (place < chunk.begin || place >= chunk.end)) return;
      const auto [id, use, operations] = model.forward[static_cast<std::size_t>(place)];
      const int unit = id.index;
      const GatheredUnit weights = engine.gather({unit});
      UnitGradients gradients = engine.gradients({unit});
      const std::vector<TensorSpec>& tensors = model.unit({unit}).tensors;
      for (std::size_t t = 0; t < tensors.size(); ++t) {
        if (!tensors[t].read_by(use)) continue;
        const float share = unit == 0 && tensors[t].uses.empty() ? 0.5f : 1.0f;
        const Part part = part_of(tensors[t], model, config, tensor_rank, tensor_ranks);
        EXPECT_EQ(weights.tensor(static_cast<int>(t)).shape, detail::shape_of(part.box)) << tensors[t].name;
        const TensorView view = gradients.tensor(static_cast<int>(t));
        EXPECT_EQ(view.shape, detail::shape_of(part.box)) << tensors[t].name;
        if (engine.frozen(tensors[t].name)) continue;
        const Shape whole = tensors[t].shape;
        const bool is_bad = tensors[t].name == bad;
        engine.compute_stream().enqueue("gradient", [=, number = unit * 16 + static_cast<std::int64_t>(t)] {
          auto* values = view.as<float>();
          detail::common_runs(whole, part.box, detail::whole_box(whole), {0, view.elements()},
                              [&](const detail::CommonRun& run) {
                                for (std::int64_t i = 0; i < run.elements; ++i) {
                                  const std::int64_t element = run.tensor + i;
                                  // Ranks that hold the same elements process different samples.
                                  for (std::int64_t s = first; s < first + count; ++s) {
                                    if (s % part.sharers != tensor_rank % part.sharers ||
                                        s / part.sharers % context_ranks != context_rank) {
                                      continue;
                                    }
                                    const std::int64_t drawn =
                                        (element * 29 + s * 31 + number * 37 + element * s % 13) % 127 - 63;
                                    values[run.first + i] += share * scale * static_cast<float>(drawn) / 64;
                                  }
                                  if (is_bad && element == whole.elements() - 1) {
                                    values[run.first + i] = std::numeric_limits<float>::infinity();
                                  }
                                }
                              });
        });
      }
      std::move(gradients).reduce();
    };
    for (int place = 3; place >= 0; --place) backward(place);
    const bool counts = stage.last() && context_rank == 0;
    end_with(engine, counts ? 0.25 * static_cast<double>(first + count) : 0, counts ? count : 0);
  }
}

void on_cut_ranks(const CutRun& run, const std::function<void(Engine&, Runtime&)>& body,
                  const std::function<void(Config&)>& adjust, const ModelSpec& model) {
  CommonStart start(run.ranks);
  run_thread_ranks(run.ranks, [&](int, const CommunicatorFactory& factory) {
    CommonStart::Rank started(start);
    Config config;
    config.stage = run.stage;
    config.mesh = run.mesh;
    config.replicate = run.replicate;
    for (const std::string& dimension : run.whole) config.layout[dimension] = "whole";
    config.train_batch_size = cut_samples;
    config.micro_batch_size = 2;
    config.accumulation_steps = 0;  // follows from the other two
    config.optimizer.type = run.optimizer;
    config.optimizer.learning_rate = 0.05;
    config.precision.compute = run.dtype;
    config.precision.communication = DataType::float32;  // keeps sums of gradients exact
    config.precision.accumulation = DataType::float32;
    if (run.stochastic_rounding) {
      config.precision.master = MasterFormat::none;
      config.precision.stochastic_rounding = true;
    }
    config.precision.moments = run.moments;
    config.gradient_clipping = run.clipping;
    config.offload = run.offload;
    config.workspace_bytes = config.staging_bytes = 64 << 10;
    config.communication_timeout = 60;
    config.threads = 1;
    config.debug.poison_memory = true;
    if (adjust) adjust(config);
    RuntimeOptions options = RuntimeOptions::from(config);
    options.log_level = LogLevel::off;
    Runtime runtime(options, factory);
    Engine engine(runtime, model, config);
    started.await_others();
    body(engine, runtime);
  });
}

}  // namespace tranche::test
