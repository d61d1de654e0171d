#include "tranche/kernels/cached_attention.h"

#include <gmock/gmock.h>

#include "kernels/cpu/instruction_sets.h"
#include "kernels/reference/cached_attention.h"
#include "tests/kernels/kernel_testing.h"

namespace tranche::kernels {
namespace {

using namespace testing;

struct Sizes {
  std::int64_t time, heads, key_value_heads, width, capacity, window;
  std::vector<std::int64_t> lengths;
};

/// New tokens whose heads follow three other columns in their rows, and a cache with earlier tokens.
struct Operands {
  Sizes sizes;
  std::int64_t batch, queries, shared;
  HostTensor query, key, value, keys, values, lengths, out;

  static std::vector<double> as_doubles(const std::vector<std::int64_t>& numbers) {
    return {numbers.begin(), numbers.end()};
  }
  Operands(DataType dtype, const Sizes& s, Random& random)
      : sizes(s),
        batch(static_cast<std::int64_t>(s.lengths.size())),
        queries(s.heads * s.width),
        shared(s.key_value_heads * s.width),
        query(random.tensor(dtype, {batch, s.time, queries + 3}, -2, 2)),
        key(random.tensor(dtype, {batch * s.time, shared + 5}, -2, 2)),
        value(random.tensor(dtype, {batch, s.time, shared + 4}, -2, 2)),
        keys(random.tensor(dtype, {batch, s.key_value_heads, s.capacity, s.width}, -2, 2)),
        values(random.tensor(dtype, {batch, s.key_value_heads, s.capacity, s.width}, -2, 2)),
        lengths(DataType::int32, {batch}, as_doubles(s.lengths)),
        out(dtype, {batch, s.time, queries}) {}

