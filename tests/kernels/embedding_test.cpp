#include "tranche/kernels/embedding.h"

#include <gmock/gmock.h>

#include "kernels/reference/embedding.h"
#include "tests/kernels/kernel_testing.h"

namespace tranche::kernels {
namespace {

using namespace testing;

constexpr auto fp32 = DataType::float32;

struct Operands {
  std::int64_t batch, time, width, vocabulary, positions;
  std::vector<std::int32_t> ids;
  HostTensor tokens, token_table, position_table, out, d_out, token_gradient, position_gradient;

  Operands(DataType dtype, std::int64_t b, std::int64_t t, std::int64_t w, Random& random)
      : batch(b),
        time(t),
        width(w),
        vocabulary(7),
        positions(t + 3),
        tokens(DataType::int32, {b, t}),
        token_table(random.tensor(dtype, {vocabulary, w})),
        position_table(random.tensor(dtype, {positions, w})),
        out(dtype, {b, t, w}),
        d_out(random.tensor(dtype, {b, t, w})),
        token_gradient(random.tensor(fp32, {vocabulary, w})),
        position_gradient(random.tensor(fp32, {positions, w})) {
    std::vector<double> drawn;
    for (std::int64_t i = 0; i < b * t; ++i) {
      ids.push_back(static_cast<std::int32_t>(random.integer(0, vocabulary - 1)));
      drawn.push_back(ids.back());
    }
    tokens = HostTensor(DataType::int32, {b, t}, drawn);
  }
  void forward(Stream& stream) {
    embedding_forward(stream, tokens.view(), token_table.view(), position_table.view(), out.view());
  }
  void backward(Stream& stream) {
    embedding_backward(stream, tokens.view(), d_out.view(), token_gradient.view(), position_gradient.view());
  }
};

TEST(Embedding, AgreesWithTheReferenceInEveryDtypeAndOddSizes) {
  Random random(31);
  Machine machine(2);
  struct Sizes {
    std::int64_t batch, time, width;
  };
  for (DataType dtype : floating_dtypes) {
    for (const Sizes& s : {Sizes{1, 1, 1}, Sizes{2, 3, 17}, Sizes{3, 5, 64}, Sizes{2, 31, 65},
                           Sizes{1, 2, 129}, Sizes{0, 3, 8}}) {
      SCOPED_TRACE(::testing::Message()
                   << name_of(dtype) << " " << s.batch << " x " << s.time << " x " << s.width);
      Operands run(dtype, s.batch, s.time, s.width, random);
      std::vector<double> out(run.out.values().size());
      reference::embedding_forward(s.time, s.width, run.ids, run.token_table.values(),
                                   run.position_table.values(), out);
      run.forward(machine.stream());
      // The error is one fp32 addition and one rounding, for sums of two numbers of the dtype.
      expect_close(run.out.values(), out, rounding_of(dtype) + 1e-7, underflow_of(dtype), "out");

      std::vector<double> token_gradient = run.token_gradient.values(),
                          position_gradient = run.position_gradient.values();
      reference::embedding_backward(s.time, s.width, run.ids, run.d_out.values(), token_gradient,
                                    position_gradient);
      run.backward(machine.stream());
      // At most 62 additions of numbers below 1: partial sums are below 63, with roundings of at most 2^-19
      // each.
      expect_close(run.token_gradient.values(), token_gradient, 0, 62 * std::ldexp(1.0, -19),
                   "token_gradient");
      expect_close(run.position_gradient.values(), position_gradient, 0, 1e-6, "position_gradient");
      EXPECT_TRUE(run.out.guard_intact() && run.token_gradient.guard_intact() &&
                  run.position_gradient.guard_intact());
    }
  }
}

TEST(Embedding, WithoutPositionsIsTheRowsOfTheTable) {
  Random random(35);
  for (int threads : {1, 3}) {
    Machine machine(threads);
    for (DataType dtype : floating_dtypes) {
      for (const std::int64_t width : {1, 17, 64, 131}) {
        SCOPED_TRACE(::testing::Message() << name_of(dtype) << " " << width);
        Operands run(dtype, 3, 5, width, random);
        std::vector<double> out(run.out.values().size());
        reference::embedding_forward(run.time, width, run.ids, run.token_table.values(), {}, out);
        embedding_forward(machine.stream(), run.tokens.view(), run.token_table.view(), {}, run.out.view());
        EXPECT_EQ(run.out.values(), out);
        std::vector<double> gradient = run.token_gradient.values();
        reference::embedding_backward(run.time, width, run.ids, run.d_out.values(), gradient, {});
        HostTensor with_positions = run.token_gradient;
        embedding_backward(machine.stream(), run.tokens.view(), run.d_out.view(), run.token_gradient.view(),
                           {});
        expect_close(run.token_gradient.values(), gradient, 0, 1e-5, "token_gradient");
        embedding_backward(machine.stream(), run.tokens.view(), run.d_out.view(), with_positions.view(),
                           run.position_gradient.view());
        EXPECT_EQ(run.token_gradient.bytes(), with_positions.bytes());
        EXPECT_TRUE(run.out.guard_intact() && run.token_gradient.guard_intact());
      }
    }
  }
  Machine meta(1, 0, DeviceKind::meta);
  const TensorView tokens{nullptr, DataType::int32, {2, 3}}, table{nullptr, DataType::bfloat16, {7, 8}},
      out{nullptr, DataType::bfloat16, {2, 3, 8}}, gradient{nullptr, fp32, {7, 8}};
  embedding_forward(meta.stream(), tokens, table, {}, out);
  embedding_backward(meta.stream(), tokens, out, gradient, {});
  EXPECT_EQ(meta.stream().work().floating_point_operations, 48.0);
  EXPECT_EQ(meta.stream().work().bytes_read, (2.0 * 48 + 24) + (6.0 * 48 + 24));
  EXPECT_EQ(meta.stream().work().bytes_written, 2.0 * 48 + 4.0 * 48);
}

TEST(Embedding, BackwardAgreesWithFiniteDifferencesOfTheReference) {
  Random random(32);
  Machine machine;
  Operands run(fp32, 2, 4, 5, random);
  const auto zero = [](std::int64_t rows, std::int64_t columns) {
    return HostTensor(fp32, {rows, columns},
                      std::vector<double>(static_cast<std::size_t>(rows * columns), 0.0));
  };
  run.token_gradient = zero(run.vocabulary, run.width);
  run.position_gradient = zero(run.positions, run.width);
  run.backward(machine.stream());
  const auto tokens = run.token_table.values(), positions = run.position_table.values(),
             d_out = run.d_out.values();
  const auto loss = [&](const std::vector<double>& token_table, const std::vector<double>& position_table) {
    std::vector<double> out(d_out.size());
    reference::embedding_forward(run.time, run.width, run.ids, token_table, position_table, out);
    return dot(out, d_out);
  };
  expect_close(run.token_gradient.values(),
               finite_differences(tokens, [&](const auto& v) { return loss(v, positions); }), 1e-6, 1e-6,
               "token");
  expect_close(run.position_gradient.values(),
               finite_differences(positions, [&](const auto& v) { return loss(tokens, v); }), 1e-6, 1e-6,
               "position");
}

TEST(Embedding, BackwardWithoutPositionsAgreesWithFiniteDifferencesOfTheReference) {
  Random random(36);
  Machine machine;
  Operands run(fp32, 2, 4, 5, random);
  const auto d_out = run.d_out.values(), table = run.token_table.values();
  const auto slopes = finite_differences(table, [&](const std::vector<double>& rows) {
    std::vector<double> out(d_out.size());
    reference::embedding_forward(run.time, run.width, run.ids, rows, {}, out);
    return dot(out, d_out);
  });
  std::vector<double> gradient(table.size(), 0.0);
  reference::embedding_backward(run.time, run.width, run.ids, d_out, gradient, {});
  expect_close(gradient, slopes, 0, 1e-9, "reference");  // the loss is linear
  run.token_gradient = HostTensor(fp32, {run.vocabulary, run.width}, std::vector<double>(table.size(), 0.0));
  embedding_backward(machine.stream(), run.tokens.view(), run.d_out.view(), run.token_gradient.view(), {});
  expect_close(run.token_gradient.values(), slopes, 1e-6, 1e-6, "token_gradient");
}

TEST(Embedding, BackwardAddsInAscendingOrderWhateverTheThreads) {
  // Every token uses the same row: its gradient must equal the plain loop's bit by bit.
  Random random(33);
  for (int threads : {1, 2, 5}) {
    Machine machine(threads);
    Operands run(DataType::bfloat16, 3, 41, 130, random);
    run.tokens = HostTensor(DataType::int32, {3, 41}, std::vector<double>(123, 4.0));
    const auto d_out = run.d_out.values();
    const auto before = run.token_gradient.values();
    std::vector<double> wanted(before.begin() + 4 * 130, before.begin() + 5 * 130);
    for (std::size_t row = 0; row < 123; ++row) {
      for (std::size_t c = 0; c < 130; ++c) {
        wanted[c] = static_cast<float>(wanted[c]) + static_cast<float>(d_out[row * 130 + c]);
      }
    }
    run.backward(machine.stream());
    const auto got = run.token_gradient.values();
    EXPECT_EQ(std::vector<double>(got.begin() + 4 * 130, got.begin() + 5 * 130), wanted);
  }
}

TEST(Embedding, PositionsThatAreGivenAreRowsOfTheTable) {
  Random random(35);
  Machine machine(2);
  for (DataType dtype : floating_dtypes) {
    Operands run(dtype, 2, 5, 33, random);
    // Positions as if the second half of each row's tokens came first.
    const std::vector<double> places{3, 4, 0, 1, 2, 7, 6, 5, 0, 7};
    HostTensor positions(DataType::int32, {2, 5}, places);
    embedding_forward(machine.stream(), run.tokens.view(), run.token_table.view(), run.position_table.view(),
                      run.out.view(), positions.view());
    settle();
    const auto table = run.token_table.values(), offsets = run.position_table.values();
    std::vector<double> wanted;
    for (std::size_t row = 0; row < places.size(); ++row) {
      for (std::size_t i = 0; i < 33; ++i) {
        wanted.push_back(table[static_cast<std::size_t>(run.ids[row]) * 33 + i] +
                         offsets[static_cast<std::size_t>(places[row]) * 33 + i]);
      }
    }
    expect_close(run.out.values(), wanted, rounding_of(dtype), underflow_of(dtype), "out");
  }
  Machine meta(1, 0, DeviceKind::meta);
  const TensorView tokens{nullptr, DataType::int32, {2, 3}}, table{nullptr, fp32, {7, 8}},
      out{nullptr, fp32, {2, 3, 8}}, five{nullptr, DataType::int32, {5}};
  EXPECT_EQ(refusal([&] { embedding_forward(meta.stream(), tokens, table, {}, out, tokens); }),
            "embedding_forward: `positions` are given, but no position_table");
  EXPECT_EQ(refusal([&] { embedding_forward(meta.stream(), tokens, table, table, out, five); }),
            "embedding_forward: `positions` has 5 elements, wanted 6");
}

TEST(Embedding, PartsOfTheVocabularySumToTheWholeInTheSameBits) {
  Random random(37);
  Machine machine(2);
  for (DataType dtype : floating_dtypes) {
    for (const bool positions : {true, false}) {
      Operands run(dtype, 3, 5, 33, random);
      const TensorView places = positions ? run.position_table.view() : TensorView{},
                       d_places = positions ? run.position_gradient.view() : TensorView{};
      const auto before = run.token_gradient.values(), places_before = run.position_gradient.values(),
                 tokens = run.token_table.values();
      embedding_forward(machine.stream(), run.tokens.view(), run.token_table.view(), places, run.out.view());
      embedding_backward(machine.stream(), run.tokens.view(), run.d_out.view(), run.token_gradient.view(),
                         d_places);
      std::vector<double> sum(run.out.values().size()), gradient;
      HostTensor place_sum(fp32, {run.positions, run.width}, places_before);
      for (const auto& [first, rows] : {std::pair<std::int64_t, std::int64_t>{0, 3}, {3, 1}, {4, 3}}) {
        SCOPED_TRACE(::testing::Message() << name_of(dtype) << " tokens from " << first);
        const TensorView table =
            run.token_table.view().slice(first * run.width, rows * run.width).reshaped({rows, run.width});
        HostTensor out(dtype, run.out.view().shape),
            d_table(fp32, {rows, run.width},
                    std::span(before).subspan(static_cast<std::size_t>(first * run.width),
                                              static_cast<std::size_t>(rows * run.width)));
        embedding_forward(machine.stream(), run.tokens.view(), table, places, out.view(), {}, first);
        embedding_backward(machine.stream(), run.tokens.view(), run.d_out.view(), d_table.view(),
                           positions ? place_sum.view() : TensorView{}, first);
        const auto got = out.values(), d_got = d_table.values();
        std::vector<double> wanted(got.size());
        const auto part = HostTensor(dtype, {rows, run.width},
                                     std::span(tokens).subspan(static_cast<std::size_t>(first * run.width),
                                                               static_cast<std::size_t>(rows * run.width)))
                              .values();
        reference::embedding_forward(run.time, run.width, run.ids, part,
                                     positions ? run.position_table.values() : std::vector<double>{}, wanted,
                                     static_cast<std::int64_t>(first));
        expect_close(got, wanted, rounding_of(dtype) + 1e-7, underflow_of(dtype), "out");
        for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += got[i];
        gradient.insert(gradient.end(), d_got.begin(), d_got.end());
        EXPECT_TRUE(out.guard_intact() && d_table.guard_intact() && place_sum.guard_intact());
      }
      EXPECT_EQ(sum, run.out.values());  // only one addend of each is not zero
      EXPECT_EQ(gradient, run.token_gradient.values());
      // The additions are in another order.
      if (positions) expect_close(place_sum.values(), run.position_gradient.values(), 0, 1e-5, "positions");
    }
  }
  Machine meta(1, 0, DeviceKind::meta);
  const TensorView tokens{nullptr, DataType::int32, {2, 3}}, table{nullptr, fp32, {7, 8}},
      out{nullptr, fp32, {2, 3, 8}};
  EXPECT_EQ(refusal([&] { embedding_forward(meta.stream(), tokens, table, {}, out, {}, -2); }),
            "embedding_forward: first_token is -2, wanted 0 or more, or whole_vocabulary");
}

TEST(Embedding, MetaCountsLikeTheCpuAndTouchesNothing) {
  Random random(34);
  Operands run(DataType::bfloat16, 2, 3, 8, random);
  Machine cpu, meta(1, 0, DeviceKind::meta);
  run.forward(cpu.stream());
  run.backward(cpu.stream());
  const TensorView tokens{nullptr, DataType::int32, {2, 3}}, table{nullptr, DataType::bfloat16, {7, 8}},
      out{nullptr, DataType::bfloat16, {2, 3, 8}}, gradient{nullptr, fp32, {7, 8}};
  embedding_forward(meta.stream(), tokens, table, table, out);
  embedding_backward(meta.stream(), tokens, out, gradient, gradient);
  EXPECT_EQ(meta.stream().work().kernels, 2);
  EXPECT_EQ(meta.stream().work().floating_point_operations, 3.0 * 48);
  EXPECT_EQ(meta.stream().work().floating_point_operations, cpu.stream().work().floating_point_operations);
  EXPECT_EQ(meta.stream().work().bytes_read, cpu.stream().work().bytes_read);
  EXPECT_EQ(meta.stream().work().bytes_written, cpu.stream().work().bytes_written);
}

TEST(Embedding, ErrorsNameTheOperand) {
  Machine machine(1, 0, DeviceKind::meta);
  const TensorView tokens{nullptr, DataType::int32, {2, 9}}, table{nullptr, fp32, {7, 8}},
      out{nullptr, fp32, {2, 9, 8}}, long_tokens{nullptr, DataType::int64, {2, 3}},
      narrow{nullptr, fp32, {9, 4}}, flat{nullptr, DataType::int32, {18}};
  const auto forward = [&](const TensorView& ids, const TensorView& positions) {
    return refusal([&] { embedding_forward(machine.stream(), ids, table, positions, out); });
  };
  EXPECT_EQ(forward(tokens, table), "embedding_forward: `tokens` has 9 positions, `position_table` only 7");
  EXPECT_EQ(forward(long_tokens, table), "embedding_forward: `tokens` has dtype int64, wanted int32");
  EXPECT_EQ(forward(tokens, narrow), "embedding_forward: `position_table` has shape [9, 4], wanted [9, 8]");
  EXPECT_EQ(forward(flat, table), "embedding_forward: `tokens` has shape [18], wanted 2 dimensions");
  const TensorView short_tokens{nullptr, DataType::int32, {2, 3}};
  EXPECT_EQ(forward(short_tokens, table), "embedding_forward: `out` has 144 elements, wanted 48");
  EXPECT_EQ(refusal([&] {
              embedding_backward(machine.stream(), short_tokens, out, table,
                                 TensorView{nullptr, DataType::bfloat16, {7, 8}});
            }),
            "embedding_backward: `position_gradient` has dtype bf16, wanted fp32");
}

}  // namespace
}  // namespace tranche::kernels
