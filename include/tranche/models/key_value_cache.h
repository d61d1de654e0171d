#pragma once
/// Keys and values of sequences that are being generated, and attention over them.

#include <cstdint>
#include <span>
#include <vector>

#include "tranche/core/tensor_view.h"
#include "tranche/device/memory.h"
#include "tranche/kernels/attention.h"
#include "tranche/kernels/cached_attention.h"
#include "tranche/models/language_model.h"

namespace tranche::models {

/// What a model's blocks keep of a token for those after it.
struct CacheHeads {
  std::int64_t key_value_heads = 0;
  std::int64_t head_width = 0;
};

/// Keys and values of `rows` sequences of up to `capacity` tokens, as LanguageModel::prefill() and decode()
/// fill them: 2 * layers * rows * key_value_heads * capacity * head_width elements of the compute dtype,
/// taken from the runtime's device memory at once (Category::activations, tag "key-value cache") and kept
/// until it is destroyed. On a mesh with a pipeline the layers are the blocks of this rank's stage, which may
/// have none; with the axis `tensor` the heads are those that this rank attends with. The keys are those that
/// attention sees, behind norms and rotation. A window takes nothing from it: all tokens are kept, the last
/// ones are read.
class KeyValueCache {
 public:
  /// Throws InvalidArgument when the model keeps none (LanguageModel::cache_heads), for less than a row and
  /// for a capacity that is not in 1 to the model's positions; OutOfMemory as all memory does.
  KeyValueCache(Engine& engine, const LanguageModel& model, std::int64_t rows, std::int64_t capacity);
  /// The memory that one takes for all blocks and heads, which is that of all stages of a pipeline together.
  static std::int64_t bytes(const LanguageModel& model, DataType dtype, std::int64_t rows,
                            std::int64_t capacity);
  /// The memory that this one takes on this rank.
  std::int64_t bytes() const noexcept { return memory_.bytes(); }

  std::int64_t rows() const noexcept { return static_cast<std::int64_t>(lengths_.size()); }
  std::int64_t capacity() const noexcept { return capacity_; }
  /// Tokens of a row.
  std::int64_t length(std::int64_t row) const { return lengths_.at(static_cast<std::size_t>(row)); }
  /// Says how many tokens of a row there are; fewer than before forgets the last ones. InvalidArgument
  /// outside 0 to the capacity.
  void set_length(std::int64_t row, std::int64_t length);
  /// [count, key_value_heads, capacity, head width] of rows from `first` on. InvalidArgument for a block that
  /// another stage computes.
  TensorView keys(std::int64_t block, std::int64_t first, std::int64_t count) const {
    return part(block, 0, first, count);
  }
  TensorView values(std::int64_t block, std::int64_t first, std::int64_t count) const {
    return part(block, 1, first, count);
  }

 private:
  /// `which`: 0 for keys, 1 for values.
  TensorView part(std::int64_t block, std::int64_t which, std::int64_t first, std::int64_t count) const;
  CacheHeads heads_;
  std::vector<std::int64_t> blocks_;  ///< that this rank computes, ascending
  std::int64_t capacity_;
  DataType dtype_;
  Buffer memory_;
  std::vector<std::int64_t> lengths_;
};

/// A pass's place in a cache: its batch entries are the rows from first_row on.
struct CachePlace {
  const KeyValueCache& cache;
  std::int64_t first_row = 0;
  /// int32 [batch] in device memory: tokens of each row, the pass's own among them; 0: a row that rests.
  ConstTensorView lengths;
  std::int64_t most = 0;  ///< no row has more
  /// The pass's tokens are the first of their rows: they see each other only.
  bool from_start = false;
};

/// A block's attention: kernels::attention_forward, and, where the pass has a cache, new keys and values are
/// added to it and those before are seen. A model that overrides LanguageModel::cache_heads() attends through
/// here. `log_sum_exp` is written without a cache only. On the axis `context` the tensors are of this rank's
/// tokens but for AttentionOptions::document_begin, the keys and values of the others come from their ranks,
/// and the call is collective over the axis. With tranche.context_exchange ulysses `kept` is
/// attention_memory(), which backward reads in place of the queries, keys and values, and log_sum_exp is of
/// other heads than this rank's rows have.
void attend(const Pass& pass, std::int64_t block, const kernels::AttentionOptions& options,
            const kernels::ConstHeads& query, const kernels::ConstHeads& key,
            const kernels::ConstHeads& value, const TensorView& out, const TensorView& log_sum_exp,
            const TensorView& kept = {});

/// Elements that attend() keeps for attend_backward(); none but with tranche.context_exchange ulysses. The
/// widths are those of this rank's heads of queries, and of keys.
TensorRequest attention_memory(const Pass& pass, std::int64_t query_width, std::int64_t key_width);

/// attend() for kernels::attention_backward, with the operands of attend() and its results. Collective over
/// the axis `context`.
void attend_backward(const Pass& pass, std::int64_t block, const kernels::AttentionOptions& options,
                     const ConstTensorView& d_out, const kernels::ConstHeads& query,
                     const kernels::ConstHeads& key, const kernels::ConstHeads& value,
                     const ConstTensorView& out, const ConstTensorView& log_sum_exp,
                     const kernels::Heads& d_query, const kernels::Heads& d_key,
                     const kernels::Heads& d_value, const ConstTensorView& kept = {});

}  // namespace tranche::models
