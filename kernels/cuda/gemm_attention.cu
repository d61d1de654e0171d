// Causal attention by batched GEMMs and softmax kernels, for fp32, dropout and head sizes that the fused
// kernels do not support. The workspace holds the scores of several heads, or of some queries of one head, at
// a time: a chunk. Forward takes 3 launches for each chunk, backward 6 (9 if not even the scores of one head
// fit). If heads share keys, GEMMs with the keys are launched for each group. The gradients of a key, which
// are summed in fp32 over its heads, are launched for each head. Scores hidden by the mask are computed too,
// except those of keys before the window of the chunk's first query.

#include <algorithm>
#include <limits>

#include "kernels/cuda/attention.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/simt.h"

namespace tranche::kernels::cuda {

namespace {

constexpr int threads = 256;
constexpr unsigned all_lanes = 0xffffffffu;

/// Scores of queries [first_query, ...) and keys [first_key, first_key + keys) of heads from first_head on of
/// one batch entry. There is a row for each query; rows are `stride` floats apart. Results that replace the
/// scores are narrowed in place.
struct ScoreRows {
  float* scores;
  float* d_scores;     ///< backward: the gradient of the dropped-out probabilities
  float* log_sum_exp;  ///< [heads, queries] of the batch entry
  std::int64_t stride, rows, time;
  std::int64_t begin, queries;  ///< the call's queries
  std::int64_t first_head, first_query, first_key, keys;
  float scale;
  AttentionMask mask;
  bool dropped;
  DropoutDraws draws;
  std::int64_t sample;
  std::int64_t heads_before;  ///< heads of the layer before the call's first one, for the dropout mask
};

/// Combines a value of each thread over the block in a fixed order; every thread gets the result.
template <class Combine>
__device__ float over_block(float x, Combine combine) {
  __shared__ float parts[threads / warp_size];
  for (int distance = warp_size / 2; distance > 0; distance /= 2) {
    x = combine(x, __shfl_xor_sync(all_lanes, x, distance));
  }
  __syncthreads();  // waits for readers of the previous call
  if (threadIdx.x % warp_size == 0) parts[threadIdx.x / warp_size] = x;
  __syncthreads();
  x = parts[0];
  for (int i = 1; i < threads / warp_size; ++i) x = combine(x, parts[i]);
  return x;
}

__device__ __forceinline__ float keep_factor(const ScoreRows& p, std::int64_t head, std::int64_t query,
                                             std::int64_t key) {
  if (!p.dropped) return 1.0f;
  const std::int64_t element = ((p.heads_before + head) * p.time + query) * p.time + key;
  const auto block = p.draws.block(p.sample, element >> 2);
  const std::uint32_t low = element & 1 ? block[1] : block[0], high = element & 1 ? block[3] : block[2];
  return p.draws.keeps(element & 2 ? high : low) ? p.draws.scale : 0.0f;
}

/// A block turns one row of scores into probabilities with dropout, stored as T at the start of the row's
/// memory, and writes log_sum_exp. A barrier separates reading from writing, so that stores never overwrite
/// scores that are still to be read.
template <class T>
__global__ void __launch_bounds__(threads) softmax_rows(ScoreRows p) {
  const std::int64_t head = p.first_head + blockIdx.y, query = p.first_query + blockIdx.x;
  float* row = p.scores + (static_cast<std::int64_t>(blockIdx.y) * p.rows + blockIdx.x) * p.stride;
  // The columns of the keys that the query sees.
  const std::int64_t begin = p.mask.first(query) - p.first_key, end = query + 1 - p.first_key;
  float maximum = -std::numeric_limits<float>::infinity();
  for (std::int64_t k = begin + threadIdx.x; k < end; k += threads) maximum = fmaxf(maximum, row[k]);
  maximum = over_block(maximum, [](float a, float b) { return fmaxf(a, b); });
  float sum = 0.0f;
  for (std::int64_t k = begin + threadIdx.x; k < end; k += threads) sum += expf(row[k] - maximum);
  sum = over_block(sum, [](float a, float b) { return a + b; });
  if (threadIdx.x == 0) p.log_sum_exp[head * p.queries + query - p.begin] = maximum + logf(sum);
  const float factor = 1.0f / sum;
  T* narrow = reinterpret_cast<T*>(row);
  for (std::int64_t first = 0; first < p.keys; first += threads) {
    const std::int64_t k = first + threadIdx.x;
    float probability = 0.0f;
    if (k >= begin && k < end) {
      probability = expf(row[k] - maximum) * factor * keep_factor(p, head, query, p.first_key + k);
    }
    __syncthreads();
    if (k < p.keys) narrow[k] = from_float<T>(probability);
  }
}

/// A block turns a row of scores into the dropped-out probabilities, and their gradient into the gradient of
/// the unscaled scores; both are stored as T at the start of the row's memory. `out` and `d_out` start at the
/// batch entry's first query and head first_head; their rows have `width` elements.
template <class T>
__global__ void __launch_bounds__(threads)
    softmax_backward_rows(ScoreRows p, const T* out, const T* d_out, std::int64_t width,
                          std::int64_t head_width) {
  const std::int64_t head = p.first_head + blockIdx.y, query = p.first_query + blockIdx.x;
  const std::int64_t at = (static_cast<std::int64_t>(blockIdx.y) * p.rows + blockIdx.x) * p.stride;
  const std::int64_t vector = (query - p.begin) * width + blockIdx.y * head_width;
  float projection = 0.0f;
  for (std::int64_t i = threadIdx.x; i < head_width; i += threads) {
    projection += to_float(out[vector + i]) * to_float(d_out[vector + i]);
  }
  projection = over_block(projection, [](float a, float b) { return a + b; });
  const float log_sum_exp = p.log_sum_exp[head * p.queries + query - p.begin];
  const std::int64_t first_seen = p.mask.first(query);
  const float *scores = p.scores + at, *gradients = p.d_scores + at;
  T *narrow_scores = reinterpret_cast<T*>(p.scores + at),
    *narrow_gradients = reinterpret_cast<T*>(p.d_scores + at);
  for (std::int64_t first = 0; first < p.keys; first += threads) {
    const std::int64_t k = first + threadIdx.x, key = p.first_key + k;
    float probability = 0.0f, gradient = 0.0f;
    if (k < p.keys && key >= first_seen && key <= query) {
      const float undropped = expf(scores[k] - log_sum_exp), keep = keep_factor(p, head, query, key);
      probability = undropped * keep;
      gradient = undropped * (gradients[k] * keep - projection) * p.scale;
    }
    __syncthreads();
    if (k < p.keys) {
      narrow_scores[k] = from_float<T>(probability);
      narrow_gradients[k] = from_float<T>(gradient);
    }
  }
}

/// A block rounds the gradients of one key and its value to the rows of a head. They come from sums [keys,
/// head width], keys first, then values.
template <class T>
__global__ void __launch_bounds__(threads)
    store_key_gradients(const float* d_key_sums, const float* d_value_sums, HeadRows<T> d_key,
                        HeadRows<T> d_value, std::int64_t head_width) {
  const std::int64_t key = blockIdx.x;
  for (std::int64_t i = threadIdx.x; i < head_width; i += threads) {
    d_key.data[key * d_key.stride + i] = from_float<T>(d_key_sums[key * head_width + i]);
    d_value.data[key * d_value.stride + i] = from_float<T>(d_value_sums[key * head_width + i]);
  }
}

/// The tensors of a call and the GEMMs over them.
template <class T>
class Attention {
 public:
  Attention(Stream& stream, const AttentionCall& call, const Workspace& workspace)
      : stream_(stream), call_(call), workspace_(workspace), scores_(static_cast<float*>(workspace.data)) {}

