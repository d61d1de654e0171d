#include "tranche/models/key_value_cache.h"

#include <fmt/core.h>

#include <algorithm>
#include <string>

#include "models/context_attention.h"
#include "models/language_stage.h"
#include "tranche/core/error.h"
#include "tranche/engine/engine.h"

namespace tranche::models {

namespace {

CacheHeads heads_of(const LanguageModel& model) {
  const std::optional<CacheHeads> heads = model.cache_heads();
  if (heads) return *heads;
  throw InvalidArgument(fmt::format(
      "{} keeps no keys and values, so that there is no cache for it: it does not override cache_heads()",
      model.architecture()));
}

/// The sizes of this rank's heads.
CacheHeads heads_of(const LanguageModel& model, const Engine& engine) {
  CacheHeads heads = heads_of(model);
  const std::int64_t ranks = engine.runtime().mesh().size(MeshAxis::tensor);
  heads.key_value_heads = std::max<std::int64_t>(heads.key_value_heads / ranks, 1);
  return heads;
}

std::int64_t bytes_of_layers(const CacheHeads& heads, std::int64_t layers, DataType dtype, std::int64_t rows,
                             std::int64_t capacity) {
  const std::int64_t token = 2 * layers * heads.key_value_heads * heads.head_width;
  return checked_multiply(checked_multiply(rows, capacity), token * size_of(dtype));
}

}  // namespace

KeyValueCache::KeyValueCache(Engine& engine, const LanguageModel& model, std::int64_t rows,
                             std::int64_t capacity)
    : heads_(heads_of(model, engine)), capacity_(capacity), dtype_(engine.config().precision.compute) {
  const std::int64_t positions = model.shape().positions;
  if (rows < 1 || capacity < 1 || capacity > positions) {
    throw InvalidArgument(fmt::format(
        "a key-value cache of {} rows of {} tokens was asked for, wanted at least one row of 1 to {} "
        "tokens, which are the model's positions",
        rows, capacity, positions));
  }
  for (const Engine::Chunk& chunk : engine.stage().chunks) {
    const BlockRange blocks = blocks_of_chunk(chunk, model.shape().layers);
    for (std::int64_t block = blocks.begin; block < blocks.end; ++block) blocks_.push_back(block);
  }
  const std::int64_t own =
      bytes_of_layers(heads_, static_cast<std::int64_t>(blocks_.size()), dtype_, rows, capacity);
  if (own > 0) {
    memory_ = Buffer(engine.runtime().memory(Tier::device), own, Category::activations, "key-value cache");
  }
  lengths_.resize(static_cast<std::size_t>(rows));
}

std::int64_t KeyValueCache::bytes(const LanguageModel& model, DataType dtype, std::int64_t rows,
                                  std::int64_t capacity) {
  return bytes_of_layers(heads_of(model), model.shape().layers, dtype, rows, capacity);
}

void KeyValueCache::set_length(std::int64_t row, std::int64_t length) {
  if (length < 0 || length > capacity_) {
    throw InvalidArgument(fmt::format("row {} of a key-value cache cannot have {} tokens: it has room for {}",
                                      row, length, capacity_));
  }
  lengths_.at(static_cast<std::size_t>(row)) = length;
}

TensorView KeyValueCache::part(std::int64_t block, std::int64_t which, std::int64_t first,
                               std::int64_t count) const {
  const auto place = std::lower_bound(blocks_.begin(), blocks_.end(), block);
  if (place == blocks_.end() || *place != block) {
    std::string held;
    for (const std::int64_t one : blocks_) held += (held.empty() ? "" : ", ") + std::to_string(one);
    throw InvalidArgument(
        fmt::format("block {} is not in the key-value cache of this rank, which has blocks {}", block, held));
  }
  const std::int64_t index = 2 * (place - blocks_.begin()) + which;
  const std::int64_t row = heads_.key_value_heads * capacity_ * heads_.head_width;
  const TensorView all{memory_.data(), dtype_, {memory_.bytes() / size_of(dtype_)}};
  return all.slice((index * rows() + first) * row, count * row)
      .reshaped({count, heads_.key_value_heads, capacity_, heads_.head_width});
}

TensorRequest attention_memory(const Pass& pass, std::int64_t query_width, std::int64_t key_width) {
  const std::int64_t columns = pass.exchanges_heads() ? 2 * (query_width + key_width) : 0;
  return {pass.dtype(), {pass.rows(), columns}};
}

void attend(const Pass& pass, std::int64_t block, const kernels::AttentionOptions& options,
            const kernels::ConstHeads& query, const kernels::ConstHeads& key,
            const kernels::ConstHeads& value, const TensorView& out, const TensorView& log_sum_exp,
            const TensorView& kept) {
  Stream& stream = pass.engine.compute_stream();
  if (pass.cache != nullptr) {
    const CachePlace& place = *pass.cache;
    const kernels::CachedKeys cached{place.cache.keys(block, place.first_row, pass.batch),
                                     place.cache.values(block, place.first_row, pass.batch), place.lengths,
                                     place.most};
    kernels::append_to_cache(stream, key, value, cached);
    if (!place.from_start) return kernels::attention_with_cache(stream, options, query, cached, out);
  }
  if (pass.exchanges_heads()) {
    return exchanged_attention(pass, block, options, {query, key, value}, out, log_sum_exp, kept);
  }
  if (pass.context != nullptr) {
    return gathered_attention(pass, block, options, {query, key, value}, out, log_sum_exp);
  }
  kernels::attention_forward(stream, options, query, key, value, out, log_sum_exp, pass.engine.workspace());
}

void attend_backward(const Pass& pass, std::int64_t block, const kernels::AttentionOptions& options,
                     const ConstTensorView& d_out, const kernels::ConstHeads& query,
                     const kernels::ConstHeads& key, const kernels::ConstHeads& value,
                     const ConstTensorView& out, const ConstTensorView& log_sum_exp,
                     const kernels::Heads& d_query, const kernels::Heads& d_key,
                     const kernels::Heads& d_value, const ConstTensorView& kept) {
  const AttentionGradients gradients{d_query, d_key, d_value};
  if (pass.exchanges_heads()) {
    return exchanged_attention_backward(pass, block, options, d_out, log_sum_exp, kept, gradients);
  }
  if (pass.context != nullptr) {
    return gathered_attention_backward(pass, block, options, d_out, {query, key, value}, out, log_sum_exp,
                                       gradients);
  }
  kernels::attention_backward(pass.engine.compute_stream(), options, d_out, query, key, value, out,
                              log_sum_exp, d_query, d_key, d_value, pass.engine.workspace());
}

}  // namespace tranche::models