  CachedKeys cache() { return {keys.view(), values.view(), lengths.view(), sizes.capacity}; }
  AttentionOptions options() const {
    AttentionOptions made;
    made.heads = sizes.heads;
    made.window = sizes.window;
    return made;
  }
  void run(Stream& stream) {
    append_to_cache(stream, {key.view(), 5}, {value.view(), 1}, cache());
    attention_with_cache(stream, options(), {query.view(), 3}, cache(), out.view());
  }
  /// The heads of an entry, which begin at a column of rows of `stride` elements.
  std::vector<double> rows(const std::vector<double>& all, std::int64_t entry, std::int64_t stride,
                           std::int64_t first, std::int64_t columns) const {
    std::vector<double> result;
    for (std::int64_t t = 0; t < sizes.time; ++t) {
      const auto at = all.begin() + (entry * sizes.time + t) * stride + first;
      result.insert(result.end(), at, at + columns);
    }
    return result;
  }
  std::vector<double> part(const std::vector<double>& all, std::int64_t entry, std::int64_t elements) const {
    return {all.begin() + entry * elements, all.begin() + (entry + 1) * elements};
  }
};

std::vector<Sizes> all_sizes() {
  return {{1, 1, 1, 1, 1, 0, {1}},
          {1, 4, 4, 64, 200, 0, {1, 64, 65, 200, 0, 129}},
          {1, 6, 2, 64, 150, 0, {150, 7}},
          {1, 9, 1, 48, 70, 0, {70, 3}},
          {1, 4, 2, 128, 300, 9, {300, 9, 10, 0, 64}},
          {3, 4, 2, 24, 90, 0, {3, 90, 0, 66}},
          {5, 2, 2, 17, 40, 3, {5, 40, 33}},
          {2, 2, 1, 257, 33, 0, {33, 2}},
          {1, 1, 1, 1024, 20, 0, {20}}};
}

TEST(CachedAttention, AgreesWithTheReferenceInEveryDtype) {
  Random random(101);
  for (const DataType dtype : floating_dtypes) {
    for (const Sizes& sizes : all_sizes()) {
      SCOPED_TRACE(::testing::Message() << name_of(dtype) << " " << sizes.heads << " heads of " << sizes.width
                                        << ", " << sizes.time << " tokens, window " << sizes.window);
      Machine machine(2);
      Operands run(dtype, sizes, random);
      std::vector<double> keys = run.keys.values(), values = run.values.values();
      const std::vector<double> new_keys = run.key.values(), new_values = run.value.values();
      run.run(machine.stream());
      const std::vector<double> got = run.out.values();
      const std::int64_t elements = sizes.key_value_heads * sizes.capacity * sizes.width;
      for (std::int64_t entry = 0; entry < run.batch; ++entry) {
        const std::int64_t length = sizes.lengths[static_cast<std::size_t>(entry)];
        for (std::int64_t t = 0; length > 0 && t < sizes.time; ++t) {
          for (std::int64_t c = 0; c < run.shared; ++c) {
            const std::int64_t to = entry * elements + c / sizes.width * sizes.capacity * sizes.width +
                                    (length - sizes.time + t) * sizes.width + c % sizes.width;
            const std::int64_t row = entry * sizes.time + t;
            keys[static_cast<std::size_t>(to)] =
                new_keys[static_cast<std::size_t>(row * (run.shared + 5) + 5 + c)];
            values[static_cast<std::size_t>(to)] =
                new_values[static_cast<std::size_t>(row * (run.shared + 4) + 1 + c)];
          }
        }
        std::vector<double> wanted(static_cast<std::size_t>(sizes.time * run.queries));
        reference::attention_with_cache(
            {.time = sizes.time,
             .heads = sizes.heads,
             .key_value_heads = sizes.key_value_heads,
             .head_width = sizes.width,
             .capacity = sizes.capacity,
             .window = sizes.window},
            length, run.rows(run.query.values(), entry, run.queries + 3, 3, run.queries),
            run.part(keys, entry, elements), run.part(values, entry, elements), wanted);
        // Scores are sums of up to a thousand products of numbers below 4 in fp32; a result is a mean of
        // values below 2.
        expect_close(run.rows(got, entry, run.queries, 0, run.queries), wanted, rounding_of(dtype),
                     3e-6 + 2 * rounding_of(dtype) * (dtype == DataType::float32 ? 8 : 0.01), "out");
      }
      EXPECT_EQ(run.keys.values(), keys) << "no other token changes";
      EXPECT_EQ(run.values.values(), values);
      EXPECT_TRUE(run.out.guard_intact() && run.keys.guard_intact() && run.values.guard_intact());
    }
  }
}

/// A token at the same position among the same keys has the same bits alone, with others, after others, on
/// any thread.
TEST(CachedAttention, AnEntrysBitsAreItsOwn) {
  for (const DataType dtype : floating_dtypes) {
    for (const std::int64_t window : {0, 70}) {
      Random random(102);
      const Sizes many{3, 6, 2, 40, 200, window, {200, 71, 3, 0, 140}};
      Operands all(dtype, many, random);
      Machine one;
      all.run(one.stream());
      const std::vector<double> wanted = all.out.values();
      for (const int threads : compared_threads()) {
        Machine machine(threads);
        HostTensor out(dtype, {all.batch, many.time, all.queries});
        attention_with_cache(machine.stream(), all.options(), {all.query.view(), 3}, all.cache(), out.view());
        EXPECT_EQ(out.values(), wanted) << threads << " threads";
      }
      for (std::int64_t entry = 0; entry < all.batch; ++entry) {
        const std::int64_t length = many.lengths[static_cast<std::size_t>(entry)];
        if (length == 0) continue;
        const std::int64_t elements = many.key_value_heads * many.capacity * many.width;
        HostTensor keys(dtype, {1, many.key_value_heads, many.capacity, many.width},
                        all.part(all.keys.values(), entry, elements)),
            values(dtype, {1, many.key_value_heads, many.capacity, many.width},
                   all.part(all.values.values(), entry, elements));
        for (std::int64_t t = 0; t < many.time; ++t) {
          const std::vector<double> rows =
              all.rows(all.query.values(), entry, all.queries + 3, 3, all.queries);
          const auto at = rows.begin() + t * all.queries;
          HostTensor query(dtype, {1, all.queries}, std::vector<double>(at, at + all.queries)),
              out(dtype, {1, 1, all.queries}),
              known(DataType::int32, {1},
                    std::vector<double>{static_cast<double>(length - many.time + t + 1)});
          attention_with_cache(one.stream(), all.options(), {query.view()},
                               {keys.view(), values.view(), known.view(), many.capacity}, out.view());
          const auto begin = wanted.begin() + (entry * many.time + t) * all.queries;
          EXPECT_EQ(out.values(), std::vector<double>(begin, begin + all.queries)) << entry << " " << t;
        }
      }
    }
  }
}

TEST(CachedAttention, EveryInstructionSetAgreesWithTheReference) {
  if (on_gpu) GTEST_SKIP() << "a GPU has none";
  for (const auto& set : cpu::instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    Random random(103);
    Machine machine;
    Operands run(DataType::float32, {1, 2, 1, 150, 100, 0, {100}}, random);
    run.run(machine.stream());
    std::vector<double> wanted(300);
    reference::attention_with_cache(
        {.time = 1, .heads = 2, .key_value_heads = 1, .head_width = 150, .capacity = 100}, 100,
        run.rows(run.query.values(), 0, 303, 3, 300), run.keys.values(), run.values.values(), wanted);
    expect_close(run.out.values(), wanted, 1e-6, 4e-6, std::string(set));
  }
}

TEST(CachedAttention, NonFiniteValuesStayVisible) {
  Random random(104);
  Machine machine;
  Operands run(DataType::float32, {1, 1, 1, 8, 70, 0, {70, 70}}, random);
  std::vector<double> values = run.keys.values();
  values[5 * 8] = NAN;  // belongs to entry 0
  run.keys = HostTensor(DataType::float32, {2, 1, 70, 8}, values);
  run.run(machine.stream());
  const std::vector<double> got = run.out.values();
  for (int i = 0; i < 8; ++i) EXPECT_TRUE(std::isnan(got[static_cast<std::size_t>(i)])) << i;
  for (int i = 8; i < 16; ++i) EXPECT_TRUE(std::isfinite(got[static_cast<std::size_t>(i)])) << i;
}

TEST(CachedAttention, MetaCountsLikeTheCpuAndTouchesNothing) {
  Random random(105);
  Operands run(DataType::bfloat16, {2, 4, 2, 16, 50, 10, {50, 20, 0}}, random);
  Machine cpu, meta(1, 0, DeviceKind::meta);
  run.run(cpu.stream());
  const DataType dtype = DataType::bfloat16;
  const TensorView query{nullptr, dtype, {3, 2, 67}}, key{nullptr, dtype, {6, 37}},
      value{nullptr, dtype, {3, 2, 36}}, keys{nullptr, dtype, {3, 2, 50, 16}},
      lengths{nullptr, DataType::int32, {3}}, out{nullptr, dtype, {3, 2, 64}};
  append_to_cache(meta.stream(), {key, 5}, {value, 1}, {keys, keys, lengths, 50});
  attention_with_cache(meta.stream(), run.options(), {query, 3}, {keys, keys, lengths, 50}, out);
  const WorkCount& work = meta.stream().work();
  EXPECT_EQ(work.kernels, 2);
  // Two queries have 10 keys each, seen by 4 heads of 16 elements; 11 keys are read.
  EXPECT_EQ(work.floating_point_operations, 3.0 * 20 * (4 * 64 + 5 * 4));
  EXPECT_EQ(work.bytes_read, (2.0 * 6 * 32 * 2 + 12) + (6.0 * 64 * 2 + 2 * 3 * 11 * 32 * 2 + 12));
  EXPECT_EQ(work.bytes_written, 2.0 * 6 * 32 * 2 + 6 * 64 * 2);
  EXPECT_EQ(work.floating_point_operations, cpu.stream().work().floating_point_operations);
  EXPECT_EQ(work.bytes_read, cpu.stream().work().bytes_read);
  EXPECT_EQ(work.bytes_written, cpu.stream().work().bytes_written);
}

TEST(CachedAttention, ErrorsNameTheOperand) {
  Machine machine(1, 0, DeviceKind::meta);
  constexpr auto fp32 = DataType::float32;
  const TensorView query{nullptr, fp32, {2, 1, 32}}, keys{nullptr, fp32, {2, 2, 10, 8}},
      lengths{nullptr, DataType::int32, {2}}, out{nullptr, fp32, {2, 1, 32}};
  const CachedKeys good{keys, keys, lengths, 10};
  const auto attention = [&](const AttentionOptions& options, const ConstHeads& rows, const CachedKeys& cache,
                             const TensorView& to) {
    return refusal([&] { attention_with_cache(machine.stream(), options, rows, cache, to); });
  };
  const std::string name = "attention_with_cache: ";
  const auto with = [](std::int64_t heads, const std::function<void(AttentionOptions&)>& change = {}) {
    AttentionOptions options;
    options.heads = heads;
    if (change) change(options);
    return options;
  };
  EXPECT_EQ(attention(with(4), {query}, good, out), "");
  EXPECT_EQ(attention(with(3), {query}, good, out), name + "the cache's 2 heads do not divide the 3 heads");
  EXPECT_EQ(attention(with(4, [](auto& o) { o.key_value_heads = 4; }), {query}, good, out),
            name + "key_value_heads is 4, but the cache has 2");
  EXPECT_EQ(attention(with(4, [](auto& o) { o.window = -1; }), {query}, good, out),
            name + "window is -1, wanted 0 or more");
  EXPECT_EQ(attention(with(4, [](auto& o) { o.scale = -1; }), {query}, good, out),
            name + "scale is -1, wanted a positive number or 0");
  EXPECT_EQ(attention(with(4, [](auto& o) { o.dropout.probability = 0.5f; }), {query}, good, out),
            name + "dropout probability is 0.5, wanted 0");
  EXPECT_EQ(attention(with(4, [&](auto& o) { o.document_begin = lengths; }), {query}, good, out),
            name + "document_begin is given, but an entry of a cache is one document");
  EXPECT_EQ(attention(with(4), {query, 1}, good, out),
            name + "`query` has rows of 32 elements, which do not hold 4 heads of 8 from column 1");
  EXPECT_EQ(attention(with(4), {query}, {keys, keys, lengths, 11}, out),
            name + "`most` is 11, wanted from the 1 new tokens to the cache's capacity of 10");
  EXPECT_EQ(attention(with(4), {query}, {keys, out, lengths, 10}, out),
            name + "`values` has shape [2, 1, 32], wanted [2, 2, 10, 8]");
  EXPECT_EQ(attention(with(4), {query}, {keys, keys, out, 10}, out),
            name + "`lengths` has dtype fp32, wanted int32");
  EXPECT_EQ(attention(with(4), {query}, good, lengths), name + "`out` has dtype int32, wanted fp32");
  EXPECT_EQ(attention(with(4), {TensorView{nullptr, fp32, {3, 32}}}, good, out),
            name + "`query` has shape [3, 32], wanted [2, time, n] or [2 * time, n]");
  const TensorView wide{nullptr, fp32, {2, 1, 10, 1025}};
  EXPECT_EQ(attention(with(1), {query}, {wide, wide, lengths, 10}, out),
            name + "`keys` has shape [2, 1, 10, 1025], wanted at least one head of 1 to 1024 elements");
  EXPECT_EQ(
      refusal([&] {
        append_to_cache(machine.stream(), {query}, {query, 20}, good);
      }),
      "append_to_cache: `value` has rows of 32 elements, which do not hold 2 heads of 8 from column 20");
  EXPECT_EQ(refusal([&] { append_to_cache(machine.stream(), {lengths}, {query}, good); }),
            "append_to_cache: `key` has shape [2], wanted [2, time, n] or [2 * time, n]");
}

}  // namespace
}  // namespace tranche::kernels
