// Compares products with plain loops in fp64, for every transposition, element type and epilogue that is
// emulated.
#include <cublasLt.h>

#include <cmath>
#include <limits>
#include <random>
#include <tuple>

#include "tests/cuda_emulation/emulation_fixture.h"
#include "tranche/core/dtype.h"

namespace cuda_emulation {
namespace {

using ::testing::HasSubstr;
using tranche::bfloat16;
using tranche::float16;

template <class T>
constexpr cudaDataType_t type = std::is_same_v<T, float>      ? CUDA_R_32F
                                : std::is_same_v<T, bfloat16> ? CUDA_R_16BF
                                                              : CUDA_R_16F;

double gelu(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

class CublasLt : public Emulation {
 protected:
  void SetUp() override {
    Emulation::SetUp();
    ASSERT_EQ(cublasLtCreate(&handle_), CUBLAS_STATUS_SUCCESS);
  }
  void TearDown() override {
    cublasLtDestroy(handle_);
    Emulation::TearDown();
  }

  template <class T>
  std::vector<T> draw(std::size_t count) {
    std::uniform_real_distribution<float> values(-1, 1);
    std::vector<T> drawn(count);
    for (T& value : drawn) value = tranche::from_float<T>(values(random_));
    return drawn;
  }

  template <class T>
  cublasStatus_t set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    return cublasLtMatmulDescSetAttribute(description_, attribute, &value, sizeof value);
  }

  struct Case {
    std::int64_t m = 5, n = 7, k = 3, batch = 1;
    bool transpose_a = false, transpose_b = false;
    float alpha = 1, beta = 0;
    cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  };

  /// Runs the case with padding between columns and matrices and compares everything that was written.
  template <class In, class Out>
  void check(const Case& c) {
    SCOPED_TRACE(::testing::Message()
                 << "m " << c.m << " n " << c.n << " k " << c.k << " batch " << c.batch << " transposed "
                 << c.transpose_a << c.transpose_b << " epilogue " << c.epilogue);
    const std::int64_t rows_a = c.transpose_a ? c.k : c.m, columns_a = c.transpose_a ? c.m : c.k;
    const std::int64_t rows_b = c.transpose_b ? c.n : c.k, columns_b = c.transpose_b ? c.k : c.n;
    const std::int64_t lead_a = rows_a + 1, lead_b = rows_b + 2, lead_d = (c.m + 7) / 8 * 8;
    const std::int64_t next_a = lead_a * columns_a + 3, next_b = lead_b * columns_b, next_d = lead_d * c.n;
    const auto a = draw<In>(static_cast<std::size_t>(next_a * c.batch));
    const auto b = draw<In>(static_cast<std::size_t>(next_b * c.batch));
    const auto d = draw<Out>(static_cast<std::size_t>(next_d * c.batch));
    const auto bias = draw<Out>(static_cast<std::size_t>(std::max(c.m, c.n)));
    const auto auxiliary = draw<Out>(static_cast<std::size_t>(next_d));
    auto* da = device(a);
    auto* db = device(b);
    auto* dd = device(d);
    auto* dbias = device(bias);
    auto* daux = device(auxiliary);
    ASSERT_EQ(cublasLtMatmulDescCreate(&description_, CUBLAS_COMPUTE_32F, CUDA_R_32F), CUBLAS_STATUS_SUCCESS);
    set(CUBLASLT_MATMUL_DESC_TRANSA, c.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_TRANSB, c.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, c.epilogue);
    set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, dbias);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, daux);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, lead_d);
    cublasLtMatrixLayout_t la, lb, ld;
    cublasLtMatrixLayoutCreate(&la, type<In>, static_cast<std::uint64_t>(rows_a),
                               static_cast<std::uint64_t>(columns_a), lead_a);
    cublasLtMatrixLayoutCreate(&lb, type<In>, static_cast<std::uint64_t>(rows_b),
                               static_cast<std::uint64_t>(columns_b), lead_b);
    cublasLtMatrixLayoutCreate(&ld, type<Out>, static_cast<std::uint64_t>(c.m),
                               static_cast<std::uint64_t>(c.n), lead_d);
    for (auto [layout, next] : {std::pair(la, next_a), std::pair(lb, next_b), std::pair(ld, next_d)}) {
      const auto count = static_cast<std::int32_t>(c.batch);
      cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count);
      cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &next,
                                       sizeof next);
    }
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulPreferenceCreate(&preference);
    const std::uint64_t workspace_bytes = 1 << 16;
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                         &workspace_bytes, sizeof workspace_bytes);
    cublasLtMatmulHeuristicResult_t results[4];
    int found = 0;
    ASSERT_EQ(
        cublasLtMatmulAlgoGetHeuristic(handle_, description_, la, lb, ld, ld, preference, 4, results, &found),
        CUBLAS_STATUS_SUCCESS)
        << last_diagnostic();
    ASSERT_EQ(found, 2);
    EXPECT_GT(results[0].workspaceSize, 0u);
    EXPECT_EQ(results[1].workspaceSize, 0u);
    void* workspace = device<unsigned char>(workspace_bytes);
    ASSERT_EQ(cublasLtMatmul(handle_, description_, &c.alpha, da, la, db, lb, &c.beta, dd, ld, dd, ld,
                             &results[0].algo, workspace, workspace_bytes, stream_),
              CUBLAS_STATUS_SUCCESS)
        << last_diagnostic();
    const auto got = host(dd, d.size());
    const auto got_bias = host(dbias, bias.size());
    const auto got_aux = host(daux, auxiliary.size());

    const auto at = [](const auto& v, std::int64_t i) {
      return static_cast<double>(tranche::to_float(v[static_cast<std::size_t>(i)]));
    };
    // The rounding of the result, and of up to k + 3 additions of values up to k + 3.
    const double unit = std::is_same_v<Out, float>     ? std::ldexp(1, -24)
                        : std::is_same_v<Out, float16> ? std::ldexp(1, -11)
                                                       : std::ldexp(1, -8);
    const auto size = static_cast<double>(c.k + 3);
    const double bound = unit * size + size * size * std::ldexp(1, -24);
    std::vector<double> columns_sum(static_cast<std::size_t>(c.m), 0);
    for (std::int64_t batch = 0; batch < c.batch; ++batch) {
      for (std::int64_t j = 0; j < c.n; ++j) {
        for (std::int64_t i = 0; i < lead_d; ++i) {
          const std::int64_t place = batch * next_d + j * lead_d + i;
          if (i >= c.m) {
            ASSERT_EQ(at(got, place), at(d, place)) << "padding was written";
            continue;
          }
          double value = c.beta == 0 ? 0 : c.beta * at(d, place);
          for (std::int64_t p = 0; p < c.k; ++p) {
            value += c.alpha * at(a, batch * next_a + (c.transpose_a ? i * lead_a + p : p * lead_a + i)) *
                     at(b, batch * next_b + (c.transpose_b ? p * lead_b + j : j * lead_b + p));
          }
          if ((c.epilogue & CUBLASLT_EPILOGUE_BIAS) != 0) value += at(bias, i);
          if ((c.epilogue & CUBLASLT_EPILOGUE_GELU) != 0) {
            if ((c.epilogue & 128) != 0) {
              ASSERT_NEAR(at(got_aux, j * lead_d + i), value, bound);
            }
            value = gelu(value);
          }
          if ((c.epilogue & CUBLASLT_EPILOGUE_RELU) != 0) value = std::max(value, 0.0);
          if ((c.epilogue & CUBLASLT_EPILOGUE_DGELU) == CUBLASLT_EPILOGUE_DGELU) {
            const double x = at(auxiliary, j * lead_d + i), step = 1e-5;
            value *= (gelu(x + step) - gelu(x - step)) / (2 * step);
          }
          columns_sum[static_cast<std::size_t>(i)] += value;
          ASSERT_NEAR(at(got, place), value, bound) << "row " << i << " column " << j;
        }
      }
    }
    if (c.epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD) {
      for (std::int64_t i = 0; i < c.m; ++i) {
        ASSERT_NEAR(at(got_bias, i), columns_sum[static_cast<std::size_t>(i)],
                    bound * static_cast<double>(c.n));
      }
    }
    if (c.epilogue == CUBLASLT_EPILOGUE_BGRADB) {
      for (std::int64_t j = 0; j < c.n; ++j) {
        double sum = 0;
        for (std::int64_t p = 0; p < c.k; ++p) sum += at(b, c.transpose_b ? p * lead_b + j : j * lead_b + p);
        ASSERT_NEAR(at(got_bias, j), sum, bound);
      }
    }
    for (cublasLtMatrixLayout_t layout : {la, lb, ld}) cublasLtMatrixLayoutDestroy(layout);
    cublasLtMatmulPreferenceDestroy(preference);
    cublasLtMatmulDescDestroy(description_);
  }

  cublasLtHandle_t handle_ = nullptr;
  cublasLtMatmulDesc_t description_ = nullptr;
  std::mt19937 random_{20240229};
};

