#pragma once
/// Trainings and forward passes on meshes with the axis `context`, for comparisons with one rank.

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "models/language_head.h"
#include "tensor_models.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/models/context_rows.h"

namespace tranche::models {

/// A run with samples of `time` tokens.
struct ContextRun {
  std::int64_t time = 16;
  int steps = 20;
  bool documents = false;                  ///< four documents in each row
  std::vector<std::int64_t> lengths = {};  ///< of micro-batches, in turn; empty: `time`
};

/// `config_of(1)` on a mesh whose `data_ranks` share the samples.
inline Config on_mesh(const std::string& mesh, int data_ranks = 1, int stage = 0) {
  Config config = config_of(1, data_ranks, stage);
  config.mesh = mesh;
  return config;
}

/// The losses of training with train_step(), followed by that of an evaluation of other samples.
inline std::vector<double> losses_of(int ranks, const LanguageModel& model, Config config,
                                     const ContextRun& run) {
  config.communication_timeout = patience_of(ranks);
  std::vector<double> result;
  std::mutex mutex;
  on_ranks(ranks, model.spec(run.time), config, [&](Engine& engine) {
    const Mesh& mesh = engine.runtime().mesh();
    const Config& used = engine.config();
    const int data_ranks = mesh.data_ranks(), data_rank = mesh.data_rank(engine.runtime().rank());
    std::vector<TokenData> data(static_cast<std::size_t>(used.accumulation_steps),
                                TokenData(run.time, model.shape().vocabulary, true));
    std::vector<double> mine;
    std::size_t number = 0;
    const auto drawn = [&](TokenData& place, std::int64_t first) {
      if (!run.lengths.empty()) place.time = run.lengths[number++ % run.lengths.size()];
      place.draw(first + data_rank * used.micro_batch_size, used.micro_batch_size);
      if (run.documents) place.split_in_four();
      return place.batch();
    };
    for (int step = 0; step < run.steps; ++step) {
      train_step(model, engine, [&](std::int64_t m) {
        return drawn(data[static_cast<std::size_t>(m)],
                     step * used.train_batch_size + m * data_ranks * used.micro_batch_size);
      });
      mine.push_back(engine.step().loss);
    }
    engine.begin_evaluation();
    for (std::int64_t m = 0; m < used.accumulation_steps; ++m) {
      model.evaluate(engine,
                     drawn(data[static_cast<std::size_t>(m)], 1000 + m * data_ranks * used.micro_batch_size));
    }
    mine.push_back(engine.end_evaluation().loss);
    if (engine.runtime().rank() != 0) return;
    const std::lock_guard lock(mutex);
    result = mine;
  });
  return result;
}

/// The values that a forward pass with dropout computes for every token: logits, and the residual after the
/// last block. The key is (sample, token).
struct TokenRows {
  std::map<std::pair<std::int64_t, std::int64_t>, std::vector<float>> logits, residual;
};

inline TokenRows forward_rows(int ranks, const LanguageModel& model, const Config& config,
                              const ContextRun& run) {
  TokenRows result;
  std::mutex mutex;
  on_ranks(ranks, model.spec(run.time), config, [&](Engine& engine) {
    TokenData data(run.time, model.shape().vocabulary, true);
    data.draw(3, batch);
    if (run.documents) data.split_in_four();
    const TokenBatch whole = data.batch();
    const InferenceScope scope(engine);
    Pass pass = model.pass_of(engine, whole, true);
    const LocalBatch local(pass, whole);
    pass.tables = model.acquire_tables(pass);
    const auto rows = [&](std::int64_t width, DataType dtype) {
      return StepTensors(engine, Category::activations, "rows", {{dtype, {pass.rows(), width}}});
    };
    StepTensors residual = rows(pass.shape.width, pass.dtype());
    model.embedding_forward(pass, engine.gather({0}), local.tokens(), residual[0]);
    for (std::int64_t block = 0; block < pass.shape.layers; ++block) {
      const StepTensors saved = model.acquire_block_activations(pass);
      StepTensors next = rows(pass.shape.width, pass.dtype());
      model.block_forward(pass, block, engine.gather(model.unit_of_block(block)), residual[0], saved,
                          &next[0]);
      residual = std::move(next);
    }
    const StepTensors logits = rows(pass.shape.vocabulary, DataType::float32),
                      wide = rows(pass.shape.width, DataType::float32);
    language_logits(model, pass, engine.gather(model.unit_of_head()), residual[0], 0, pass.rows(), logits[0]);
    kernels::cast(engine.compute_stream(), residual[0], wide[0]);
    engine.compute_stream().synchronize();
    const std::lock_guard lock(mutex);
    const std::int64_t of_run = pass.rows() / pass.runs();
    for (std::int64_t row = 0; row < pass.rows(); ++row) {
      const std::int64_t sample = row % of_run / pass.time;
      const std::int64_t token = pass.first_of_run(static_cast<int>(row / of_run)) + row % pass.time;
      const auto row_of = [&](const TensorView& all) {
        const float* first = all.as<float>() + row * all.shape[1];
        return std::vector<float>(first, first + all.shape[1]);
      };
      result.logits[{sample, token}] = row_of(logits[0]);
      result.residual[{sample, token}] = row_of(wide[0]);
    }
  });
  return result;
}

}  // namespace tranche::models
