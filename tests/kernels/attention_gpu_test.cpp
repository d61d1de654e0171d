// Attention on a GPU or its emulation: compares the fused kernels and the GEMM path with the fp64 reference.

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/cuda/attention.h"
#include "kernels/reference/attention.h"
#include "tests/core/rounds.h"
#include "tests/device/as_on_gpu.h"
#include "tests/kernels/gpu_testing.h"
#include "tranche/kernels/attention.h"

namespace tranche::kernels {
namespace {

using namespace testing;

constexpr auto fp32 = DataType::float32, bf16 = DataType::bfloat16, fp16 = DataType::float16;

struct Sizes {
  std::int64_t batch, time, heads, head_width;
  std::int64_t width() const { return heads * head_width; }
};

class AttentionGpu : public GpuTest {
 protected:
  /// One problem: inputs with their values after rounding to the dtype, and the fp64 results.
  struct Problem {
    Sizes sizes;
    DataType dtype;
    std::vector<std::int64_t> samples;
    AttentionOptions options;
    HostTensor query_key_value, d_out;
    std::vector<double> out, log_sum_exp, gradient;
  };
  struct Results {
    std::vector<double> out, log_sum_exp, gradient;
    std::vector<std::vector<unsigned char>> bytes;
  };

  std::unique_ptr<Problem> problem(const Sizes& s, DataType dtype, float dropout, std::uint64_t salt) {
    Random random(salt);
    auto made =
        std::make_unique<Problem>(Problem{s,
                                          dtype,
                                          std::vector<std::int64_t>(static_cast<std::size_t>(s.batch)),
                                          {},
                                          random.tensor(dtype, {s.batch, s.time, 3 * s.width()}, -2, 2),
                                          random.tensor(dtype, {s.batch, s.time, s.width()}),
                                          {},
                                          {},
                                          {}});
    Problem& p = *made;
    std::iota(p.samples.begin(), p.samples.end(), 1000);
    p.options.heads = s.heads;
    p.options.dropout = {.probability = dropout, .seed = 5, .step = 7, .site = 3, .samples = p.samples};
    std::vector<double> keep;
    if (dropout > 0) {
      const DropoutDraws draws = dropout_draws(p.options.dropout);
      for (std::int64_t sample : p.samples) {
        for (std::int64_t e = 0; e < s.heads * s.time * s.time; ++e) {
          const bool kept = draws.keeps(draws.block(sample, e / 4)[static_cast<std::size_t>(e % 4)]);
          keep.push_back(kept ? static_cast<double>(draws.scale) : 0.0);
        }
      }
    }
    const reference::AttentionShape shape{.batch = s.batch,
                                          .time = s.time,
                                          .heads = s.heads,
                                          .key_value_heads = s.heads,
                                          .head_width = s.head_width,
                                          .document_begin = {}};
    p.out.resize(static_cast<std::size_t>(s.batch * s.time * s.width()));
    p.log_sum_exp.resize(static_cast<std::size_t>(s.batch * s.heads * s.time));
    p.gradient.resize(3 * p.out.size());
    const auto values = p.query_key_value.values();
    const auto packed = reference::packed<const double>(values, s.width());
    reference::attention_forward(shape, packed, keep, p.out, p.log_sum_exp);
    reference::attention_backward(shape, p.d_out.values(), packed, keep,
                                  reference::packed<double>(p.gradient, s.width()));
    return made;
  }

  /// The checked operands, for a call of one path by its name.
  static cuda::AttentionCall call_of(const Problem& p, const TensorView& query_key_value,
                                     const TensorView& out, const TensorView& log_sum_exp,
                                     const TensorView& d_out, const TensorView& d_query_key_value) {
    const Sizes& s = p.sizes;
    cuda::AttentionCall call;
    call.batch = s.batch;
    call.time = call.queries = s.time;
    call.heads = call.key_value_heads = s.heads;
    call.head_width = s.head_width;
    call.dtype = p.dtype;
    call.scale = 1.0f / std::sqrt(static_cast<float>(s.head_width));
    for (std::size_t part = 0; part < 3; ++part) {
      const std::int64_t first = static_cast<std::int64_t>(part) * s.width() * size_of(p.dtype);
      call.parts[part] = {static_cast<const char*>(query_key_value.data) + first, 3 * s.width()};
      call.d_parts[part] = {static_cast<char*>(d_query_key_value.data) + first, 3 * s.width()};
    }
    call.out = out.data;
    call.log_sum_exp = log_sum_exp.as<float>();
    call.d_out = d_out.data;
    if (p.options.dropout.probability > 0) {
      call.dropout = dropout_draws(p.options.dropout);
      call.samples = p.samples;
    }
    return call;
  }

