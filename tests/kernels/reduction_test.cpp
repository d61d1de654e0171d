#include "tranche/kernels/reduction.h"

#include <gmock/gmock.h>

#include <limits>
#include <random>

#include "device/cuda_probe.h"
#include "kernels/cpu/reduction.h"
#include "tests/core/exact_draw.h"
#include "tranche/kernels/elementwise.h"
#include "vector_test_support.h"

namespace tranche::kernels::testing {
namespace {

/// The fixed order as a recursion: a group is (the group without its last rank) + its last rank.
float group_sum(std::span<const float> ranks) {
  if (ranks.size() == 1) return ranks[0];
  const float before = group_sum(ranks.first(ranks.size() - 1));
  return before + ranks.back();
}
std::vector<float> sums_of_groups(std::span<const float> ranks, std::size_t group_size) {
  std::vector<float> sums;
  for (; !ranks.empty(); ranks = ranks.subspan(std::min(group_size, ranks.size()))) {
    sums.push_back(group_sum(ranks.first(std::min(group_size, ranks.size()))));
  }
  return sums;
}

struct OrderedSumCase {
  DataType piece;
  DataType out;
  int ranks;
  int group;
  bool accumulate;
  std::int64_t n;
  SumTarget target = SumTarget::caches;
  std::int64_t offset = 0;  ///< elements before the result
  int outer = 1;            ///< groups in an outer group
};

void expect_fixed_order(const OrderedSumCase& c, const std::string& set, int threads) {
  std::vector<Guarded> pieces;
  std::vector<const void*> pointers;
  for (int rank = 0; rank < c.ranks; ++rank) {
    pieces.emplace_back(c.piece, c.n, c.offset == 0 ? 0 : rank);
    fill_random(pieces.back(), static_cast<unsigned>(100 * rank + c.n));
  }
  for (auto& piece : pieces) pointers.push_back(piece.view().data);
  Guarded got(c.out, c.n, c.offset);
  if (c.accumulate) fill_random(got, 9);
  Guarded wanted = got;
  std::vector<float> values(static_cast<std::size_t>(c.ranks));
  for (std::int64_t i = 0; i < c.n; ++i) {
    for (std::size_t rank = 0; rank < values.size(); ++rank) values[rank] = pieces[rank].get(i);
    std::vector<float> sums =
        sums_of_groups(sums_of_groups(values, static_cast<std::size_t>(std::max(std::abs(c.group), 1))),
                       static_cast<std::size_t>(c.outer));
    // A fold begins with the value that is there, and other sums are added to it.
    if (c.accumulate && c.group > 0) sums = {group_sum(sums)};
    if (c.accumulate) sums.insert(sums.begin(), wanted.get(i));
    wanted.set(i, group_sum(sums));
  }
  TestStream stream(threads);
  ordered_sum(stream, pointers, c.piece, {c.group, c.outer}, c.accumulate, got.view(), c.target);
  ASSERT_TRUE(got.bits() == wanted.bits())
      << described(set, c.n, threads) << ", " << c.ranks << " pieces of " << name_of(c.piece)
      << " in groups of " << c.group << " and " << c.outer << (c.accumulate ? " added to " : " into ")
      << name_of(c.out);
}

TEST(OrderedSum, IsInFixedOrderForEveryRankAndGroup) {
  for (const auto& set : tested_instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    for (int ranks = 1; ranks <= 9; ++ranks) {
      for (int group = -4; group <= 10; ++group) {
        for (const DataType piece : floating_types()) {
          for (const DataType out : floating_types()) {
            for (const bool accumulate : {false, true}) {
              expect_fixed_order({piece, out, ranks, group, accumulate, 37}, set, 1);
            }
          }
        }
      }
    }
  }
}

TEST(OrderedSum, GroupsAreAddedInsideOuterGroupsFirst) {
  std::mt19937 random(1);
  for (const auto& set : tested_instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    for (int ranks = 1; ranks <= 13; ++ranks) {
      for (const int group : {-3, -2, 0, 1, 2, 3, 9}) {
        for (const int outer : {2, 3, 5}) {
          for (const std::int64_t n : {37, 131}) {
            const DataType piece = floating_types()[random() % 3], out = floating_types()[random() % 3];
            const SumTarget target = random() % 2 == 0 ? SumTarget::caches : SumTarget::memory;
            const bool accumulate = random() % 2 == 0;
            expect_fixed_order({piece, out, ranks, group, accumulate, n, target, ranks % 5, outer}, set, 1);
          }
        }
      }
    }
  }
  for (const int threads : thread_counts()) {
    expect_fixed_order(
        {DataType::float32, DataType::bfloat16, 7, 2, true, large_size, SumTarget::memory, 3, 2}, "best",
        threads);
  }
}

TEST(OrderedSum, EverySizeAndThreadCount) {
  for (const auto& set : tested_instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    for (const std::int64_t n : vector_sizes()) {
      expect_fixed_order({DataType::bfloat16, DataType::float32, 5, 3, true, n}, set, 1);
      expect_fixed_order({DataType::bfloat16, DataType::float32, 5, 0, true, n}, set, 1);
      expect_fixed_order({DataType::bfloat16, DataType::float32, 6, -2, true, n}, set, 1);
    }
  }
  for (const int threads : thread_counts()) {
    expect_fixed_order({DataType::float32, DataType::bfloat16, 3, 2, false, large_size}, "best", threads);
  }
}

/// Non-temporal stores need whole aligned vectors. Tests every size near these, with results and operands at
/// any address.
TEST(OrderedSum, IsInFixedOrderWithNonTemporalStores) {
  int point = 0;
  for (const auto& set : tested_instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    for (int ranks = 1; ranks <= 9; ++ranks) {
      for (const int group : {-2, 0, 1, 2, 3, 9}) {
        for (const DataType piece : floating_types()) {
          for (const DataType out : floating_types()) {
            for (const std::int64_t n : {0, 1, 37, 131, 1029}) {
              if (!test::swept(point++, 7)) continue;
              const bool accumulate = (ranks + n) % 2 == 0;
              expect_fixed_order({piece, out, ranks, group, accumulate, n, SumTarget::memory, ranks % 5}, set,
                                 1);
            }
          }
        }
      }
    }
    for (const DataType out : floating_types()) {
      for (std::int64_t offset = 0; offset <= 33; ++offset) {
        expect_fixed_order({DataType::bfloat16, out, 2, 2, false, 333, SumTarget::memory, offset}, set, 1);
        expect_fixed_order({DataType::float32, out, 4, 4, false, 300 + offset, SumTarget::memory, offset},
                           set, 1);
      }
    }
  }
  for (const int threads : thread_counts()) {
    expect_fixed_order({DataType::float32, DataType::float32, 8, 8, false, large_size, SumTarget::memory, 3},
                       "best", threads);
  }
}

TEST(OrderedSum, MayAliasAPiece) {
  for (const DataType type : floating_types()) {
    for (std::size_t aliased = 0; aliased < 4; ++aliased) {
      std::vector<Guarded> pieces;
      for (unsigned rank = 0; rank < 4; ++rank) {
        pieces.emplace_back(type, 267);
        fill_random(pieces.back(), rank);
      }
      std::vector<const void*> pointers;
      for (auto& piece : pieces) pointers.push_back(piece.view().data);
      Guarded apart(type, 267);
      TestStream stream;
      ordered_sum(stream, pointers, type, 3, false, apart.view());
      const SumTarget target = aliased % 2 == 0 ? SumTarget::caches : SumTarget::memory;
      ordered_sum(stream, pointers, type, 3, false, pieces[aliased].view(), target);
      EXPECT_EQ(pieces[aliased].bits(), apart.bits()) << "piece " << aliased << " of " << name_of(type);
    }
  }
}

/// Compares it with its definition: a cast to the communication dtype, and the sum of that single operand.
void expect_cast_and_sum(DataType communication, DataType out, std::int64_t n, std::int64_t offset,
                         bool accumulate, int threads, const std::string& set) {
  Guarded source(DataType::float32, n, offset % 5);
  fill_random(source, static_cast<unsigned>(n));
  if (n > 4) {
    source.set(0, NAN);
    source.set(1, -INFINITY);
    source.set(2, -0.0f);
    source.set(3, -3e38f);  // beyond fp16; in bf16 only a wrong carry would make it infinite
    source.set(4, 1e-7f);
  }
  Guarded got(out, n, offset);
  fill_random(got, 9);
  Guarded wanted = got, piece(communication, n);
  TestStream stream(threads), one;
  cast(one, source.view(), piece.view());
  const void* pieces[] = {piece.view().data};
  ordered_sum(one, pieces, communication, 1, accumulate, wanted.view());
  rounded_sum(stream, source.view(), communication, accumulate, got.view());
  ASSERT_TRUE(got.bits() == wanted.bits())
      << described(set, n, threads) << ", over " << name_of(communication)
      << (accumulate ? " added to " : " into ") << name_of(out) << " at offset " << offset;
}

TEST(RoundedSum, IsACastAndTheSumOfOnePiece) {
  for (const auto& set : tested_instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    for (const DataType communication : floating_types()) {
      for (const DataType out : floating_types()) {
        for (const bool accumulate : {false, true}) {
          for (const std::int64_t n : vector_sizes()) {
            expect_cast_and_sum(communication, out, n, n % 34, accumulate, 1, set);
          }
        }
      }
    }
  }
  for (const int threads : thread_counts()) {
    expect_cast_and_sum(DataType::bfloat16, DataType::float32, large_size, 3, false, threads, "best");
    expect_cast_and_sum(DataType::float16, DataType::bfloat16, large_size, 0, true, threads, "best");
  }
}

TEST(RoundedSum, MayBeInPlace) {
  for (const std::int64_t n : {5, 131, 1029}) {
    Guarded x(DataType::float32, n);
    fill_random(x, 1);
    Guarded wanted(DataType::bfloat16, n);
    TestStream stream;
    cast(stream, x.view(), wanted.view());
    rounded_sum(stream, x.view(), DataType::bfloat16, false, x.view());
    for (std::int64_t i = 0; i < n; ++i) ASSERT_EQ(x.get(i), wanted.get(i)) << i << " of " << n;
  }
}

TEST(OrderedSum, KeepsTheSignOfZero) {
  Guarded piece(DataType::float32, 3);
  for (int i = 0; i < 3; ++i) piece.set(i, -0.0f);
  Guarded out(DataType::float32, 3);
  const void* const pieces[] = {piece.view().data, piece.view().data};
  TestStream stream;
  ordered_sum(stream, pieces, DataType::float32, 1, false, out.view());
  EXPECT_EQ(out.bits(), piece.bits());
}

TEST(OrderedSum, OwnsTheListOfPieces) {
  Guarded piece(DataType::float32, 3);
  fill_random(piece, 1);
  Guarded out(DataType::float32, 3);
  TestStream stream(1, DeviceKind::cpu, true);
  {
    std::vector<const void*> pointers{piece.view().data};
    ordered_sum(stream, pointers, DataType::float32, 1, false, out.view());
    pointers[0] = nullptr;
  }
  stream.run();
  EXPECT_EQ(out.bits(), piece.bits());
}

/// The header's definition, element by element.
GradientStatistics statistics_spec(Guarded& gradient) {
  GradientStatistics result;
  for (std::int64_t i = 0; i < gradient.elements(); ++i) {
    const double x = gradient.get(i);
    result.squares.add(x * x);
  }
  result.squares.normalize();
  return result;
}

GradientStatistics statistics_of(Guarded& gradient, int threads = 1) {
  TestValue<GradientStatistics> got(GradientStatistics{.squares = {{7}}, .first_non_finite = -77});
  TestStream stream(threads);
  gradient_statistics(stream, gradient.view(), got.data());
  return got.get();
}

TEST(GradientStatistics, IsTheExactSum) {
  std::vector<std::int64_t> sizes = vector_sizes();
  sizes.insert(sizes.end(), {4095, 4096, 4097, 4103, 8192, 12289, large_size});
  for (const auto& set : tested_instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    for (const DataType type : floating_types()) {
      for (const std::int64_t n : sizes) {
        Guarded gradient(type, n);
        fill_random(gradient, static_cast<unsigned>(n));
        const auto got = statistics_of(gradient);
        ASSERT_EQ(got.squares, statistics_spec(gradient).squares)
            << described(set, n, 1) << " of " << name_of(type);
        ASSERT_EQ(got.first_non_finite, -1);
      }
    }
  }
}

TEST(GradientStatistics, IsTheRationalSumRoundedOnce) {
  for (const auto& set : tested_instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    for (const ExactCase& drawn : square_sums) {
      const std::vector<float> numbers = drawn_floats(drawn);
      Guarded gradient(DataType::float32, drawn.count);
      for (int i = 0; i < drawn.count; ++i) gradient.set(i, numbers[static_cast<std::size_t>(i)]);
      const double sum = statistics_of(gradient).squares.value();
      ASSERT_EQ(std::bit_cast<std::uint64_t>(sum), drawn.bits)
          << set << ' ' << drawn.kind << ' ' << drawn.count;
    }
  }
}

TEST(GradientStatistics, RangesOfExponentsAroundThoseOfTheFastWay) {
  for (const auto& set : tested_instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    for (const int greatest : {-126, -107, 0, 127}) {
      for (int below = 0; below <= 45; ++below) {
        Guarded gradient(DataType::float32, 4096);
        std::mt19937 engine(static_cast<unsigned>(below));
        for (std::int64_t i = 0; i < 4096;
             ++i) {  // all but one are near the greatest, so that the sums grow fastest
          const float mantissa = 2.0f - 0x1p-22f * static_cast<float>(engine() % 4 + 1);
          gradient.set(i, std::ldexp(mantissa, i == 77 ? greatest - below : greatest));
        }
        ASSERT_EQ(statistics_of(gradient).squares, statistics_spec(gradient).squares)
            << greatest << ' ' << below;
      }
    }
  }
}

// Blocks of one number use one lane only; many near the greatest use all of them.
TEST(RunningSquares, AreExactWhateverTheBlocks) {
  if (on_gpu) GTEST_SKIP() << "a loop of the CPU's";
  std::mt19937 engine(5);
  const auto near_two = [&] { return 2.0f - 0x1p-22f * static_cast<float>(engine() % 4 + 1); };
  for (const auto& set : tested_instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    for (const std::int64_t size : {1, 5, 31, 512, 4096}) {
      for (const int spread : {0, 8, 17, 40}) {
        cpu::RunningSquares squares;
        SquareSum wanted;
        for (std::int64_t done = 0; done < (size == 512 ? 1 << 20 : 20000); done += size) {
          // In some runs a few blocks have other magnitudes.
          const bool differs = spread % 17 != 0 && engine() % 50 == 0;
          const int other = differs ? static_cast<int>(engine() % 60) - 30 : 0;
          std::vector<float> block(static_cast<std::size_t>(size));
          for (float& value : block) value = std::ldexp(near_two(), other);
          if (done == 0) block.back() = std::ldexp(block.back(), -spread);
          cpu::add_squares({block.data(), DataType::float32, Shape{size}}, squares);
          for (const float value : block) wanted.add_square(value);
        }
        wanted.normalize();
        SquareSum got = cpu::sum_of(squares);
        got.normalize();
        ASSERT_EQ(got, wanted) << set << ' ' << size << ' ' << spread;
      }
    }
  }
}

TEST(GradientStatistics, ThreadsChangeNoBit) {
  Guarded gradient(DataType::bfloat16, 4096 * 67 + 11);
  fill_random(gradient, 3);
  const auto wanted = statistics_spec(gradient);
  for (const int threads : thread_counts()) {
    EXPECT_EQ(statistics_of(gradient, threads).squares, wanted.squares);
  }
  const std::int64_t last = gradient.elements() - 1;
  gradient.set(last, INFINITY);
  EXPECT_EQ(statistics_of(gradient).first_non_finite, last);
  gradient.set(4096 * 60 + 5, -INFINITY);
  EXPECT_EQ(statistics_of(gradient, thread_counts().back()).first_non_finite, 4096 * 60 + 5);
}

TEST(GradientStatistics, FindsTheFirstNonFiniteWhereverItIs) {
  for (const auto& set : tested_instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    for (const DataType type : floating_types()) {
      for (const float bad : {INFINITY, -INFINITY, std::numeric_limits<float>::quiet_NaN(),
                              -std::numeric_limits<float>::quiet_NaN()}) {
        Guarded gradient(type, 4096 + 13);
        for (std::int64_t i = 0; i < gradient.elements(); ++i) gradient.set(i, 1.0f);
        for (std::int64_t i = 0; i < gradient.elements(); i += (i < 40 || i > 4080 ? 1 : 97)) {
          gradient.set(i, bad);
          const auto got = statistics_of(gradient);
          ASSERT_EQ(got.first_non_finite, i) << set << ' ' << name_of(type) << ' ' << bad;
          ASSERT_LE(got.squares.value(), 4096 + 12) << "what is not finite never enters the limbs";
          gradient.set(i, 1.0f);
        }
      }
    }
  }
}

TEST(GradientStatistics, LargestFiniteValuesAreFinite) {
  Guarded gradient(DataType::float32, 9);
  for (int i = 0; i < 9; ++i) gradient.set(i, -std::numeric_limits<float>::max());
  const auto got = statistics_of(gradient);
  EXPECT_EQ(got.first_non_finite, -1);
  EXPECT_EQ(got.squares, statistics_spec(gradient).squares);
}

Digest digest_of(Guarded& values, std::uint64_t tensor, std::int64_t first, int threads = 1) {
  TestValue<Digest> digest(Digest{});
  TestStream stream(threads);
  add_digest(stream, values.view(), tensor, first, digest.data());
  return digest.get();
}

TEST(Digest, DependsNeitherOnSplitNorOrder) {
  constexpr std::int64_t n = 5003;
  for (unsigned seed = 0; seed < 20; ++seed) {
    std::mt19937 engine(seed);
    const DataType type = floating_types()[seed % 3];
    Guarded values(type, n);
    fill_random(values, seed);
    const Digest whole = digest_of(values, 7, 1000);
    std::vector<std::int64_t> cuts{0, n};
    for (unsigned i = 0; i < seed; ++i) cuts.push_back(static_cast<std::int64_t>(engine() % (n + 1)));
    std::sort(cuts.begin(), cuts.end());
    std::vector<std::size_t> order(cuts.size() - 1);
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), engine);
    TestValue<Digest> sum(Digest{});
    TestStream stream;
    for (const std::size_t i : order) {
      add_digest(stream, values.view().slice(cuts[i], cuts[i + 1] - cuts[i]), 7, 1000 + cuts[i], sum.data());
    }
    EXPECT_EQ(sum.get(), whole) << "seed " << seed;
  }
}