  void forward() {
    lay_out(query_chunk(call_.heads, call_.queries, call_.time, workspace_.bytes, 1), 1, 0);
    for_chunks([&](std::int64_t batch, std::int64_t head, std::int64_t heads, std::int64_t query,
                   std::int64_t queries) {
      const std::int64_t key = first_key(query), keys = query + queries - key;
      Gemm scores = rows(false, true, queries, keys, call_.head_width);
      scores.alpha = call_.scale;
      left(scores, part(0, batch, head, query), call_.parts[0].stride, call_.head_width);
      right(scores, part(1, batch, head, key), call_.parts[1].stride);
      result(scores, scores_, DataType::float32, chunk_.stride, chunk_.rows * chunk_.stride);
      for_heads(head, heads, scores);
      launch(stream_, "attention_softmax", softmax_rows<T>, grid(queries, heads),
             score_rows(batch, head, query, key, keys));
      Gemm out = rows(false, false, queries, call_.head_width, keys);
      left(out, scores_, narrow_stride(), chunk_.rows * narrow_stride());
      right(out, part(2, batch, head, key), call_.parts[2].stride);
      result(out, static_cast<T*>(call_.out) + row_at(batch, head, query), call_.dtype, call_.width(),
             call_.head_width);
      for_heads(head, heads, out);
    });
  }

