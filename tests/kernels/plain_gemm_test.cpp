// Compares the kernel for GEMMs for which cuBLASLt has no algorithm with the fp64 reference; on the emulated
// device also as the fallback of a cuBLASLt that refuses unaligned operands.

#include "kernels/cuda/plain_gemm.h"

#include <gmock/gmock.h>

#include "kernels/reference/matmul.h"
#include "tests/kernels/gpu_testing.h"
#include "tranche/kernels/matmul.h"
#if defined(TRANCHE_CUDA_EMULATION)
#include "tests/cuda_emulation/control.h"
#endif

namespace tranche::kernels {
namespace {

using namespace testing;

class PlainGemm : public GpuTest {
 protected:
  /// The bound is twice k fp32 roundings and one of the store, as in matmul_gpu_test.cpp; magnitudes are
  /// below `most`.
  static void expect_near(const std::vector<double>& got, const std::vector<double>& wanted, std::int64_t k,
                          double most, DataType dtype) {
    const double r = dtype == DataType::float32 ? 0 : rounding_of(dtype);
    expect_close(got, wanted, r,
                 2.0 * (static_cast<double>(k) + 4) * std::ldexp(1.0, -24) * most + underflow_of(dtype), "c");
  }
};

TEST_F(PlainGemm, TakesAnyStridesAndFactors) {
  Random random(81);
  // Rows are stored with padding between them, and so are matrices.
  const std::int64_t batch = 2, m = 19, n = 35, k = 33;
  for (DataType dtype : floating_dtypes) {
    for (int bits = 0; bits < 8; ++bits) {
      const bool transpose_a = (bits & 1) != 0, transpose_b = (bits & 2) != 0, accumulate = (bits & 4) != 0;
      for (DataType c_dtype : {dtype, DataType::float32}) {
        SCOPED_TRACE(::testing::Message()
                     << "flags " << bits << " " << name_of(dtype) << " into " << name_of(c_dtype));
        cuda::Gemm p = cuda::dense(transpose_a, transpose_b, m, n, k);
        p.dtype = dtype;
        p.c_dtype = c_dtype;
        p.row_a += 1;
        p.row_b += 3;
        p.row_c += 2;
        p.batch = batch;
        p.next_a = (transpose_a ? k : m) * p.row_a + 5;
        p.next_b = (transpose_b ? n : k) * p.row_b + 1;
        p.next_c = m * p.row_c + 7;
        p.alpha = 0.75f;
        p.beta = accumulate ? -0.5f : 0.0f;
        const HostTensor a = random.tensor(dtype, {batch * p.next_a}),
                         b = random.tensor(dtype, {batch * p.next_b}),
                         c = accumulate ? random.tensor(c_dtype, {batch * p.next_c})
                                        : HostTensor(c_dtype, {batch * p.next_c});
        const Tensor on_a = on_gpu(a, dtype, {batch * p.next_a}), on_b = on_gpu(b, dtype, {batch * p.next_b}),
                     on_c = on_gpu(c, c_dtype, {batch * p.next_c});
        p.a = on_a.view().data;
        p.b = on_b.view().data;
        p.c = on_c.view().data;
        cuda::plain_gemm(stream(), p);
        const std::vector<double> va = a.values(), vb = b.values(), before = c.values(),
                                  after = on_c.values();
        std::vector<double> wanted, got;
        double most = 1;
        for (std::int64_t s = 0; s < batch; ++s) {
          for (std::int64_t i = 0; i < m; ++i) {
            for (std::int64_t j = 0; j < n; ++j) {
              double sum = 0, magnitude = 1;
              for (std::int64_t l = 0; l < k; ++l) {
                const double x = va[static_cast<std::size_t>(
                    s * p.next_a + (transpose_a ? l * p.row_a + i : i * p.row_a + l))];
                const double y = vb[static_cast<std::size_t>(
                    s * p.next_b + (transpose_b ? j * p.row_b + l : l * p.row_b + j))];
                sum += x * y;
                magnitude += std::abs(x * y);
              }
              const auto place = static_cast<std::size_t>(s * p.next_c + i * p.row_c + j);
              wanted.push_back(0.75 * sum + (accumulate ? -0.5 * before[place] : 0.0));
              got.push_back(after[place]);
              most = std::max(most, magnitude);
            }
          }
        }
        expect_near(got, wanted, k, most, c_dtype);
        // Memory between rows and matrices is unchanged: NaNs where c was not read.
        for (std::size_t place = 0; place < after.size(); ++place) {
          const auto inside = static_cast<std::int64_t>(place) % p.next_c;
          if (inside < m * p.row_c && inside % p.row_c < n) continue;
          EXPECT_TRUE(after[place] == before[place] ||
                      (after[place] != after[place] && before[place] != before[place]))
              << "written at " << place;
        }
      }
    }
  }
}

#if defined(TRANCHE_CUDA_EMULATION)
class PlainGemmBehindCublas : public PlainGemm {
 protected:
  void SetUp() override {
    PlainGemm::SetUp();
    cuda_emulation::set_least_alignment(16);
  }
  void TearDown() override {
    PlainGemm::TearDown();
    cuda_emulation::set_least_alignment(1);
  }
};

TEST_F(PlainGemmBehindCublas, TakesOverWhereNoAlgorithmIsFound) {
  Random random(82);
  const std::int64_t m = 6, k = 24;
  for (DataType dtype : floating_dtypes) {
    for (const std::int64_t n : {16, 7}) {  // rows of 7 elements are not aligned to 16 bytes
      SCOPED_TRACE(::testing::Message() << n << " columns of " << name_of(dtype));
      const HostTensor a = random.tensor(dtype, {m, k}), b = random.tensor(dtype, {k, n});
      const Tensor on_a = on_gpu(a, dtype, {m, k}), on_b = on_gpu(b, dtype, {k, n}),
                   c = poisoned(dtype, {m, n});
      const std::int64_t issued = cuda_emulation::calls("cublasLtMatmul");
      matmul(stream(), {}, on_a.view(), on_b.view(), c.view(), workspace());
      EXPECT_EQ(cuda_emulation::calls("cublasLtMatmul") - issued, n == 16 ? 1 : 0);
      std::vector<double> wanted(static_cast<std::size_t>(m * n));
      reference::matmul({m, n, k, false, false}, a.values(), b.values(), false, wanted);
      expect_near(c.values(), wanted, k, static_cast<double>(k), dtype);
    }
  }
}

TEST_F(PlainGemmBehindCublas, ComposesWhatIsFused) {
  Random random(83);
  const std::int64_t m = 5, n = 9, k = 8;
  const DataType dtype = DataType::float32;
  const HostTensor a = random.tensor(dtype, {m, k}), b = random.tensor(dtype, {k, n}),
                   bias = random.tensor(dtype, {n});
  const Tensor on_a = on_gpu(a, dtype, {m, k}), on_b = on_gpu(b, dtype, {k, n}),
               on_bias = on_gpu(bias, dtype, {n}), out = poisoned(dtype, {m, n});
  matmul_bias(stream(), on_a.view(), on_b.view(), on_bias.view(), out.view(), workspace());
  std::vector<double> wanted(static_cast<std::size_t>(m * n));
  reference::matmul({m, n, k, false, false}, a.values(), b.values(), false, wanted);
  for (std::size_t i = 0; i < wanted.size(); ++i) wanted[i] += bias.values()[i % static_cast<std::size_t>(n)];
  expect_near(out.values(), wanted, k, static_cast<double>(k) + 1, dtype);
}
#endif

}  // namespace
}  // namespace tranche::kernels