TEST(Digest, ThreadsChangeNothing) {
  Guarded values(DataType::float32, large_size);
  fill_random(values, 1);
  const Digest one = digest_of(values, 0, 0);
  for (const int threads : thread_counts()) EXPECT_EQ(digest_of(values, 0, 0, threads), one);
}

TEST(Digest, SeesIndexTensorAndEveryBit) {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> seen;
  const auto note = [&](const Digest& digest) { seen.emplace_back(digest.lanes[0], digest.lanes[1]); };
  Guarded values(DataType::float32, 2);
  values.set(0, 1.5f);
  values.set(1, -2.25f);
  note(digest_of(values, 0, 0));
  for (std::uint64_t tensor = 1; tensor < 5; ++tensor) note(digest_of(values, tensor, 0));
  for (std::int64_t first = 1; first < 5; ++first) note(digest_of(values, 0, first));
  for (int bit = 0; bit < 32; ++bit) {
    const float kept = values.get(0);
    values.set(0, std::bit_cast<float>(std::bit_cast<std::uint32_t>(kept) ^ (1u << bit)));
    note(digest_of(values, 0, 0));
    values.set(0, kept);
  }
  std::swap(values.as<float>()[0], values.as<float>()[1]);
  note(digest_of(values, 0, 0));
  std::sort(seen.begin(), seen.end());
  EXPECT_EQ(std::adjacent_find(seen.begin(), seen.end()), seen.end());
  // The two lanes are independent: each alone distinguishes all these cases.
  for (auto& [first, second] : seen) std::swap(first, second);
  std::sort(seen.begin(), seen.end());
  EXPECT_TRUE(std::adjacent_find(seen.begin(), seen.end(), [](const auto& a, const auto& b) {
                return a.first == b.first;
              }) == seen.end());
}