  void backward() {
    // This case holds the scores of whole heads and, if heads share keys, the sums of the gradients of a
    // group's keys.
    const std::int64_t sums = call_.group() > 1 ? 2 * call_.time * call_.head_width : 0;
    const std::int64_t left_over = workspace_.bytes - sums * std::int64_t{sizeof(float)};
    ScoreChunk chunk =
        query_chunk(call_.heads, call_.queries, call_.time, std::max<std::int64_t>(left_over, 0), 2);
    const bool whole = chunk.rows == call_.queries;
    if (!whole) chunk = query_chunk(call_.heads, call_.queries, call_.time, workspace_.bytes, 2);
    lay_out(chunk, 2, whole ? sums : 0);
    for_chunks([&](std::int64_t batch, std::int64_t head, std::int64_t heads, std::int64_t query,
                   std::int64_t queries) {
      // If all queries are one chunk, the gradients of keys that no query sees are written, too.
      const std::int64_t key = whole ? 0 : first_key(query);
      score_gradients(batch, head, heads, query, queries, key, whole ? call_.time : query + queries - key);
      query_gradient(batch, head, heads, query, queries, key);
      if (whole) key_gradients(batch, head, heads, query, queries, 0, call_.time);
    });
    if (whole) return;
    // Not even the scores of one head fit. Columns of scores are computed again, each with all queries that
    // may see its key.
    const bool shared = call_.group() > 1;
    chunk = key_chunk(call_.queries, workspace_.bytes, 2, shared ? call_.head_width : 0);
    lay_out(chunk, 2, shared ? 2 * chunk.stride * call_.head_width : 0);
    for (std::int64_t index = 0; index < call_.batch * call_.key_value_heads; ++index) {
      const std::int64_t batch = index / call_.key_value_heads;
      const std::int64_t head = index % call_.key_value_heads * call_.group();
      for (std::int64_t key = 0; key < call_.time; key += chunk_.stride) {
        const std::int64_t keys = std::min(chunk_.stride, call_.time - key);
        const std::int64_t last = call_.end_query();
        // There is at least one query; its scores are masked if it sees none of the keys.
        const std::int64_t query = std::min(std::max(key, call_.first_query), last - 1);
        const std::int64_t seeing = call_.window > 0 ? std::min(last, key + keys - 1 + call_.window) : last;
        const std::int64_t queries = std::max<std::int64_t>(seeing - query, 1);
        for (std::int64_t g = 0; g < call_.group(); ++g) {
          score_gradients(batch, head + g, 1, query, queries, key, keys);
          key_gradients(batch, head + g, 1, query, queries, key, keys);
        }
      }
    }
  }

