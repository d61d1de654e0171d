// Forward passes of language models that return logits: of a whole text, and of the next token with a cache.

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <utility>

#include "models/language_head.h"
#include "models/language_stage.h"
#include "tranche/core/error.h"
#include "tranche/engine/engine.h"
#include "tranche/models/key_value_cache.h"
#include "tranche/models/language_model.h"
#include "tranche/models/tensor_rows.h"
#include "tranche/pipeline/executor.h"

namespace tranche::models {

namespace {

StepTensors acquire_residual(const Pass& pass) {
  return {pass.engine,
          Category::activations,
          "residual",
          {{pass.dtype(), {pass.local_rows(), pass.shape.width}}}};
}

/// Gathers `count` rows of logits over the axis `tensor`, from this rank's columns.
std::vector<float> whole_logits(const Pass& pass, std::vector<float> own, std::int64_t count) {
  if (pass.tensor == nullptr) return own;
  // Parts may differ by a column, but messages must have equal sizes.
  const std::int64_t vocabulary = pass.shape.vocabulary, ranks = pass.tensor_ranks();
  const std::int64_t message = count * divide_round_up(vocabulary, ranks);
  own.resize(static_cast<std::size_t>(message));
  std::vector<float> parts(static_cast<std::size_t>(message * ranks)),
      result(static_cast<std::size_t>(count * vocabulary));
  gather_from_ranks(pass, "logits", own.data(), parts.data(), message, DataType::float32, Tier::host);
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    const std::int64_t first = vocabulary * rank / ranks, columns = vocabulary * (rank + 1) / ranks - first;
    for (std::int64_t row = 0; row < count; ++row) {
      std::copy_n(parts.begin() + rank * message + row * columns, columns,
                  result.begin() + row * vocabulary + first);
    }
  }
  return result;
}

/// Returns the logits of rows [first, first + count) of the residual on the host; waits for them.
std::vector<float> logits_of(const LanguageModel& model, const Pass& pass, const ConstTensorView& residual,
                             std::int64_t first, std::int64_t count) {
  Engine& engine = pass.engine;
  Stream& stream = engine.compute_stream();
  const std::int64_t columns = pass.part_of(pass.shape.vocabulary).count;
  std::vector<float> result(static_cast<std::size_t>(count * columns));
  const GatheredRows rows(pass, "the residual", residual);
  const StepTensors logits(engine, Category::activations, "next token's logits",
                           {{DataType::float32, {count, columns}}});
  language_logits(model, pass, engine.gather(model.unit_of_head()), rows.view(), first, count, logits[0]);
  engine.device().copy_to_host(stream, result.data(), logits[0].data, logits[0].bytes());
  stream.synchronize();
  return whole_logits(pass, std::move(result), count);
}

/// The rows of a pass whose logits are requested, and the logits, which the last stage writes.
struct WantedLogits {
  std::int64_t first = 0, count = 0;
  std::vector<float> values = {};
};

/// An inference pass on a chunk of this rank.
class InferenceChunk : public pipeline::ChunkWork {
 public:
  InferenceChunk(const LanguageModel& model, const Pass& pass, const ConstTensorView& tokens,
                 WantedLogits& logits, const Engine::Chunk& chunk)
      : model_(model), pass_(pass), tokens_(tokens), logits_(logits), chunk_(chunk) {}

  TensorView input() override {
    residual_ = acquire_residual(pass_);
    return residual_[0];
  }
  void forward() override {
    Engine& engine = pass_.engine;
    if (chunk_.first()) {
      residual_ = acquire_residual(pass_);
      model_.embedding_forward(pass_, engine.gather(embedding), tokens_, residual_[0]);
    }
    const BlockRange blocks = blocks_of_chunk(chunk_, pass_.shape.layers);
    for (std::int64_t block = blocks.begin; block < blocks.end; ++block) {
      const GatheredUnit unit = engine.gather(model_.unit_of_block(block));
      const StepTensors activations = model_.acquire_block_activations(pass_);
      StepTensors next = acquire_residual(pass_);
      model_.block_forward(pass_, block, unit, residual_[0], activations, &next[0]);
      residual_ = std::move(next);
    }
    if (!chunk_.last()) return;
    logits_.values = logits_of(model_, pass_, residual_[0], logits_.first, logits_.count);
    residual_.release();
  }
  ConstTensorView output() override { return residual_[0]; }
  void output_sent(const Event& sent) override { residual_.take().release(sent); }