TEST(Digest, NansAreOneValueAndZerosAreTwo) {
  Guarded a(DataType::float32, 1);
  Guarded b(DataType::float32, 1);
  a.set(0, std::bit_cast<float>(0x7fc00000u));
  b.set(0, std::bit_cast<float>(0xff800001u));
  EXPECT_EQ(digest_of(a, 0, 0), digest_of(b, 0, 0));
  a.set(0, INFINITY);
  EXPECT_NE(digest_of(a, 0, 0), digest_of(b, 0, 0));
  a.set(0, 0.0f);
  b.set(0, -0.0f);
  EXPECT_NE(digest_of(a, 0, 0), digest_of(b, 0, 0));
}

TEST(Digest, WidensSixteenBitValues) {
  Guarded wide(DataType::float32, 9);
  for (const DataType type : {DataType::bfloat16, DataType::float16}) {
    Guarded narrow(type, 9);
    fill_random(narrow, 4);
    for (int i = 0; i < 9; ++i) wide.set(i, narrow.get(i));
    EXPECT_EQ(digest_of(narrow, 3, 5), digest_of(wide, 3, 5));
  }
}

/// Reports and checkpoints contain digests, so the mix must not change unnoticed.
TEST(Digest, KnownAnswer) {
  Guarded values(DataType::float32, 3);
  values.set(0, 1.0f);
  values.set(1, -0.5f);
  values.set(2, 0.0f);
  const Digest digest = digest_of(values, 2, 10);
  EXPECT_EQ(digest.lanes[0], 0x60d4d65573d4dcd3u) << std::hex << digest.lanes[0];
  EXPECT_EQ(digest.lanes[1], 0x9f64b59bbf02aaf8u) << std::hex << digest.lanes[1];
}

