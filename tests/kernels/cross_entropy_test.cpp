#include "tranche/kernels/cross_entropy.h"

#include <gmock/gmock.h>

#include <limits>

#include "kernels/reference/cross_entropy.h"
#include "tests/kernels/kernel_testing.h"

namespace tranche::kernels {
namespace {

using namespace testing;

constexpr auto fp32 = DataType::float32;

/// Rows of logits with their labels, and all outputs of the calls.
struct Operands {
  std::int64_t rows, vocabulary;
  std::vector<double> logits;
  std::vector<std::int32_t> labels;
  HostTensor targets, maximum, sum, target_logit, loss_sum, token_count;

  Operands(std::int64_t r, std::int64_t v, Random& random)
      : rows(r),
        vocabulary(v),
        logits(HostTensor(fp32, {r, v}, random.values(r * v, -20, 20)).values()),
        targets(DataType::int32, {r}),
        maximum(fp32, {r}),
        sum(fp32, {r}),
        target_logit(fp32, {r}),
        loss_sum(DataType::float64, {1}, std::vector<double>{3.5}),
        token_count(DataType::int64, {1}, std::vector<double>{2}) {
    std::vector<double> drawn;
    for (std::int64_t i = 0; i < r; ++i) {
      const bool ignored = i % 4 == 3;
      labels.push_back(ignored ? ignored_label : static_cast<std::int32_t>(random.integer(0, v - 1)));
      drawn.push_back(labels.back());
    }
    targets = HostTensor(DataType::int32, {r}, drawn);
  }
  CrossEntropyState state() { return {maximum.view(), sum.view(), target_logit.view()}; }

