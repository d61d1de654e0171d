#include "tranche/kernels/cached_attention.h"

#include <fmt/core.h>

#include <cmath>
#include <type_traits>

#include "kernels/cached_attention_operands.h"
#include "kernels/check.h"
#include "kernels/cpu/cached_attention.h"
#include "kernels/cpu/convert.h"
#include "kernels/cuda/cached_attention.h"
#include "kernels/dispatch.h"
#include "kernels/meta/cached_attention_cost.h"

namespace tranche::kernels {

namespace {

/// Checks that `held` has a row for every new token, with `heads` heads from its first column on.
HeadRows<const void> checked_rows(std::string_view kernel, std::string_view operand, const ConstHeads& held,
                                  const CachedShape& of, std::int64_t heads) {
  check_dtype(kernel, operand, held.rows.dtype, {of.dtype});
  const Shape& shape = held.rows.shape;
  const bool by_token = shape.rank() == 2 && shape[0] == of.batch * of.time;
  if (!by_token && !(shape.rank() == 3 && shape[0] == of.batch && shape[1] == of.time)) {
    refuse(kernel, fmt::format("`{}` has shape {}, wanted [{}, {}, n] or [{}, n]", operand, shape.to_string(),
                               of.batch, of.time, of.batch * of.time));
  }
  const std::int64_t stride = shape[shape.rank() - 1];
  if (held.first_column < 0 || held.first_column + heads * of.head_width > stride) {
    refuse(kernel,
           fmt::format("`{}` has rows of {} elements, which do not hold {} heads of {} from column {}",
                       operand, stride, heads, of.head_width, held.first_column));
  }
  // A tensor on meta has no address, so none is computed.
  const void* data = held.rows.data;
  return {data == nullptr ? nullptr : cpu::element_at(of.dtype, data, held.first_column), stride};
}

/// Checks and fills in everything but `time`.
CachedShape checked_shape(std::string_view kernel, const CachedKeys& cache) {
  check_floating(kernel, "keys", cache.keys.dtype);
  check_rank(kernel, "keys", cache.keys.shape, 4);
  check_dtype(kernel, "values", cache.values.dtype, {cache.keys.dtype});
  check_shape(kernel, "values", cache.values.shape, cache.keys.shape);
  const Shape& shape = cache.keys.shape;
  CachedShape checked;
  checked.batch = shape[0];
  checked.key_value_heads = shape[1];
  checked.capacity = shape[2];
  checked.head_width = shape[3];
  checked.dtype = cache.keys.dtype;
  check_dtype(kernel, "lengths", cache.lengths.dtype, {DataType::int32});
  check_shape(kernel, "lengths", cache.lengths.shape, {checked.batch});
  checked.lengths = cache.lengths.as<std::int32_t>();
  if (checked.head_width < 1 || checked.head_width > cached_head_width || checked.key_value_heads < 1) {
    refuse(kernel, fmt::format("`keys` has shape {}, wanted at least one head of 1 to {} elements",
                               shape.to_string(), cached_head_width));
  }
  return checked;
}

/// The number of new tokens of each entry, according to an operand's rows.
std::int64_t checked_time(std::string_view kernel, std::string_view operand, const Shape& rows,
                          const CachedShape& of, const CachedKeys& cache) {
  std::int64_t time = 0;
  if (rows.rank() == 3) {
    time = rows[1];
  } else if (rows.rank() == 2 && of.batch > 0 && rows[0] % of.batch == 0) {
    time = rows[0] / of.batch;
  } else {
    refuse(kernel, fmt::format("`{}` has shape {}, wanted [{}, time, n] or [{} * time, n]", operand,
                               rows.to_string(), of.batch, of.batch));
  }
  if (cache.most < time || cache.most > of.capacity) {
    refuse(kernel, fmt::format("`most` is {}, wanted from the {} new tokens to the cache's capacity of {}",
                               cache.most, time, of.capacity));
  }
  return time;
}

}  // namespace

void append_to_cache(Stream& stream, const ConstHeads& key, const ConstHeads& value,
                     const CachedKeys& cache) {
  constexpr std::string_view kernel = "append_to_cache";
  CacheAppend call;
  static_cast<CachedShape&>(call) = checked_shape(kernel, cache);
  call.time = checked_time(kernel, "key", key.rows.shape, call, cache);
  call.key = checked_rows(kernel, "key", key, call, call.key_value_heads);
  call.value = checked_rows(kernel, "value", value, call, call.key_value_heads);
  call.keys = cache.keys.data;
  call.values = cache.values.data;
  dispatch(
      stream, kernel, meta::append_to_cache_cost(call),
      [call, threads = stream.threads()] { cpu::append_to_cache(call, threads); },
      [&] { cuda::append_to_cache(stream, call); });
}

void attention_with_cache(Stream& stream, const AttentionOptions& options, const ConstHeads& query,
                          const CachedKeys& cache, const TensorView& out) {
  constexpr std::string_view kernel = "attention_with_cache";
  CachedAttention call;
  static_cast<CachedShape&>(call) = checked_shape(kernel, cache);
  call.time = checked_time(kernel, "query", query.rows.shape, call, cache);
  call.heads = options.heads;
  if (call.heads < 1 || call.heads % call.key_value_heads != 0) {
    refuse(kernel,
           fmt::format("the cache's {} heads do not divide the {} heads", call.key_value_heads, call.heads));
  }
  if (options.key_value_heads != 0 && options.key_value_heads != call.key_value_heads) {
    refuse(kernel, fmt::format("key_value_heads is {}, but the cache has {}", options.key_value_heads,
                               call.key_value_heads));
  }
  if (options.window < 0) refuse(kernel, fmt::format("window is {}, wanted 0 or more", options.window));
  call.window = options.window;
  if (!(options.scale >= 0.0f && std::isfinite(options.scale))) {
    refuse(kernel, fmt::format("scale is {}, wanted a positive number or 0", options.scale));
  }
  call.scale = options.scale > 0 ? options.scale : 1.0f / std::sqrt(static_cast<float>(call.head_width));
  if (options.dropout.probability != 0.0f) {
    refuse(kernel, fmt::format("dropout probability is {}, wanted 0", options.dropout.probability));
  }
  if (options.document_begin.shape.rank() > 0) {
    refuse(kernel, "document_begin is given, but an entry of a cache is one document");
  }
  call.query = checked_rows(kernel, "query", query, call, call.heads);
  check_dtype(kernel, "out", out.dtype, {call.dtype});
  check_elements(kernel, "out", out.elements(), call.batch * call.time * call.heads * call.head_width);
  call.keys = cache.keys.data;
  call.values = cache.values.data;
  call.out = out.data;
  dispatch(
      stream, kernel, meta::attention_with_cache_cost(call, cache.most),
      [call, threads = stream.threads()] { cpu::attention_with_cache(call, threads); },
      [&] { cuda::attention_with_cache(stream, call); });
}

}  // namespace tranche::kernels