TEST_F(CublasLt, SizesAndTranspositions) {
  for (const bool ta : {false, true}) {
    for (const bool tb : {false, true}) {
      for (const auto& [m, n, k] : {std::tuple(1, 1, 1), std::tuple(5, 7, 3), std::tuple(64, 4, 9),
                                    std::tuple(65, 5, 1), std::tuple(130, 9, 33)}) {
        check<float, float>({m, n, k, 1, ta, tb, 1, 0});
      }
      check<bfloat16, bfloat16>({66, 6, 19, 3, ta, tb, 0.5f, 0});
    }
  }
}

TEST_F(CublasLt, ElementTypesScalesAndBatches) {
  check<float, float>({9, 6, 4, 5, false, true, -0.5f, 2});
  check<bfloat16, float>({9, 6, 4, 2, true, false, 1, 1});
  check<float16, float16>({9, 6, 4, 2, false, false, 1, 0.5f});
  check<float16, float>({9, 6, 4, 2, false, false, 1, 0});
}

TEST_F(CublasLt, Epilogues) {
  for (const cublasLtEpilogue_t epilogue :
       {CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_RELU_BIAS, CUBLASLT_EPILOGUE_GELU,
        CUBLASLT_EPILOGUE_GELU_BIAS, CUBLASLT_EPILOGUE_GELU_AUX, CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
        CUBLASLT_EPILOGUE_DGELU, CUBLASLT_EPILOGUE_DGELU_BGRAD, CUBLASLT_EPILOGUE_BGRADB}) {
    check<bfloat16, bfloat16>({13, 9, 5, 1, true, false, 1, 0, epilogue});
    check<float, float>({70, 9, 5, 1, false, true, 1, 0, epilogue});
  }
}

