// Attention with groups of heads, windows, documents and rows wider than the heads, on a GPU or its
// emulation.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/cuda/attention.h"
#include "tests/core/rounds.h"
#include "tests/device/as_on_gpu.h"
#include "tests/kernels/attention_problem.h"
#include "tests/kernels/gpu_testing.h"
#include "tranche/kernels/attention.h"

namespace tranche::kernels {
namespace {

using namespace testing;

constexpr auto fp32 = DataType::float32, bf16 = DataType::bfloat16, fp16 = DataType::float16;
constexpr std::string_view flash = "flash attention on tensor cores";

class AttentionMasksGpu : public GpuTest {
 protected:
  /// The emulation runs one in three of the sweep's points, which still include every mask and every group.
  static int stride() { return test::as_on_gpu() ? 1 : 3; }

  struct Outcome {
    AttentionResults values;
    std::vector<std::vector<unsigned char>> bytes;
  };

  enum class Through : std::uint8_t { public_kernels, choice, products };
  /// Calls the public kernels, or the functions below them, which accept a workspace of any size: with the
  /// path that they choose, or with the path of GEMMs.
  Outcome run(const AttentionProblem& p, Through through = Through::public_kernels) {
    return run(p, through, 0, p.sizes.time);
  }
  /// Only the queries of `count` tokens from `first` on.
  Outcome run(const AttentionProblem& p, Through through, std::int64_t first, std::int64_t count) {
    const AttentionSizes& s = p.sizes;
    AttentionSizes of_queries = s;
    of_queries.time = count;
    std::vector<Tensor> parts, gradients;
    for (std::size_t part = 0; part < 3; ++part) {
      const Shape rows = part == 0 ? of_queries.rows(0) : s.rows(part);
      parts.push_back(on_gpu(part == 0 ? tokens_of(p.parts[0], first, count) : p.parts[part], p.dtype, rows));
      gradients.push_back(poisoned(p.dtype, rows));
    }
    const Tensor d_out = on_gpu(tokens_of(p.d_out, first, count), p.dtype, of_queries.out()),
                 out = poisoned(p.dtype, of_queries.out()),
                 log_sum_exp = poisoned(fp32, of_queries.statistics());
    const Tensor begins = on_gpu(p.document_begin, DataType::int32, Shape{0});
    AttentionOptions options = p.options({begins.view().data, DataType::int32, {s.batch, s.time}});
    options.first_query = first;
    const ConstHeads query{parts[0].view(), s.padding}, key{parts[1].view(), s.padding},
        value{parts[2].view(), s.padding};
    if (through != Through::public_kernels) {
      cuda::AttentionCall call;
      call.batch = s.batch;
      call.time = s.time;
      call.first_query = first;
      call.queries = count;
      call.heads = s.heads;
      call.key_value_heads = s.key_value_heads;
      call.head_width = s.head_width;
      call.dtype = p.dtype;
      call.scale = 1.0f / std::sqrt(static_cast<float>(s.head_width));
      call.window = s.window;
      if (!s.documents.empty()) call.document_begin = static_cast<const std::int32_t*>(begins.view().data);
      for (std::size_t part = 0; part < 3; ++part) {
        call.parts[part] = {parts[part].view().data, s.rows(part)[2]};
        call.d_parts[part] = {gradients[part].view().data, s.rows(part)[2]};
      }
      call.out = out.view().data;
      call.log_sum_exp = log_sum_exp.view().as<float>();
      call.d_out = d_out.view().data;
      if (s.dropout > 0) {
        call.dropout = dropout_draws(options.dropout);
        call.samples = p.samples;
      }
      const bool choice = through == Through::choice;
      (choice ? cuda::attention_forward : cuda::gemm_attention_forward)(stream(), call, workspace());
      (choice ? cuda::attention_backward : cuda::gemm_attention_backward)(stream(), call, workspace());
    } else {
      attention_forward(stream(), options, query, key, value, out.view(), log_sum_exp.view(), workspace());
      attention_backward(stream(), options, d_out.view(), query, key, value, out.view(), log_sum_exp.view(),
                         {gradients[0].view(), s.padding}, {gradients[1].view(), s.padding},
                         {gradients[2].view(), s.padding}, workspace());
    }
    return {
        {out.values(),
         log_sum_exp.values(),
         {gradients[0].values(), gradients[1].values(), gradients[2].values()}},
        {out.bytes(), log_sum_exp.bytes(), gradients[0].bytes(), gradients[1].bytes(), gradients[2].bytes()}};
  }

