// States in blocks: an update on decoded states, whose results are encoded again, on every device.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "core/block8.h"
#include "optimizer_spec.h"
#include "rule_groups.h"
#include "tranche/kernels/optimizer_update.h"

namespace tranche::kernels::testing {
namespace {

constexpr std::int64_t range_elements = 5 * 256 + 4096;

/// Segments begin at blocks; one is smaller than a block, one has many.
std::vector<UpdateSegment> block_segments() {
  return {{0, 3, 0}, {256, 256, 1}, {512, 300, 0}, {1280, 4096 - 7, 2}};
}

bool without_sign(const UpdateRule& rule, std::size_t slot) {
  return rule.states[slot].not_negative;
}

/// The operands of a rule: states in blocks, and the same numbers in fp32.
struct Operands {
  Operands(const UpdateRule& the_rule, const RuleValues& values, DataType gradient_type, DataType weight_type)
      : rule(the_rule),
        slots(the_rule.kept(values)),
        gradient(gradient_type, range_elements),
        master(DataType::float32, range_elements),
        weight(weight_type, range_elements) {
    fill_random(gradient, 1);
    fill_random(master, 2);
    for (std::size_t slot = 0; slot < rule.states.size(); ++slot) {
      if ((slots >> slot & 1) == 0) continue;
      const bool positive = without_sign(rule, slot);
      dtypes.push_back(positive ? DataType::block8_unsigned : DataType::block8);
      plain.emplace_back(DataType::float32, range_elements);
      fill_random(plain.back(), 3 + static_cast<unsigned>(slot), positive);
      blocks.emplace_back(DataType::uint8, bytes_of(DataType::block8, range_elements));
    }
    for (std::size_t s = 0; s < dtypes.size(); ++s) {
      detail::encode_blocks8(dtypes[s], {plain[s].as<float>(), range_elements}, bytes(s));
      decode(s);
    }
  }
  std::byte* bytes(std::size_t s) { return blocks[s].as<std::byte>(); }
  void decode(std::size_t s) {
    detail::decode_blocks8(dtypes[s], bytes(s), {plain[s].as<float>(), range_elements});
  }
  /// Encodes a segment's fp32 states after the update, as the update in blocks should; others do not change.
  void encode(std::size_t s, const UpdateSegment& segment) {
    const auto count = static_cast<std::size_t>(segment.count);
    detail::encode_blocks8(dtypes[s], {plain[s].as<float>() + segment.first, count},
                           bytes(s) + bytes_of(dtypes[s], segment.first));
  }
  RuleOperands of(bool in_blocks, std::vector<TensorView>& states, std::span<const UpdateSegment> segments,
                  const RuleGroups& arguments, bool with_weight) {
    states.clear();
    for (std::size_t s = 0; s < dtypes.size(); ++s) {
      TensorView view = plain[s].view();
      if (in_blocks) view = {bytes(s), dtypes[s], Shape{range_elements}};
      states.push_back(view);
    }
    RuleOperands operands;
    arguments.give_to(operands);
    operands.slots = slots;
    operands.segments = segments;
    operands.gradient = gradient.view();
    operands.master = master.view();
    operands.state = states;
    if (with_weight) operands.weight = weight.view();
    return operands;
  }
  std::string bits() const {
    std::string all = master.bits() + weight.bits();
    for (const Guarded& state : blocks) all += state.bits();
    return all;
  }

