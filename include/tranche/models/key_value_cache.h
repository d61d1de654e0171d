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

/// The sizes of the keys and values that each block stores for a token.
struct CacheHeads {
  std::int64_t key_value_heads = 0;
  std::int64_t head_width = 0;
};

/// Keys and values of `rows` sequences of up to `capacity` tokens, which LanguageModel::prefill() and
/// decode() fill. It has 2 * layers * rows * key_value_heads * capacity * head_width elements of the compute
/// dtype, which the constructor allocates from the runtime's device memory (Category::activations, tag
/// "key-value cache"). On a mesh with a pipeline the layers are the blocks of this rank's stage, which may
/// have none; with the axis `tensor` the heads are this rank's. Keys are stored after norms and rotation. A
/// window does not reduce the cache: all tokens are stored, and the last ones are read.
class KeyValueCache {
 public:
  /// Throws InvalidArgument if the model does not support a cache (LanguageModel::cache_heads), for less than
  /// one row and for a capacity outside 1 to the model's positions; OutOfMemory.
  KeyValueCache(Engine& engine, const LanguageModel& model, std::int64_t rows, std::int64_t capacity);
  /// The bytes of a cache for all blocks and heads, which all stages of a pipeline need together.
  static std::int64_t bytes(const LanguageModel& model, DataType dtype, std::int64_t rows,
                            std::int64_t capacity);
  /// The bytes of this cache on this rank.
  std::int64_t bytes() const noexcept { return memory_.bytes(); }

  std::int64_t rows() const noexcept { return static_cast<std::int64_t>(lengths_.size()); }
  std::int64_t capacity() const noexcept { return capacity_; }
  /// The number of tokens in a row.
  std::int64_t length(std::int64_t row) const { return lengths_.at(static_cast<std::size_t>(row)); }
  /// Sets the number of tokens in a row; reducing it drops the last ones. Throws InvalidArgument outside 0 to
  /// the capacity.
  void set_length(std::int64_t row, std::int64_t length);
  /// [count, key_value_heads, capacity, head width] of rows from `first` on. Throws InvalidArgument for a
  /// block of another stage.
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
  std::vector<std::int64_t> blocks_;  ///< this rank's blocks, ascending
  std::int64_t capacity_;
  DataType dtype_;
  Buffer memory_;
  std::vector<std::int64_t> lengths_;
};

/// The rows of a cache that a pass uses: its batch entries are the rows from first_row on.
struct CachePlace {
  const KeyValueCache& cache;
  std::int64_t first_row = 0;
  /// int32 [batch] in device memory: the number of tokens in each row, including the pass's own; 0: an idle
  /// row.
  ConstTensorView lengths;
  std::int64_t most = 0;  ///< the largest of `lengths`
  /// The pass's tokens are the first of their rows, so that they see only each other.
  bool from_start = false;
};

/// A block's attention: kernels::attention_forward; if the pass has a cache, it adds the new keys and values,
/// and attends to the cached ones too. A model that overrides LanguageModel::cache_heads() must use this
/// function for attention. `log_sum_exp` is written only without a cache. On the axis `context` the tensors
/// have this rank's tokens, except AttentionOptions::document_begin; keys and values of other tokens come
/// from other ranks, and the call is collective over the axis. With tranche.context_exchange ulysses `kept`
/// is attention_memory(), which backward reads instead of queries, keys and values, and log_sum_exp belongs
/// to other heads than this rank's rows.
void attend(const Pass& pass, std::int64_t block, const kernels::AttentionOptions& options,
            const kernels::ConstHeads& query, const kernels::ConstHeads& key,
            const kernels::ConstHeads& value, const TensorView& out, const TensorView& log_sum_exp,
            const TensorView& kept = {});

/// The elements that attend() saves for attend_backward(); none unless tranche.context_exchange is ulysses.
/// The widths are those of this rank's query heads and key heads.
TensorRequest attention_memory(const Pass& pass, std::int64_t query_width, std::int64_t key_width);

/// The backward of attend(), using kernels::attention_backward, with the operands and results of attend().
/// Collective over the axis `context`.
void attend_backward(const Pass& pass, std::int64_t block, const kernels::AttentionOptions& options,
                     const ConstTensorView& d_out, const kernels::ConstHeads& query,
                     const kernels::ConstHeads& key, const kernels::ConstHeads& value,
                     const ConstTensorView& out, const ConstTensorView& log_sum_exp,
                     const kernels::Heads& d_query, const kernels::Heads& d_key,
                     const kernels::Heads& d_value, const ConstTensorView& kept = {});

}  // namespace tranche::models
