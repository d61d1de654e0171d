// Compares every rule in a file with the results of other libraries, and tests what the files guarantee.
#include "tranche/optim/rules.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <set>

#include "optimizer_testing.h"
#include "tests/core/error_text.h"
#include "tests/optim/golden_updates.h"
#include "tranche/kernels/optimizer_update.h"

namespace tranche::test {
namespace {

using ::testing::HasSubstr;

/// The sizes in scripts/optimizer_goldens.py.
constexpr std::int64_t sizes[] = {77, 13, 1, 30, 257, 279};
constexpr int golden_steps = 100;
constexpr double golden_rate = 0.01;

/// Six tensors in one range, which the ends in `shards` divide; all of them decay.
class GoldenRange {
 public:
  explicit GoldenRange(const Optimizer& optimizer) : optimizer_(optimizer) {
    for (std::size_t t = 0; t < std::size(sizes); ++t) {
      for (const double w : draw(1000 + t, sizes[t])) master_.push_back(static_cast<float>(0.5 * w));
    }
    for (const OptimizerStateTensor& state : optimizer.state({})) {
      states_.emplace_back(master_.size(), state.initial_value);
    }
    gradient_.resize(master_.size());
    partial_.resize(2 * std::size(sizes));
    sums_.resize(partial_.size());
  }

  void step(Stream& stream, int number, const std::vector<std::int64_t>& cuts, float loss_scale) {
    std::size_t next = 0;
    for (std::size_t t = 0; t < std::size(sizes); ++t) {
      const double scale =
          std::ldexp(1.0, static_cast<int>(t) - 3) * (1 + number % 3) * static_cast<double>(loss_scale);
      for (const double g : draw(100000 + 100 * static_cast<std::uint64_t>(number) + t, sizes[t])) {
        gradient_[next++] = static_cast<float>(g * scale);
      }
    }
    OptimizerStep step = step_of(number, golden_rate);
    step.gradient_scale = 1 / loss_scale;
    const std::vector<std::byte> numbers = optimizer_.numbers(step, {});
    std::fill(partial_.begin(), partial_.end(), SquareSum{});
    // Each shard belongs to a rank of its own.
    std::int64_t begin = 0;
    std::vector<std::int64_t> ends = cuts;
    ends.push_back(static_cast<std::int64_t>(master_.size()));
    for (const bool finish : {false, true}) {
      begin = 0;
      for (const std::int64_t end : ends) {
        UpdateRange range = view(begin, end, numbers);
        const std::vector<TensorSegment> segments = segments_of(begin, end);
        range.segments = segments;
        if (finish) {
          optimizer_.apply(stream, step, range);
        } else if (optimizer_.sums({}) > 0) {
          optimizer_.prepare(stream, step, range);
        }
        stream.synchronize();
        begin = end;
      }
      for (std::size_t i = 0; i < sums_.size(); ++i) sums_[i] = partial_[i].value();
    }
  }

  const std::vector<float>& weights() const { return master_; }
  const std::vector<std::vector<float>>& states() const { return states_; }
  const std::vector<double>& sums() const { return sums_; }

 private:
  UpdateRange view(std::int64_t begin, std::int64_t end, const std::vector<std::byte>& numbers) {
    const Shape shape{end - begin};
    UpdateRange range;
    range.gradient = {gradient_.data() + begin, DataType::float32, shape};
    range.master = {master_.data() + begin, DataType::float32, shape};
    for (auto& state : states_) range.state.push_back({state.data() + begin, DataType::float32, shape});
    range.weight = {nullptr, DataType::float32, shape};
    range.numbers = numbers.data();
    range.numbers_stride = static_cast<std::int64_t>(numbers.size());
    return range;
  }
  std::vector<TensorSegment> segments_of(std::int64_t begin, std::int64_t end) {
    std::vector<TensorSegment> segments;
    std::int64_t at = 0;
    for (std::size_t t = 0; t < std::size(sizes); ++t) {
      const std::int64_t from = std::max(begin, at), to = std::min(end, at + sizes[t]);
      if (from < to) {
        TensorSegment segment;
        segment.first = from - begin;
        segment.count = to - from;
        segment.first_element = from - at;
        segment.partial = partial_.data() + 2 * t;
        segment.sums = sums_.data() + 2 * t;
        segments.push_back(segment);
      }
      at += sizes[t];
    }
    return segments;
  }