  /// Runs the public kernels, or the GEMM path whatever the sizes.
  Results run(const Problem& p, bool by_gemm = false) {
    const Sizes& s = p.sizes;
    const Shape packed{s.batch, s.time, 3 * s.width()}, row{s.batch, s.time, s.width()},
        statistics{s.batch, s.heads, s.time};
    const Tensor query_key_value = on_gpu(p.query_key_value, p.dtype, packed),
                 d_out = on_gpu(p.d_out, p.dtype, row);
    const Tensor out = poisoned(p.dtype, row), log_sum_exp = poisoned(fp32, statistics),
                 gradient = poisoned(p.dtype, packed);
    if (by_gemm) {
      const cuda::AttentionCall call =
          call_of(p, query_key_value.view(), out.view(), log_sum_exp.view(), d_out.view(), gradient.view());
      cuda::gemm_attention_forward(stream(), call, workspace());
      cuda::gemm_attention_backward(stream(), call, workspace());
    } else {
      const TensorView rows = query_key_value.view(), d_rows = gradient.view();
      const std::int64_t width = s.width();
      attention_forward(stream(), p.options, {rows}, {rows, width}, {rows, 2 * width}, out.view(),
                        log_sum_exp.view(), workspace());
      attention_backward(stream(), p.options, d_out.view(), {rows}, {rows, width}, {rows, 2 * width},
                         out.view(), log_sum_exp.view(), {d_rows}, {d_rows, width}, {d_rows, 2 * width},
                         workspace());
    }
    return {out.values(),
            log_sum_exp.values(),
            gradient.values(),
            {out.bytes(), log_sum_exp.bytes(), gradient.bytes()}};
  }

  static double norm_of(const std::vector<double>& x) { return std::sqrt(dot(x, x)); }

