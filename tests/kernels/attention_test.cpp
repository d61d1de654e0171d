#include "tranche/kernels/attention.h"

#include <gmock/gmock.h>

#include <numeric>

#include "kernels/cpu/attention.h"
#include "kernels/reference/attention.h"
#include "tests/kernels/kernel_testing.h"

namespace tranche::kernels {
namespace {

using namespace testing;

constexpr auto fp32 = DataType::float32;

struct Sizes {
  std::int64_t batch, time, width, heads;
};
std::string text_of(const Sizes& s) {
  return "batch " + std::to_string(s.batch) + " time " + std::to_string(s.time) + " width " +
         std::to_string(s.width) + " heads " + std::to_string(s.heads);
}

/// All inputs and outputs of one forward and backward.
struct Operands {
  Sizes sizes;
  std::vector<std::int64_t> samples;
  AttentionOptions options;
  HostTensor query_key_value, d_out, out, log_sum_exp, d_query_key_value;

  Operands(DataType dtype, const Sizes& s, float dropout, Random& random)
      : sizes(s),
        samples(static_cast<std::size_t>(s.batch)),
        query_key_value(random.tensor(dtype, {s.batch, s.time, 3 * s.width}, -2, 2)),
        d_out(random.tensor(dtype, {s.batch, s.time, s.width})),
        out(dtype, {s.batch, s.time, s.width}),
        log_sum_exp(fp32, {s.batch, s.heads, s.time}),
        d_query_key_value(dtype, {s.batch, s.time, 3 * s.width}) {
    std::iota(samples.begin(), samples.end(), 1000);
    options.heads = s.heads;
    options.dropout = {.probability = dropout, .seed = 5, .step = 7, .site = 3, .samples = samples};
  }
  Operands(const Operands&) = delete;
  Operands& operator=(const Operands&) = delete;

