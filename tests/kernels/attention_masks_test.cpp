// Attention with groups of heads, windows, documents and rows wider than the heads, on the CPU.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/cpu/attention.h"
#include "kernels/cpu/attention_bf16.h"
#include "tests/core/rounds.h"
#include "tests/kernels/attention_problem.h"
#include "tranche/kernels/matmul.h"

namespace tranche::kernels {
namespace {

using namespace testing;

constexpr auto fp32 = DataType::float32, bf16 = DataType::bfloat16;

/// The results of one forward and backward, as bytes and as values.
struct Outcome {
  HostTensor out, log_sum_exp;
  std::vector<HostTensor> gradient;

  std::vector<TestBytes> bytes() const {
    return {out.bytes(), log_sum_exp.bytes(), gradient[0].bytes(), gradient[1].bytes(), gradient[2].bytes()};
  }
  AttentionResults values() const {
    return {out.values(),
            log_sum_exp.values(),
            {gradient[0].values(), gradient[1].values(), gradient[2].values()}};
  }
};

Outcome run(AttentionProblem& p, Machine& machine) {
  const AttentionSizes& s = p.sizes;
  Outcome made{HostTensor(p.dtype, s.out()), HostTensor(fp32, s.statistics()), {}};
  for (std::size_t part = 0; part < 3; ++part) made.gradient.emplace_back(p.dtype, s.rows(part));
  const AttentionOptions options = p.options(p.document_begin.view());
  const ConstHeads query{p.parts[0].view(), s.padding}, key{p.parts[1].view(), s.padding},
      value{p.parts[2].view(), s.padding};
  attention_forward(machine.stream(), options, query, key, value, made.out.view(), made.log_sum_exp.view(),
                    machine.workspace());
  attention_backward(machine.stream(), options, p.d_out.view(), query, key, value, made.out.view(),
                     made.log_sum_exp.view(), {made.gradient[0].view(), s.padding},
                     {made.gradient[1].view(), s.padding}, {made.gradient[2].view(), s.padding},
                     machine.workspace());
  EXPECT_TRUE(made.out.guard_intact() && made.log_sum_exp.guard_intact());
  for (const HostTensor& gradient : made.gradient) EXPECT_TRUE(gradient.guard_intact());
  return made;
}

void expect_agreement(const AttentionSizes& sizes, DataType dtype, Machine& machine, std::uint64_t salt) {
  SCOPED_TRACE(sizes.text() + " " + std::string(name_of(dtype)));
  AttentionProblem p(sizes, dtype, salt);
  p.expect_close_to(p.expected(), run(p, machine).values());
}

TEST(AttentionMasks, AgreeWithTheReferenceForEveryDtypeGroupAndMask) {
  Machine machine(2);
  int point = 0;
  for (DataType dtype : floating_dtypes) {
    for (const AttentionSizes& sizes : attention_sweep({5, 32, 48, 80}, 70, 3)) {
      if (test::swept(point++, 7)) expect_agreement(sizes, dtype, machine, 90);
    }
  }
}

TEST(AttentionMasks, AgreeWithTheReferenceOverManyTiles) {
  Machine machine(2);
  // Sizes near tiles of 256 keys and 64 queries, with documents that begin within tiles and at their edges.
  const AttentionSizes sizes[] = {
      {.time = 330, .heads = 2, .head_width = 8, .window = 1},
      {.time = 330, .heads = 2, .key_value_heads = 1, .head_width = 32, .window = 65},
      {.time = 600, .heads = 2, .key_value_heads = 2, .head_width = 16, .window = 250},
      {.time = 530, .heads = 1, .head_width = 64, .window = 257},
      {.batch = 2, .time = 300, .heads = 3, .key_value_heads = 1, .head_width = 32, .documents = {255, 1, 7}},
      {.time = 640, .heads = 1, .head_width = 32, .window = 100, .documents = {256, 64, 257}},
      {.time = 520, .heads = 2, .key_value_heads = 1, .head_width = 16, .documents = {319, 1}},
  };
  int point = 0;
  for (const AttentionSizes& s : sizes) {
    for (DataType dtype : {fp32, bf16}) {
      if (test::swept(point++)) expect_agreement(s, dtype, machine, 91);
    }
  }
}

TEST(AttentionMasks, BitsDependNeitherOnThreadsNorOnWorkspace) {
  const AttentionSizes sizes[] = {
      {.batch = 1,
       .time = 330,
       .heads = 4,
       .key_value_heads = 2,
       .head_width = 32,
       .window = 90,
       .documents = {200, 1, 63},
       .padding = 2,
       .dropout = 0.2f},
      {.time = 270, .heads = 7, .key_value_heads = 1, .head_width = 16, .documents = {64, 1, 150}},
  };
  Machine one(1), two(2), five(5);
  for (const AttentionSizes& s : sizes) {
    Machine least(2, cpu::attention_workspace_bytes(s.head_width));
    for (DataType dtype : floating_dtypes) {
      SCOPED_TRACE(s.text());
      AttentionProblem p(s, dtype, 92);
      const auto first = run(p, one).bytes();
      EXPECT_EQ(first, run(p, two).bytes());
      // There is a task for each tile, because there are more threads than heads of keys.
      EXPECT_EQ(first, run(p, five).bytes());
      // The same, because the gradients of all queries do not fit.
      EXPECT_EQ(first, run(p, least).bytes());
    }
  }
}

// The queries of some tokens with the keys of all. Their results are those of all queries, and the parts'
// gradients of keys and values add up to the whole.
TEST(AttentionMasks, PartsOfTheQueriesAreThoseOfAll) {
  const AttentionSizes sizes[] = {
      {.batch = 2, .time = 640, .heads = 2, .key_value_heads = 1, .head_width = 32, .dropout = 0.2f},
      {.time = 560, .heads = 3, .head_width = 24, .documents = {200, 1, 63}, .padding = 2},
      {.time = 600, .heads = 2, .key_value_heads = 2, .head_width = 32, .window = 70, .dropout = 0.1f},
      {.time = 300,
       .heads = 7,
       .key_value_heads = 1,
       .head_width = 16,
       .window = 40,
       .documents = {64, 1, 150}}};
  for (const AttentionSizes& s : sizes) {
    for (const int threads : {1, 5}) {  // one pass over keys, and a task for each tile
      Machine machine(threads);
      for (DataType dtype : floating_dtypes) {
        SCOPED_TRACE(s.text() + " " + std::string(name_of(dtype)));
        // If a row's bits do not depend on the number of rows, the parts have the bits of the whole.
        const bool bits = cpu::attention_runs_in_bf16(dtype, s.head_width) ||
                          matmul_sum_order(DeviceKind::cpu, fp32).ascending;
        const double rounding = dtype == fp32 ? 1e-6 : rounding_of(dtype);
        const auto expect_same = [&](const std::vector<double>& got, const std::vector<double>& wanted,
                                     std::int64_t begin) {
          ASSERT_EQ(got.size(), wanted.size());
          for (std::size_t i = 0; i < got.size(); ++i) {
            if (std::isnan(wanted[i])) continue;  // padding
            const double bound = bits ? 0 : 4 * rounding * std::max(1.0, std::abs(wanted[i]));
            ASSERT_LE(std::abs(got[i] - wanted[i]), bound) << begin << " " << i << " is " << got[i];
          }
        };
        AttentionProblem p(s, dtype, 95);
        Outcome whole = run(p, machine);
        const AttentionOptions all = p.options(p.document_begin.view());
        std::array<std::vector<double>, 2> sums;
        // The parts end at a tile's edge, within a tile, and before the last query, which is a part by
        // itself.
        const std::int64_t ends[] = {64, s.time / 2 + 5, s.time - 1, s.time};
        std::int64_t first = 0;
        for (const std::int64_t end : ends) {
          const std::int64_t count = end - first;
          AttentionOptions options = all;
          options.first_query = first;
          HostTensor query = tokens_of(p.parts[0], first, count), d_out = tokens_of(p.d_out, first, count);
          HostTensor out(dtype, {s.batch, count, s.out()[2]}), statistics(fp32, {s.batch, s.heads, count}),
              d_query(dtype, {s.batch, count, s.rows(0)[2]}), d_key(dtype, s.rows(1)),
              d_value(dtype, s.rows(2));
          const ConstHeads queries{query.view(), s.padding}, key{p.parts[1].view(), s.padding},
              value{p.parts[2].view(), s.padding};
          attention_forward(machine.stream(), options, queries, key, value, out.view(), statistics.view(),
                            machine.workspace());
          attention_backward(machine.stream(), options, d_out.view(), queries, key, value, out.view(),
                             statistics.view(), {d_query.view(), s.padding}, {d_key.view(), s.padding},
                             {d_value.view(), s.padding}, machine.workspace());
          EXPECT_TRUE(out.guard_intact() && statistics.guard_intact() && d_query.guard_intact());
          EXPECT_TRUE(d_key.guard_intact() && d_value.guard_intact());
          expect_same(out.values(), tokens_of(whole.out, first, count).values(), first);
          expect_same(d_query.values(), tokens_of(whole.gradient[0], first, count).values(), first);
          HostTensor sums_of_all(fp32, {s.batch * s.heads, s.time, 1}, whole.log_sum_exp.values());
          expect_same(statistics.values(), tokens_of(sums_of_all, first, count).values(), first);
          const HostTensor* const d_parts[] = {&d_key, &d_value};
          for (std::size_t i = 0; i < 2; ++i) {
            const std::vector<double> values = d_parts[i]->values();
            if (sums[i].empty()) sums[i].assign(values.size(), 0.0);
            for (std::size_t k = 0; k < values.size(); ++k) sums[i][k] += values[k];
          }
          first = end;
        }
        for (std::size_t i = 0; i < 2; ++i) {
          const std::vector<double> wanted = whole.gradient[i + 1].values();
          for (std::size_t k = 0; k < wanted.size(); ++k) {
            if (std::isnan(wanted[k])) continue;
            EXPECT_NEAR(sums[i][k], wanted[k], 8 * rounding * std::max(1.0, std::abs(wanted[k]))) << k;
          }
        }
      }
    }
  }
}

TEST(AttentionMasks, QueriesThatAreNoPartOfTheTokensAreRefused) {
  Machine machine(1);
  AttentionProblem p({.time = 5, .heads = 1, .head_width = 4}, fp32, 96);
  HostTensor out(fp32, {1, 3, 4}), statistics(fp32, {1, 1, 3});
  HostTensor query = tokens_of(p.parts[0], 0, 3);
  AttentionOptions options = p.options({});
  options.first_query = 3;
  try {
    attention_forward(machine.stream(), options, {query.view()}, {p.parts[1].view()}, {p.parts[2].view()},
                      out.view(), statistics.view(), machine.workspace());
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_TRUE(std::string(error.what())
                    .starts_with("attention_forward: queries [3, 6) are not among 5 tokens, which `key` has"))
        << error.what();
  }
}

TEST(AttentionMasks, AMaskThatHidesNothingAndWiderRowsChangeNoBit) {
  Machine machine(2);
  for (DataType dtype : floating_dtypes) {
    const AttentionSizes plain{.time = 330, .heads = 2, .key_value_heads = 2, .head_width = 32};
    AttentionProblem p(plain, dtype, 93);
    const auto wanted = run(p, machine).bytes();
    p.sizes.window = 330;
    EXPECT_EQ(run(p, machine).bytes(), wanted);
    p.sizes.window = 0;
    p.sizes.documents = {400};
    p.document_begin = HostTensor(DataType::int32, {1, 330}, document_begins(p.sizes));
    EXPECT_EQ(run(p, machine).bytes(), wanted);
    p.sizes.documents = {};
    p.sizes.scale = 1.0f / std::sqrt(32.0f);
    EXPECT_EQ(run(p, machine).bytes(), wanted);

    AttentionProblem wide(plain, dtype, 93);
    wide.sizes.padding = 5;
    for (std::size_t part = 0; part < 3; ++part) {
      const std::vector<double> dense = p.parts[part].values();
      std::vector<double> rows;
      for (std::size_t t = 0; t < 330; ++t) {
        rows.insert(rows.end(), 5, 77.0);
        rows.insert(rows.end(), dense.begin() + static_cast<std::ptrdiff_t>(64 * t),
                    dense.begin() + static_cast<std::ptrdiff_t>(64 * (t + 1)));
        rows.insert(rows.end(), 5, -77.0);
      }
      wide.parts[part] = HostTensor(dtype, wide.sizes.rows(part), rows);
    }
    const Outcome got = run(wide, machine);
    EXPECT_EQ(got.out.bytes(), wanted[0]);
    for (std::size_t part = 0; part < 3; ++part) {
      const std::vector<double> rows = got.gradient[part].values();
      std::vector<double> heads;
      for (std::size_t t = 0; t < 330; ++t) {
        heads.insert(heads.end(), rows.begin() + static_cast<std::ptrdiff_t>(74 * t + 5),
                     rows.begin() + static_cast<std::ptrdiff_t>(74 * t + 69));
      }
      EXPECT_EQ(HostTensor(dtype, {330, 64}, heads).bytes(), wanted[2 + part]);
    }
  }
}

// The tolerance is 1e-6 of the largest value: the position of a document's beginning within a tile determines
// which keys are summed in one product, so bits differ.
TEST(AttentionMasks, PackedDocumentsAreEachDocumentAlone) {
  Machine machine(2);
  for (const std::int64_t window : {0, 20}) {
    const AttentionSizes packed{.time = 400,
                                .heads = 4,
                                .key_value_heads = 2,
                                .head_width = 16,
                                .window = window,
                                .documents = {1, 131, 3, 200, 65}};
    AttentionProblem p(packed, fp32, 94);
    const AttentionResults whole = run(p, machine).values();
    std::int64_t begin = 0;
    for (std::int64_t length : packed.documents) {
      SCOPED_TRACE(length);
      AttentionSizes sizes = packed;
      sizes.time = length;
      sizes.documents = {};
      AttentionProblem alone(sizes, fp32, 94);
      const auto cut = [&](const std::vector<double>& rows, std::int64_t width) {
        const auto first = rows.begin() + static_cast<std::ptrdiff_t>(begin * width);
        return std::vector<double>(first, first + static_cast<std::ptrdiff_t>(length * width));
      };
      for (std::size_t part = 0; part < 3; ++part) {
        const std::int64_t width = sizes.rows(part)[2];
        alone.parts[part] = HostTensor(fp32, sizes.rows(part), cut(p.parts[part].values(), width));
      }
      alone.d_out = HostTensor(fp32, sizes.out(), cut(p.d_out.values(), 64));
      const AttentionResults got = run(alone, machine).values();
      expect_close(cut(whole.out, 64), got.out, 1e-6, 1e-6, "out");
      for (std::size_t part = 0; part < 3; ++part) {
        const std::vector<double>& wanted = got.gradient[part];
        double largest = 1;
        for (double x : wanted) largest = std::max(largest, std::abs(x));
        expect_close(cut(whole.gradient[part], sizes.rows(part)[2]), wanted, 1e-6, 1e-6 * largest,
                     "gradient");
      }
      begin += length;
    }
    EXPECT_EQ(begin, packed.time);
  }
}

// A product with a masked NaN would be NaN, so this shows that no product with hidden tiles is computed.
TEST(AttentionMasks, TilesThatNoQuerySeesAreSkipped) {
  Machine machine(1);
  for (DataType dtype : {fp32, bf16}) {
    for (const bool by_window : {true, false}) {
      AttentionSizes sizes{.time = 1000, .heads = 2, .key_value_heads = 1, .head_width = 32};
      if (by_window) {
        sizes.window = 33;
      } else {
        sizes.documents = {704, 296};
      }
      SCOPED_TRACE(sizes.text());
      AttentionProblem p(sizes, dtype, 95);
      const Outcome wanted = run(p, machine);
      // Queries from 704 on see keys from 672 on, a multiple of the step at which tiles are cut.
      for (std::size_t part = 0; part < 3; ++part) {
        const std::int64_t width = sizes.rows(part)[2], hidden = by_window ? 672 : 704;
        std::vector<double> values = p.parts[part].values();
        std::fill_n(values.begin(), static_cast<std::ptrdiff_t>(hidden * width), std::nan(""));
        p.parts[part] = HostTensor(dtype, sizes.rows(part), values);
      }
      const Outcome got = run(p, machine);
      const auto expect_same_end = [&](const HostTensor& a, const HostTensor& b, std::size_t from) {
        const std::vector<double> x = a.values(), y = b.values();
        for (std::size_t i = from; i < x.size(); ++i) ASSERT_EQ(x[i], y[i]) << i;
      };
      expect_same_end(got.out, wanted.out, 704 * 64);
      expect_same_end(got.gradient[0], wanted.gradient[0], 704 * 64);
      const std::size_t first_key = by_window ? 704 + 64 : 704;
      expect_same_end(got.gradient[1], wanted.gradient[1], first_key * 32);
      expect_same_end(got.gradient[2], wanted.gradient[2], first_key * 32);
    }
  }
}

TEST(AttentionMasks, TheReferencesBackwardAgreesWithFiniteDifferences) {
  const AttentionSizes sizes[] = {
      {.batch = 2, .time = 5, .heads = 4, .key_value_heads = 2, .head_width = 3, .window = 2, .padding = 1},
      {.time = 7, .heads = 2, .key_value_heads = 1, .head_width = 2, .documents = {1, 4}, .dropout = 0.4f},
      {.time = 7, .heads = 3, .head_width = 2, .window = 3, .documents = {2, 5}, .scale = 0.8f},
  };
  for (const AttentionSizes& s : sizes) {
    SCOPED_TRACE(s.text());
    AttentionProblem p(s, DataType::float64, 96);
    const AttentionResults wanted = p.expected();
    const std::vector<double> d_out = p.d_out.values();
    for (std::size_t part = 0; part < 3; ++part) {
      const std::vector<double> start = p.parts[part].values();
      std::vector<double> differences = finite_differences(start, [&](const std::vector<double>& x) {
        p.parts[part] = HostTensor(DataType::float64, s.rows(part), x);
        return dot(p.expected().out, d_out);
      });
      p.parts[part] = HostTensor(DataType::float64, s.rows(part), start);
      for (std::size_t i = 0; i < differences.size(); ++i) {
        const double x = wanted.gradient[part][i];
        if (std::isnan(x)) continue;  // padding
        EXPECT_NEAR(differences[i], x, 1e-8) << part << " " << i;
      }
    }
  }
}

TEST(AttentionMasks, CostsCountWhatTheWindowLeavesAndTheHeadsThatAreRead) {
  Machine meta(1, 0, DeviceKind::meta);
  const TensorView query{nullptr, bf16, {2, 9, 8}}, key{nullptr, bf16, {18, 4}},
      value{nullptr, bf16, {18, 6}};
  const TensorView statistics{nullptr, fp32, {2, 4, 9}};
  const Workspace workspace{nullptr, minimum_workspace_bytes};
  AttentionOptions options;
  options.heads = 4;
  options.key_value_heads = 2;
  options.window = 3;
  const auto work = [&] { return meta.stream().work(); };
  attention_forward(meta.stream(), options, {query}, {key}, {value, 2}, query, statistics, workspace);
  const double pairs = 2 * (1 + 2 + 7 * 3), rows = 18;
  EXPECT_EQ(work().floating_point_operations, pairs * (4 * 8 + 5 * 4));
  EXPECT_EQ(work().bytes_read, rows * (8 + 4 + 4) * 2);
  EXPECT_EQ(work().bytes_written, rows * 8 * 2 + rows * 4 * 4);
  const auto before = work();
  attention_backward(meta.stream(), options, query, {query}, {key}, {value, 2}, query, statistics, {query},
                     {key}, {value, 2}, workspace);
  EXPECT_EQ(work().floating_point_operations - before.floating_point_operations,
            pairs * (10 * 8 + 6 * 4) + 2 * rows * 8);
  EXPECT_EQ(work().bytes_read - before.bytes_read, rows * (3 * 8 + 4 + 4) * 2 + rows * 4 * 4);
  EXPECT_EQ(work().bytes_written - before.bytes_written, rows * (8 + 4 + 4) * 2);
}

TEST(AttentionMasks, ErrorsNameTheOperandAndWhatWasWanted) {
  Machine machine(1, 0, DeviceKind::meta);
  const TensorView out{nullptr, fp32, {2, 9, 8}}, packed{nullptr, fp32, {2, 9, 24}};
  const TensorView statistics{nullptr, fp32, {2, 2, 9}}, narrow{nullptr, fp32, {18, 4}};
  AttentionOptions two;
  two.heads = 2;
  struct Operands {
    ConstHeads query, key, value;
    TensorView out, statistics;
    std::int64_t bytes = minimum_workspace_bytes;
  };
  const Operands fine{{packed}, {packed, 8}, {packed, 16}, out, statistics};
  const auto forward = [&](const AttentionOptions& options, const Operands& o) {
    return refusal([&] {
      attention_forward(machine.stream(), options, o.query, o.key, o.value, o.out, o.statistics,
                        Workspace{nullptr, o.bytes});
    });
  };
  const auto with = [&](auto change) {
    AttentionOptions options = two;
    change(options);
    return forward(options, fine);
  };
  EXPECT_EQ(forward(two, fine), "");
  EXPECT_EQ(with([](auto& o) { o.heads = 3; }), "attention_forward: 3 heads do not divide the width 8");
  EXPECT_EQ(with([](auto& o) { o.heads = 0; }), "attention_forward: 0 heads do not divide the width 8");
  EXPECT_EQ(with([](auto& o) { o.key_value_heads = 4; }),
            "attention_forward: 4 key_value_heads do not divide the 2 heads");
  EXPECT_EQ(with([](auto& o) { o.key_value_heads = -1; }),
            "attention_forward: -1 key_value_heads do not divide the 2 heads");
  EXPECT_EQ(with([](auto& o) { o.window = -1; }), "attention_forward: window is -1, wanted 0 or more");
  EXPECT_EQ(with([](auto& o) { o.scale = -0.5f; }),
            "attention_forward: scale is -0.5, wanted a positive number or 0");
  EXPECT_EQ(with([](auto& o) { o.scale = std::nanf(""); }),
            "attention_forward: scale is nan, wanted a positive number or 0");
  EXPECT_EQ(with([&](auto& o) {
              o.document_begin = {nullptr, DataType::int64, {2, 9}};
            }),
            "attention_forward: `document_begin` has dtype int64, wanted int32");
  EXPECT_EQ(with([&](auto& o) {
              o.document_begin = {nullptr, DataType::int32, {9, 2}};
            }),
            "attention_forward: `document_begin` has shape [9, 2], wanted [2, 9]");
  EXPECT_EQ(with([](auto& o) { o.dropout.probability = 1; }),
            "attention_forward: dropout probability is 1, wanted [0, 1)");
  const std::vector<std::int64_t> one_sample{0};
  EXPECT_EQ(with([&](auto& o) { o.dropout = {.probability = 0.1f, .samples = one_sample}; }),
            "attention_forward: dropout names 1 samples, wanted 2 (one for each batch entry)");

  Operands o = fine;
  o.key = {narrow};
  EXPECT_EQ(forward(two, o),
            "attention_forward: `key` has rows of 4 elements, which do not hold 2 heads of 4 from column 0");
  EXPECT_EQ(with([&](auto& options) { options.key_value_heads = 1; }), "");
  o = fine;
  o.value.first_column = 17;
  EXPECT_EQ(forward(two, o),
            "attention_forward: `value` has rows of 24 elements, which do not hold 2 heads "
            "of 4 from column 17");
  o.value.first_column = -1;
  EXPECT_EQ(forward(two, o),
            "attention_forward: `value` has rows of 24 elements, which do not hold 2 heads "
            "of 4 from column -1");
  o = fine;
  o.query.rows.shape = {9, 2, 24};
  EXPECT_EQ(forward(two, o), "attention_forward: `query` has shape [9, 2, 24], wanted [2, 9, n] or [18, n]");
  o = fine;
  o.key.rows.dtype = bf16;
  EXPECT_EQ(forward(two, o), "attention_forward: `key` has dtype bf16, wanted fp32");
  o = fine;
  o.out.dtype = bf16;
  EXPECT_EQ(forward(two, o), "attention_forward: `out` has dtype bf16, wanted fp32");
  o = fine;
  o.statistics.shape = {2, 4, 9};
  EXPECT_EQ(forward(two, o), "attention_forward: `log_sum_exp` has shape [2, 4, 9], wanted [2, 2, 9]");
  o = fine;
  o.bytes = 1000;
  EXPECT_EQ(forward(two, o),
            "attention_forward: workspace has 1000 bytes; heads of width 4 need at least 150528");

  const auto backward = [&](const TensorView& d_out, const Heads& d_value) {
    return refusal([&] {
      attention_backward(machine.stream(), two, d_out, fine.query, fine.key, fine.value, out, statistics,
                         {packed}, {packed, 8}, d_value, Workspace{nullptr, minimum_workspace_bytes});
    });
  };
  EXPECT_EQ(backward(packed, {packed, 16}),
            "attention_backward: `d_out` has shape [2, 9, 24], wanted [2, 9, 8]");
  EXPECT_EQ(backward(out, {narrow}),
            "attention_backward: `d_value` has rows of 4 elements, which do not "
            "hold 2 heads of 4 from column 0");
}

}  // namespace
}  // namespace tranche::kernels
