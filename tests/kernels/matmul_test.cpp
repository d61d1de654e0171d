#include "tranche/kernels/matmul.h"

#include <gmock/gmock.h>

#include <tuple>

#include "device/cuda_probe.h"
#include "kernels/cpu/matmul.h"
#include "kernels/cpu/matmul_onednn.h"
#include "kernels/cpu/tasks.h"
#include "kernels/cuda/gemm.h"
#include "kernels/matmul_log.h"
#include "kernels/reference/elementwise.h"
#include "kernels/reference/matmul.h"
#include "tests/kernels/kernel_testing.h"
#include "tranche/kernels/elementwise.h"

namespace tranche::kernels {
namespace {

using namespace testing;
using ::testing::HasSubstr;

struct Problem {
  std::int64_t m, n, k;
};

Shape stored(bool transposed, std::int64_t rows, std::int64_t columns) {
  return transposed ? Shape{columns, rows} : Shape{rows, columns};
}

/// Runs one GEMM and compares it with fp64. In any order the error of k fp32 products and additions is less
/// than (k + 2) 2^-24 of the sum of absolute values (Higham, 2002, section 3.1). Twice that allows for
/// dot-product instructions, which add pairs unrounded or truncate. The store adds one rounding.
void check_gemm(const Problem& problem, const MatmulOptions& options, DataType dtype, DataType c_dtype,
                Machine& machine, Random& random) {
  const auto [m, n, k] = problem;
  SCOPED_TRACE(::testing::Message() << m << " x " << n << " x " << k << " transposed " << options.transpose_a
                                    << options.transpose_b << " accumulate " << options.accumulate << " "
                                    << name_of(dtype) << " into " << name_of(c_dtype));
  HostTensor a = random.tensor(dtype, stored(options.transpose_a, m, k));
  HostTensor b = random.tensor(dtype, stored(options.transpose_b, k, n));
  HostTensor c = options.accumulate ? random.tensor(c_dtype, {m, n}) : HostTensor(c_dtype, {m, n});
  HostTensor before = c;  // for oneDNN's bf16 GEMM, which is also tested if it is not the chosen path
  const reference::MatmulShape shape{m, n, k, options.transpose_a, options.transpose_b};
  const auto absolute = [](std::vector<double> values) {
    for (double& value : values) value = std::abs(value);
    return values;
  };
  std::vector<double> wanted = c.values(), magnitude = absolute(c.values());
  reference::matmul(shape, a.values(), b.values(), options.accumulate, wanted);
  reference::matmul(shape, absolute(a.values()), absolute(b.values()), options.accumulate, magnitude);
  std::vector<double> bound(wanted.size());
  for (std::size_t i = 0; i < bound.size(); ++i) {
    const double sum_error = 2.0 * (static_cast<double>(k) + 2.0) * std::ldexp(1.0, -24) * magnitude[i];
    const double store = c_dtype == DataType::float32 ? 0.0 : rounding_of(c_dtype);
    bound[i] = sum_error * (1 + store) + store * std::abs(wanted[i]) + underflow_of(c_dtype);
  }
  matmul(machine.stream(), options, a.view(), b.view(), c.view(), machine.workspace());
  expect_within(c.values(), wanted, bound, "c");
  EXPECT_TRUE(c.guard_intact());
  if (dtype == DataType::bfloat16 && m * n * k > 0) {
    cpu::MatmulCall call{options.transpose_a,
                         options.transpose_b,
                         options.accumulate,
                         m,
                         n,
                         k,
                         dtype,
                         c_dtype,
                         a.view().data,
                         b.view().data,
                         before.view().data,
                         machine.workspace(),
                         machine.stream().threads()};
    const bool run = cpu::onednn_matmul(call);
    if (run) expect_within(before.values(), wanted, bound, "c by oneDNN");
    EXPECT_FALSE(run && (m < 16 || n < 16 || k % 32 != 0))
        << "a shape that its matrix-unit kernels get wrong";
    EXPECT_TRUE(before.guard_intact());
  }
}

using Case = std::tuple<DataType, DataType, bool, bool, bool>;
class Matmul : public ::testing::TestWithParam<Case> {};

TEST_P(Matmul, AgreesWithTheReferenceInOddSizes) {
  const auto [dtype, c_dtype, transpose_a, transpose_b, accumulate] = GetParam();
  Random random(11);
  Machine machine(2);
  const Problem problems[] = {
      {1, 1, 1},      {1, 17, 33},
      {31, 1, 7},     {3, 5, 1},
      {16, 16, 16},   {15, 33, 65},
      {64, 48, 2},    {37, 41, 97},
      {127, 130, 64}, {257, 33, 13},
      {19, 513, 21},  {9, 11, 769},
      {16, 16, 32},  // from here to 250: sizes for which oneDNN is called
      {17, 33, 64},   {48, 16, 96},
      {250, 31, 416}, {random.integer(1, 70), random.integer(1, 70), random.integer(1, 70)}};
  for (const Problem& problem : problems) {
    check_gemm(problem, {transpose_a, transpose_b, accumulate}, dtype, c_dtype, machine, random);
  }
}

TEST_P(Matmul, EmptySizesAreLegal) {
  const auto [dtype, c_dtype, transpose_a, transpose_b, accumulate] = GetParam();
  Random random(12);
  Machine machine;
  for (const Problem& problem : {Problem{0, 3, 2}, Problem{3, 0, 2}, Problem{3, 2, 0}, Problem{0, 0, 0}}) {
    check_gemm(problem, {transpose_a, transpose_b, accumulate}, dtype, c_dtype, machine, random);
  }
}

std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  const auto [dtype, c_dtype, transpose_a, transpose_b, accumulate] = info.param;
  return std::string(name_of(dtype)) + "_" + std::string(name_of(c_dtype)) + (transpose_a ? "_T" : "_N") +
         (transpose_b ? "T" : "N") + (accumulate ? "_add" : "");
}

constexpr auto fp32 = DataType::float32, bf16 = DataType::bfloat16, fp16 = DataType::float16;
INSTANTIATE_TEST_SUITE_P(Fp32, Matmul,
                         ::testing::Combine(::testing::Values(fp32), ::testing::Values(fp32),
                                            ::testing::Bool(), ::testing::Bool(), ::testing::Bool()),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Bf16, Matmul,
                         ::testing::Combine(::testing::Values(bf16), ::testing::Values(bf16, fp32),
                                            ::testing::Bool(), ::testing::Bool(), ::testing::Bool()),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Fp16, Matmul,
                         ::testing::Combine(::testing::Values(fp16), ::testing::Values(fp16, fp32),
                                            ::testing::Bool(), ::testing::Bool(), ::testing::Bool()),
                         case_name);

TEST(MatmulBits, RepeatAndForOwnTilesDoNotDependOnThreads) {
  for (DataType dtype : floating_dtypes) {
    SCOPED_TRACE(name_of(dtype));
    Random random(13);
    const std::int64_t m = 150, n = 270, k = 390;
    HostTensor a = random.tensor(dtype, {m, k}), b = random.tensor(dtype, {k, n});
    const auto run = [&](int threads, std::int64_t workspace_bytes) {
      Machine machine(threads, workspace_bytes);
      HostTensor c(dtype, {m, n});
      matmul(machine.stream(), {}, a.view(), b.view(), c.view(), machine.workspace());
      return c.bytes();
    };
    const auto first = run(2, minimum_workspace_bytes);
    EXPECT_EQ(first, run(2, minimum_workspace_bytes));
    // oneDNN gives equal bits only for equal numbers of threads.
    if (matmul_path(DeviceKind::cpu, dtype).starts_with("oneDNN")) continue;
    for (int threads : {1, 3}) EXPECT_EQ(first, run(threads, minimum_workspace_bytes));
    EXPECT_EQ(first, run(3, 4 * minimum_workspace_bytes + 4096));
  }
}

TEST(ParallelTasks, RunEachTaskOnceAndPassFailuresOn) {
  for (int threads : {1, 2, 7}) {
    std::vector<int> runs(100, 0);
    cpu::parallel_tasks(threads, 100, [&](std::int64_t i, int slot) {
      EXPECT_TRUE(slot >= 0 && slot < threads);
      ++runs[static_cast<std::size_t>(i)];
    });
    EXPECT_EQ(runs, std::vector<int>(100, 1)) << threads;
    EXPECT_EQ(refusal([&] {
                cpu::parallel_tasks(threads, 100, [](std::int64_t i, int) {
                  if (i == 41) throw InvalidArgument("task 41");
                });
              }),
              "task 41");
  }
}

TEST(MatmulOneDnn, LeavesTheCallAloneWhenItsScratchpadDoesNotFit) {
  Random random(15);
  Machine machine;
  HostTensor a = random.tensor(bf16, {333, 257}), b = random.tensor(bf16, {257, 129}), c(bf16, {333, 129});
  const auto untouched = c.bytes();
  cpu::MatmulCall call{
      true, false, false,         257,           129,           333,
      bf16, bf16,  a.view().data, b.view().data, c.view().data, {machine.workspace().data, 0},
      1};
  b = random.tensor(bf16, {333, 129});
  call.b = b.view().data;
  if (!cpu::onednn_matmul(call)) {
    EXPECT_EQ(c.bytes(), untouched);
  }
}

TEST(MatmulMeta, CountsLikeTheCpuAndTouchesNothing) {
  Machine meta(1, 0, DeviceKind::meta);
  const Workspace workspace{nullptr, minimum_workspace_bytes};
  matmul(meta.stream(), {}, {nullptr, bf16, {48, 32}}, {nullptr, bf16, {32, 20}}, {nullptr, bf16, {48, 20}},
         workspace);
  matmul(meta.stream(), {true, false, true}, {nullptr, bf16, {32, 48}}, {nullptr, bf16, {32, 20}},
         {nullptr, fp32, {48, 20}}, workspace);
  const WorkCount& work = meta.stream().work();
  EXPECT_EQ(work.kernels, 2);
  EXPECT_EQ(work.floating_point_operations, 2 * 2.0 * 48 * 20 * 32);
  EXPECT_EQ(work.bytes_read, 2 * 2.0 * (48 * 32 + 32 * 20) + 4.0 * 48 * 20);
  EXPECT_EQ(work.bytes_written, 2.0 * 48 * 20 + 4.0 * 48 * 20);

  Machine cpu;
  Random random(14);
  HostTensor a = random.tensor(bf16, {48, 32}), b = random.tensor(bf16, {32, 20}), c(bf16, {48, 20});
  HostTensor at = random.tensor(bf16, {32, 48}), d = random.tensor(fp32, {48, 20});
  matmul(cpu.stream(), {}, a.view(), b.view(), c.view(), cpu.workspace());
  matmul(cpu.stream(), {true, false, true}, at.view(), b.view(), d.view(), cpu.workspace());
  EXPECT_EQ(cpu.stream().work().floating_point_operations, work.floating_point_operations);
  EXPECT_EQ(cpu.stream().work().bytes_read, work.bytes_read);
  EXPECT_EQ(cpu.stream().work().bytes_written, work.bytes_written);
}

TEST(MatmulLog, ListsEveryProductOfTheStreamWhileItIsAsked) {
  Random random(15);
  Machine machine;
  HostTensor a = random.tensor(bf16, {5, 3}), b = random.tensor(bf16, {5, 4}), c(fp32, {3, 4});
  HostTensor bias = random.tensor(bf16, {5}), out(bf16, {4, 5}), weight = random.tensor(bf16, {3, 5});
  HostTensor x = random.tensor(bf16, {4, 3});
  const auto issue = [&] {
    matmul(machine.stream(), {.transpose_a = true, .accumulate = true}, a.view(), b.view(), c.view(),
           machine.workspace());
    matmul_bias(machine.stream(), x.view(), weight.view(), bias.view(), out.view(), machine.workspace());
  };
  std::vector<Gemm> gemms;
  issue();
  log_gemms(machine.stream(), &gemms);
  issue();
  log_gemms(machine.stream(), nullptr);
  issue();
  const std::vector<Gemm> wanted{{true, false, true, 3, 4, 5, bf16, fp32},
                                 {false, false, false, 4, 5, 3, bf16, bf16}};
  EXPECT_EQ(gemms, wanted);
}

TEST(MatmulErrors, NameTheOperandAndWhatWasWanted) {
  Machine machine(1, 0, DeviceKind::meta);
  const auto text = [&](const MatmulOptions& options, const ConstTensorView& a, const ConstTensorView& b,
                        const TensorView& c, std::int64_t bytes = minimum_workspace_bytes) {
    return refusal([&] { matmul(machine.stream(), options, a, b, c, {nullptr, bytes}); });
  };
  EXPECT_EQ(text({}, {nullptr, fp32, {2, 3}}, {nullptr, fp32, {4, 5}}, {nullptr, fp32, {2, 5}}),
            "matmul: `b` has shape [4, 5], wanted [3, 5]");
  EXPECT_EQ(text({false, true}, {nullptr, fp32, {2, 3}}, {nullptr, fp32, {4, 5}}, {nullptr, fp32, {2, 4}}),
            "matmul: `b (transposed)` has shape [4, 5], wanted [4, 3]");
  EXPECT_EQ(text({}, {nullptr, fp32, {2, 3}}, {nullptr, fp32, {3, 5}}, {nullptr, fp32, {5, 2}}),
            "matmul: `c` has shape [5, 2], wanted [2, 5]");
  EXPECT_EQ(text({}, {nullptr, fp32, {2, 3, 1}}, {nullptr, fp32, {3, 5}}, {nullptr, fp32, {2, 5}}),
            "matmul: `a` has shape [2, 3, 1], wanted 2 dimensions");
  EXPECT_EQ(text({}, {nullptr, bf16, {2, 3}}, {nullptr, fp16, {3, 5}}, {nullptr, fp32, {2, 5}}),
            "matmul: `b` has dtype fp16, wanted bf16");
  EXPECT_EQ(text({}, {nullptr, fp32, {2, 3}}, {nullptr, fp32, {3, 5}}, {nullptr, bf16, {2, 5}}),
            "matmul: `c` has dtype bf16, wanted fp32");
  EXPECT_THAT(text({}, {nullptr, DataType::int32, {2, 3}}, {nullptr, fp32, {3, 5}}, {nullptr, fp32, {2, 5}}),
              HasSubstr("matmul: `a` has dtype int32"));
  EXPECT_EQ(text({}, {nullptr, bf16, {2, 3}}, {nullptr, bf16, {3, 5}}, {nullptr, bf16, {2, 5}}, 4096),
            "matmul: workspace has 4096 bytes; bf16 GEMMs need at least 8388608: raise tranche.workspace");
}

TEST(MatmulPath, SaysHowEachDtypeRuns) {
  for (DataType dtype : floating_dtypes) EXPECT_FALSE(matmul_path(DeviceKind::cpu, dtype).empty());
  EXPECT_THAT(matmul_path(DeviceKind::cpu, fp16), HasSubstr("widened to fp32"));
  EXPECT_EQ(matmul_path(DeviceKind::meta, bf16), "counted, not computed");
  EXPECT_FALSE(matmul_libraries(DeviceKind::cpu).empty());
  if (detail::probe_cuda().compiled) {
    EXPECT_EQ(matmul_path(DeviceKind::cuda, bf16), "cuBLASLt bf16, sums in fp32");
    EXPECT_EQ(matmul_path(DeviceKind::cuda, fp16), "cuBLASLt fp16, sums in fp32");
    EXPECT_EQ(matmul_path(DeviceKind::cuda, fp32), "cuBLASLt IEEE fp32 (no TF32)");
    EXPECT_THAT(matmul_libraries(DeviceKind::cuda),
                ::testing::AnyOf(HasSubstr(", no device"), HasSubstr(", compute capability ")));
    EXPECT_THAT(matmul_libraries(DeviceKind::cuda), ::testing::StartsWith("cuBLASLt "));
  } else {
    EXPECT_THROW(matmul_path(DeviceKind::cuda, bf16), NotCompiled);
    EXPECT_THROW(matmul_libraries(DeviceKind::cuda), NotCompiled);
  }
}

TEST(MatmulFused, OnTheCpuIsItsPartsToTheBit) {
  Random random(16);
  Machine machine(2);
  for (DataType dtype : floating_dtypes) {
    for (const Problem& p : {Problem{7, 33, 19}, Problem{16, 8, 8}, Problem{3, 5, 0}, Problem{0, 4, 2}}) {
      SCOPED_TRACE(::testing::Message() << p.m << " x " << p.n << " x " << p.k << " " << name_of(dtype));
      HostTensor a = random.tensor(dtype, {p.m, p.k}), b = random.tensor(dtype, {p.k, p.n});
      HostTensor bias = random.tensor(dtype, {p.n}), weight = random.tensor(dtype, {p.n, p.k});
      HostTensor hidden(dtype, {p.m, p.n}), activated(dtype, {p.m, p.n}), d_hidden(dtype, {p.m, p.n});
      HostTensor out(dtype, {p.m, p.n}), wanted(dtype, {p.m, p.n}), wanted_gelu(dtype, {p.m, p.n});
      Stream& stream = machine.stream();
      const Workspace& workspace = machine.workspace();
      matmul_bias(stream, a.view(), b.view(), bias.view(), out.view(), workspace);
      matmul_bias_gelu(stream, a.view(), b.view(), bias.view(), hidden.view(), activated.view(), workspace);
      matmul(stream, {}, a.view(), b.view(), wanted.view(), workspace);
      add_bias(stream, wanted.view(), bias.view());
      gelu_forward(stream, wanted.view(), wanted_gelu.view());
      EXPECT_EQ(out.bytes(), wanted.bytes());
      HostTensor from_transposed(dtype, {p.m, p.n}), product(dtype, {p.m, p.n});
      matmul_bias(stream, a.view(), weight.view(), bias.view(), from_transposed.view(), workspace, true);
      matmul(stream, {.transpose_b = true}, a.view(), weight.view(), product.view(), workspace);
      add_bias(stream, product.view(), bias.view());
      EXPECT_EQ(from_transposed.bytes(), product.bytes());
      EXPECT_EQ(hidden.bytes(), wanted.bytes());
      EXPECT_EQ(activated.bytes(), wanted_gelu.bytes());
      matmul_gelu_backward(stream, a.view(), weight.view(), hidden.view(), d_hidden.view(), workspace);
      matmul(stream, {.transpose_b = true}, a.view(), weight.view(), out.view(), workspace);
      gelu_backward(stream, hidden.view(), out.view(), out.view());
      EXPECT_EQ(d_hidden.bytes(), out.bytes());
    }
  }
}

/// A linear layer whose weight is stored [out, in], like those of Qwen2 with biases: the calls of
/// models/linear.cpp.
TEST(MatmulFused, OutByInWeightsWithABiasAgreeWithFiniteDifferences) {
  constexpr std::int64_t rows = 5, in = 7, outs = 6;
  Random random(21);
  Machine machine(2);
  const DataType fp32 = DataType::float32;
  HostTensor x = random.tensor(fp32, {rows, in}), weight = random.tensor(fp32, {outs, in}),
             bias = random.tensor(fp32, {outs}), d_out = random.tensor(fp32, {rows, outs});
  const auto loss = [&](const std::vector<double>& at, const std::vector<double>& w,
                        const std::vector<double>& b) {
    std::vector<double> out(rows * outs);
    reference::matmul({rows, outs, in, false, true}, at, w, false, out);
    reference::add_bias(rows, outs, out, b);
    return dot(out, d_out.values());
  };
  const auto at = x.values(), w = weight.values(), b = bias.values(), gradient = d_out.values();
  const auto x_slopes = finite_differences(at, [&](const auto& v) { return loss(v, w, b); });
  const auto weight_slopes = finite_differences(w, [&](const auto& v) { return loss(at, v, b); });
  const auto bias_slopes = finite_differences(b, [&](const auto& v) { return loss(at, w, v); });

  // The loss is linear in each argument, so finite differences only have roundings over 2h.
  std::vector<double> d_x(rows * in), d_weight(outs * in), d_bias(outs, 0.0);
  reference::matmul({rows, in, outs, false, false}, gradient, w, false, d_x);
  reference::matmul({outs, in, rows, true, false}, gradient, at, false, d_weight);
  reference::bias_gradient(rows, outs, gradient, d_bias);
  expect_close(d_x, x_slopes, 0, 1e-9, "reference d_x");
  expect_close(d_weight, weight_slopes, 0, 1e-9, "reference d_weight");
  expect_close(d_bias, bias_slopes, 0, 1e-9, "reference d_bias");

  Stream& stream = machine.stream();
  const Workspace& workspace = machine.workspace();
  HostTensor out(fp32, {rows, outs}), got_x(fp32, {rows, in}), got_weight(fp32, {outs, in});
  HostTensor got_bias(fp32, {outs}, std::vector<double>(outs, 0.0));
  matmul_bias(stream, x.view(), weight.view(), bias.view(), out.view(), workspace, true);
  EXPECT_NEAR(dot(out.values(), gradient), loss(at, w, b), 1e-5);
  matmul(stream, {}, d_out.view(), weight.view(), got_x.view(), workspace);
  matmul(stream, {.transpose_a = true}, d_out.view(), x.view(), got_weight.view(), workspace);
  bias_gradient(stream, d_out.view(), got_bias.view(), workspace);
  expect_close(got_x.values(), x_slopes, 1e-6, 2e-6, "d_x");
  expect_close(got_weight.values(), weight_slopes, 1e-6, 2e-6, "d_weight");
  expect_close(got_bias.values(), bias_slopes, 1e-6, 1e-6, "d_bias");
}

TEST(MatmulFused, ErrorsNameTheOperandAndCostsAddUp) {
  Machine meta(1, 0, DeviceKind::meta);
  const Workspace workspace{nullptr, minimum_workspace_bytes};
  const TensorView a{nullptr, bf16, {4, 8}}, b{nullptr, bf16, {8, 6}}, out{nullptr, bf16, {4, 6}};
  const auto text = [&](const TensorView& bias, const TensorView& c) {
    return refusal([&] { matmul_bias(meta.stream(), a, b, bias, c, workspace); });
  };
  EXPECT_EQ(text({nullptr, bf16, {5}}, out), "matmul_bias: `bias` has shape [5], wanted [6]");
  EXPECT_EQ(text({nullptr, fp32, {6}}, out), "matmul_bias: `bias` has dtype fp32, wanted bf16");
  EXPECT_EQ(text({nullptr, bf16, {6}}, {nullptr, fp32, {4, 6}}),
            "matmul_bias: `c` has dtype fp32, wanted bf16");
  EXPECT_EQ(
      refusal([&] {
        matmul_bias_gelu(meta.stream(), a, b, {nullptr, bf16, {6}}, out, {nullptr, bf16, {6, 4}}, workspace);
      }),
      "matmul_bias_gelu: `activated` has shape [6, 4], wanted [4, 6]");
  EXPECT_EQ(refusal([&] {
              matmul_gelu_backward(meta.stream(), a, {nullptr, bf16, {6, 8}}, {nullptr, bf16, {6, 4}}, out,
                                   workspace);
            }),
            "matmul_gelu_backward: `hidden` has shape [6, 4], wanted [4, 6]");
  EXPECT_EQ(refusal([&] {
              matmul_bias(meta.stream(), a, b, {nullptr, bf16, {6}}, out, workspace, true);
            }),
            "matmul_bias: `b (transposed)` has shape [8, 6], wanted [8, 8]");
  matmul_bias(meta.stream(), a, b, {nullptr, bf16, {6}}, out, workspace);
  EXPECT_EQ(meta.stream().work().kernels, 1);
  EXPECT_EQ(meta.stream().work().floating_point_operations, 2.0 * 4 * 6 * 8 + 4 * 6);
  EXPECT_EQ(meta.stream().work().bytes_read, 2.0 * (4 * 8 + 8 * 6 + 6));
}

TEST(MatmulGemm, AlignmentIsOfAddressAndStridesAndSixteenAtMost) {
  EXPECT_EQ(cuda::gemm_alignment(0, 0, 0), 16u);
  EXPECT_EQ(cuda::gemm_alignment(4096, 64, 0),
            16u);  // a stage that puts a tensor at another address must not change bits
  EXPECT_EQ(cuda::gemm_alignment(4096 + 16, 64, 0), 16u);
  EXPECT_EQ(cuda::gemm_alignment(4096 + 8, 64, 0), 8u);
  EXPECT_EQ(cuda::gemm_alignment(4096, 6, 0), 2u);
  EXPECT_EQ(cuda::gemm_alignment(4096, 64, 12), 4u);
  EXPECT_EQ(cuda::gemm_alignment(4097, 64, 12), 1u);
}

TEST(MatmulGemm, DenseOperandsHaveTheirStoredWidthsAsStrides) {
  for (bool transpose_a : {false, true}) {
    for (bool transpose_b : {false, true}) {
      const cuda::Gemm gemm = cuda::dense(transpose_a, transpose_b, 2, 3, 5);
      EXPECT_EQ(gemm.row_a, transpose_a ? 2 : 5);
      EXPECT_EQ(gemm.row_b, transpose_b ? 5 : 3);
      EXPECT_EQ(gemm.row_c, 3);
    }
  }
}

/// Columns [first, first + count) of a matrix.
HostTensor columns_of(const HostTensor& from, std::int64_t rows, std::int64_t columns, std::int64_t first,
                      std::int64_t count) {
  const std::vector<double> all = from.values();
  std::vector<double> some;
  for (std::int64_t row = 0; row < rows; ++row) {
    const auto begin = all.begin() + row * columns + first;
    some.insert(some.end(), begin, begin + count);
  }
  return {from.dtype(), {rows, count}, some};
}

TEST(Matmul, SumsThatGoOnHaveTheBitsOfOneProduct) {
  int ascending = 0;
  for (const DataType dtype : {DataType::float32, DataType::bfloat16, DataType::float16}) {
    const SumOrder order = matmul_sum_order(DeviceKind::cpu, dtype);
    if (!order.ascending) continue;
    ++ascending;
    Random random(7);
    Machine machine(2);
    for (const Problem& p : {Problem{5, 3, 6}, Problem{13, 70, 4102}, Problem{61, 129, 387}}) {
      for (const bool transpose_b : {false, true}) {
        if (transpose_b && p.k % order.step != 0) continue;
        HostTensor a = random.tensor(dtype, {p.m, p.k}),
                   b = random.tensor(dtype, stored(transpose_b, p.k, p.n));
        HostTensor whole(DataType::float32, {p.m, p.n});
        HostTensor sums(DataType::float32, {p.m, p.n},
                        std::vector<double>(static_cast<std::size_t>(p.m * p.n), 0.0));
        matmul(machine.stream(), {.transpose_b = transpose_b}, a.view(), b.view(), whole.view(),
               machine.workspace());
        const std::int64_t ends[] = {p.k / 4 / 2 * 2, p.k / 4 / 2 * 2, p.k / 3 * 2, p.k};
        std::int64_t begin = 0;
        for (const std::int64_t end : ends) {
          HostTensor of_a = columns_of(a, p.m, p.k, begin, end - begin);
          HostTensor of_b = transpose_b ? columns_of(b, p.n, p.k, begin, end - begin)
                                        : columns_of({dtype, {1, p.k * p.n}, b.values()}, 1, p.k * p.n,
                                                     begin * p.n, (end - begin) * p.n);
          matmul(machine.stream(), {.transpose_b = transpose_b, .continues = true}, of_a.view(),
                 of_b.view().reshaped(stored(transpose_b, end - begin, p.n)), sums.view(),
                 machine.workspace());
          begin = end;
        }
        EXPECT_TRUE(sums.bytes() == whole.bytes())
            << name_of(dtype) << " " << p.m << " x " << p.n << " x " << p.k << " " << transpose_b;
        EXPECT_TRUE(sums.guard_intact());
        // An accumulating product adds c before or after its sum.
        HostTensor before = random.tensor(DataType::float32, {p.m, p.n}), accumulated = before;
        matmul(machine.stream(), {.transpose_b = transpose_b, .accumulate = true}, a.view(), b.view(),
               accumulated.view(), machine.workspace());
        if (order.begins_with_c) {
          matmul(machine.stream(), {.transpose_b = transpose_b, .continues = true}, a.view(), b.view(),
                 before.view(), machine.workspace());
        } else {
          accumulate(machine.stream(), whole.view(), before.view());
        }
        EXPECT_TRUE(accumulated.bytes() == before.bytes())
            << name_of(dtype) << " " << p.k << " " << transpose_b;
      }
    }
  }
  if (ascending == 0) GTEST_SKIP() << "no path of this machine and build adds up in ascending order";
}

TEST(Matmul, SumsThatCannotGoOnAreRefused) {
  Machine machine(1);
  const auto refused = [&](DataType dtype, DataType c_dtype, std::int64_t k, bool transpose_b,
                           bool accumulate) {
    HostTensor a(dtype, {2, k}), b(dtype, stored(transpose_b, k, 2)), c(c_dtype, {2, 2});
    return refusal([&] {
      matmul(machine.stream(), {.transpose_b = transpose_b, .accumulate = accumulate, .continues = true},
             a.view(), b.view(), c.view(), machine.workspace());
    });
  };
  const auto bf16 = DataType::bfloat16, fp32 = DataType::float32;
  if (!matmul_sum_order(DeviceKind::cpu, fp32).ascending) {
    EXPECT_EQ(refused(fp32, fp32, 2, false, false),
              "matmul: sums cannot be continued: " + std::string(matmul_path(DeviceKind::cpu, fp32)) +
                  " does not add in ascending order");
  }
  const SumOrder order = matmul_sum_order(DeviceKind::cpu, bf16);
  if (!order.ascending) return;
  EXPECT_EQ(refused(bf16, bf16, 2, false, false),
            "matmul: continued sums need an fp32 `c`, and exclude `accumulate`");
  EXPECT_EQ(refused(bf16, fp32, 2, false, true),
            "matmul: continued sums need an fp32 `c`, and exclude `accumulate`");
  if (order.step == 1) return;
  EXPECT_EQ(refused(bf16, fp32, 3, true, false),
            "matmul: sums are continued by 2 values of k at a time, and k = 3 is not a multiple of that");
}

}  // namespace
}  // namespace tranche::kernels