  void forward(Machine& machine) {
    const TensorView packed = query_key_value.view();
    attention_forward(machine.stream(), options, {packed}, {packed, sizes.width}, {packed, 2 * sizes.width},
                      out.view(), log_sum_exp.view(), machine.workspace());
  }
  void backward(Machine& machine) {
    const TensorView packed = query_key_value.view(), gradient = d_query_key_value.view();
    attention_backward(machine.stream(), options, d_out.view(), {packed}, {packed, sizes.width},
                       {packed, 2 * sizes.width}, out.view(), log_sum_exp.view(), {gradient},
                       {gradient, sizes.width}, {gradient, 2 * sizes.width}, machine.workspace());
  }
  bool guards_intact() const {
    return out.guard_intact() && log_sum_exp.guard_intact() && d_query_key_value.guard_intact();
  }
  reference::AttentionShape shape() const {
    return {.batch = sizes.batch,
            .time = sizes.time,
            .heads = sizes.heads,
            .key_value_heads = sizes.heads,
            .head_width = sizes.width / sizes.heads,
            .document_begin = {}};
  }
  /// The dropout factors of probabilities by the masks' definition, drawn one by one.
  std::vector<double> keep_scale() const {
    if (options.dropout.probability == 0) return {};
    const cpu::DropoutMask mask(options.dropout);
    std::vector<double> factors;
    for (std::int64_t b = 0; b < sizes.batch; ++b) {
      for (std::int64_t e = 0; e < sizes.heads * sizes.time * sizes.time; ++e) {
        const bool kept = mask.keep(samples[static_cast<std::size_t>(b)], e);
        factors.push_back(kept ? static_cast<double>(mask.scale()) : 0.0);
      }
    }
    return factors;
  }
};

// Sizes near vector widths and near the tiles of 64 queries and 256 keys.
const Sizes odd_sizes[] = {{1, 1, 1, 1},    {2, 3, 6, 2},    {1, 17, 17, 1},  {3, 31, 48, 3}, {2, 64, 32, 2},
                           {1, 65, 130, 2}, {1, 257, 24, 3}, {1, 320, 16, 1}, {0, 4, 8, 2},   {2, 0, 8, 2}};

TEST(Attention, AgreesWithTheReferenceInOddSizes) {
  Random random(51);
  Machine machine(2);
  for (const Sizes& sizes : odd_sizes) {
    for (float dropout : {0.0f, 0.3f}) {
      SCOPED_TRACE(text_of(sizes) + " dropout " + std::to_string(dropout));
      Operands operands(fp32, sizes, dropout, random);
      std::vector<double> out(operands.out.values().size()),
          log_sum_exp(operands.log_sum_exp.values().size());
      std::vector<double> gradient(operands.query_key_value.values().size());
      const auto keep = operands.keep_scale();
      const auto values = operands.query_key_value.values();
      const auto packed = reference::packed<const double>(values, sizes.width);
      reference::attention_forward(operands.shape(), packed, keep, out, log_sum_exp);
      reference::attention_backward(operands.shape(), operands.d_out.values(), packed, keep,
                                    reference::packed<double>(gradient, sizes.width));
      operands.forward(machine);
      operands.backward(machine);
      // Scores up to 2 * 2 * sqrt(65) = 33 have an error of some 33 * 2^-22, which becomes the relative error
      // of their exponentials: 1e-5. Values are below 2 / 0.7; gradients sum up to 320 terms with an average
      // weight of 1 / 160.
      expect_close(operands.out.values(), out, 2e-5, 2e-5, "out");
      expect_close(operands.log_sum_exp.values(), log_sum_exp, 2e-6, 2e-5, "log_sum_exp");
      expect_close(operands.d_query_key_value.values(), gradient, 5e-5, 1e-4, "d_query_key_value");
      EXPECT_TRUE(operands.guards_intact());
    }
  }
}

// This tests fp32 tiles, which narrow heads use on every CPU; bf16_tile_test.cpp tests the others.
TEST(Attention, SixteenBitsAreTheFp32ResultRoundedOnce) {
  Machine machine(2);
  for (DataType dtype : {DataType::bfloat16, DataType::float16}) {
    for (const Sizes& sizes : odd_sizes) {
      SCOPED_TRACE(text_of(sizes) + " " + std::string(name_of(dtype)));
      Random random(52);
      Operands narrow(dtype, sizes, 0.1f, random), wide(fp32, sizes, 0.1f, random);
      wide.query_key_value =
          HostTensor(fp32, {sizes.batch, sizes.time, 3 * sizes.width}, narrow.query_key_value.values());
      wide.d_out = HostTensor(fp32, {sizes.batch, sizes.time, sizes.width}, narrow.d_out.values());
      narrow.forward(machine);
      wide.forward(machine);
      EXPECT_EQ(narrow.out.bytes(),
                HostTensor(dtype, {sizes.batch, sizes.time, sizes.width}, wide.out.values()).bytes());
      EXPECT_EQ(narrow.log_sum_exp.bytes(), wide.log_sum_exp.bytes());
      wide.out = HostTensor(fp32, {sizes.batch, sizes.time, sizes.width}, narrow.out.values());
      narrow.backward(machine);
      wide.backward(machine);
      EXPECT_EQ(narrow.d_query_key_value.bytes(),
                HostTensor(dtype, {sizes.batch, sizes.time, 3 * sizes.width}, wide.d_query_key_value.values())
                    .bytes());
      EXPECT_TRUE(narrow.guards_intact());
    }
  }
}

TEST(Attention, BackwardAgreesWithFiniteDifferencesOfTheReference) {
  Random random(53);
  Machine machine;
  for (float dropout : {0.0f, 0.4f}) {
    Operands operands(fp32, {2, 5, 6, 2}, dropout, random);
    operands.forward(machine);
    operands.backward(machine);
    const auto keep = operands.keep_scale();
    const auto d_out = operands.d_out.values();
    const auto loss = [&](const std::vector<double>& query_key_value) {
      std::vector<double> out(d_out.size()), log_sum_exp(20);
      reference::attention_forward(operands.shape(), reference::packed<const double>(query_key_value, 6),
                                   keep, out, log_sum_exp);
      return dot(out, d_out);
    };
    // Finite differences have errors of about 1e-9, fp32 arithmetic of less than 1e-5.
    expect_close(operands.d_query_key_value.values(),
                 finite_differences(operands.query_key_value.values(), loss), 1e-5, 1e-5,
                 "d_query_key_value");
  }
}

TEST(Attention, BitsDependNeitherOnThreadsNorOnWorkspace) {
  for (DataType dtype : floating_dtypes) {
    const Sizes sizes{1, 270, 32, 2};
    const auto run = [&](int threads, std::int64_t workspace_bytes) {
      Random random(54);
      Machine machine(threads, workspace_bytes);
      Operands operands(dtype, sizes, 0.2f, random);
      operands.forward(machine);
      operands.backward(machine);
      return std::vector{operands.out.bytes(), operands.log_sum_exp.bytes(),
                         operands.d_query_key_value.bytes()};
    };
    const auto first = run(1, minimum_workspace_bytes);
    for (int threads : {2, 5}) EXPECT_EQ(first, run(threads, minimum_workspace_bytes)) << threads;
    // With the smallest workspace the gradient of the queries takes a separate pass.
    EXPECT_EQ(first, run(2, cpu::attention_workspace_bytes(16)));
  }
}

TEST(Attention, HeadsOfARankAreThoseOfAllHeads) {
  for (DataType dtype : floating_dtypes) {
    Random random(56);
    Machine machine(2);
    const Sizes sizes{2, 70, 48, 3};
    Operands whole(dtype, sizes, 0.3f, random);
    whole.forward(machine);
    whole.backward(machine);
    // The columns of one head of rows of `heads` heads, and of each part of packed rows.
    const auto columns = [](const HostTensor& from, std::size_t parts, std::size_t head) {
      std::vector<double> taken;
      const auto values = from.values();
      for (std::size_t at = 0; at < values.size(); at += 48) {
        const auto begin = values.begin() + static_cast<std::ptrdiff_t>(at + head * 16);
        taken.insert(taken.end(), begin, begin + 16);
      }
      return HostTensor(from.dtype(), {2, 70, static_cast<std::int64_t>(parts) * 16}, taken);
    };
    for (std::size_t head = 0; head < 3; ++head) {
      Operands one(dtype, {2, 70, 16, 1}, 0.3f, random);
      one.options.first_head = static_cast<std::int64_t>(head);
      one.query_key_value = columns(whole.query_key_value, 3, head);
      one.d_out = columns(whole.d_out, 1, head);
      one.forward(machine);
      one.backward(machine);
      EXPECT_EQ(one.out.values(), columns(whole.out, 1, head).values()) << name_of(dtype) << " head " << head;
      EXPECT_EQ(one.d_query_key_value.values(), columns(whole.d_query_key_value, 3, head).values());
    }
  }
  Machine machine;
  Random random(57);
  Operands wrong(fp32, {1, 2, 4, 1}, 0.5f, random);
  wrong.options.first_head = -1;
  EXPECT_EQ(refusal([&] { wrong.forward(machine); }),
            "attention_forward: first_head is -1, wanted 0 or more");
  wrong.options.first_head = 0;
  wrong.options.dropout.sample_elements = 8;
  EXPECT_EQ(refusal([&] { wrong.forward(machine); }),
            "attention_forward: dropout names a part of the samples, which only the kernel dropout takes");
}

TEST(Attention, KeysAfterAQueryDoNotReachIt) {
  Random random(55);
  Machine machine;
  const Sizes sizes{1, 70, 8, 2};
  Operands operands(fp32, sizes, 0.0f, random);
  operands.forward(machine);
  const auto before = operands.out.values();
  auto values = operands.query_key_value.values();
  for (std::size_t i = 66 * 24; i < values.size(); ++i) values[i] = std::nan("");
  operands.query_key_value = HostTensor(fp32, {1, 70, 24}, values);
  operands.forward(machine);
  const auto after = operands.out.values();
  EXPECT_TRUE(std::equal(before.begin(), before.begin() + 64 * 8, after.begin()));
  EXPECT_TRUE(std::isnan(after.back()));
}

TEST(Attention, MetaCountsLikeTheCpuAndTouchesNothing) {
  Random random(56);
  Operands operands(DataType::bfloat16, {2, 9, 8, 2}, 0.1f, random);
  Machine cpu, meta(1, 0, DeviceKind::meta);
  operands.forward(cpu);
  operands.backward(cpu);
  const TensorView packed{nullptr, DataType::bfloat16, {2, 9, 24}},
      out{nullptr, DataType::bfloat16, {2, 9, 8}};
  const TensorView statistics{nullptr, fp32, {2, 2, 9}};
  const Workspace workspace{nullptr, minimum_workspace_bytes};
  attention_forward(meta.stream(), operands.options, {packed}, {packed, 8}, {packed, 16}, out, statistics,
                    workspace);
  attention_backward(meta.stream(), operands.options, out, {packed}, {packed, 8}, {packed, 16}, out,
                     statistics, {packed}, {packed, 8}, {packed, 16}, workspace);
  EXPECT_EQ(meta.stream().work().kernels, 2);
  const double pairs = 2 * 9 * 10 / 2;
  EXPECT_EQ(meta.stream().work().floating_point_operations, pairs * (14 * 8 + 11 * 2) + 2 * 2 * 9 * 8);
  EXPECT_EQ(meta.stream().work().floating_point_operations, cpu.stream().work().floating_point_operations);
  EXPECT_EQ(meta.stream().work().bytes_read, cpu.stream().work().bytes_read);
  EXPECT_EQ(meta.stream().work().bytes_written, cpu.stream().work().bytes_written);
}

}  // namespace
}  // namespace tranche::kernels