 private:
  const LanguageModel& model_;
  const Pass& pass_;
  ConstTensorView tokens_;
  WantedLogits& logits_;
  Engine::Chunk chunk_;
  StepTensors residual_;
};

/// An inference pass on this rank.
class InferencePass : public pipeline::MicroBatchWork {
 public:
  InferencePass(const LanguageModel& model, const Pass& pass, const ConstTensorView& tokens,
                WantedLogits& logits)
      : model_(model), pass_(pass), tokens_(tokens), logits_(logits) {}
  std::unique_ptr<pipeline::ChunkWork> begin(const Engine::Chunk& chunk) override {
    return std::make_unique<InferenceChunk>(model_, pass_, tokens_, logits_, chunk);
  }
  void end() override {}

 private:
  const LanguageModel& model_;
  const Pass& pass_;
  ConstTensorView tokens_;
  WantedLogits& logits_;
};

/// Runs the pass on this rank's chunks and returns the logits on the stages in `where`. Afterwards the host
/// memory of the pass's inputs may be reused.
std::vector<float> forward(const LanguageModel& model, Pass& pass, const ConstTensorView& tokens,
                           WantedLogits wanted, LogitsOn where) {
  Engine& engine = pass.engine;
  pass.tables = model.acquire_tables(pass);
  const auto begin = [&](std::int64_t) {
    return std::make_unique<InferencePass>(model, pass, tokens, wanted);
  };
  if (engine.stage().stages == 1) {
    in_parts(engine, [&] { begin(0)->begin(engine.stage().chunks.front())->forward(); });
    return std::move(wanted.values);
  }
  pipeline::run_forward(engine, begin, "inference");
  engine.compute_stream().synchronize();
  if (where == LogitsOn::last_stage) return std::move(wanted.values);
  wanted.values.resize(static_cast<std::size_t>(wanted.count * pass.shape.vocabulary));
  pipeline::give_to_all_stages(engine, wanted.values, "logits");
  return std::move(wanted.values);
}

void require_token(std::int32_t token, std::int64_t vocabulary) {
  if (token < 0 || token >= vocabulary) {
    throw InvalidArgument(fmt::format("token {} is not in the vocabulary of {}", token, vocabulary));
  }
}

/// Returns the logits after `tokens`, which must fit the model; fills a row of the cache, if there is one.
std::vector<float> whole_text(const LanguageModel& model, Engine& engine,
                              std::span<const std::int32_t> tokens, const KeyValueCache* cache,
                              std::int64_t row, LogitsOn where) {
  if (tokens.empty()) throw InvalidArgument("no tokens were given to continue; give at least one");
  const auto seen = static_cast<std::int64_t>(tokens.size());
  for (const std::int32_t token : tokens) require_token(token, model.shape().vocabulary);
  const InferenceScope scope(engine, {1, seen, 1});
  Stream& stream = engine.compute_stream();
  const StepTensors inputs(engine, Category::activations, "prompt",
                           {{DataType::int32, {1, seen}}, {DataType::int32, {1}}});
  engine.device().copy_from_host(stream, inputs[0].data, tokens.data(), inputs[0].bytes());
  const std::int64_t sample = 0;
  Pass pass = model.whole_pass_of(engine, {inputs[0], inputs[0], {&sample, 1}}, false);
  std::optional<CachePlace> place;
  const auto length = static_cast<std::int32_t>(seen);
  if (cache != nullptr) {
    engine.device().copy_from_host(stream, inputs[1].data, &length, inputs[1].bytes());
    place.emplace(CachePlace{*cache, row, inputs[1], seen, true});
    pass.cache = &*place;
  }
  return forward(model, pass, inputs[0], {seen - 1, 1}, where);
}

}  // namespace

std::optional<CacheHeads> LanguageModel::cache_heads() const {
  return std::nullopt;
}

bool LanguageModel::has_cache() const {
  return cache_heads().has_value();
}

std::vector<float> LanguageModel::next_token_logits(Engine& engine, std::span<const std::int32_t> tokens,
                                                    LogitsOn where) const {
  const auto most = static_cast<std::size_t>(shape().positions);
  return whole_text(*this, engine, tokens.last(std::min(tokens.size(), most)), nullptr, 0, where);
}