  /// Checks 16-bit results. `out` is a mean of values below 2 with weights that were rounded once (relative
  /// error r) and is stored with one more rounding: 2 r + r |out|. Scores of up to 4 sqrt(128) = 45 have an
  /// fp32 error of 1e-5, relative in the weights. Gradients have three roundings with relative error r (out
  /// in the projection, the weight or score gradient, the store) of terms that cancel, so the norm of the
  /// error is checked, and each error relative to the largest value.
  static void expect_close_to(const Problem& p, const Results& got) {
    const double r = rounding_of(p.dtype);
    expect_close(got.out, p.out, 1.1 * r, 2 * r + 1e-4, "out");
    expect_close(got.log_sum_exp, p.log_sum_exp, 2e-6, 3e-5, "log_sum_exp");
    std::vector<double> difference(got.gradient.size());
    double largest = 0;
    for (std::size_t i = 0; i < difference.size(); ++i) {
      difference[i] = got.gradient[i] - p.gradient[i];
      largest = std::max(largest, std::abs(p.gradient[i]));
    }
    EXPECT_LE(norm_of(difference), 2 * r * norm_of(p.gradient)) << repeat_line();
    expect_close(got.gradient, p.gradient, 2 * r, 4 * r * largest, "d_query_key_value");
  }
  static std::string text_of(const Sizes& s, DataType dtype) {
    return std::string(name_of(dtype)) + " batch " + std::to_string(s.batch) + " time " +
           std::to_string(s.time) + " heads " + std::to_string(s.heads) + " of " +
           std::to_string(s.head_width);
  }
};

TEST_F(AttentionGpu, FlashAgreesWithTheReferenceInOddSizes) {
  // Sizes near tiles of 64 keys and 128 queries; a row of one is the smallest.
  std::vector<Sizes> sizes;
  for (std::int64_t time : {1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129}) sizes.push_back({1, time, 1, 64});
  for (std::int64_t time : {1, 16, 17, 65, 129}) sizes.push_back({1, time, 1, 128});
  sizes.push_back({2, 33, 3, 64});
  sizes.push_back({2, 18, 2, 128});
  sizes.push_back({1, 200, 1, 64});
  bool narrow = false;
  for (const Sizes& s : sizes) {
    narrow = !narrow;  // dtypes alternate, because the kernels differ only in the conversion
    for (DataType dtype : {narrow ? bf16 : fp16}) {
      SCOPED_TRACE(text_of(s, dtype));
      ASSERT_EQ(attention_path(DeviceKind::cuda, dtype, s.head_width, 0), "flash attention on tensor cores");
      const auto p = problem(s, dtype, 0, 61);
      expect_close_to(*p, run(*p));
    }
  }
}

TEST_F(AttentionGpu, FlashAgreesWithTheReferenceInLargeSizes) {
  if (!test::as_on_gpu()) GTEST_SKIP() << "for a GPU, and for test_kernels_matrix_gpu.as_on_gpu";
  // Many tiles, some with several samples and heads; the reference takes a second for the longest.
  bool narrow = false;
  int point = 0;
  for (const std::int64_t head : {64, 128}) {
    for (const Sizes& s :
         {Sizes{2, 200, 3, head}, Sizes{2, 257, 3, head}, Sizes{1, 640, 2, head}, Sizes{1, 1000, 1, head}}) {
      narrow = !narrow;
      if (!test::swept(point++, 3)) continue;
      const DataType dtype = narrow ? bf16 : fp16;
      SCOPED_TRACE(text_of(s, dtype));
      const auto p = problem(s, dtype, 0, 60);
      expect_close_to(*p, run(*p));
    }
  }
}

TEST_F(AttentionGpu, FlashGivesTheSameBitsAgainAndWithEverySizeOfWorkspace) {
  const Sizes s{2, 70, 2, 64};
  const auto p = problem(s, bf16, 0, 62);
  const Results first = run(*p);
  EXPECT_EQ(first.bytes, run(*p).bytes);
  lend_workspace(attention_workspace_bytes(s.head_width, s.time));
  EXPECT_EQ(first.bytes, run(*p).bytes);
}

TEST_F(AttentionGpu, FlashTakesTheHeadsInPartsThatFitTheWorkspace) {
  const Sizes s{2, 20, 3, 64};
  const auto p = problem(s, fp16, 0, 63);
  const Results whole = run(*p);
  const Shape packed{s.batch, s.time, 3 * s.width()}, row{s.batch, s.time, s.width()};
  const Tensor query_key_value = on_gpu(p->query_key_value, fp16, packed),
               d_out = on_gpu(p->d_out, fp16, row);
  const Tensor out = poisoned(fp16, row), log_sum_exp = poisoned(fp32, {s.batch, s.heads, s.time}),
               gradient = poisoned(fp16, packed);
  const cuda::AttentionCall call =
      call_of(*p, query_key_value.view(), out.view(), log_sum_exp.view(), d_out.view(), gradient.view());
  cuda::flash_forward(stream(), call);
  cuda::flash_backward(stream(), call,
                       {workspace().data, 4 * cuda::flash_scratch_bytes(s.time)});  // 4 of 6 heads
  EXPECT_EQ(gradient.bytes(), whole.bytes[2]);
}

TEST_F(AttentionGpu, KeysAfterAQueryDoNotReachIt) {
  const Sizes s{1, 130, 1, 64};
  auto p = problem(s, bf16, 0, 64);
  const Results before = run(*p);
  auto values = p->query_key_value.values();
  for (std::size_t i = 64 * 3 * 64; i < values.size(); ++i) values[i] = std::nan("");
  p->query_key_value = HostTensor(bf16, {1, 130, 3 * 64}, values);
  const Results after = run(*p);
  EXPECT_TRUE(std::equal(before.out.begin(), before.out.begin() + 64 * 64, after.out.begin()));
  EXPECT_TRUE(std::isnan(after.out.back()));
}

TEST_F(AttentionGpu, ProductsAgreeWithTheReferenceInOddSizes) {
  const Sizes sizes[] = {{1, 1, 1, 1},   {2, 3, 2, 3},   {1, 17, 1, 17},
                         {2, 33, 3, 16}, {1, 65, 2, 65}, {1, 270, 1, 24}};
  for (const Sizes& s : sizes) {
    for (float dropout : {0.0f, 0.3f}) {
      SCOPED_TRACE(text_of(s, fp32) + " dropout " + std::to_string(dropout));
      ASSERT_EQ(attention_path(DeviceKind::cuda, fp32, s.head_width, dropout), "cuBLASLt GEMMs and softmax");
      const auto p = problem(s, fp32, dropout, 65);
      const Results got = run(*p);
      // Scores of up to 33 have errors of 33 * 2^-22, relative in the weights, as on the CPU.
      expect_close(got.out, p->out, 2e-5, 2e-5, "out");
      expect_close(got.log_sum_exp, p->log_sum_exp, 2e-6, 2e-5, "log_sum_exp");
      expect_close(got.gradient, p->gradient, 5e-5, 1e-4, "d_query_key_value");
    }
  }
}

TEST_F(AttentionGpu, ProductsTakeScoresInPartsThatFitTheWorkspace) {
  const Sizes s{1, 61, 3, 20};
  const auto p = problem(s, fp32, 0.2f, 66);
  for (std::int64_t bytes : {cuda::attention_workspace_bytes(s.head_width, s.time),
                             2 * 30 * 64 * std::int64_t{4}, 2 * 2 * 61 * 64 * std::int64_t{4}}) {
    SCOPED_TRACE(bytes);
    lend_workspace(bytes);
    const Sizes& z = p->sizes;
    const Shape packed{z.batch, z.time, 3 * z.width()}, row{z.batch, z.time, z.width()};
    const Tensor query_key_value = on_gpu(p->query_key_value, fp32, packed),
                 d_out = on_gpu(p->d_out, fp32, row);
    const Tensor out = poisoned(fp32, row), log_sum_exp = poisoned(fp32, {z.batch, z.heads, z.time}),
                 gradient = poisoned(fp32, packed);
    const cuda::AttentionCall call =
        call_of(*p, query_key_value.view(), out.view(), log_sum_exp.view(), d_out.view(), gradient.view());
    cuda::gemm_attention_forward(stream(), call, workspace());
    cuda::gemm_attention_backward(stream(), call, workspace());
    expect_close(out.values(), p->out, 2e-5, 2e-5, "out");
    expect_close(gradient.values(), p->gradient, 5e-5, 1e-4, "d_query_key_value");
  }
}

TEST_F(AttentionGpu, BothPathsAgreeInSixteenBits) {
  for (DataType dtype : {bf16, fp16}) {
    const Sizes s{1, 40, 2, 64};
    SCOPED_TRACE(text_of(s, dtype));
    const auto p = problem(s, dtype, 0, 67);
    const Results flash = run(*p), by_gemm = run(*p, true);
    expect_close_to(*p, by_gemm);
    const double r = rounding_of(dtype);
    expect_close(flash.out, by_gemm.out, 2 * r, 4 * r + 2e-4, "out");
    expect_close(flash.log_sum_exp, by_gemm.log_sum_exp, 2e-6, 5e-5, "log_sum_exp");
    std::vector<double> difference(flash.gradient.size());
    for (std::size_t i = 0; i < difference.size(); ++i)
      difference[i] = flash.gradient[i] - by_gemm.gradient[i];
    EXPECT_LE(norm_of(difference), 4 * r * norm_of(p->gradient)) << repeat_line();
  }
}

TEST_F(AttentionGpu, SixteenBitsWithDropoutAndEmptySizes) {
  const auto dropped = problem({2, 19, 2, 64}, bf16, 0.25f, 68);
  expect_close_to(*dropped, run(*dropped));
  for (const Sizes& s : {Sizes{0, 4, 2, 64}, Sizes{2, 0, 2, 64}}) {
    const auto p = problem(s, bf16, 0, 69);
    EXPECT_TRUE(run(*p).out.empty());
  }
}

}  // namespace
}  // namespace tranche::kernels