  HostTensor chunk(std::int64_t first, std::int64_t columns) const {
    std::vector<double> values;
    for (std::int64_t r = 0; r < rows; ++r) {
      const auto begin = logits.begin() + r * vocabulary + first;
      values.insert(values.end(), begin, begin + columns);
    }
    return {fp32, {rows, columns}, values};
  }
  void loss(Stream& stream, std::int64_t chunk_columns) {
    cross_entropy_begin(stream, state());
    for (std::int64_t first = 0; first < vocabulary; first += chunk_columns) {
      HostTensor part = chunk(first, std::min(chunk_columns, vocabulary - first));
      cross_entropy_accumulate(stream, part.view(), targets.view(), first, state());
    }
    cross_entropy_finish(stream, targets.view(), state(), loss_sum.view(), token_count.view());
  }
  /// The gradients of all chunks, joined.
  std::vector<double> gradient(Stream& stream, std::int64_t chunk_columns, float scale, DataType dtype,
                               bool in_place) {
    std::vector<double> whole(logits.size());
    for (std::int64_t first = 0; first < vocabulary; first += chunk_columns) {
      const std::int64_t columns = std::min(chunk_columns, vocabulary - first);
      HostTensor part = chunk(first, columns), d_part(dtype, {rows, columns});
      HostTensor& out = in_place ? part : d_part;
      cross_entropy_gradient(stream, part.view(), targets.view(), first, state(), scale, out.view());
      EXPECT_TRUE(out.guard_intact());
      const auto values = out.values();
      for (std::int64_t r = 0; r < rows; ++r) {
        std::copy_n(values.begin() + r * columns, columns, whole.begin() + r * vocabulary + first);
      }
    }
    return whole;
  }
};

TEST(CrossEntropy, AgreesWithTheReferenceInChunksOfAnySize) {
  Random random(41);
  Machine machine(2);
  struct Sizes {
    std::int64_t rows, vocabulary, chunk;
  };
  for (const Sizes& s : {Sizes{1, 1, 1}, Sizes{5, 7, 3}, Sizes{9, 256, 256}, Sizes{4, 257, 64},
                         Sizes{17, 101, 17}, Sizes{3, 1031, 500}, Sizes{8, 33, 16}, Sizes{0, 5, 5}}) {
    SCOPED_TRACE(::testing::Message() << s.rows << " x " << s.vocabulary << " by " << s.chunk);
    Operands run(s.rows, s.vocabulary, random);
    const auto wanted = reference::cross_entropy_forward(s.vocabulary, run.logits, run.labels);
    run.loss(machine.stream(), s.chunk);
    // A row's sum has a relative error below 1e-6, so its logarithm has an error below 1e-6; there are at
    // most 17 rows.
    EXPECT_NEAR(run.loss_sum.values()[0], 3.5 + wanted.loss_sum, 2e-6 * (1 + static_cast<double>(s.rows)))
        << repeat_line();
    EXPECT_EQ(run.token_count.values()[0], 2.0 + static_cast<double>(wanted.tokens));
    std::vector<double> d_logits(run.logits.size());
    const float scale = 0.37f;
    reference::cross_entropy_backward(s.vocabulary, run.logits, run.labels, scale, d_logits);
    for (DataType dtype : floating_dtypes) {
      SCOPED_TRACE(name_of(dtype));
      expect_close(run.gradient(machine.stream(), s.chunk, scale, dtype, false), d_logits,
                   rounding_of(dtype) + 2e-6, 1e-7 + underflow_of(dtype), "d_logits");
    }
    expect_close(run.gradient(machine.stream(), s.chunk, scale, fp32, true), d_logits, 2e-6, 1e-7,
                 "in place");
  }
}

TEST(CrossEntropy, StatesOfRanksCombineToThatOfAllColumns) {
  Random random(47);
  Machine machine(2);
  constexpr double infinity = std::numeric_limits<double>::infinity();
  const std::vector<std::pair<std::int64_t, std::int64_t>> parts{{0, 34}, {34, 34}, {68, 33}};
  Operands run(9, 101, random);
  // A rank has no finite logits for row 3, whose label is ignored.
  for (std::size_t i = 34; i < 68; ++i) run.logits[3 * 101 + i] = -infinity;
  HostTensor states(fp32, {3, 3, 9});
  for (std::size_t rank = 0; rank < 3; ++rank) {
    const auto row = [&](std::int64_t which) {
      return states.view().slice((static_cast<std::int64_t>(rank) * 3 + which) * 9, 9);
    };
    const CrossEntropyState state{row(0), row(1), row(2)};
    HostTensor logits = run.chunk(parts[rank].first, parts[rank].second);
    cross_entropy_begin(machine.stream(), state);
    cross_entropy_accumulate(machine.stream(), logits.view(), run.targets.view(), parts[rank].first, state);
  }
  run.loss(machine.stream(), 101);
  const double whole_loss = run.loss_sum.values()[0];
  const auto whole_sum = run.sum.values(), whole_maximum = run.maximum.values(),
             whole_target = run.target_logit.values();
  Operands combined = run;
  cross_entropy_combine(machine.stream(), states.view(), combined.state());
  EXPECT_EQ(combined.maximum.values(), whole_maximum);
  for (std::size_t i = 0; i < 9; ++i) {
    if (run.labels[i] != ignored_label) {
      EXPECT_EQ(combined.target_logit.values()[i], whole_target[i]);
    }
  }
  expect_close(combined.sum.values(), whole_sum, 2e-6, 0, "sum");
  combined.loss_sum = HostTensor(DataType::float64, {1}, std::vector<double>{3.5});
  cross_entropy_finish(machine.stream(), combined.targets.view(), combined.state(), combined.loss_sum.view(),
                       combined.token_count.view());
  EXPECT_NEAR(combined.loss_sum.values()[0], whole_loss, 2e-5);
  EXPECT_TRUE(combined.sum.guard_intact() && combined.maximum.guard_intact());

  // With one rank the combination is a copy.
  HostTensor one(fp32, {1, 3, 9});
  const CrossEntropyState first{one.view().slice(0, 9), one.view().slice(9, 9), one.view().slice(18, 9)};
  HostTensor logits = run.chunk(0, 101);
  cross_entropy_begin(machine.stream(), first);
  cross_entropy_accumulate(machine.stream(), logits.view(), run.targets.view(), 0, first);
  cross_entropy_combine(machine.stream(), one.view(), combined.state());
  EXPECT_EQ(combined.sum.values(), whole_sum);
  EXPECT_EQ(combined.maximum.values(), whole_maximum);

  Machine meta(1, 0, DeviceKind::meta);
  const TensorView row{nullptr, fp32, {9}}, few{nullptr, fp32, {3, 2, 9}};
  EXPECT_EQ(refusal([&] {
              cross_entropy_combine(meta.stream(), few, {row, row, row});
            }),
            "cross_entropy_combine: `states` has shape [3, 2, 9], wanted [3, 3, 9]");
  cross_entropy_combine(meta.stream(), TensorView{nullptr, fp32, {3, 3, 9}}, {row, row, row});
  EXPECT_EQ(meta.stream().work().floating_point_operations, 6.0 * 27);
}

TEST(CrossEntropy, GradientAgreesWithFiniteDifferencesOfTheReference) {
  Random random(42);
  Machine machine;
  Operands run(5, 11, random);
  for (double& logit : run.logits) logit /= 10;
  run.loss(machine.stream(), 4);
  const auto differences = finite_differences(run.logits, [&](const std::vector<double>& logits) {
    return reference::cross_entropy_forward(run.vocabulary, logits, run.labels).loss_sum;
  });
  // The kernel's logits are rounded to fp32, an error of at most 2^-24 of 2.
  expect_close(run.gradient(machine.stream(), 4, 1.0f, fp32, false), differences, 1e-5, 1e-6, "d_logits");
}

TEST(CrossEntropy, BitsDoNotDependOnThreads) {
  const auto run_with = [](int threads) {
    Random random(43);
    Machine machine(threads);
    Operands run(37, 131, random);
    run.loss(machine.stream(), 50);
    return std::pair{run.loss_sum.bytes(),
                     run.gradient(machine.stream(), 50, 0.1f, DataType::bfloat16, false)};
  };
  const auto one = run_with(1);
  for (int threads : {2, 3, 8}) EXPECT_EQ(one, run_with(threads)) << threads;
}

TEST(CrossEntropy, HugeLogitsStayFiniteAndBadOnesShow) {
  Random random(44);
  Machine machine;
  constexpr double infinity = std::numeric_limits<double>::infinity();
  Operands run(3, 20, random);
  for (std::size_t i = 0; i < 20; ++i) run.logits[i] = i < 8 ? -infinity : 3e38 * (i % 2 ? 1 : -1);
  run.labels = {9, 0, 1};
  run.targets = HostTensor(DataType::int32, {3}, std::vector<double>{9, 0, 1});
  run.loss(machine.stream(), 8);  // the first chunk of row 0 is all -infinity
  EXPECT_TRUE(std::isfinite(run.loss_sum.values()[0]));
  run.logits[25] = std::numeric_limits<double>::quiet_NaN();
  run.loss(machine.stream(), 8);
  EXPECT_TRUE(std::isnan(run.loss_sum.values()[0]));
}

TEST(CrossEntropy, LabelThatNoChunkHeldShows) {
  Random random(45);
  Machine machine;
  Operands run(1, 10, random);
  run.targets = HostTensor(DataType::int32, {1}, std::vector<double>{10});
  run.loss(machine.stream(), 10);
  EXPECT_TRUE(std::isnan(run.loss_sum.values()[0]));
}

TEST(CrossEntropy, MetaCountsLikeTheCpuAndTouchesNothing) {
  Random random(46);
  Operands run(6, 10, random);
  Machine cpu, meta(1, 0, DeviceKind::meta);
  run.loss(cpu.stream(), 10);
  run.gradient(cpu.stream(), 10, 1.0f, DataType::bfloat16, false);
  const TensorView row{nullptr, fp32, {6}}, labels{nullptr, DataType::int32, {6}},
      logits{nullptr, fp32, {6, 10}};
  const CrossEntropyState state{row, row, row};
  cross_entropy_begin(meta.stream(), state);
  cross_entropy_accumulate(meta.stream(), logits, labels, 0, state);
  cross_entropy_finish(meta.stream(), labels, state, {nullptr, DataType::float64, {1}},
                       {nullptr, DataType::int64, {1}});
  cross_entropy_gradient(meta.stream(), logits, labels, 0, state, 1.0f,
                         {nullptr, DataType::bfloat16, {6, 10}});
  EXPECT_EQ(meta.stream().work().kernels, 4);
  EXPECT_EQ(meta.stream().work().floating_point_operations, 8.0 * 60 + 24);
  EXPECT_EQ(meta.stream().work().floating_point_operations, cpu.stream().work().floating_point_operations);
  EXPECT_EQ(meta.stream().work().bytes_read, cpu.stream().work().bytes_read);
  EXPECT_EQ(meta.stream().work().bytes_written, cpu.stream().work().bytes_written);
}

TEST(CrossEntropy, ErrorsNameTheOperand) {
  Machine machine(1, 0, DeviceKind::meta);
  const TensorView row{nullptr, fp32, {6}}, labels{nullptr, DataType::int32, {6}},
      logits{nullptr, fp32, {6, 10}};
  const CrossEntropyState state{row, row, row};
  const auto accumulate = [&](const TensorView& l, const TensorView& t, std::int64_t first,
                              const CrossEntropyState& s) {
    return refusal([&] { cross_entropy_accumulate(machine.stream(), l, t, first, s); });
  };
  const TensorView bf16_logits{nullptr, DataType::bfloat16, {6, 10}}, five{nullptr, DataType::int32, {5}},
      short_row{nullptr, fp32, {5}}, wrong{nullptr, DataType::int64, {1}};
  EXPECT_EQ(accumulate(bf16_logits, labels, 0, state),
            "cross_entropy_accumulate: `logits` has dtype bf16, wanted fp32");
  EXPECT_EQ(accumulate(logits, five, 0, state),
            "cross_entropy_accumulate: `targets` has 5 elements, wanted 6");
  EXPECT_EQ(accumulate(logits, labels, -1, state),
            "cross_entropy_accumulate: first_column is -1, wanted 0 or more");
  EXPECT_EQ(accumulate(logits, labels, 0, {row, short_row, row}),
            "cross_entropy_accumulate: `state.sum` has 5 elements, wanted 6");
  EXPECT_EQ(refusal([&] { cross_entropy_finish(machine.stream(), labels, state, wrong, wrong); }),
            "cross_entropy_finish: `loss_sum` has dtype int64, wanted fp64");
  EXPECT_EQ(refusal([&] { cross_entropy_gradient(machine.stream(), logits, labels, 0, state, 1.0f, row); }),
            "cross_entropy_gradient: `d_logits` has shape [6], wanted [6, 10]");
}

}  // namespace
}  // namespace tranche::kernels