  /// The results of all queries, computed in parts that end at these tokens; the parts' gradients of keys and
  /// values are added up.
  AttentionResults in_parts(const AttentionProblem& p, Through through,
                            const std::vector<std::int64_t>& ends) {
    const AttentionSizes& s = p.sizes;
    AttentionResults whole;
    whole.out.resize(static_cast<std::size_t>(s.out().elements()));
    whole.log_sum_exp.resize(static_cast<std::size_t>(s.statistics().elements()));
    for (std::size_t part = 0; part < 3; ++part) {
      whole.gradient[part].assign(static_cast<std::size_t>(s.rows(part).elements()), 0.0);
    }
    std::int64_t first = 0;
    for (const std::int64_t end : ends) {
      const std::int64_t count = end - first;
      const AttentionResults got = run(p, through, first, count).values;
      const auto put = [&](const std::vector<double>& from, std::int64_t groups, std::int64_t width,
                           std::vector<double>& to) {
        for (std::int64_t group = 0; group < groups; ++group) {
          std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(group * count * width),
                      static_cast<std::ptrdiff_t>(count * width),
                      to.begin() + static_cast<std::ptrdiff_t>((group * s.time + first) * width));
        }
      };
      put(got.out, s.batch, s.out()[2], whole.out);
      put(got.log_sum_exp, s.batch * s.heads, 1, whole.log_sum_exp);
      put(got.gradient[0], s.batch, s.rows(0)[2], whole.gradient[0]);
      for (const std::size_t part : {1, 2}) {
        for (std::size_t i = 0; i < got.gradient[part].size(); ++i) {
          whole.gradient[part][i] += got.gradient[part][i];
        }
      }
      first = end;
    }
    return whole;
  }

