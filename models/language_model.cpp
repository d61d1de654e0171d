#include "tranche/models/language_model.h"

#include <fmt/core.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "models/language_stage.h"
#include "tranche/comm/communicator.h"
#include "tranche/core/error.h"
#include "tranche/engine/engine.h"
#include "tranche/models/key_value_cache.h"
#include "tranche/partition/mesh.h"
#include "tranche/pipeline/executor.h"

namespace tranche::models {

namespace {

void require_places(const std::optional<ConstTensorView>& view, const Shape& tokens, std::string_view what,
                    const LanguageModel& model) {
  if (!view) return;
  if (!model.takes_documents()) {
    throw InvalidArgument(fmt::format(
        "{} were given, but {} cannot use them: it takes a row as one document from position 0 on", what,
        model.architecture()));
  }
  if (view->dtype != DataType::int32 || !(view->shape == tokens)) {
    throw InvalidArgument(fmt::format("{} must be int32 {} as the tokens are, not {} {}", what,
                                      tokens.to_string(), name_of(view->dtype), view->shape.to_string()));
  }
}

/// Elements of a token's queries: those of a block's dimension "heads".
std::int64_t width_of_heads(const UnitSpec& block) {
  for (const TensorSpec& tensor : block.tensors) {
    for (std::size_t d = 0; d < tensor.dimensions.size(); ++d) {
      if (tensor.dimensions[d].name == "heads") {
        return tensor.shape[static_cast<int>(d)] / tensor.dimensions[d].blocks;
      }
    }
  }
  return 0;
}

}  // namespace

void require_whole(const Engine& engine, std::string_view call, std::string_view instead) {
  if (engine.stage().stages == 1) return;
  throw ConfigurationError(
      fmt::format("{} on a mesh with a pipeline ({}), whose stages compute a part of the "
                  "model each; {}",
                  call, engine.runtime().mesh().to_string(), instead));
}

void in_parts(Engine& engine, const std::function<void()>& work) {
  try {
    work();
  } catch (...) {
    const Runtime& runtime = engine.runtime();
    if (runtime.tensor() != nullptr || runtime.context() != nullptr) {
      engine.break_down(std::current_exception());
    }
    throw;
  }
}

DataType Pass::dtype() const {
  return engine.config().precision.compute;
}

kernels::DropoutOptions Pass::dropout(float probability, std::uint32_t site) const {
  return {.probability = training ? probability : 0.0f,
          .seed = engine.config().seed,
          .step = static_cast<std::uint64_t>(engine.steps()),
          .site = site,
          .samples = samples};
}

double LanguageModel::flops_per_token(std::int64_t sequence) const {
  const ModelShape sizes = shape();
  return 3 * static_cast<double>(sizes.layers) * block_operations(sequence) +
         6 * static_cast<double>(sizes.vocabulary) * static_cast<double>(sizes.width);
}

void LanguageModel::require_sequence(std::int64_t sequence) const {
  const std::int64_t positions = shape().positions;
  if (sequence >= 1 && sequence <= positions) return;
  throw ConfigurationError(
      fmt::format("sequence length {} is not in 1..{}: the model has {} positions; shorten the sequence or "
                  "change the model",
                  sequence, positions, positions));
}

UnitSpec LanguageModel::head_unit() const {
  throw InvalidArgument(fmt::format("{} has no head of its own", architecture()));
}

UnitId LanguageModel::unit_of_block(std::int64_t block) const {
  return {narrow<int>(block + 1)};
}

UnitId LanguageModel::unit_of_head() const {
  const ModelShape sizes = shape();
  return sizes.tied_head ? embedding : unit_of_block(sizes.layers);
}

namespace {

/// The gathers of each unit in a micro-batch: the embedding's by the embedding and, if tied, by the head; a
/// block's by its forward and its backward, and by the recomputed forward if its group of blocks does not
/// stay gathered. Groups end at the end of chunks (LanguageChunk).
std::vector<int> gathers_of_micro_batch(const Config& training, const std::vector<int>& begins,
                                        std::int64_t layers, bool tied) {
  std::vector<int> gathers(static_cast<std::size_t>(layers) + 1, 2);
  const std::int64_t every = std::max(training.checkpoint_every, 1);
  for (std::size_t chunk = 0; training.activation_checkpointing && chunk < begins.size(); ++chunk) {
    const bool last = chunk + 1 == begins.size();
    const std::int64_t first = std::max(begins[chunk] - 1, 0),
                       behind = last ? layers : std::min<std::int64_t>(begins[chunk + 1] - 1, layers);
    for (std::int64_t block = first; block < behind; ++block) {
      const std::int64_t begin = std::max(block / every * every, first),
                         end = std::min((block / every + 1) * every, behind);
      if (block + 1 < end && !group_stays_gathered(training, end - begin))
        ++gathers[static_cast<std::size_t>(block) + 1];
    }
  }
  if (!tied) {
    gathers.front() = 1;
    gathers.push_back(1);
  }
  return gathers;
}

}  // namespace

ModelSpec LanguageModel::spec(std::int64_t sequence) const {
  require_sequence(sequence);
  const std::int64_t layers = shape().layers;
  const bool tied = shape().tied_head;
  ModelSpec spec;
  spec.add_unit(embedding_unit());
  for (std::int64_t block = 0; block < layers; ++block) spec.add_unit(block_unit(block));
  if (!tied) spec.add_unit(head_unit());
  spec.gathers_with_chunks = [layers, tied](const Config& training, const std::vector<int>& begins) {
    return gathers_of_micro_batch(training, begins, layers, tied);
  };
  spec.gathers_per_micro_batch = [layers, tied](const Config& training) {
    return gathers_of_micro_batch(training, {0}, layers, tied);
  };
  spec.forward.push_back({embedding, embedding_use, 0});
  for (std::int64_t block = 0; block < layers; ++block) {
    spec.forward.push_back({unit_of_block(block), 0, block_operations(sequence)});
  }
  const double head = 2 * static_cast<double>(shape().vocabulary) * static_cast<double>(shape().width);
  spec.forward.push_back({unit_of_head(), tied ? head_use : 0, head});
  spec.residual_width = shape().width;
  spec.name = architecture();
  spec.tensor_dimensions = tensor_dimensions();
  spec.chain_sums = chain_sums();
  spec.sequence_parts = sequence_parts();
  spec.whole_dimensions = whole_dimensions();
  if (!spec.tensor_dimensions.empty()) {
    std::vector<std::string> tables;  // tables whose gradients need the residual's rows
    const UnitSpec embedding_spec = embedding_unit();
    for (const TensorSpec& tensor : embedding_spec.tensors) {
      if (tensor.read_by(embedding_use)) tables.push_back(tensor.name);
    }
    spec.tensor_messages = [layers, tables](const Config& training, int begin, int end,
                                            const std::function<bool(std::string_view)>& frozen) {
      TensorMessages sent;
      // The embedding's messages; its backward sends nothing if it is frozen.
      if (begin == 0) sent.rows += std::all_of(tables.begin(), tables.end(), frozen) ? 1 : 2;
      if (end == layers + 2) {
        sent.rows += 2;
        sent.numbers += 3;  // of the softmax: largest logit, sum, and the target's logit
      }
      const std::int64_t every = std::max(training.checkpoint_every, 1);
      const std::int64_t first = std::max(begin - 1, 0), behind = std::min<std::int64_t>(end - 1, layers);
      const bool whole_mlp = training.leaves_whole("inner");
      for (std::int64_t block = first; block < behind; ++block) {
        sent.rows += whole_mlp ? 5 : 10;  // of attention and the MLP together
        if (!training.activation_checkpointing) continue;
        // The last block of a group is recomputed without its output.
        const bool ends_group = (block + 1) % every == 0 || block + 1 == behind;
        sent.rows += whole_mlp ? 2 : ends_group ? 3 : 4;
      }
      return sent;
    };
  }
  if (const std::optional<CacheHeads> heads = cache_heads(); heads && spec.sequence_parts) {
    const std::int64_t queries = width_of_heads(block_unit(0));
    spec.context_elements = [layers, sequence, heads = *heads, queries](
                                const Config& training, const Mesh& mesh, int begin, int end) {
      const int ranks = mesh.size(MeshAxis::context);
      const std::int64_t run = divide_round_up(sequence, 2 * ranks);
      const std::int64_t tokens = 2 * training.micro_batch_size * run;
      // Ranks of the axis `tensor` have some of the heads; if there are more ranks than heads, they share
      // them.
      const std::int64_t width =
          heads.head_width * std::max<std::int64_t>(1, heads.key_value_heads / mesh.size(MeshAxis::tensor));
      const std::int64_t blocks = std::min<std::int64_t>(end - 1, layers) - std::max(begin - 1, 0);
      if (training.context_exchange == ContextExchange::ulysses) {
        // Queries, keys and values are sent to their heads and the output back; the gradients in reverse.
        const std::int64_t sent = (2 * queries / mesh.size(MeshAxis::tensor) + 2 * width) / ranks;
        const int passes = training.activation_checkpointing ? 3 : 2;
        return std::max<std::int64_t>(blocks, 0) * passes * (ranks - 1) * tokens * sent;
      }
      // Keys and values are gathered in forward, in backward and in recomputation; their gradients are
      // reduced and scattered.
      const int messages = training.activation_checkpointing ? 8 : 6;
      return std::max<std::int64_t>(blocks, 0) * messages * (ranks - 1) * tokens * width;
    };
  }
  spec.tokens_per_sample = sequence;
  spec.flops_per_token = flops_per_token(sequence);
  spec.recomputes_activations = true;
  return spec;
}

Pass LanguageModel::pass_of(Engine& engine, const TokenBatch& batch, bool training) const {
  Pass pass = whole_pass_of(engine, batch, training);
  Communicator* const context = engine.runtime().context();
  if (context == nullptr) return pass;
  pass.context = context;
  pass.batch *= 2;
  pass.time = divide_round_up(pass.time, 2 * context->size());
  return pass;
}

Pass LanguageModel::whole_pass_of(Engine& engine, const TokenBatch& batch, bool training) const {
  const Shape& tokens = batch.tokens.shape;
  if (tokens.rank() != 2 || batch.tokens.dtype != DataType::int32) {
    throw InvalidArgument(fmt::format("tokens must be int32 [batch, time], not {} {}",
                                      name_of(batch.tokens.dtype), tokens.to_string()));
  }
  if (batch.targets.dtype != DataType::int32 || !(batch.targets.shape == tokens)) {
    throw InvalidArgument(fmt::format("targets must be int32 {} as the tokens are, not {} {}",
                                      tokens.to_string(), name_of(batch.targets.dtype),
                                      batch.targets.shape.to_string()));
  }
  require_places(batch.document_begin, tokens, "document boundaries", *this);
  require_places(batch.positions, tokens, "positions", *this);
  if (static_cast<std::int64_t>(batch.samples.size()) != tokens[0]) {
    throw InvalidArgument(
        fmt::format("{} sample indices were given for {} sequences", batch.samples.size(), tokens[0]));
  }
  require_sequence(tokens[1]);
  const ModelShape sizes = shape();
  const std::int64_t units = sizes.layers + (sizes.tied_head ? 1 : 2);
  if (engine.model().units().size() != static_cast<std::size_t>(units)) {
    throw InvalidArgument(
        fmt::format("the engine holds {} units, but this model of {} has {}: make it with the model's spec()",
                    engine.model().units().size(), architecture(), units));
  }
  return {.engine = engine,
          .shape = sizes,
          .batch = tokens[0],
          .time = tokens[1],
          .samples = batch.samples,
          .training = training,
          .document_begin = batch.document_begin,
          .positions = batch.positions,
          .sequence = tokens[1],
          .tensor = engine.runtime().tensor()};
}

void LanguageModel::forward_backward(Engine& engine, const TokenBatch& batch) const {
  require_whole(engine, "forward_backward()", "use models::train_step()");
  in_parts(engine, [&] {
    LanguageMicroBatch work(*this, engine, batch, LanguageMicroBatch::Kind::alone);
    {
      const auto chunk = work.begin(engine.stage().chunks.front());
      chunk->forward();
      chunk->backward();
    }
    work.end();
  });
}

void LanguageModel::evaluate(Engine& engine, const TokenBatch& batch) const {
  const auto begin = [&](std::int64_t) {
    return std::make_unique<LanguageMicroBatch>(*this, engine, batch, LanguageMicroBatch::Kind::evaluation);
  };
  if (engine.stage().stages > 1) return pipeline::run_forward(engine, begin);
  in_parts(engine, [&] {
    const auto work = begin(0);
    work->begin(engine.stage().chunks.front())->forward();
    work->end();
  });
}

void train_step(const LanguageModel& model, Engine& engine, const MicroBatches& batches) {
  if (engine.stage().stages > 1) {
    return pipeline::run_step(engine, [&](std::int64_t micro_batch) {
      return std::make_unique<LanguageMicroBatch>(model, engine, batches(micro_batch),
                                                  LanguageMicroBatch::Kind::beside);
    });
  }
  for (std::int64_t m = 0; m < engine.config().accumulation_steps; ++m) {
    model.forward_backward(engine, batches(m));
  }
}

}  // namespace tranche::models
