// Master weights as halves and in bf16 alone: the values that they preserve, and that an update of them
// equals an update of fp32 numbers with the operands' rounding, on every device.
#include "tranche/kernels/master_weights.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/split_float.h"
#include "kernel_testing.h"
#include "rule_groups.h"
#include "tranche/kernels/optimizer_update.h"
#include "vector_test_support.h"

namespace tranche::kernels::testing {
namespace {

using detail::join_float;
using detail::round_stochastically;
using detail::split_float;
using detail::SplitFloat;

std::uint32_t bits_of(float value) {
  return std::bit_cast<std::uint32_t>(value);
}

/// Returns false if the contract does not hold for a bit pattern.
bool keeps(std::uint32_t bits) {
  const auto value = std::bit_cast<float>(bits);
  const SplitFloat parts = split_float(value);
  const float joined = join_float(parts);
  if (std::isnan(value)) return std::isnan(joined) && std::isnan(to_float(parts.high));
  return bits_of(joined) == bits;
}

TEST(MasterWeights, HalvesKeepEveryKindOfPattern) {
  std::vector<std::uint32_t> lower{0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
  for (std::uint32_t i = 0; i < (on_gpu ? 0u : 10u); ++i) lower.push_back(i * 6553 + 17);
  // All upper halves; fewer on the emulation of a GPU, which is slow.
  constexpr std::int64_t uppers = on_gpu ? 1024 : 65536;
  const auto count = static_cast<std::int64_t>(lower.size()) * uppers;
  Guarded values(DataType::float32, count, 1), high(DataType::bfloat16, count, 3),
      alone = high, low(DataType::uint16, count, 1), joined(DataType::float32, count);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint32_t bits = static_cast<std::uint32_t>(i % uppers * (65536 / uppers) + 65536 / uppers - 1)
                                   << 16 |
                               lower[static_cast<std::size_t>(i / uppers)];
    values.as<float>()[i] = std::bit_cast<float>(bits);
  }
  for (const int threads : compared_threads()) {
    TestStream stream(threads);
    split_halves(stream, values.view(), high.view(), low.view());
    split_halves(stream, values.view(), alone.view(), {});
    join_halves(stream, high.view(), low.view(), joined.view());
    settle();
    EXPECT_TRUE(alone.bits() == high.bits());
    for (std::int64_t i = 0; i < count; ++i) {
      const float value = values.as<float>()[i], upper = to_float(high.as<bfloat16>()[i]);
      const float back = joined.as<float>()[i];
      if (std::isnan(value)) {
        ASSERT_TRUE(std::isnan(upper) && std::isnan(back)) << std::hex << bits_of(value);
        continue;
      }
      ASSERT_EQ(bits_of(back), bits_of(value)) << std::hex << bits_of(value);
      if (std::isinf(value) || std::isinf(upper)) continue;
      // The neighbour nearer to zero is not nearer to the value; the other one is farther away.
      const float toward = std::bit_cast<float>(bits_of(upper) - 0x10000u);
      const float away = std::bit_cast<float>(bits_of(upper) + 0x10000u);
      const double distance = std::abs(double{value} - upper);
      if (upper != 0) {
        ASSERT_LE(distance, std::abs(double{value} - toward)) << value;
      }
      if (std::isfinite(away)) {
        ASSERT_LT(distance, std::abs(double{value} - away)) << value;
      }
    }
  }
}

TEST(MasterWeightsSlow, HalvesKeepEveryPattern) {
  std::int64_t lost = 0;
  std::uint32_t bits = 0;
  do {
    lost += keeps(bits) ? 0 : 1;
  } while (++bits != 0);
  EXPECT_EQ(lost, 0);
}

// --- Updates --------------------------------------------------------------------------------------------

constexpr std::int64_t elements = 1000;
constexpr RoundingKey key{0x123456789abcdefull, 77};

/// Segments of three groups, the second of which is skipped; the tensors are at other positions in the range.
std::vector<UpdateSegment> segments_of(SquareSum* partial, const double* sums) {
  std::vector<UpdateSegment> segments{{1, 3, 0}, {5, 40, 1}, {64, 300, 2}, {364, 636, 0}};
  const std::int64_t first[] = {0, 12, 1'000'003, 5};
  for (std::size_t i = 0; i < segments.size(); ++i) {
    segments[i].partial = partial;
    segments[i].sums = sums;
    segments[i].tensor = 3 * i;
    segments[i].first_element = first[i];
  }
  return segments;
}

using Bytes = std::vector<std::byte, TestAllocator<std::byte>>;
/// A format of master weights and its rounding; `copy`: there is a weight beside a bf16 master.
struct Format {
  DataType master;
  WeightRounding rounding;
  bool copy;
};
const Format formats[] = {{DataType::float32, WeightRounding::half_away, true},
                          {DataType::uint16, WeightRounding::half_away, true},
                          {DataType::bfloat16, WeightRounding::nearest_even, false},
                          {DataType::bfloat16, WeightRounding::nearest_even, true},
                          {DataType::bfloat16, WeightRounding::stochastic, false},
                          {DataType::bfloat16, WeightRounding::stochastic, true}};

/// The rules' states, and master weights in a format.
struct Masters {
  Masters(const UpdateRule& the_rule, unsigned kept, const Format& format, DataType state_type)
      : rule(the_rule),
        slots(kept),
        of(format),
        gradient(DataType::bfloat16, elements, 1),
        master(format.master, elements, 1),
        weight(DataType::bfloat16, elements, 3) {
    fill_random(gradient, 1);
    for (std::size_t slot = 0; slot < rule.states.size(); ++slot) {
      if ((slots >> slot & 1) == 0) continue;
      states.emplace_back(state_type, elements);
      fill_random(states.back(), 3 + static_cast<unsigned>(slot), rule.states[slot].not_negative);
    }
    std::mt19937 draw(5);
    std::uniform_real_distribution<float> uniform(-2, 2);
    for (std::int64_t i = 0; i < elements; ++i) set(i, uniform(draw), 0);
  }
  float get(std::int64_t i) {
    if (of.master == DataType::uint16)
      return join_float({weight.as<bfloat16>()[i], master.as<std::uint16_t>()[i]});
    return master.get(i);
  }
  void set(std::int64_t i, float value, std::uint32_t draw) {
    const SplitFloat parts = split_float(value);
    bfloat16 rounded = parts.high;
    if (of.rounding == WeightRounding::nearest_even) rounded = to_bfloat16(value);
    if (of.rounding == WeightRounding::stochastic) rounded = round_stochastically(value, draw);
    if (of.master == DataType::float32) master.as<float>()[i] = value;
    if (of.master == DataType::uint16) master.as<std::uint16_t>()[i] = parts.low;
    if (of.master == DataType::bfloat16) master.as<bfloat16>()[i] = rounded;
    if (of.copy) weight.as<bfloat16>()[i] = rounded;
  }
  void update(TestStream& stream, RulePhase phase, const RuleGroups& groups,
              const std::vector<UpdateSegment>& segments) {
    std::vector<TensorView> views;
    for (Guarded& state : states) views.push_back(state.view());
    RuleOperands operands;
    groups.give_to(operands);
    operands.slots = slots;
    operands.segments = segments;
    operands.gradient = gradient.view();
    operands.master = master.view();
    operands.state = views;
    operands.rounding = of.rounding;
    std::vector<RoundingKey, TestAllocator<RoundingKey>> own_key{key};
    if (of.rounding == WeightRounding::stochastic) operands.rounding_key = own_key.data();
    if (of.copy) operands.weight = weight.view();
    rule_update(stream, rule, phase, operands);
    settle();
  }
  std::string bits() const {
    std::string all = master.bits() + (of.copy ? weight.bits() : std::string());
    for (const Guarded& state : states) all += state.bits();
    return all;
  }

