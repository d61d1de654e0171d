#include <gmock/gmock.h>

#include <cmath>
#include <set>

#include "kernels/cpu/dropout_mask.h"
#include "tranche/kernels/elementwise.h"
#include "vector_test_support.h"

namespace tranche::kernels::testing {
namespace {

DropoutOptions options_of(float probability, std::span<const std::int64_t> samples = {}) {
  return {probability, 1234, 17, 5, samples};
}

Guarded dropped(const DropoutOptions& options, Guarded& x, int threads = 1) {
  Guarded y(x.dtype(), x.elements());
  TestStream stream(threads);
  dropout(stream, options, x.view(), y.view());
  return y;
}

TEST(Dropout, IsTheMaskOfEachSampleAndElement) {
  constexpr std::int64_t per_sample = 101;
  const std::vector<std::int64_t> samples{4, 0, 1000000007, 4};
  for (const auto& set : tested_instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    for (const DataType type : floating_types()) {
      const auto options = options_of(0.3f, samples);
      Guarded x(type, 4 * per_sample);
      fill_random(x, 1);
      Guarded wanted(type, x.elements());
      const cpu::DropoutMask mask(options);
      for (std::int64_t i = 0; i < x.elements(); ++i) {
        const bool kept = mask.keep(samples[static_cast<std::size_t>(i / per_sample)], i % per_sample);
        wanted.set(i, kept ? x.get(i) * (1.0f / (1.0f - 0.3f)) : 0.0f);
      }
      EXPECT_EQ(dropped(options, x).bits(), wanted.bits()) << set;
      TestStream stream;
      dropout(stream, options, x.view(), x.view());
      EXPECT_EQ(x.bits(), wanted.bits()) << "in place";
    }
  }
}

TEST(Dropout, FactorsAreKeepForAnyRange) {
  const cpu::DropoutMask mask(options_of(0.5f));
  for (const auto& set : tested_instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    for (const std::int64_t sample : {std::int64_t{0}, std::int64_t{3}, (std::int64_t{1} << 40) - 1}) {
      for (const std::int64_t first : {std::int64_t{0}, std::int64_t{1}, std::int64_t{2}, std::int64_t{3},
                                       std::int64_t{5}, std::int64_t{4} << 32, (std::int64_t{4} << 32) - 9}) {
        for (const std::int64_t n : vector_sizes()) {
          Guarded factors(DataType::float32, n);
          mask.factors(sample, first, n, factors.as<float>());
          for (std::int64_t i = 0; i < n; ++i) {
            ASSERT_EQ(factors.get(i), mask.keep(sample, first + i) ? mask.scale() : 0.0f)
                << set << ", sample " << sample << ", first " << first << ", " << n << " elements, at " << i;
          }
        }
      }
    }
  }
}

TEST(Dropout, AnySplitOfTheBatchGivesTheSame) {
  constexpr std::int64_t per_sample = 257;
  const std::vector<std::int64_t> samples{11, 12, 13, 14, 15, 16, 17};
  Guarded x(DataType::bfloat16, 7 * per_sample);
  fill_random(x, 1);
  const std::string whole = dropped(options_of(0.1f, samples), x).bits();
  for (unsigned seed = 0; seed < 16; ++seed) {
    std::mt19937 engine(seed);
    Guarded y(DataType::bfloat16, x.elements());
    for (std::int64_t first = 0; first < 7;) {
      const std::int64_t count = 1 + static_cast<std::int64_t>(engine() % static_cast<unsigned>(7 - first));
      TestStream stream;
      dropout(stream,
              options_of(0.1f, std::span(samples).subspan(static_cast<std::size_t>(first),
                                                          static_cast<std::size_t>(count))),
              x.view().slice(first * per_sample, count * per_sample),
              y.view().slice(first * per_sample, count * per_sample));
      first += count;
    }
    EXPECT_EQ(y.bits(), whole) << "seed " << seed;
  }
}

TEST(Dropout, APartOfTheSamplesHasTheMasksOfTheWhole) {
  // Ranks have parts of three samples that begin and end anywhere; the last elements are padding.
  constexpr std::int64_t per_sample = 1300, whole_elements = 3 * per_sample;
  const std::vector<std::int64_t> samples{11, 5, 13};
  for (const DataType type : floating_types()) {
    Guarded x(type, whole_elements);
    fill_random(x, 1);
    const std::string whole = dropped(options_of(0.3f, samples), x).bits();
    for (const std::int64_t part : {1001, 1300, 97, 3900, 4000}) {
      std::string joined;
      for (std::int64_t first = 0; first < whole_elements; first += part) {
        Guarded mine(type, part), out(type, part);
        for (std::int64_t i = 0; i < part; ++i) {
          mine.set(i, first + i < whole_elements ? x.get(first + i) : 1.0f);
        }
        DropoutOptions options = options_of(0.3f, samples);
        options.first_element = first;
        options.sample_elements = per_sample;
        TestStream stream(2);
        dropout(stream, options, mine.view(), out.view());
        joined += out.bits();
      }
      const auto valid = static_cast<std::size_t>(whole_elements * size_of(type));
      EXPECT_EQ(joined.substr(0, valid), whole) << part;
      EXPECT_EQ(joined.find_first_not_of('\0', valid), std::string::npos) << "padding of " << part;
    }
  }
}

TEST(Dropout, ARunOfEverySampleHasTheMasksOfTheWhole) {
  // Elements [300, 900) of three samples of 1300 elements, as a whole and in parts, and two of four columns
  // of their rows.
  constexpr std::int64_t per_sample = 1300, offset = 300, run = 600;
  const std::vector<std::int64_t> samples{11, 5, 13};
  for (const DataType type : floating_types()) {
    Guarded x(type, 3 * per_sample), runs(type, 3 * run), wanted(type, 3 * run);
    fill_random(x, 1);
    Guarded whole = dropped(options_of(0.3f, samples), x);
    for (std::int64_t i = 0; i < 3 * run; ++i) {
      const std::int64_t at = i / run * per_sample + offset + i % run;
      runs.set(i, x.get(at));
      wanted.set(i, whole.get(at));
    }
    TestStream stream(2);
    DropoutOptions options = options_of(0.3f, samples);
    options.sample_offset = offset;
    Guarded out(type, 3 * run);
    dropout(stream, options, runs.view(), out.view());
    EXPECT_EQ(out.bits(), wanted.bits());
    options.sample_elements = run;
    for (const std::int64_t first : {0, 77, 1100}) {
      options.first_element = first;
      const std::int64_t count = 3 * run - first;
      Guarded part(type, count);
      dropout(stream, options, runs.view().slice(first, count), part.view());
      EXPECT_EQ(part.bits(), wanted.bits().substr(static_cast<std::size_t>(first * size_of(type)))) << first;
    }
    DropoutOptions columns = options_of(0.3f, samples);
    columns.sample_offset = offset;
    columns.row_elements = 4;
    columns.first_column = 1;
    Guarded two(type, 3 * run / 2), two_wanted(type, 3 * run / 2);
    for (std::int64_t i = 0; i < 3 * run / 2; ++i) {
      two.set(i, runs.get(i / 2 * 4 + 1 + i % 2));
      two_wanted.set(i, wanted.get(i / 2 * 4 + 1 + i % 2));
    }
    const TensorView rows = two.view().reshaped({3 * run / 4, 2});
    dropout(stream, columns, rows, rows);
    EXPECT_EQ(two.bits(), two_wanted.bits());
  }
}

TEST(Dropout, APartThatIsNoneIsRefused) {
  const std::int64_t sample[] = {0};
  Guarded x(DataType::float32, 4);
  TestStream stream;
  DropoutOptions options = options_of(0.5f, sample);
  options.first_element = 4;
  EXPECT_EQ(
      refusal([&] { dropout(stream, options, x.view(), x.view()); }),
      "dropout: first_element is 4 with sample_elements 0, wanted at least 0, and sample_elements where a "
      "part begins behind the first element");
  options = options_of(0.5f, sample);
  options.sample_offset = -1;
  EXPECT_EQ(refusal([&] { dropout(stream, options, x.view(), x.view()); }),
            "dropout: sample_offset is -1, wanted at least 0");
}

TEST(Dropout, SomeColumnsHaveTheMasksOfTheWholeRows) {
  // Ranks have columns of two blocks of a row. Their number is odd, so that no run begins at a whole block of
  // draws.
  constexpr std::int64_t rows_per_sample = 3, of_block = 1301, row_elements = 2 * of_block;
  const std::vector<std::int64_t> samples{11, 5, 13};
  const std::int64_t rows = rows_per_sample * static_cast<std::int64_t>(samples.size());
  for (const auto& set : tested_instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    for (const DataType type : floating_types()) {
      Guarded x(type, rows * row_elements);
      fill_random(x, 1);
      Guarded whole = dropped(options_of(0.3f, samples), x);
      for (const auto& [first, run] :
           {std::pair<std::int64_t, std::int64_t>{0, of_block}, {0, 5}, {7, 1100}}) {
        Guarded mine(type, rows * 2 * run), wanted(type, rows * 2 * run), out(type, rows * 2 * run);
        for (std::int64_t row = 0; row < rows; ++row) {
          for (std::int64_t column = 0; column < 2 * run; ++column) {
            const std::int64_t at = row * row_elements + column / run * of_block + first + column % run;
            mine.set(row * 2 * run + column, x.get(at));
            wanted.set(row * 2 * run + column, whole.get(at));
          }
        }
        DropoutOptions options = options_of(0.3f, samples);
        options.row_elements = row_elements;
        options.first_column = first;
        options.column_blocks = 2;
        TestStream stream(2);
        dropout(stream, options, mine.view().reshaped({rows, 2 * run}), out.view().reshaped({rows, 2 * run}));
        EXPECT_TRUE(out.bits() == wanted.bits()) << set << " " << name_of(type) << " from column " << first;
      }
    }
  }
}

TEST(Dropout, ColumnsThatAreNoPartAreRefused) {
  const std::int64_t samples[] = {0, 1};
  Guarded x(DataType::float32, 24);
  TestStream stream;
  const auto refused = [&](std::int64_t first, std::int64_t blocks, const Shape& shape,
                           std::int64_t element) {
    DropoutOptions options = options_of(0.5f, samples);
    options.row_elements = 12;
    options.first_column = first;
    options.column_blocks = blocks;
    options.first_element = options.sample_elements = element;
    return refusal([&] { dropout(stream, options, x.view().reshaped(shape), x.view().reshaped(shape)); });
  };
  EXPECT_EQ(refused(7, 1, {4, 6}, 0),
            "dropout: 6 columns from column 7 on, in 1 blocks, are no part of rows of 12 elements");
  EXPECT_EQ(refused(0, 5, {4, 6}, 0),
            "dropout: 6 columns from column 0 on, in 5 blocks, are no part of rows of 12 elements");
  EXPECT_EQ(refused(0, 1, {3, 8}, 0), "dropout: `x` has 3 rows, which 2 samples do not divide");
  EXPECT_EQ(refused(0, 1, {4, 6}, 12),
            "dropout: a part of the columns and a part of the samples were given; give one of the two");
}

TEST(Dropout, ThreadsChangeNoBit) {
  const std::vector<std::int64_t> samples{1, 2, 3};
  Guarded x(DataType::float32, 3 * 27001);
  fill_random(x, 1);
  const std::string wanted = dropped(options_of(0.25f, samples), x).bits();
  for (const int threads : thread_counts()) {
    EXPECT_TRUE(dropped(options_of(0.25f, samples), x, threads).bits() == wanted) << threads;
  }
}

TEST(Dropout, EveryPartOfTheKeyChangesTheMask) {
  const std::int64_t sample[] = {9};
  const std::int64_t other[] = {10};
  Guarded x(DataType::float32, 200);
  for (int i = 0; i < 200; ++i) x.set(i, 1.0f);
  std::set<std::string> seen;
  const DropoutOptions base = options_of(0.5f, sample);
  seen.insert(dropped(base, x).bits());
  auto changed = base;
  changed.seed ^= 1;
  seen.insert(dropped(changed, x).bits());
  changed = base;
  changed.step += 1;
  seen.insert(dropped(changed, x).bits());
  changed = base;
  changed.site += 1;
  seen.insert(dropped(changed, x).bits());
  changed = base;
  changed.samples = other;
  seen.insert(dropped(changed, x).bits());
  EXPECT_EQ(seen.size(), 5u);
  EXPECT_EQ(seen.count(dropped(base, x).bits()), 1u);
}

TEST(Dropout, KeepsTheStatedShare) {
  const std::vector<std::int64_t> samples{0, 1, 2, 3};
  constexpr std::int64_t n = test::fewer<std::int64_t>(400000);
  Guarded x(DataType::float32, n);
  for (std::int64_t i = 0; i < n; ++i) x.set(i, 1.0f);
  for (const float probability : {0.0f, 0.1f, 0.5f, 0.9f}) {
    Guarded y = dropped(options_of(probability, samples), x);
    double kept = 0;
    double pairs = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      kept += y.get(i) != 0;
      if (i > 0) pairs += y.get(i) != 0 && y.get(i - 1) != 0;
    }
    const double keep = 1.0 - static_cast<double>(probability);
    // The bound is five standard deviations of a binomial; the draws are fixed, so the result never changes.
    EXPECT_NEAR(kept / n, keep, 5 * std::sqrt(keep * (1 - keep) / n) + 1e-12);
    // Neighbours are independent: both are kept with probability keep^2 (the deviation is at most twice as
    // large).
    EXPECT_NEAR(pairs / (n - 1), keep * keep, 10 * std::sqrt(keep * (1 - keep) / n) + 1e-12);
    EXPECT_EQ(*std::max_element(y.as<float>(), y.as<float>() + n), 1.0f / (1.0f - probability));
  }
}

TEST(Dropout, DroppedElementsAreZeroWhateverTheyWere) {
  const std::int64_t sample[] = {0};
  Guarded x(DataType::float32, 64);
  for (int i = 0; i < 64; ++i) x.set(i, i % 2 ? -1.0f : NAN);
  Guarded y = dropped(options_of(0.5f, sample), x);
  const cpu::DropoutMask mask(options_of(0.5f));
  for (int i = 0; i < 64; ++i) {
    if (mask.keep(0, i)) {
      EXPECT_TRUE(std::isnan(y.get(i)) == (i % 2 == 0));
    } else {
      EXPECT_EQ(std::bit_cast<std::uint32_t>(y.get(i)), 0u);
    }
  }
}

TEST(Dropout, OwnsTheListOfSamplesAndTakesEmptyTensors) {
  Guarded x(DataType::float32, 64);
  fill_random(x, 1);
  const std::int64_t sample[] = {3};
  const std::string wanted = dropped(options_of(0.5f, sample), x).bits();
  Guarded y(DataType::float32, 64);
  TestStream stream(1, DeviceKind::cpu, true);
  {
    std::vector<std::int64_t> samples{3};
    dropout(stream, options_of(0.5f, samples), x.view(), y.view());
    samples[0] = 4;
  }
  stream.run();
  EXPECT_EQ(y.bits(), wanted);
  Guarded empty(DataType::float32, 0);
  EXPECT_EQ(dropped(options_of(0.5f), empty).bits(), "");
  EXPECT_EQ(dropped(options_of(0.5f, sample), empty).bits(), "");
}

}  // namespace
}  // namespace tranche::kernels::testing
