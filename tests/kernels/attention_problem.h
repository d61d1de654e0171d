#pragma once
/// Attention problems with groups of heads, windows, documents and rows wider than the heads, and their
/// results in fp64, for tests on the CPU and on the GPU.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernels/dropout_draws.h"
#include "kernels/reference/attention.h"
#include "tests/kernels/kernel_testing.h"
#include "tranche/kernels/attention.h"

namespace tranche::kernels::testing {

struct AttentionSizes {
  std::int64_t batch = 1, time = 1, heads = 1, key_value_heads = 1, head_width = 1;
  std::int64_t window = 0;
  std::vector<std::int64_t> documents = {};  ///< lengths, repeated along the tokens of the batch; empty: no
                                             ///< documents
  std::int64_t padding = 0;                  ///< columns before and after the heads in a row
  float dropout = 0, scale = 0;

  std::int64_t heads_of(std::size_t part) const { return part == 0 ? heads : key_value_heads; }
  Shape rows(std::size_t part) const { return {batch, time, heads_of(part) * head_width + 2 * padding}; }
  Shape out() const { return {batch, time, heads * head_width}; }
  Shape statistics() const { return {batch, heads, time}; }
  std::string text() const {
    std::string made = "batch " + std::to_string(batch) + " time " + std::to_string(time) + " heads " +
                       std::to_string(heads) + "/" + std::to_string(key_value_heads) + " of " +
                       std::to_string(head_width) + " window " + std::to_string(window) + " padding " +
                       std::to_string(padding) + " dropout " + std::to_string(dropout) + " documents";
    for (std::int64_t length : documents) made += " " + std::to_string(length);
    return made;
  }
};

/// The first token of each token's document, if documents have these lengths repeatedly; a row ends a
/// document.
inline std::vector<double> document_begins(const AttentionSizes& s) {
  std::vector<double> begins;
  std::size_t next = 0;
  for (std::int64_t b = 0; b < s.batch; ++b) {
    std::int64_t begin = 0, length = s.documents[next++ % s.documents.size()];
    for (std::int64_t t = 0; t < s.time; ++t) {
      if (t == begin + length) {
        begin = t;
        length = s.documents[next++ % s.documents.size()];
      }
      begins.push_back(static_cast<double>(begin));
    }
  }
  return begins;
}

/// Rows [first, first + count) of the tokens of every batch entry.
inline HostTensor tokens_of(const HostTensor& all, std::int64_t first, std::int64_t count) {
  const Shape& shape = all.shape();
  const std::vector<double> values = all.values();
  std::vector<double> taken;
  for (std::int64_t b = 0; b < shape[0]; ++b) {
    const auto from = values.begin() + static_cast<std::ptrdiff_t>((b * shape[1] + first) * shape[2]);
    taken.insert(taken.end(), from, from + static_cast<std::ptrdiff_t>(count * shape[2]));
  }
  return HostTensor(all.dtype(), {shape[0], count, shape[2]}, taken);
}

struct AttentionResults {
  std::vector<double> out, log_sum_exp;
  std::array<std::vector<double>, 3> gradient;  ///< gradients of queries, keys and values, rows with their
                                                ///< padding
};

struct AttentionProblem {
  AttentionSizes sizes;
  DataType dtype;
  std::vector<std::int64_t> samples;
  std::vector<HostTensor> parts;  ///< query, key, value, with the values after rounding to the dtype
  HostTensor d_out, document_begin;

  AttentionProblem(const AttentionSizes& s, DataType type, std::uint64_t salt)
      : sizes(s),
        dtype(type),
        d_out(Random(salt).tensor(type, s.out())),
        document_begin(s.documents.empty()
                           ? HostTensor(DataType::int32, Shape{0})
                           : HostTensor(DataType::int32, {s.batch, s.time}, document_begins(s))) {
    Random random(salt + 1000);
    for (std::int64_t b = 0; b < s.batch; ++b) samples.push_back(1000 + b);
    for (std::size_t part = 0; part < 3; ++part) parts.push_back(random.tensor(type, s.rows(part), -2, 2));
  }

  /// The options, with the beginnings of documents in `begins`.
  AttentionOptions options(const ConstTensorView& begins) const {
    AttentionOptions made;
    made.heads = sizes.heads;
    made.key_value_heads = sizes.key_value_heads;
    made.window = sizes.window;
    made.scale = sizes.scale;
    made.dropout = {.probability = sizes.dropout, .seed = 5, .step = 7, .site = 3, .samples = samples};
    if (!sizes.documents.empty()) made.document_begin = begins;
    return made;
  }