  void expect_agreement(const AttentionSizes& sizes, DataType dtype) {
    SCOPED_TRACE(sizes.text() + " " + std::string(name_of(dtype)));
    const AttentionProblem p(sizes, dtype, 97);
    p.expect_close_to(p.expected(), run(p).values);
  }
};

TEST_F(AttentionMasksGpu, FlashAgreesWithTheReferenceForEveryGroupAndMask) {
  int point = 0;
  for (AttentionSizes& sizes : attention_sweep({64, 128, 64}, 70, 8)) {
    if (point++ % stride() != 0) continue;
    sizes.dropout = 0;
    const DataType dtype = point % 2 == 0 ? bf16 : fp16;
    ASSERT_EQ(attention_path(DeviceKind::cuda, dtype, sizes.head_width, 0), flash);
    expect_agreement(sizes, dtype);
  }
}

TEST_F(AttentionMasksGpu, FlashAgreesWithTheReferenceOverManyTiles) {
  // Sizes near tiles of 64 and 128, with documents that begin within tiles and at their edges.
  const AttentionSizes sizes[] = {
      {.time = 330, .heads = 1, .head_width = 64, .window = 1},
      {.time = 270, .heads = 2, .key_value_heads = 1, .head_width = 64, .window = 65},
      {.time = 300, .heads = 1, .head_width = 128, .window = 130},
      {.batch = 2,
       .time = 200,
       .heads = 2,
       .key_value_heads = 1,
       .head_width = 64,
       .documents = {127, 1, 64}},
      {.time = 330, .heads = 1, .head_width = 128, .documents = {192, 65}},
      {.time = 330, .heads = 2, .key_value_heads = 2, .head_width = 64, .window = 40, .documents = {200, 63}},
  };
  bool narrow = false;
  for (const AttentionSizes& s : sizes) {
    narrow = !narrow;
    expect_agreement(s, narrow ? bf16 : fp16);
  }
}

TEST_F(AttentionMasksGpu, FlashAgreesWithTheReferenceInLargeSizes) {
  if (!test::as_on_gpu()) GTEST_SKIP() << "for a GPU, and for test_kernels_matrix_gpu.as_on_gpu";
  int point = 0;
  for (const std::int64_t head : {64, 128}) {
    const DataType dtype = head == 64 ? bf16 : fp16;
    for (const AttentionSizes& sizes :
         {AttentionSizes{.batch = 2, .time = 257, .heads = 4, .key_value_heads = 2, .head_width = head},
          AttentionSizes{.time = 500, .heads = 2, .key_value_heads = 1, .head_width = head, .window = 300},
          AttentionSizes{.time = 600, .heads = 1, .head_width = head, .documents = {400, 1, 250}}}) {
      if (test::swept(point++, 2)) expect_agreement(sizes, dtype);
    }
  }
}

TEST_F(AttentionMasksGpu, ProductsAgreeWithTheReferenceForEveryGroupAndMask) {
  int point = 0;
  for (const AttentionSizes& sizes : attention_sweep({5, 48, 80}, 40, 3)) {
    if (point++ % stride() != 0) continue;
    const DataType dtype = floating_dtypes[point / stride() % 3];
    ASSERT_NE(attention_path(DeviceKind::cuda, dtype, sizes.head_width, sizes.dropout), flash);
    expect_agreement(sizes, dtype);
  }
}

TEST_F(AttentionMasksGpu, PartsOfTheQueriesAreThoseOfAll) {
  const AttentionSizes sizes[] = {
      {.batch = 2, .time = 200, .heads = 2, .key_value_heads = 2, .head_width = 64},
      {.time = 330, .heads = 2, .key_value_heads = 1, .head_width = 64, .window = 40, .documents = {200, 63}},
      {.time = 270, .heads = 1, .head_width = 128, .window = 130},
      {.time = 60, .heads = 4, .key_value_heads = 2, .head_width = 20, .padding = 3, .dropout = 0.2f},
      {.time = 60, .heads = 2, .key_value_heads = 2, .head_width = 48, .window = 7, .documents = {9, 20}}};
  for (const AttentionSizes& s : sizes) {
    SCOPED_TRACE(s.text());
    const AttentionProblem p(s, bf16, 101);
    // A part within a tile, one that ends at a tile's edge, and one of a single query.
    p.expect_close_to(p.expected(), in_parts(p, Through::public_kernels,
                                             {s.time / 7, 64 * (s.time / 128) + 32, s.time - 1, s.time}));
  }
}

TEST_F(AttentionMasksGpu, PartsOfTheQueriesTakeScoresThatFitTheWorkspace) {
  for (const AttentionSizes& s :
       {AttentionSizes{.time = 37, .heads = 6, .key_value_heads = 2, .head_width = 20, .window = 7},
        AttentionSizes{.time = 37, .heads = 2, .key_value_heads = 2, .head_width = 20, .dropout = 0.2f}}) {
    for (const std::int64_t bytes :
         {cuda::attention_workspace_bytes(20, 37), 2 * 15 * 40 * std::int64_t{4}}) {
      SCOPED_TRACE(bytes);
      lend_workspace(bytes);
      const AttentionProblem p(s, fp32, 102);
      p.expect_close_to(p.expected(), in_parts(p, Through::products, {9, 28, 37}));
    }
  }
}

TEST_F(AttentionMasksGpu, ProductsTakeScoresInPartsThatFitTheWorkspace) {
  for (const AttentionSizes& s : {
           AttentionSizes{.time = 37, .heads = 6, .key_value_heads = 2, .head_width = 20, .window = 7},
           AttentionSizes{.time = 37,
           .heads = 4,
           .key_value_heads = 1,
           .head_width = 20,
           .documents = {9, 20},
           .dropout = 0.2f},
       }) {
    // Workspaces: the smallest one; one for rows of a single head; and ones for the scores of one head and of
    // two heads, with the sums of a key's gradients beside them.
    const std::int64_t sums = 2 * 37 * 20 * 4, head = 2 * 37 * 40 * 4;
    for (const std::int64_t bytes : {cuda::attention_workspace_bytes(20, 37), 2 * 15 * 40 * std::int64_t{4},
                                     head + sums, 2 * head + sums}) {
      SCOPED_TRACE(bytes);
      lend_workspace(bytes);
      const AttentionProblem p(s, fp32, 98);
      p.expect_close_to(p.expected(), run(p, Through::products).values);
    }
  }
}

TEST_F(AttentionMasksGpu, AMaskThatHidesNothingChangesNoBit) {
  for (const std::int64_t head : {64, 128, 48}) {
    SCOPED_TRACE(head);
    AttentionProblem p({.time = 150, .heads = 2, .key_value_heads = 2, .head_width = head}, bf16, 99);
    const auto wanted = run(p).bytes;
    p.sizes.window = 150;
    EXPECT_EQ(run(p).bytes, wanted);
    p.sizes.window = 0;
    p.sizes.documents = {400};
    p.document_begin = HostTensor(DataType::int32, {1, 150}, document_begins(p.sizes));
    EXPECT_EQ(run(p).bytes, wanted);
  }
}

TEST_F(AttentionMasksGpu, FlashTakesWholeGroupsAndProductsTakeWhatIsLarger) {
  const AttentionProblem p({.time = 20, .heads = 6, .key_value_heads = 2, .head_width = 64, .window = 9},
                           fp16, 100);
  const auto whole = run(p).bytes;
  const std::int64_t head = cuda::flash_scratch_bytes(20);
  lend_workspace(5 * head);
  EXPECT_EQ(run(p, Through::choice).bytes, whole);  // one group of three after another
  lend_workspace(2 * head);
  const Outcome got = run(p, Through::choice);
  EXPECT_NE(got.bytes, whole);
  p.expect_close_to(p.expected(), got.values);
}

// A product with a masked NaN would be NaN, so this shows that no product with hidden tiles is computed.
TEST_F(AttentionMasksGpu, FlashSkipsTilesThatNoQuerySees) {
  for (const bool by_window : {true, false}) {
    AttentionSizes sizes{.time = 330, .heads = 2, .key_value_heads = 1, .head_width = 64};
    if (by_window) {
      sizes.window = 33;
    } else {
      sizes.documents = {256, 74};
    }
    AttentionProblem p(sizes, bf16, 101);
    const AttentionResults wanted = run(p).values;
    // Queries from 256 on see keys from 224 on, which are in the tile that starts at 192.
    for (std::size_t part = 0; part < 3; ++part) {
      const std::int64_t width = sizes.rows(part)[2], hidden = by_window ? 192 : 256;
      std::vector<double> values = p.parts[part].values();
      std::fill_n(values.begin(), static_cast<std::ptrdiff_t>(hidden * width), std::nan(""));
      p.parts[part] = HostTensor(bf16, sizes.rows(part), values);
    }
    const AttentionResults got = run(p).values;
    const auto expect_same_end = [](const std::vector<double>& x, const std::vector<double>& y,
                                    std::size_t from) {
      for (std::size_t i = from; i < x.size(); ++i) ASSERT_EQ(x[i], y[i]) << i;
    };
    expect_same_end(got.out, wanted.out, 256 * 128);
    expect_same_end(got.gradient[0], wanted.gradient[0], 256 * 128);
    expect_same_end(got.gradient[1], wanted.gradient[1], 256 * 64);
    expect_same_end(got.gradient[2], wanted.gradient[2], 256 * 64);
  }
}

}  // namespace
}  // namespace tranche::kernels