TEST(Reduction, CountsTheSameOnMetaAndTouchesNothing) {
  TestStream cpu;
  TestStream meta(1, DeviceKind::meta);
  Guarded values(DataType::bfloat16, 10);
  fill_random(values, 1);
  Guarded out(DataType::float32, 10);
  fill_random(out, 2);
  const std::string before = out.bits();
  TestValue<GradientStatistics> statistics(GradientStatistics{.squares = {}, .first_non_finite = 5});
  TestValue<Digest> digest(Digest{{5, 5}});
  const void* const pieces[] = {values.view().data, values.view().data, values.view().data};
  for (TestStream* stream : {&meta, &cpu}) {
    ordered_sum(*stream, pieces, DataType::bfloat16, 2, true, out.view());
    EXPECT_EQ(stream->work().floating_point_operations, 30);
    EXPECT_EQ(stream->work().bytes_read, 10 * (3 * 2 + 4));
    EXPECT_EQ(stream->work().bytes_written, 40);
    gradient_statistics(*stream, values.view(), statistics.data());
    EXPECT_EQ(stream->work().floating_point_operations, 50);
    EXPECT_EQ(stream->work().bytes_written, 56 - 16 + static_cast<double>(sizeof(GradientStatistics)));
    add_digest(*stream, values.view(), 0, 0, digest.data());
    EXPECT_EQ(stream->work().bytes_read, 140);
    EXPECT_EQ(stream->work().kernels, 3);
    rounded_sum(*stream, out.view(), DataType::bfloat16, true, values.view());
    EXPECT_EQ(stream->work().bytes_read, 140 + 10 * (4 + 2));
    EXPECT_EQ(stream->work().bytes_written, 72 + 20 - 16 + static_cast<double>(sizeof(GradientStatistics)));
    if (stream == &meta) {
      EXPECT_EQ(out.bits(), before);
      EXPECT_EQ(statistics.get().first_non_finite, 5);
      EXPECT_EQ(digest.get(), (Digest{{5, 5}}));
    }
  }
  EXPECT_EQ(statistics.get().first_non_finite, -1);
}