  const UpdateRule& rule;
  unsigned slots;
  Format of;
  Guarded gradient, master, weight;
  std::vector<Guarded> states;
};

struct MasterCase {
  const char* type;
  std::vector<std::pair<const char*, double>> options;
};
const MasterCase master_cases[] = {{"AdamW", {{"weight_decay", 0.1}}}, {"Adagrad", {}},
                                   {"Lion", {{"weight_decay", 0.1}}},  {"SGD", {{"momentum", 0.9}}},
                                   {"RMSprop", {{"eps", 1e-3}}},       {"LARS", {{"weight_decay", 0.1}}},
                                   {"Lamb", {{"weight_decay", 0.1}}},  {"muon_step", {}}};

RuleValues values_of(const MasterCase& one) {
  const UpdateRule& rule = rule_named(one.type);
  RuleValues values(rule, rule.types.empty() ? "Muon" : one.type);
  for (const auto& [name, value] : one.options) values.set(name, value);
  return values;
}

TEST(MasterWeights, AnUpdateIsThatOfFp32NumbersRoundedAsAsked) {
  constexpr Format plain{DataType::float32, WeightRounding::nearest_even, false};
  int turn = 0;
  for (const auto& set : tested_instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    for (const MasterCase& one : master_cases) {
      const UpdateRule& rule = rule_named(one.type);
      const RuleValues values = values_of(one);
      const unsigned slots = rule.kept(values);
      const RuleGroups groups(values, 0.02, 1);
      for (const Format& format : formats) {
        const DataType state_type = ++turn % 2 == 0 ? DataType::float32 : DataType::bfloat16;
        if (on_gpu && turn % 5 != 1) continue;
        if (one.type == std::string("Adagrad") && state_type != DataType::float32) continue;
        Masters got(rule, slots, format, state_type), wanted = got, numbers(rule, slots, plain, state_type);
        for (std::int64_t i = 0; i < elements; ++i) numbers.master.as<float>()[i] = got.get(i);
        std::vector<double, TestAllocator<double>> sums{4.0, 2.25};
        std::vector<SquareSum, TestAllocator<SquareSum>> partial(2), of_numbers(2);
        TestStream stream(1 + turn % 3);
        const auto run = [&](RulePhase phase) {
          got.update(stream, phase, groups, segments_of(partial.data(), sums.data()));
          numbers.update(stream, phase, groups, segments_of(of_numbers.data(), sums.data()));
        };
        if (rule.trust) {
          run(RulePhase::advance);
          for (int sum = 0; sum < 2; ++sum) {
            EXPECT_EQ(partial[static_cast<std::size_t>(sum)].value(),
                      of_numbers[static_cast<std::size_t>(sum)].value());
          }
          run(RulePhase::finish);
        } else {
          run(RulePhase::update);
        }
        for (const UpdateSegment& segment : segments_of(nullptr, nullptr)) {
          const RandomKey stream_of = detail::rounding_stream(key.seed, key.step, segment.tensor);
          for (std::int64_t i = segment.first; segment.group != 1 && i < segment.first + segment.count; ++i) {
            const std::int64_t element = segment.first_element + i - segment.first;
            const auto block = random_block(stream_of, static_cast<std::uint64_t>(element / 8));
            wanted.set(i, numbers.master.as<float>()[i], detail::rounding_draw(block, element));
          }
        }
        for (std::size_t s = 0; s < wanted.states.size(); ++s) {
          ASSERT_TRUE(got.states[s].bits() == numbers.states[s].bits());
        }
        wanted.states.clear();
        got.states.clear();
        ASSERT_TRUE(got.bits() == wanted.bits())
            << set << ", " << one.type << ", master " << name_of(format.master) << ", rounding "
            << static_cast<int>(format.rounding) << (format.copy ? ", with a weight" : "");
      }
    }
  }
}

// A thousand steps with a gradient that depends on the weights, beside an fp32 master that is rounded by
// plain arithmetic.
TEST(MasterWeights, HalvesAreTheFp32MasterOverAThousandSteps) {
  const UpdateRule& rule = rule_named("AdamW");
  const RuleValues values(rule, "AdamW");
  Masters halves(rule, 0b11, formats[1], DataType::float32), fp32 = halves;
  std::vector<float> master(elements);
  for (std::int64_t i = 0; i < elements; ++i) master[static_cast<std::size_t>(i)] = halves.get(i);
  for (int step = 1; step <= (on_gpu ? 30 : 1000); ++step) {  // the emulation is slow
    const RuleGroups groups(values, 1e-3, -1, step);
    for (std::int64_t i = 0; i < elements; ++i) {
      const float w = master[static_cast<std::size_t>(i)];
      // The nearest bf16 number, with ties away from zero, in fp64: 8 significant bits.
      int exponent = 0;
      const double fraction = std::frexp(double{w}, &exponent);
      const double rounded = std::ldexp(std::round(std::ldexp(fraction, 8)), exponent - 8);
      ASSERT_EQ(static_cast<double>(to_float(halves.weight.as<bfloat16>()[i])), rounded) << step << ": " << w;
      const float gradient = static_cast<float>(rounded) - 0.1f * static_cast<float>((i * 7 + step) % 11) +
                             (step % 3 == 0 ? 0.4f : 0.0f);
      halves.gradient.set(i, gradient);
      fp32.gradient.set(i, gradient);
    }
    const UpdateSegment all{0, elements, 0};
    TestStream stream;
    halves.update(stream, RulePhase::update, groups, {all});
    RuleOperands plain;
    std::vector<TensorView> states{fp32.states[0].view(), fp32.states[1].view()};
    std::vector<float, TestAllocator<float>> own(master.begin(), master.end());
    plain.arguments = groups.bytes.data();
    plain.slots = 0b11;
    plain.segments = {&all, 1};
    plain.gradient = fp32.gradient.view();
    plain.master = {own.data(), DataType::float32, Shape{elements}};
    plain.state = states;
    rule_update(stream, rule, RulePhase::update, plain);
    settle();
    master.assign(own.begin(), own.end());
    for (std::int64_t i = 0; i < elements; ++i) {
      ASSERT_EQ(bits_of(halves.get(i)), bits_of(master[static_cast<std::size_t>(i)])) << step << ": " << i;
    }
  }
}

/// Makes `draws` updates of weights at `fraction` of the distance between two neighbours; returns the mean
/// error divided by its standard deviation.
double mean_in_deviations(double fraction, std::int64_t draws, float sign) {
  constexpr std::int64_t at_once = 1 << 20;
  const std::int64_t count = std::min(at_once, draws);
  constexpr float unit = 0x1p-7f;  // distance of bf16 numbers in [1, 2)
  const UpdateRule& rule = rule_named("SGD");
  const RuleValues values(rule, "SGD");
  UpdateFacts facts;
  facts.learning_rate = 1;
  const std::vector<std::byte> numbers = rule.arguments(values, facts);
  Bytes arguments(numbers.begin(), numbers.end());
  Guarded gradient(DataType::float32, count), master(DataType::bfloat16, count);
  const float below = sign * 1.25f;
  const float step = -sign * static_cast<float>(fraction) * unit;
  std::fill_n(gradient.as<float>(), count, step);
  const float from = to_float(to_bfloat16(below));
  EXPECT_EQ(from, below);
  const double value = double{below} - step;
  std::int64_t away = 0;
  std::int64_t done = 0;
  for (std::int64_t number = 1; done < draws; ++number, done += count) {
    std::fill_n(master.as<bfloat16>(), count, to_bfloat16(below));
    std::vector<RoundingKey, TestAllocator<RoundingKey>> own_key{{99, number}};
    UpdateSegment all{0, count, 0};
    all.tensor = 7;
    RuleOperands operands;
    operands.arguments = arguments.data();
    operands.segments = {&all, 1};
    operands.gradient = gradient.view();
    operands.master = master.view();
    operands.rounding = WeightRounding::stochastic;
    operands.rounding_key = own_key.data();
    TestStream stream(2);
    rule_update(stream, rule, RulePhase::update, operands);
    settle();
    for (std::int64_t i = 0; i < count; ++i) away += master.as<bfloat16>()[i] == to_bfloat16(below) ? 0 : 1;
  }
  // Each of the others must be the neighbour; otherwise the mean below shows the error.
  const double share = static_cast<double>(away) / static_cast<double>(done);
  const double exact = (value - below) / (sign * unit);
  return (share - exact) / std::sqrt(exact * (1 - exact) / static_cast<double>(done));
}

TEST(MasterWeights, StochasticRoundingIsUnbiased) {
  for (const double fraction : {0.01, 0.3, 0.5, 0.875}) {
    for (const float sign : {1.0f, -1.0f}) {
      EXPECT_LT(std::abs(mean_in_deviations(fraction, on_gpu ? 1 << 12 : 1 << 18, sign)), 4)
          << sign * fraction;
    }
  }
}

TEST(MasterWeightsSlow, StochasticRoundingIsUnbiasedOverAHundredMillionDraws) {
  for (const double fraction : {0.003, 0.5}) {
    EXPECT_LT(std::abs(mean_in_deviations(fraction, 100'000'000, 1)), 4) << fraction;
  }
}

TEST(MasterWeights, StochasticRoundingKeepsSpecialNumbers) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  for (const std::uint32_t draw : {0u, 1u, 0x8000u, 0xffffu}) {
    for (const float sign : {1.0f, -1.0f}) {
      EXPECT_EQ(to_float(round_stochastically(sign * infinity, draw)), sign * infinity);
      EXPECT_TRUE(std::isnan(to_float(round_stochastically(sign * std::nanf(""), draw))));
      EXPECT_EQ(to_float(round_stochastically(sign * std::numeric_limits<float>::max(), draw)),
                sign * std::bit_cast<float>(0x7f7f0000u));
      EXPECT_EQ(to_float(round_stochastically(sign * 1.5f, draw)), sign * 1.5f);
      EXPECT_EQ(bits_of(to_float(round_stochastically(sign * 0.0f, draw))), bits_of(sign * 0.0f));
    }
  }
}

// An element has the same draw however a tensor is divided over calls, ranges, segments and threads.
TEST(MasterWeights, DrawsAreOfATensorsElements) {
  const UpdateRule& rule = rule_named("SGD");
  const RuleValues values(rule, "SGD");
  const std::vector<std::byte> numbers = rule.arguments(values, UpdateFacts{.learning_rate = 1});
  Bytes arguments(numbers.begin(), numbers.end());
  constexpr std::int64_t n = 5000;
  Guarded gradient(DataType::bfloat16, n), start(DataType::bfloat16, n);
  fill_random(gradient, 1);
  fill_random(start, 2);
  std::vector<RoundingKey, TestAllocator<RoundingKey>> own_key{key};
  const auto updated = [&](std::vector<std::int64_t> cuts, int threads, std::uint64_t tensor = 11) {
    Guarded master = start;
    cuts.push_back(n);
    std::int64_t begin = 0;
    for (const std::int64_t cut : cuts) {
      const std::int64_t half = (cut - begin) / 2;
      UpdateSegment parts[2] = {{0, half, 0}, {half, cut - begin - half, 0}};
      for (UpdateSegment& part : parts) {
        part.tensor = tensor;
        part.first_element = begin + part.first;
      }
      RuleOperands operands;
      operands.arguments = arguments.data();
      operands.segments = parts;
      operands.gradient = gradient.view().slice(begin, cut - begin);
      operands.master = master.view().slice(begin, cut - begin);
      operands.rounding = WeightRounding::stochastic;
      operands.rounding_key = own_key.data();
      TestStream stream(threads);
      rule_update(stream, rule, RulePhase::update, operands);
      settle();
      begin = cut;
    }
    return master.bits();
  };
  for (const auto& set : tested_instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    const std::string whole = updated({}, 1);
    for (const std::vector<std::int64_t>& cuts :
         {std::vector<std::int64_t>{1}, {7, 8, 9}, {513, 1031}, {2500}, {4997}}) {
      EXPECT_TRUE(updated(cuts, 3) == whole) << set << ", cut at " << cuts.front();
    }
    EXPECT_FALSE(updated({}, 1, 12) == whole);
    own_key[0].step += 1;
    EXPECT_FALSE(updated({}, 1) == whole);
    own_key[0] = {key.seed + 1, key.step};
    EXPECT_FALSE(updated({}, 1) == whole);
    own_key[0] = key;
  }
}

TEST(MasterWeights, CostTheirBytesAndRefuseWhatDoesNotFit) {
  const UpdateRule& rule = rule_named("AdamW");
  TestStream meta(1, DeviceKind::meta);
  const RuleGroups groups(RuleValues(rule, "AdamW"), 0.02, 1);
  const std::vector<UpdateSegment> all{{0, 600, 0}};
  const auto bytes = [&](const Format& format) {
    Masters of(rule, 0b11, format, DataType::float32);
    TestStream counted(1, DeviceKind::meta);
    of.update(counted, RulePhase::update, groups, all);
    return std::pair(counted.work().bytes_read, counted.work().bytes_written);
  };
  EXPECT_EQ(bytes(formats[1]),
            std::pair(600.0 * (2 + 4 + 8), 600.0 * (4 + 8)));  // master weights in two halves
  EXPECT_EQ(bytes(formats[2]),
            std::pair(600.0 * (2 + 2 + 8), 600.0 * (2 + 8)));  // bf16 weights without a master
  EXPECT_EQ(bytes(formats[3]), std::pair(600.0 * (2 + 2 + 8), 600.0 * (4 + 8)));

  const auto refused = [&](Format format, bool with_key = true) {
    return refusal([&] {
      Masters of(rule, 0b11, format, DataType::float32);
      std::vector<TensorView> states{of.states[0].view(), of.states[1].view()};
      RuleOperands operands;
      operands.arguments = groups.bytes.data();
      operands.slots = 0b11;
      operands.segments = all;
      operands.gradient = of.gradient.view();
      operands.master = of.master.view();
      operands.state = states;
      operands.rounding = format.rounding;
      if (with_key) operands.rounding_key = &key;
      if (format.copy) operands.weight = of.weight.view();
      rule_update(meta, rule, RulePhase::update, operands);
    });
  };
  using Rounding = WeightRounding;
  EXPECT_EQ(
      refused({DataType::uint16, Rounding::half_away, false}),
      "adam_update: `master` holds lower halves, so `weight`, which holds the upper ones, must be given");
  EXPECT_EQ(refused({DataType::uint16, Rounding::nearest_even, true}),
            "adam_update: a `master` of lower halves needs the rounding half_away");
  EXPECT_EQ(refused({DataType::bfloat16, Rounding::half_away, false}),
            "adam_update: a bf16 `master` needs the rounding nearest_even or stochastic");
  EXPECT_EQ(refused({DataType::float32, Rounding::stochastic, true}),
            "adam_update: an fp32 `master` cannot be rounded stochastically");
  EXPECT_EQ(refused({DataType::bfloat16, Rounding::stochastic, false}, false),
            "adam_update: `rounding_key` is null");
  EXPECT_EQ(refused({DataType::bfloat16, Rounding::stochastic, true}), "nothing was thrown");

  Guarded values(DataType::float32, 8), high(DataType::bfloat16, 8);
  split_halves(meta, values.view(), high.view(), {});
  EXPECT_EQ(refusal([&] { join_halves(meta, high.view(), {}, values.view()); }),
            "join_halves: the address of `low` is null");
}

}  // namespace
}  // namespace tranche::kernels::testing