  const UpdateRule& rule;
  unsigned slots;
  Guarded gradient, master, weight;
  std::vector<DataType> dtypes;
  std::vector<Guarded> plain, blocks;
};

struct Case {
  const char* type;
  std::vector<std::pair<const char*, double>> options;
};
const Case cases[] = {{"AdamW", {{"weight_decay", 0.1}}},
                      {"AdamW", {{"amsgrad", 1}}},
                      {"Lion", {{"weight_decay", 0.1}}},
                      {"SGD", {{"momentum", 0.9}}},
                      {"RMSprop", {{"centered", 1}, {"momentum", 0.5}, {"eps", 1e-3}}},
                      {"LARS", {{"weight_decay", 0.1}}},
                      {"Lamb", {{"weight_decay", 0.1}}}};

TEST(OptimizerBlock8, UpdatesDecodedStatesAndEncodesWhatTheyAreThen) {
  int turn = 0;
  for (const auto& set : tested_instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    for (const Case& one : cases) {
      const UpdateRule& rule = rule_named(one.type);
      RuleValues values(rule, one.type);
      for (const auto& [name, value] : one.options) values.set(name, value);
      for (const DataType gradient : floating_types()) {
        const DataType weight = floating_types()[static_cast<std::size_t>(++turn % 3)];
        Operands wanted(rule, values, gradient, weight), got = wanted;
        const RuleGroups arguments(values, 0.01, 2);
        std::vector<UpdateSegment> segments = block_segments();
        std::vector<double, TestAllocator<double>> sums{4.0, 2.25};
        std::vector<SquareSum, TestAllocator<SquareSum>> partial(2), unused(2);
        const bool with_weight = turn % 2 == 0;
        TestStream stream(1 + turn % 3);
        std::vector<TensorView> states;
        const auto run = [&](Operands& on, bool in_blocks, RulePhase phase,
                             std::vector<SquareSum, TestAllocator<SquareSum>>& into) {
          for (UpdateSegment& segment : segments) {
            segment.partial = into.data();
            segment.sums = sums.data();
          }
          RuleOperands operands =
              on.of(in_blocks, states, segments, arguments, with_weight && phase != RulePhase::advance);
          rule_update(stream, rule, phase, operands);
          settle();
        };
        const auto encode = [&] {
          for (std::size_t s = 0; s < wanted.dtypes.size(); ++s) {
            for (const UpdateSegment& segment : segments) {
              if (segment.group != 2) wanted.encode(s, segment);
            }
            wanted.decode(s);
          }
        };
        if (rule.trust) {
          run(got, true, RulePhase::advance, partial);
          run(wanted, false, RulePhase::advance, unused);
          if (rule.states_first) encode();
          run(wanted, false, RulePhase::finish, unused);
          run(got, true, RulePhase::finish, partial);
          if (!rule.states_first) encode();
          if (!rule.states_first) {
            EXPECT_EQ(partial[1].value(), unused[1].value()) << one.type;
          }
          EXPECT_EQ(partial[0].value(), unused[0].value()) << one.type;
          EXPECT_GT(partial[1].value(), 0);
        } else {
          run(wanted, false, RulePhase::update, unused);
          encode();
          run(got, true, RulePhase::update, partial);
        }
        ASSERT_TRUE(got.bits() == wanted.bits())
            << set << ", " << one.type << ", gradient " << name_of(gradient) << ", weight "
            << (with_weight ? name_of(weight) : "absent");
      }
    }
  }
}

// The squares are those of directions computed from the states as stored.
TEST(OptimizerBlock8, LambsSumsAreOfStoredStates) {
  const UpdateRule& rule = rule_named("Lamb");
  RuleValues values(rule, "Lamb");
  values.set("betas", 0, 0);
  values.set("weight_decay", 0);
  Operands of(rule, values, DataType::float32, DataType::float32);
  const RuleGroups arguments(values, 0.01, 2);
  std::vector<SquareSum, TestAllocator<SquareSum>> partial(2);
  const std::vector<UpdateSegment> segments{{0, 700, 0, partial.data(), nullptr}};
  TestStream stream;
  std::vector<TensorView> states;
  rule_update(stream, rule, RulePhase::advance, of.of(true, states, segments, arguments, false));
  settle();
  of.decode(0);
  of.decode(1);
  const float* const m = of.plain[0].as<float>();
  const float* const v = of.plain[1].as<float>();
  std::vector<float> squares;
  for (int i = 0; i < 700; ++i) squares.push_back(m[i] / (std::sqrt(v[i]) + 1e-8f));
  double sum = 0;
  for (const float direction : squares) sum += double{direction} * direction;
  EXPECT_NEAR(partial[1].value(), sum, 1e-5 * sum);
}

TEST(OptimizerBlock8, OfManyBlocksOnThreadsAreThoseOfOne) {
  const UpdateRule& rule = rule_named("AdamW");
  RuleValues values(rule, "AdamW");
  constexpr std::int64_t n = streamed_size / 256 * 256 + 77;
  Guarded gradient(DataType::bfloat16, n), master(DataType::float32, n), weight(DataType::bfloat16, n, 3);
  fill_random(gradient, 1);
  fill_random(master, 2);
  Guarded first(DataType::uint8, bytes_of(DataType::block8, n)), second = first;
  for (Guarded* state : {&first, &second}) {
    std::fill_n(state->as<std::byte>(), state->elements(), std::byte{});
  }
  const RuleGroups arguments(values, 0.01, 2);
  const UpdateSegment segment{0, n, 0};
  std::string expected;
  for (const int threads : thread_counts()) {
    Guarded w = master, m = first, v = second, to = weight;
    const std::vector<TensorView> states{{m.as<std::byte>(), DataType::block8, Shape{n}},
                                         {v.as<std::byte>(), DataType::block8_unsigned, Shape{n}}};
    RuleOperands of;
    arguments.give_to(of);
    of.slots = 0b11;
    of.segments = {&segment, 1};
    of.gradient = gradient.view();
    of.master = w.view();
    of.state = states;
    of.weight = to.view();
    TestStream stream(threads);
    rule_update(stream, rule, RulePhase::update, of);
    const std::string bits = w.bits() + m.bits() + v.bits() + to.bits();
    if (expected.empty()) expected = bits;
    EXPECT_TRUE(bits == expected) << threads << " threads";
  }
}

TEST(OptimizerBlock8, CostsABlocksBytesAndRefusesPartsOfBlocks) {
  const UpdateRule& rule = rule_named("AdamW");
  RuleValues values(rule, "AdamW");
  Operands of(rule, values, DataType::bfloat16, DataType::bfloat16);
  const RuleGroups arguments(values, 0.01, 2);
  std::vector<TensorView> states;
  TestStream meta(1, DeviceKind::meta);
  const std::vector<UpdateSegment> all{{256, 512, 0}};
  rule_update(meta, rule, RulePhase::update, of.of(true, states, all, arguments, true));
  EXPECT_EQ(meta.work().bytes_read, 512 * (2 + 4) + 2 * 520);
  EXPECT_EQ(meta.work().bytes_written, 512 * (2 + 4) + 2 * 520);
  const auto refused = [&](std::vector<UpdateSegment> segments, bool mixed) {
    return refusal([&] {
      RuleOperands operands = of.of(true, states, segments, arguments, true);
      if (mixed) states[1] = of.plain[1].view();
      rule_update(meta, rule, RulePhase::update, operands);
    });
  };
  EXPECT_EQ(refused({{0, 8, 0}, {8, 8, 0}}, false),
            "adam_update: segment 1 begins at element 8, within a block of 256");
  EXPECT_EQ(refused({{0, 8, 0}}, true), "adam_update: `exp_avg` and `exp_avg_sq` differ in dtype");
}

}  // namespace
}  // namespace tranche::kernels::testing