std::vector<float> LanguageModel::prefill(Engine& engine, KeyValueCache& cache, std::int64_t row,
                                          std::span<const std::int32_t> tokens, LogitsOn where) const {
  cache.set_length(row, static_cast<std::int64_t>(tokens.size()));
  try {
    return whole_text(*this, engine, tokens, &cache, row, where);
  } catch (...) {
    cache.set_length(row, 0);
    throw;
  }
}

std::vector<float> LanguageModel::decode(Engine& engine, KeyValueCache& cache,
                                         std::span<const std::int32_t> tokens, LogitsOn where) const {
  const std::int64_t rows = cache.rows();
  if (static_cast<std::int64_t>(tokens.size()) != rows) {
    throw InvalidArgument(
        fmt::format("{} tokens were given for the {} rows of a key-value cache", tokens.size(), rows));
  }
  const ModelShape sizes = shape();
  std::vector<std::int32_t> inputs, positions, lengths;  // harmless values for idle rows
  std::int64_t most = 1;
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int32_t token = tokens[static_cast<std::size_t>(row)];
    const std::int64_t length = cache.length(row);
    if (token >= 0) {
      require_token(token, sizes.vocabulary);
      if (length < 1 || length >= cache.capacity()) {
        throw InvalidArgument(
            fmt::format("row {} of a key-value cache cannot take another token: it has {} of {}; {}", row,
                        length, cache.capacity(),
                        length < 1 ? "fill it with prefill()" : "let it rest and compute the text anew"));
      }
      most = std::max(most, length + 1);
    }
    inputs.push_back(std::max(token, 0));
    positions.push_back(token < 0 ? 0 : static_cast<std::int32_t>(length));
    lengths.push_back(token < 0 ? 0 : static_cast<std::int32_t>(length) + 1);
  }
  std::vector<float> result;
  {
    const InferenceScope scope(engine, {rows, 1, rows});
    Stream& stream = engine.compute_stream();
    const TensorRequest numbers{DataType::int32, {rows, 1}};
    const StepTensors memory(engine, Category::activations, "new tokens", {numbers, numbers, numbers});
    engine.device().copy_from_host(stream, memory[0].data, inputs.data(), memory[0].bytes());
    engine.device().copy_from_host(stream, memory[1].data, positions.data(), memory[1].bytes());
    engine.device().copy_from_host(stream, memory[2].data, lengths.data(), memory[2].bytes());
    const std::vector<std::int64_t> samples(static_cast<std::size_t>(rows));
    Pass pass = whole_pass_of(engine, {memory[0], memory[0], samples}, false);
    pass.positions = memory[1];
    const CachePlace place{cache, 0, memory[2].reshaped({rows}), most, false};
    pass.cache = &place;
    result = forward(*this, pass, memory[0], {0, rows}, where);
  }
  for (std::int64_t row = 0; row < rows; ++row) {
    if (tokens[static_cast<std::size_t>(row)] >= 0) cache.set_length(row, cache.length(row) + 1);
  }
  return result;
}

void LanguageModel::gather_for_others(Engine& engine) const {
  const InferenceScope scope(engine, {0, 0, 0});
  for (const Engine::Chunk& chunk : engine.stage().chunks) {
    const BlockRange blocks = blocks_of_chunk(chunk, shape().layers);
    if (chunk.first()) (void)engine.gather(embedding);
    for (std::int64_t block = blocks.begin; block < blocks.end; ++block) {
      (void)engine.gather(unit_of_block(block));
    }
    if (chunk.last()) (void)engine.gather(unit_of_head());
  }
}

std::vector<double> LanguageModel::next_token_probabilities(Engine& engine,
                                                            std::span<const std::int32_t> tokens,
                                                            double temperature) const {
  if (!(temperature > 0)) {
    throw InvalidArgument(fmt::format("temperature is {}, but must be positive", temperature));
  }
  const std::vector<float> logits = next_token_logits(engine, tokens);
  const double highest = *std::max_element(logits.begin(), logits.end());
  std::vector<double> probabilities(logits.size());
  double sum = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    probabilities[i] = std::exp((logits[i] - highest) / temperature);
    sum += probabilities[i];
  }
  for (auto& p : probabilities) p /= sum;
  return probabilities;
}

}  // namespace tranche::models