 private:
  /// Divides the workspace: scores, their gradients with two copies, and `sums` floats. The remainder from a
  /// multiple of 256 bytes on is for cuBLASLt; it may be empty.
  void lay_out(ScoreChunk chunk, int copies, std::int64_t sums) {
    // A chunk has whole groups of heads, or a divisor of one group.
    const std::int64_t group = call_.group();
    if (chunk.heads > group) chunk.heads = chunk.heads / group * group;
    while (chunk.heads < group && group % chunk.heads != 0) --chunk.heads;
    chunk_ = chunk;
    d_scores_ = scores_ + chunk_.elements();
    sums_ = scores_ + copies * chunk_.elements();
    const std::int64_t floats = copies * chunk_.elements() + sums;
    const std::int64_t taken = (floats * std::int64_t{sizeof(float)} + 255) / 256 * 256;
    scratch_ = taken < workspace_.bytes
                   ? Workspace{static_cast<unsigned char*>(workspace_.data) + taken, workspace_.bytes - taken}
                   : Workspace{};
  }
  /// The first key that queries from this one on may see, rounded down to a multiple of 8, so that rows stay
  /// aligned.
  std::int64_t first_key(std::int64_t query) const {
    return call_.window > 0 ? std::max<std::int64_t>(0, query - call_.window + 1) / 8 * 8 : 0;
  }
  /// Runs the GEMM for `heads` heads: as one batch, or one batch for each key that some of them share.
  void for_heads(std::int64_t head, std::int64_t heads, Gemm product) const {
    const std::int64_t group = call_.group();
    product.next_b = group == 1 ? call_.head_width : 0;
    const auto advance = [](const void* data, std::int64_t elements, DataType dtype) {
      return static_cast<const char*>(data) + elements * size_of(dtype);
    };
    for (std::int64_t end = head + heads; head < end;) {
      product.batch = group == 1 ? heads : std::min(group - head % group, end - head);
      gemm(stream_, product, scratch_);
      head += product.batch;
      product.a = advance(product.a, product.batch * product.next_a, product.dtype);
      product.b = advance(product.b, call_.head_width, product.dtype);
      product.c = const_cast<char*>(advance(product.c, product.batch * product.next_c, product.c_dtype));
    }
  }
  std::int64_t narrow_stride() const {
    return chunk_.stride * static_cast<std::int64_t>(sizeof(float) / sizeof(T));
  }
  std::int64_t row_at(std::int64_t batch, std::int64_t head, std::int64_t row) const {
    return (batch * call_.queries + row - call_.first_query) * call_.width() + head * call_.head_width;
  }
  /// The element of the query (0), key (1) or value (2) that a head of queries uses.
  std::int64_t part_at(int which, std::int64_t stride, std::int64_t batch, std::int64_t head,
                       std::int64_t row) const {
    if (which == 0) {
      return (batch * call_.queries + row - call_.first_query) * stride + head * call_.head_width;
    }
    return (batch * call_.time + row) * stride + head / call_.group() * call_.head_width;
  }
  const T* part(int which, std::int64_t batch, std::int64_t head, std::int64_t row) const {
    const auto& rows = call_.parts[static_cast<std::size_t>(which)];
    return static_cast<const T*>(rows.data) + part_at(which, rows.stride, batch, head, row);
  }
  T* d_part(int which, std::int64_t batch, std::int64_t head, std::int64_t row) const {
    const auto& rows = call_.d_parts[static_cast<std::size_t>(which)];
    return static_cast<T*>(rows.data) + part_at(which, rows.stride, batch, head, row);
  }
  static Gemm rows(bool transpose_a, bool transpose_b, std::int64_t m, std::int64_t n, std::int64_t k) {
    Gemm gemm = dense(transpose_a, transpose_b, m, n, k);
    gemm.dtype = data_type_of<T>();
    return gemm;
  }
  static void left(Gemm& gemm, const void* a, std::int64_t row, std::int64_t next) {
    gemm.a = a;
    gemm.row_a = row;
    gemm.next_a = next;
  }
  static void right(Gemm& gemm, const void* b, std::int64_t row) {
    gemm.b = b;
    gemm.row_b = row;
  }
  static void result(Gemm& gemm, void* c, DataType dtype, std::int64_t row, std::int64_t next) {
    gemm.c = c;
    gemm.c_dtype = dtype;
    gemm.row_c = row;
    gemm.next_c = next;
  }
  static LaunchShape grid(std::int64_t queries, std::int64_t heads) {
    return {dim3(static_cast<unsigned>(queries), static_cast<unsigned>(heads)), threads};
  }
  ScoreRows score_rows(std::int64_t batch, std::int64_t head, std::int64_t query, std::int64_t key,
                       std::int64_t keys) const {
    ScoreRows made{scores_,
                   d_scores_,
                   call_.log_sum_exp + batch * call_.heads * call_.queries,
                   chunk_.stride,
                   chunk_.rows,
                   call_.time,
                   call_.first_query,
                   call_.queries,
                   head,
                   query,
                   key,
                   keys,
                   call_.scale,
                   call_.mask(batch),
                   call_.dropout.has_value(),
                   {},
                   0,
                   call_.first_head};
    if (call_.dropout) {
      made.draws = *call_.dropout;
      made.sample = call_.samples[static_cast<std::size_t>(batch)];
    }
    return made;
  }