TEST(Reduction, RefusesByName) {
  TestStream stream(1, DeviceKind::meta);
  Guarded out(DataType::float32, 4);
  Guarded integers(DataType::int32, 4);
  const void* const piece[] = {out.view().data};
  GradientStatistics statistics;
  Digest digest;
  EXPECT_EQ(refusal([&] { ordered_sum(stream, piece, DataType::int64, 1, false, out.view()); }),
            "ordered_sum: `pieces` has dtype int64, wanted fp32, bf16 or fp16");
  EXPECT_EQ(refusal([&] { ordered_sum(stream, piece, DataType::float32, 1, false, integers.view()); }),
            "ordered_sum: `out` has dtype int32, wanted fp32, bf16 or fp16");
  EXPECT_EQ(refusal([&] { ordered_sum(stream, {}, DataType::float32, 1, false, out.view()); }),
            "ordered_sum: `pieces` is empty, wanted at least one");
  EXPECT_EQ(refusal([&] {
              ordered_sum(stream, piece, DataType::float32, {2, 0}, false, out.view());
            }),
            "ordered_sum: 0 groups in an outer group, wanted at least 1");
  EXPECT_EQ(refusal([&] { rounded_sum(stream, integers.view(), DataType::bfloat16, false, out.view()); }),
            "rounded_sum: `source` has dtype int32, wanted fp32");
  EXPECT_EQ(refusal([&] { rounded_sum(stream, out.view(), DataType::int64, false, out.view()); }),
            "rounded_sum: `communication` has dtype int64, wanted fp32, bf16 or fp16");
  EXPECT_EQ(refusal([&] { rounded_sum(stream, out.view(), DataType::bfloat16, false, integers.view()); }),
            "rounded_sum: `out` has dtype int32, wanted fp32, bf16 or fp16");
  EXPECT_EQ(refusal([&] { gradient_statistics(stream, integers.view(), &statistics); }),
            "gradient_statistics: `gradient` has dtype int32, wanted fp32, bf16 or fp16");
  EXPECT_EQ(refusal([&] { gradient_statistics(stream, out.view(), nullptr); }),
            "gradient_statistics: `statistics` is null");
  EXPECT_EQ(refusal([&] { add_digest(stream, integers.view(), 0, 0, &digest); }),
            "add_digest: `values` has dtype int32, wanted fp32, bf16 or fp16");
  EXPECT_EQ(refusal([&] { add_digest(stream, out.view(), 0, 0, nullptr); }), "add_digest: `digest` is null");
  EXPECT_EQ(refusal([&] { add_digest(stream, out.view(), 0, -1, &digest); }),
            "add_digest: first_element is -1, wanted at least 0");
  TestStream cuda(1, DeviceKind::cuda);
  const std::vector<const void*> many(4001, nullptr);
  if (detail::probe_cuda().compiled) {
    EXPECT_EQ(refusal([&] { ordered_sum(cuda, many, DataType::float32, 8, false, out.view()); }),
              "ordered_sum: 4001 pieces, where a GPU takes 4000 at once; sum them in groups of ranks");
  } else {
    EXPECT_EQ(refusal([&] { add_digest(cuda, out.view(), 0, 0, &digest); }),
              "the CUDA kernels is not part of this build; configure with -DTRANCHE_CUDA=ON");
  }
  EXPECT_EQ(cuda.work().kernels, 0);
  EXPECT_EQ(stream.work().kernels, 0);
}

}  // namespace
}  // namespace tranche::kernels::testing