TEST_F(CublasLt, RefusesWhatItCannotDo) {
  ASSERT_EQ(cublasLtMatmulDescCreate(&description_, CUBLAS_COMPUTE_32F, CUDA_R_32F), CUBLAS_STATUS_SUCCESS);
  const std::int32_t one = 1;
  EXPECT_EQ(cublasLtMatmulDescSetAttribute(description_, CUBLASLT_MATMUL_DESC_FILL_MODE, &one, sizeof one),
            CUBLAS_STATUS_NOT_SUPPORTED);
  EXPECT_EQ(cublasLtMatmulDescSetAttribute(description_, CUBLASLT_MATMUL_DESC_TRANSA, &one, 1),
            CUBLAS_STATUS_INVALID_VALUE);
  cublasLtMatrixLayout_t square, wide;
  cublasLtMatrixLayoutCreate(&square, CUDA_R_32F, 4, 4, 4);
  cublasLtMatrixLayoutCreate(&wide, CUDA_R_32F, 4, 5, 4);
  float* data = device(std::vector<float>(16, 1));
  const float number = 1;
  const auto multiply = [&](const void* a, cublasLtMatrixLayout_t layout_b, void* d) {
    return cublasLtMatmul(handle_, description_, &number, a, square, data, layout_b, &number, d, square, d,
                          square, nullptr, nullptr, 0, stream_);
  };
  EXPECT_EQ(multiply(data, wide, data), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_THAT(last_diagnostic(), HasSubstr("sizes do not fit: op(a) 4 x 4, op(b) 4 x 5, c 4 x 4, d 4 x 4"));
  EXPECT_EQ(multiply(data + 4, square, data), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_THAT(last_diagnostic(), HasSubstr("cublasLtMatmul: a: 64 bytes from"));
  float on_host[16];
  EXPECT_EQ(multiply(data, square, on_host), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_THAT(last_diagnostic(), HasSubstr("lies in no live device allocation"));
  fail_call("cublasLtMatmul", 1, CUBLAS_STATUS_EXECUTION_FAILED);
  EXPECT_EQ(multiply(data, square, data), CUBLAS_STATUS_EXECUTION_FAILED);
  EXPECT_EQ(multiply(data, square, data), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(host(data, 16), std::vector<float>(16, 5)) << "4 + 1";
  cublasLtMatrixLayoutDestroy(square);
  cublasLtMatrixLayoutDestroy(wide);
  cublasLtMatmulDescDestroy(description_);
}

TEST_F(CublasLt, NamesItself) {
  EXPECT_GE(cublasLtGetVersion(), 120000u);
  EXPECT_STREQ(cublasLtGetStatusString(CUBLAS_STATUS_NOT_SUPPORTED), "the function is not supported");
  EXPECT_STREQ(cublasLtGetStatusName(CUBLAS_STATUS_INVALID_VALUE), "CUBLAS_STATUS_INVALID_VALUE");
}

}  // namespace
}  // namespace cuda_emulation