  const Optimizer& optimizer_;
  std::vector<float> master_, gradient_;
  std::vector<std::vector<float>> states_;
  std::vector<SquareSum> partial_;
  std::vector<double> sums_;
};

std::unique_ptr<Optimizer> optimizer_of(const GoldenUpdate& golden) {
  RuleParameters parameters;
  for (const auto& [name, value] : golden.parameters) parameters[name] = value;
  return make_rule_optimizer(golden.type, parameters);
}

/// Elements at which Lion's blend is so near to 0 that fp32 and fp64 may differ in its sign.
std::set<std::size_t> signs_in_doubt(const GoldenUpdate& golden) {
  std::set<std::size_t> result;
  if (std::string(golden.type) != "Lion") return result;
  std::vector<double> m(
      static_cast<std::size_t>(std::accumulate(std::begin(sizes), std::end(sizes), std::int64_t{0})));
  for (int step = 1; step <= golden_steps; ++step) {
    std::size_t i = 0;
    for (std::size_t t = 0; t < std::size(sizes); ++t) {
      const double scale = std::ldexp(1.0, static_cast<int>(t) - 3) * (1 + step % 3);
      for (const double drawn : draw(100000 + 100 * static_cast<std::uint64_t>(step) + t, sizes[t])) {
        const double g = drawn * scale;
        if (std::abs(0.9 * m[i] + 0.1 * g) < 1e-6) result.insert(i);
        m[i] = 0.99 * m[i] + 0.01 * g;
        ++i;
      }
    }
  }
  return result;
}

TEST(Rules, FollowOtherLibrariesInFp64) {
  const auto device = make_device({});
  std::set<std::string_view> tested;
  for (const GoldenUpdate& golden : golden_updates()) {
    const auto optimizer = optimizer_of(golden);
    tested.insert(golden.type);
    GoldenRange range(*optimizer);
    for (int step = 1; step <= golden_steps; ++step) {
      range.step(device->compute_stream(), step, {64, 256, 320, 512}, 1);
    }
    const std::set<std::size_t> left_out = signs_in_doubt(golden);
    EXPECT_LE(left_out.size(), 5U);
    std::size_t i = 0;
    for (const std::int64_t size : sizes) {
      const auto count = static_cast<std::size_t>(size);
      float largest = 0;
      for (std::size_t k = 0; k < count; ++k) largest = std::max(largest, std::abs(golden.weights[i + k]));
      for (std::size_t k = 0; k < count; ++k, ++i) {
        if (left_out.contains(i)) continue;
        ASSERT_NEAR(range.weights()[i], golden.weights[i], 1e-5 * static_cast<double>(largest))
            << golden.name << ", element " << k << " of the tensor of " << size;
      }
    }
  }
  for (const RuleType& type : rule_types()) {
    if (type.rule->whole_matrices) continue;  // muon_test.cpp tests them
    EXPECT_TRUE(tested.contains(type.name)) << type.name << " has no golden vector";
  }
}

// Loss scales that are powers of two, and every division of tensors, give the same bits of weights, states
// and sums.
TEST(Rules, GiveTheSameBitsHoweverTensorsAreCut) {
  const auto device = make_device({});
  for (const GoldenUpdate& golden : golden_updates()) {
    const auto optimizer = optimizer_of(golden);
    GoldenRange whole(*optimizer), cut(*optimizer);
    for (int step = 1; step <= 5; ++step) {
      whole.step(device->compute_stream(), step, {}, 1);
      cut.step(device->compute_stream(), step, {1, 64, 100, 377, 378, 600}, 1024);
      ASSERT_EQ(whole.weights(), cut.weights()) << golden.name;
      ASSERT_EQ(whole.states(), cut.states()) << golden.name;
      if (optimizer->sums({}) > 0) {
        ASSERT_EQ(whole.sums(), cut.sums()) << golden.name;
      }
    }
  }
}

TEST(Rules, AreNamedOnceAndFoundInAnyCase) {
  std::set<std::string_view> names, kernels;
  for (const RuleType& type : rule_types()) {
    EXPECT_TRUE(names.insert(type.name).second) << type.name;
    EXPECT_EQ(find_rule(type.name)->rule, type.rule);
    EXPECT_TRUE(nearest_to_missing(type.name).empty()) << type.name;
    EXPECT_NO_THROW(make_rule_optimizer(type.name, {})) << type.name;
    for (const RuleOption& option : type.rule->options) EXPECT_FALSE(option.meaning.empty()) << option.name;
  }
  EXPECT_EQ(find_rule("aDAMw")->name, "AdamW");
  EXPECT_EQ(find_rule("AdamX"), nullptr);
  EXPECT_THAT(nearest_to_missing("1-bit Adam"), HasSubstr("AdamW"));
  EXPECT_THAT(nearest_to_missing("Schedule-Free"), HasSubstr("WSD"));
  EXPECT_EQ(nearest_to_missing("AdamW8bit"), "AdamW with tranche.moments block8");
}

TEST(Rules, RefuseWhatIsOutOfRangeOrNotTheirs) {
  const auto refusal = [](const char* type, const RuleParameters& parameters,
                          DataType moments = DataType::float32) {
    return message_of<InvalidArgument>([&] { (void)make_rule_optimizer(type, parameters, moments); });
  };
  EXPECT_EQ(refusal("Lion", {{"betas", std::array{0.9, 1.0}}}),
            "Lion: betas are [0.9, 1]; each must be at least 0 and below 1");
  EXPECT_EQ(refusal("Lion", {{"eps", 0.1}}), "Lion has no eps");
  EXPECT_EQ(refusal("Adagrad", {{"lr_decay", -1}}),
            "Adagrad: lr_decay is -1; it must be finite and not negative");
  EXPECT_EQ(refusal("RMSprop", {{"alpha", 1}}), "RMSprop: alpha is 1; it must be at least 0 and below 1");
  EXPECT_EQ(refusal("RMSprop", {{"alpha", std::array{0.5, 0.5}}}), "RMSprop: alpha is one number");
  EXPECT_EQ(refusal("Lamb", {{"min_coeff", 2}, {"max_coeff", 1}}),
            "Lamb: min_coeff is 2, above max_coeff, 1");
  EXPECT_EQ(refusal("Adagrad", {}, DataType::bfloat16),
            "Adagrad: its sum is kept in fp32 alone, not in bf16");
  EXPECT_EQ(refusal("Adagrad", {}, DataType::block8),
            "Adagrad: its sum is kept in fp32 alone, not in block8");
  EXPECT_EQ(refusal("Lion", {}, DataType::block8_unsigned),
            "Lion: moments can be kept in fp32, bf16 or block8, not block8_unsigned");
  EXPECT_EQ(refusal("SGD", {}, DataType::bfloat16),
            "SGD: it keeps no moments with these parameters, in bf16 or any dtype");
  EXPECT_EQ(refusal("Lamp", {}), "there is no optimizer Lamp");
  GroupOptions group;
  group.epsilon = 1e-3;
  const auto lion = make_rule_optimizer("Lion", {});
  EXPECT_EQ(message_of<InvalidArgument>([&] { lion->check_group(group); }),
            "Lion: a parameter group sets eps, which Lion has not");
}

TEST(Rules, KeepStatesOfLargeTensorsInBlocks) {
  const auto formats = [](const char* type, const RuleParameters& parameters, std::int64_t elements) {
    TrainableTensor tensor;
    tensor.shape = Shape{elements};
    std::vector<DataType> found;
    const auto rule = make_rule_optimizer(type, parameters, DataType::block8);
    for (const OptimizerStateTensor& state : rule->state(tensor)) found.push_back(state.dtype);
    return found;
  };
  constexpr DataType fp32 = DataType::float32, with_sign = DataType::block8,
                     without_sign = DataType::block8_unsigned;
  using Formats = std::vector<DataType>;
  EXPECT_EQ(formats("AdamW", {{"amsgrad", 1}}, 4096), (Formats{with_sign, without_sign, without_sign}));
  EXPECT_EQ(formats("AdamW", {}, 4095), (Formats{fp32, fp32}));
  EXPECT_EQ(formats("RMSprop", {{"centered", 1}, {"momentum", 0.5}}, 5000),
            (Formats{without_sign, with_sign, with_sign}));
  EXPECT_EQ(formats("Lion", {}, 5000), (Formats{with_sign}));
  EXPECT_EQ(make_rule_optimizer("Lion", {}, DataType::block8)->describe(),
            R"({"type": "Lion", "betas": [0.9, 0.99], "weight_decay": 0, "moments": "block8"})");
}

TEST(Rules, DescribeAllTheirOptions) {
  EXPECT_EQ(make_rule_optimizer("lamb", {{"max_coeff", 10}})->describe(),
            R"({"type": "Lamb", "betas": [0.9, 0.999], "eps": 1e-08, "weight_decay": 0, "max_coeff": 10, )"
            R"("min_coeff": null, "moments": "fp32"})");
}

/// One step of LAMB on one tensor, computed by hand in fp64.
TEST(Rules, LambsRatioIsClampedWhereAskedAndOneWithoutNorm) {
  const UpdateRule& rule = *find_rule("Lamb")->rule;
  const auto ratio = [&](const RuleParameters& parameters, double weight, double direction) {
    RuleValues values(rule, "Lamb");
    for (const auto& [name, value] : parameters) values.set(name, value.first, value.second);
    const std::vector<std::byte> arguments = rule.arguments(values, {});
    return rule.ratio(arguments.data(), weight, direction);
  };
  EXPECT_EQ(ratio({}, 300, 2), 150);
  EXPECT_EQ(ratio({{"max_coeff", 10}}, 300, 2), 10);
  EXPECT_EQ(ratio({{"min_coeff", 0.01}}, 1, 1000), 0.01f);
  EXPECT_EQ(ratio({{"min_coeff", 0.5}}, 0, 1000), 1);
  EXPECT_EQ(ratio({}, 5, 0), 1);
}

}  // namespace
}  // namespace tranche::test