  template <class Work>
  void for_chunks(Work work) const {
    for (std::int64_t batch = 0; batch < call_.batch; ++batch) {
      for (std::int64_t head = 0; head < call_.heads; head += chunk_.heads) {
        for (std::int64_t query = call_.first_query; query < call_.end_query(); query += chunk_.rows) {
          work(batch, head, std::min(chunk_.heads, call_.heads - head), query,
               std::min(chunk_.rows, call_.end_query() - query));
        }
      }
    }
  }

  /// Replaces the scores by probabilities, and computes the gradients of the scores behind them.
  void score_gradients(std::int64_t batch, std::int64_t head, std::int64_t heads, std::int64_t query,
                       std::int64_t queries, std::int64_t key, std::int64_t keys) const {
    Gemm scores = rows(false, true, queries, keys, call_.head_width);
    scores.alpha = call_.scale;
    left(scores, part(0, batch, head, query), call_.parts[0].stride, call_.head_width);
    right(scores, part(1, batch, head, key), call_.parts[1].stride);
    result(scores, scores_, DataType::float32, chunk_.stride, chunk_.rows * chunk_.stride);
    for_heads(head, heads, scores);
    Gemm d_scores = rows(false, true, queries, keys, call_.head_width);
    left(d_scores, static_cast<const T*>(call_.d_out) + row_at(batch, head, query), call_.width(),
         call_.head_width);
    right(d_scores, part(2, batch, head, key), call_.parts[2].stride);
    result(d_scores, d_scores_, DataType::float32, chunk_.stride, chunk_.rows * chunk_.stride);
    for_heads(head, heads, d_scores);
    launch(stream_, "attention_softmax_backward", softmax_backward_rows<T>, grid(queries, heads),
           score_rows(batch, head, query, key, keys),
           static_cast<const T*>(call_.out) + row_at(batch, head, call_.first_query),
           static_cast<const T*>(call_.d_out) + row_at(batch, head, call_.first_query), call_.width(),
           call_.head_width);
  }
  void query_gradient(std::int64_t batch, std::int64_t head, std::int64_t heads, std::int64_t query,
                      std::int64_t queries, std::int64_t key) const {
    Gemm gradient = rows(false, false, queries, call_.head_width, query + queries - key);
    left(gradient, d_scores_, narrow_stride(), chunk_.rows * narrow_stride());
    right(gradient, part(1, batch, head, key), call_.parts[1].stride);
    result(gradient, d_part(0, batch, head, query), call_.dtype, call_.d_parts[0].stride, call_.head_width);
    for_heads(head, heads, gradient);
  }
  void key_gradients(std::int64_t batch, std::int64_t head, std::int64_t heads, std::int64_t query,
                     std::int64_t queries, std::int64_t key, std::int64_t keys) const {
    Gemm gradient = rows(true, false, keys, call_.head_width, queries);
    gradient.next_b = call_.head_width;
    const T* const d_out = static_cast<const T*>(call_.d_out) + row_at(batch, head, query);
    if (call_.group() == 1) {
      gradient.batch = heads;
      left(gradient, d_scores_, narrow_stride(), chunk_.rows * narrow_stride());
      right(gradient, part(0, batch, head, query), call_.parts[0].stride);
      result(gradient, d_part(1, batch, head, key), call_.dtype, call_.d_parts[1].stride, call_.head_width);
      gemm(stream_, gradient, scratch_);
      left(gradient, scores_, narrow_stride(), chunk_.rows * narrow_stride());
      right(gradient, d_out, call_.width());
      result(gradient, d_part(2, batch, head, key), call_.dtype, call_.d_parts[2].stride, call_.head_width);
      gemm(stream_, gradient, scratch_);
      return;
    }
    float* const d_value_sums = sums_ + keys * call_.head_width;
    for (std::int64_t i = 0; i < heads; ++i) {  // in order; each is added to the sum of the previous ones
      const std::int64_t number = (head + i) % call_.group();
      const std::int64_t scores = i * chunk_.rows * chunk_.stride;
      gradient.beta = number == 0 ? 0.0f : 1.0f;
      left(gradient, d_scores_ + scores, narrow_stride(), 0);
      right(gradient, part(0, batch, head + i, query), call_.parts[0].stride);
      result(gradient, sums_, DataType::float32, call_.head_width, 0);
      gemm(stream_, gradient, scratch_);
      left(gradient, scores_ + scores, narrow_stride(), 0);
      right(gradient, d_out + i * call_.head_width, call_.width());
      result(gradient, d_value_sums, DataType::float32, call_.head_width, 0);
      gemm(stream_, gradient, scratch_);
      if (number + 1 < call_.group()) continue;
      launch(stream_, "attention_store_key_gradients", store_key_gradients<T>,
             {static_cast<unsigned>(keys), threads}, sums_, d_value_sums,
             HeadRows<T>{d_part(1, batch, head + i, key), call_.d_parts[1].stride},
             HeadRows<T>{d_part(2, batch, head + i, key), call_.d_parts[2].stride}, call_.head_width);
    }
  }

  Stream& stream_;
  const AttentionCall& call_;
  Workspace workspace_;
  float* scores_ = nullptr;
  float* d_scores_ = nullptr;
  float* sums_ = nullptr;  ///< sums of the gradients of keys that heads share, then of values
  ScoreChunk chunk_;
  Workspace scratch_;
};

template <class Work>
void with_type(DataType dtype, Work work) {
  if (dtype == DataType::bfloat16) return work(bfloat16());
  if (dtype == DataType::float16) return work(float16());
  work(float());
}

}  // namespace

void gemm_attention_forward(Stream& stream, const AttentionCall& call, const Workspace& workspace) {
  with_type(call.dtype,
            [&](auto element) { Attention<decltype(element)>(stream, call, workspace).forward(); });
}

void gemm_attention_backward(Stream& stream, const AttentionCall& call, const Workspace& workspace) {
  with_type(call.dtype,
            [&](auto element) { Attention<decltype(element)>(stream, call, workspace).backward(); });
}

}  // namespace tranche::kernels::cuda