  /// The results of the formula in fp64. Padding of the gradients is NaN, like a tensor's untouched memory.
  AttentionResults expected() const {
    const AttentionSizes& s = sizes;
    std::vector<double> keep;
    if (s.dropout > 0) {
      const DropoutDraws draws = dropout_draws(options({}).dropout);
      for (std::int64_t sample : samples) {
        for (std::int64_t e = 0; e < s.heads * s.time * s.time; ++e) {
          const bool kept = draws.keeps(draws.block(sample, e / 4)[static_cast<std::size_t>(e % 4)]);
          keep.push_back(kept ? static_cast<double>(draws.scale) : 0.0);
        }
      }
    }
    std::vector<std::int32_t> begins;
    if (!s.documents.empty()) {
      for (double begin : document_begin.values()) begins.push_back(static_cast<std::int32_t>(begin));
    }
    const reference::AttentionShape shape{s.batch,      s.time,   s.heads, s.key_value_heads,
                                          s.head_width, s.window, s.scale, begins};
    AttentionResults made;
    made.out.resize(static_cast<std::size_t>(s.out().elements()));
    made.log_sum_exp.resize(static_cast<std::size_t>(s.statistics().elements()));
    std::array<std::vector<double>, 3> values;
    std::array<reference::HeadRows<const double>, 3> operands;
    std::array<reference::HeadRows<double>, 3> gradients;
    const auto padding = static_cast<std::size_t>(s.padding);
    for (std::size_t part = 0; part < 3; ++part) {
      values[part] = parts[part].values();
      made.gradient[part].assign(values[part].size(), std::nan(""));
      const std::int64_t stride = s.rows(part)[2];
      if (values[part].empty()) continue;
      operands[part] = {std::span<const double>(values[part]).subspan(padding), stride};
      gradients[part] = {std::span(made.gradient[part]).subspan(padding), stride};
    }
    reference::attention_forward(shape, {operands[0], operands[1], operands[2]}, keep, made.out,
                                 made.log_sum_exp);
    reference::attention_backward(shape, d_out.values(), {operands[0], operands[1], operands[2]}, keep,
                                  {gradients[0], gradients[1], gradients[2]});
    return made;
  }

  /// Checks the results. fp32: scores of up to 45 have errors of 45 * 2^-22, relative in the weights; a
  /// gradient sums over a group and its queries. 16 bits: the norm of the error is at most a few roundings,
  /// and each error a fraction of the largest value.
  void expect_close_to(const AttentionResults& wanted, const AttentionResults& got) const {
    const bool wide = dtype == DataType::float32;
    const double r = rounding_of(dtype);
    expect_close(got.out, wanted.out, wide ? 2e-5 : 1.1 * r, wide ? 2e-5 : 2.5 * r + 1e-4, "out");
    expect_close(got.log_sum_exp, wanted.log_sum_exp, 2e-6, 3e-5, "log_sum_exp");
    const char* const names[] = {"d_query", "d_key", "d_value"};
    for (std::size_t part = 0; part < 3; ++part) {
      ASSERT_EQ(got.gradient[part].size(), wanted.gradient[part].size());
      double norm = 0, difference = 0, largest = 0;
      for (double x : wanted.gradient[part])
        largest = std::isnan(x) ? largest : std::max(largest, std::abs(x));
      for (std::size_t i = 0; i < wanted.gradient[part].size(); ++i) {
        const double x = wanted.gradient[part][i], error = got.gradient[part][i] - x;
        if (std::isnan(x)) {
          ASSERT_TRUE(std::isnan(got.gradient[part][i])) << names[part] << " padding " << i;
          continue;
        }
        norm += x * x;
        difference += error * error;
        const double bound = wide ? 5e-5 * std::abs(x) + 1e-4 * std::max(1.0, largest / 8)
                                  : 2 * r * std::abs(x) + 4 * r * std::max(2.0, largest);
        ASSERT_LE(std::abs(error), bound) << names[part] << " " << i << " is " << got.gradient[part][i]
                                          << ", wanted " << x << "; " << repeat_line();
      }
      // The second term is for gradients that cancel to 0, such as those of a query that sees only itself.
      const auto count = static_cast<double>(wanted.gradient[part].size());
      EXPECT_LE(std::sqrt(difference),
                (wide ? 2e-5 : 3 * r) * std::sqrt(norm) + (wide ? 1e-6 : 3 * r) * std::sqrt(count))
          << names[part] << "; " << repeat_line();
    }
  }
};

/// Each mask with each number of heads in a group; head sizes alternate.
inline std::vector<AttentionSizes> attention_sweep(std::vector<std::int64_t> head_widths, std::int64_t time,
                                                   std::int64_t padding) {
  struct Mask {
    std::int64_t window;
    std::vector<std::int64_t> documents;
  };
  const Mask masks[] = {{0, {}},         {1, {}},         {3, {}},         {time + 9, {}},  {0, {1}},
                        {0, {1, 7, 33}}, {0, {time + 3}}, {5, {1, 19, 2}}, {40, {64, 1, 9}}};
  std::vector<AttentionSizes> made;
  for (const Mask& mask : masks) {
    for (const std::int64_t group : {1, 2, 4, 7}) {
      AttentionSizes s;
      s.batch = made.size() % 5 == 0 ? 2 : 1;
      s.time = time;
      s.key_value_heads = made.size() % 3 == 0 ? 2 : 1;
      s.heads = group * s.key_value_heads;
      s.head_width = head_widths[made.size() % head_widths.size()];
      s.window = mask.window;
      s.documents = mask.documents;
      s.padding = made.size() % 2 == 0 ? 0 : padding;
      s.dropout = made.size() % 4 == 1 ? 0.3f : 0.0f;
      s.scale = made.size() % 6 == 5 ? 0.2f : 0.0f;
      made.push_back(s);
    }
  }
  return made;
}

}  // namespace tranche::kernels::testing
