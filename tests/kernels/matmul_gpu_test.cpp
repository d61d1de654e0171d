// Compares GEMMs on a GPU or its emulation with the fp64 reference.

#include <gmock/gmock.h>

#include <set>

#include "kernels/cuda/gemm.h"
#include "kernels/reference/matmul.h"
#include "tests/core/rounds.h"
#include "tests/device/as_on_gpu.h"
#include "tests/kernels/gpu_testing.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/kernels/matmul.h"
#include "tranche/kernels/matmul_rows.h"

namespace tranche::kernels {
namespace {

using namespace testing;

constexpr auto fp32 = DataType::float32;

struct Problem {
  std::int64_t m, n, k;
};

std::vector<double> absolute(std::vector<double> values) {
  for (double& value : values) value = std::abs(value);
  return values;
}
Shape stored(bool transposed, std::int64_t rows, std::int64_t columns) {
  return transposed ? Shape{columns, rows} : Shape{rows, columns};
}

class MatmulGpu : public GpuTest {
 protected:
  /// In any order the error of k fp32 products and sums is less than (k + 2) 2^-24 of the sum of absolute
  /// values (Higham, 2002, section 3.1); twice that allows for tensor cores, which truncate. The store adds a
  /// rounding.
  static std::vector<double> bound(const std::vector<double>& wanted, const std::vector<double>& magnitude,
                                   std::int64_t k, DataType c_dtype) {
    std::vector<double> made(wanted.size());
    const double store = c_dtype == fp32 ? 0.0 : rounding_of(c_dtype);
    for (std::size_t i = 0; i < made.size(); ++i) {
      made[i] = 2.0 * (static_cast<double>(k) + 2.0) * std::ldexp(1.0, -24) * magnitude[i] * (1 + store) +
                store * std::abs(wanted[i]) + underflow_of(c_dtype);
    }
    return made;
  }
  /// The operands of one GEMM, and the device's result.
  struct Outcome {
    std::vector<double> a, b, c, got;
  };
  Outcome outcome(const Problem& p, const MatmulOptions& options, DataType dtype, DataType c_dtype,
                  Random& random) {
    const Shape a_shape = stored(options.transpose_a, p.m, p.k),
                b_shape = stored(options.transpose_b, p.k, p.n);
    const HostTensor a = random.tensor(dtype, a_shape), b = random.tensor(dtype, b_shape);
    const HostTensor c =
        options.accumulate ? random.tensor(c_dtype, {p.m, p.n}) : HostTensor(c_dtype, {p.m, p.n});
    const Tensor on_a = on_gpu(a, dtype, a_shape), on_b = on_gpu(b, dtype, b_shape),
                 on_c = on_gpu(c, c_dtype, {p.m, p.n});
    matmul(stream(), options, on_a.view(), on_b.view(), on_c.view(), workspace());
    return {a.values(), b.values(), c.values(), on_c.values()};
  }
  static std::string text_of(const Problem& p, const MatmulOptions& options, DataType dtype,
                             DataType c_dtype) {
    return (::testing::Message() << p.m << " x " << p.n << " x " << p.k << " transposed "
                                 << options.transpose_a << options.transpose_b << " accumulate "
                                 << options.accumulate << " " << name_of(dtype) << " into "
                                 << name_of(c_dtype))
        .GetString();
  }
  /// Compares every element.
  void check(const Problem& p, const MatmulOptions& options, DataType dtype, DataType c_dtype,
             Random& random) {
    SCOPED_TRACE(text_of(p, options, dtype, c_dtype));
    const Outcome all = outcome(p, options, dtype, c_dtype, random);
    const reference::MatmulShape shape{p.m, p.n, p.k, options.transpose_a, options.transpose_b};
    std::vector<double> wanted = all.c, magnitude = absolute(all.c);
    reference::matmul(shape, all.a, all.b, options.accumulate, wanted);
    reference::matmul(shape, absolute(all.a), absolute(all.b), options.accumulate, magnitude);
    expect_within(all.got, wanted, bound(wanted, magnitude, p.k, c_dtype), "c");
  }
  /// Compares the corners and some 2,000 drawn elements, each computed as a dot product, because the whole
  /// reference of a large problem takes many seconds. In the largest problem here each tile of 64 x 64 has
  /// about ten draws.
  void check_drawn(const Problem& p, const MatmulOptions& options, DataType dtype, DataType c_dtype,
                   Random& random) {
    SCOPED_TRACE(text_of(p, options, dtype, c_dtype));
    const Outcome all = outcome(p, options, dtype, c_dtype, random);
    std::vector<double> got, wanted, magnitude;
    const auto look_at = [&](std::int64_t row, std::int64_t column) {
      const auto at = static_cast<std::size_t>(row * p.n + column);
      double sum = options.accumulate ? all.c[at] : 0, absolute_sum = std::abs(sum);
      for (std::int64_t k = 0; k < p.k; ++k) {
        const double product =
            all.a[static_cast<std::size_t>(options.transpose_a ? k * p.m + row : row * p.k + k)] *
            all.b[static_cast<std::size_t>(options.transpose_b ? column * p.k + k : k * p.n + column)];
        sum += product;
        absolute_sum += std::abs(product);
      }
      got.push_back(all.got[at]);
      wanted.push_back(sum);
      magnitude.push_back(absolute_sum);
    };
    for (const std::int64_t row : {std::int64_t{0}, p.m - 1}) {
      for (const std::int64_t column : {std::int64_t{0}, p.n - 1}) look_at(row, column);
    }
    for (int draw = 0; draw < 2000; ++draw) {
      look_at(random.integer(0, p.m - 1), random.integer(0, p.n - 1));
    }
    expect_within(got, wanted, bound(wanted, magnitude, p.k, c_dtype), "c, drawn");
    // The other elements are checked roughly: c was poisoned with NaNs, and no sum exceeds k.
    for (const double value : all.got) {
      if (!(std::abs(value) <= static_cast<double>(p.k) + 1)) {
        ADD_FAILURE() << "an element is " << value << "; " << repeat_line();
        break;
      }
    }
  }
};

TEST_F(MatmulGpu, AgreesWithTheReferenceInOddSizes) {
  Random random(71);
  for (DataType dtype : floating_dtypes) {
    for (DataType c_dtype : std::set<DataType>{dtype, fp32}) {
      for (int bits = 0; bits < 8; ++bits) {
        for (const Problem& p : {Problem{1, 1, 1}, Problem{1, 17, 33}, Problem{31, 1, 7}, Problem{16, 16, 16},
                                 Problem{15, 33, 65}, Problem{37, 41, 97}, Problem{64, 48, 8},
                                 Problem{0, 3, 2}, Problem{3, 0, 2}, Problem{3, 2, 0}}) {
          check(p, {(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0}, dtype, c_dtype, random);
        }
      }
    }
  }
}

TEST_F(MatmulGpu, AgreesWithTheReferenceInLargeSizes) {
  if (!test::as_on_gpu()) GTEST_SKIP() << "for a GPU, and for test_kernels_matrix_gpu.as_on_gpu";
  Random random(75);
  int point = 0;
  for (DataType dtype : floating_dtypes) {
    for (DataType c_dtype : std::set<DataType>{dtype, fp32}) {
      for (int bits = 0; bits < 8; ++bits) {
        if (!test::swept(point++, 3)) continue;
        check_drawn({257, 513, 769}, {(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0}, dtype, c_dtype,
                    random);
      }
      // A layer's forward GEMM and its weight's gradient.
      for (const MatmulOptions& options : {MatmulOptions{}, MatmulOptions{true, false, true}}) {
        if (!test::swept(point++, 3)) continue;
        check_drawn({1024, 768, 3072}, options, dtype, c_dtype, random);
      }
    }
  }
}

TEST_F(MatmulGpu, GivesTheSameBitsAgain) {
  Random random(72);
  const HostTensor a = random.tensor(DataType::bfloat16, {40, 72}),
                   b = random.tensor(DataType::bfloat16, {72, 48});
  const Tensor on_a = on_gpu(a, DataType::bfloat16, {40, 72}), on_b = on_gpu(b, DataType::bfloat16, {72, 48});
  const Tensor first = poisoned(fp32, {40, 48}), second = poisoned(fp32, {40, 48});
  matmul(stream(), {}, on_a.view(), on_b.view(), first.view(), workspace());
  matmul(stream(), {}, on_a.view(), on_b.view(), second.view(), workspace());
  EXPECT_EQ(first.bytes(), second.bytes());
}

TEST_F(MatmulGpu, FusedFormsAgreeWithTheReference) {
  Random random(73);
  for (DataType dtype : floating_dtypes) {
    // Rows of a multiple of 8 elements are fused; others are composed.
    for (const Problem& p :
         {Problem{9, 16, 24}, Problem{17, 64, 8}, Problem{5, 7, 3}, Problem{0, 8, 8}, Problem{4, 8, 0}}) {
      SCOPED_TRACE(::testing::Message() << p.m << " x " << p.n << " x " << p.k << " " << name_of(dtype));
      const HostTensor a = random.tensor(dtype, {p.m, p.k}), b = random.tensor(dtype, {p.k, p.n}),
                       bias = random.tensor(dtype, {p.n});
      const Tensor on_a = on_gpu(a, dtype, {p.m, p.k}), on_b = on_gpu(b, dtype, {p.k, p.n}),
                   on_bias = on_gpu(bias, dtype, {p.n});
      const Tensor out = poisoned(dtype, {p.m, p.n}), hidden = poisoned(dtype, {p.m, p.n}),
                   activated = poisoned(dtype, {p.m, p.n});
      matmul_bias(stream(), on_a.view(), on_b.view(), on_bias.view(), out.view(), workspace());
      matmul_bias_gelu(stream(), on_a.view(), on_b.view(), on_bias.view(), hidden.view(), activated.view(),
                       workspace());
      std::vector<double> wanted(static_cast<std::size_t>(p.m * p.n)), gelu(wanted.size());
      reference::matmul({p.m, p.n, p.k, false, false}, a.values(), b.values(), false, wanted);
      for (std::size_t i = 0; i < wanted.size(); ++i)
        wanted[i] += bias.values()[i % static_cast<std::size_t>(p.n)];
      for (std::size_t i = 0; i < wanted.size(); ++i) {
        const double x = wanted[i];
        gelu[i] = 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
      }
      // Composed forms round twice, and sums are below 26. The slope of gelu is below 1.13, so a rounding of
      // its argument counts as one of its result. Approximations of tanh may have an error of 1e-4.
      const double r = rounding_of(dtype);
      expect_close(out.values(), wanted, 2.1 * r, 2 * r + 1e-5, "out");
      std::vector<double> turned;
      const auto values = b.values();
      for (std::int64_t j = 0; j < p.n; ++j) {
        for (std::int64_t i = 0; i < p.k; ++i)
          turned.push_back(values[static_cast<std::size_t>(i * p.n + j)]);
      }
      const Tensor on_turned = on_gpu(HostTensor(dtype, {p.n, p.k}, turned), dtype, {p.n, p.k});
      const Tensor from_transposed = poisoned(dtype, {p.m, p.n});
      matmul_bias(stream(), on_a.view(), on_turned.view(), on_bias.view(), from_transposed.view(),
                  workspace(), true);
      expect_close(from_transposed.values(), wanted, 2.1 * r, 2 * r + 1e-5, "b stored [n, k]");
      const Tensor by_rows = poisoned(dtype, {p.m, p.n}), plain = poisoned(dtype, {p.m, p.n});
      matmul_rows(stream(), true, on_a.view(), on_turned.view(), on_bias.view(), by_rows.view(), workspace());
      EXPECT_EQ(by_rows.values(), from_transposed.values()) << "the same calls of the library";
      matmul(stream(), {}, on_a.view(), on_b.view(), plain.view(), workspace());
      matmul_rows(stream(), false, on_a.view(), on_b.view(), {}, by_rows.view(), workspace());
      EXPECT_EQ(by_rows.values(), plain.values());
      expect_close(hidden.values(), wanted, 2.1 * r, 2 * r + 1e-5, "hidden");
      expect_close(activated.values(), gelu, 4 * r, 4 * r + 1e-4, "activated");
    }
  }
}

TEST_F(MatmulGpu, GeluBackwardAgreesWithItsParts) {
  Random random(74);
  for (DataType dtype : floating_dtypes) {
    for (const Problem& p : {Problem{9, 16, 24}, Problem{17, 64, 8}, Problem{5, 7, 3}, Problem{4, 8, 0}}) {
      SCOPED_TRACE(::testing::Message() << p.m << " x " << p.n << " x " << p.k << " " << name_of(dtype));
      const Tensor d_out = on_gpu(random.tensor(dtype, {p.m, p.k}), dtype, {p.m, p.k}),
                   weight = on_gpu(random.tensor(dtype, {p.n, p.k}), dtype, {p.n, p.k}),
                   hidden = on_gpu(random.tensor(dtype, {p.m, p.n}, -3, 3), dtype, {p.m, p.n});
      const Tensor fused = poisoned(dtype, {p.m, p.n}), parts = poisoned(dtype, {p.m, p.n});
      matmul_gelu_backward(stream(), d_out.view(), weight.view(), hidden.view(), fused.view(), workspace());
      matmul(stream(), {.transpose_b = true}, d_out.view(), weight.view(), parts.view(), workspace());
      gelu_backward(stream(), hidden.view(), parts.view(), parts.view());
      const double r = rounding_of(dtype);
      expect_close(fused.values(), parts.values(), 4 * r, 1e-3, "d_hidden");
    }
  }
}

}  // namespace
}  // namespace tranche::kernels
