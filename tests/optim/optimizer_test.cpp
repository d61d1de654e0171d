// The optimizers' own part: scalars of a step, groups, masks, state. The loops are tested with the kernels.
#include "tranche/optim/optimizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <future>
#include <limits>
#include <memory>

#include "optimizer_testing.h"
#include "tests/core/error_text.h"

namespace tranche::test {
namespace {

using ::testing::HasSubstr;

/// One optimizer of each type, with weight decay, for tests of what every optimizer guarantees.
std::vector<std::unique_ptr<Optimizer>> every_optimizer() {
  std::vector<std::unique_ptr<Optimizer>> result;
  result.push_back(make_adam({.weight_decay = 0.1}));
  result.push_back(make_sgd({.weight_decay = 0.1}));
  result.push_back(make_sgd({.momentum = 0.9, .weight_decay = 0.1}));
  return result;
}

/// One element in double, directly from the papers (with bias-corrected moments, unlike the kernel's folded
/// form).
struct PlainAdam {
  double w, m = 0, v = 0;
  void update(double g, int t, double rate, const AdamOptions& o, bool decay, double beta1) {
    const double decay_rate = decay ? o.weight_decay : 0;
    if (!o.decoupled) g += decay_rate * w;
    m = beta1 * m + (1 - beta1) * g;
    v = o.beta2 * v + (1 - o.beta2) * g * g;
    if (o.decoupled) w -= rate * decay_rate * w;
    w -= rate * (m / (1 - std::pow(beta1, t))) / (std::sqrt(v / (1 - std::pow(o.beta2, t))) + o.epsilon);
  }
};

TEST_F(OptimizerTest, FirstAdamStepMovesByTheRateAgainstTheSignOfTheGradient) {
  // After one step m / (1 - beta1) = g and v / (1 - beta2) = g^2, so the step is rate * sign(g), apart from
  // epsilon 1e-8. Weight decay of 0.5 at rate 0.1 first subtracts 0.05 of the weight.
  const auto optimizer = make_adam({.weight_decay = 0.5});
  Shard shard(1, 2);
  shard.gradient = {0.5f};
  shard.master = {1.0f};
  apply(*optimizer, step_of(1, 0.1), shard);
  EXPECT_NEAR(shard.master[0], 1.0 - 0.05 - 0.1, 3e-7);
  EXPECT_FLOAT_EQ(shard.state[0][0], (1 - 0.9f) * 0.5f);
  EXPECT_FLOAT_EQ(shard.state[1][0], (1 - 0.999f) * 0.25f);
}

TEST_F(OptimizerTest, AdamFollowsThePapersOverManySteps) {
  for (const bool decoupled : {true, false}) {
    for (const bool decay : {true, false}) {
      // An epsilon larger than the roots of moments shows whether it is corrected like them.
      const AdamOptions options{.beta1 = 0.8,
                                .beta2 = 0.95,
                                .epsilon = decay ? 1e-6 : 0.5,
                                .weight_decay = 0.1,
                                .decoupled = decoupled};
      const auto optimizer = make_adam(options);
      Shard shard(13, 2);
      std::vector<PlainAdam> plain;
      for (const float w : shard.master) plain.push_back({w});
      for (int t = 1; t <= 20; ++t) {
        OptimizerStep step = step_of(t, 0.01 / t);
        step.gradient_scale = 0.5f;
        apply(*optimizer, step, shard, {.learning_rate_factor = 3, .decay = decay});
        for (std::size_t i = 0; i < plain.size(); ++i) {
          plain[i].update(0.5 * shard.gradient[i], t, 3 * 0.01 / t, options, decay, 0.8);
        }
      }
      // 20 updates with a few fp32 roundings each, for weights of order 1: 20 * 8 * 6e-8 = 1e-5.
      for (std::size_t i = 0; i < plain.size(); ++i) {
        EXPECT_NEAR(shard.master[i], plain[i].w, 1e-5) << "element " << i << " decoupled " << decoupled;
      }
    }
  }
}

TEST_F(OptimizerTest, AGroupsOwnValuesFollowThePapersToo) {
  for (const bool decoupled : {true, false}) {
    const AdamOptions of_others{.beta1 = 0.9, .beta2 = 0.999, .weight_decay = 0.5, .decoupled = decoupled};
    const AdamOptions own{
        .beta1 = 0.8, .beta2 = 0.95, .epsilon = 0.5, .weight_decay = 0.1, .decoupled = decoupled};
    GroupOptions group{.learning_rate_factor = 3};
    group.learning_rate = 0.01;
    group.weight_decay = own.weight_decay;
    group.betas = {own.beta1, own.beta2};
    group.epsilon = own.epsilon;
    const auto optimizer = make_adam(of_others);
    EXPECT_NO_THROW(optimizer->check_group(group));
    Shard shard(13, 2);
    std::vector<PlainAdam> plain;
    for (const float w : shard.master) plain.push_back({w});
    for (int t = 1; t <= 20; ++t) {
      OptimizerStep step = step_of(t, 0.5 / t);
      step.momentum = 0.25;  // a schedule's momentum, which the group ignores too
      apply(*optimizer, step, shard, group);
      for (std::size_t i = 0; i < plain.size(); ++i) {
        plain[i].update(shard.gradient[i], t, 0.03, own, true, own.beta1);
      }
    }
    // The bound is the one above.
    for (std::size_t i = 0; i < plain.size(); ++i) {
      EXPECT_NEAR(shard.master[i], plain[i].w, 1e-5) << "element " << i << " decoupled " << decoupled;
    }
  }
}

TEST_F(OptimizerTest, AGroupsOwnValuesAreChecked) {
  const auto adam = make_adam({});
  const auto sgd = make_sgd({});
  GroupOptions group;
  EXPECT_NO_THROW(sgd->check_group(group));
  group.weight_decay = 0.1;
  group.learning_rate = 0.1;
  EXPECT_NO_THROW(sgd->check_group(group));
  group.betas = {0.5, 1};
  EXPECT_THAT(message_of<InvalidArgument>([&] { adam->check_group(group); }),
              HasSubstr("AdamW: betas are [0.5, 1]"));
  EXPECT_THAT(message_of<InvalidArgument>([&] { sgd->check_group(group); }),
              HasSubstr("SGD: a parameter group sets betas, which SGD has not"));
  group.betas.reset();
  group.weight_decay = -1;
  EXPECT_THAT(message_of<InvalidArgument>([&] { sgd->check_group(group); }),
              HasSubstr("SGD: weight_decay is -1"));
}

TEST_F(OptimizerTest, BiasCorrectionBelongsToTheBetaThatTheKernelUses) {
  // 1 - 0.999999 is 1e-6, but for the nearest float it is 1.0133e-6, so a correction from the rounded beta
  // would be wrong by more than a percent. With beta1 = 0 the first step from v = 0 must move by the rate for
  // every beta2.
  for (const double beta2 : {0.5, 0.99, 0.999, 0.99999, 0.999999}) {
    const auto optimizer = make_adam({.beta1 = 0, .beta2 = beta2, .epsilon = 0});
    Shard shard(1, 2);
    shard.gradient = {0.5f};
    shard.master = {0.0f};
    apply(*optimizer, step_of(1, 1.0), shard);
    EXPECT_NEAR(shard.master[0], -1, 3e-7) << beta2;  // a few roundings of fp32
  }
}

TEST_F(OptimizerTest, AScheduleMayReplaceBeta1) {
  // With beta1 = 0 the moment is the gradient itself, without a correction.
  const auto optimizer = make_adam({});
  Shard shard(1, 2);
  shard.gradient = {0.5f};
  shard.state[0] = {77.0f};
  OptimizerStep step = step_of(5, 0.1);
  step.momentum = 0;
  apply(*optimizer, step, shard);
  EXPECT_EQ(shard.state[0][0], 0.5f);
}

TEST_F(OptimizerTest, AMaskedStepChangesNothing) {
  for (const auto& optimizer : every_optimizer()) {
    Shard shard(7, optimizer->state({}).size());
    for (float& g : shard.gradient) g = std::numeric_limits<float>::quiet_NaN();
    for (auto& tensor : shard.state) tensor.assign(7, 0.5f);
    const Shard before = shard;
    OptimizerStep step = step_of(3, 0.1);
    step.apply = false;
    apply(*optimizer, step, shard);
    EXPECT_EQ(shard.master, before.master) << optimizer->name();
    EXPECT_EQ(shard.state, before.state) << optimizer->name();
  }
}

TEST_F(OptimizerTest, WritesTheComputeDtypeWeight) {
  const auto optimizer = make_sgd({});
  Shard shard(3, 0);
  std::vector<bfloat16> weight(3);
  UpdateRange range = shard.range();
  range.weight = {weight.data(), DataType::bfloat16, Shape{3}};
  apply(*optimizer, step_of(1, 0.1), range);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(weight[i], to_bfloat16(shard.master[i])) << i;
}

TEST_F(OptimizerTest, MomentsMayBeKeptInBf16) {
  const auto optimizer = make_adam({.moment_dtype = DataType::bfloat16});
  for (const OptimizerStateTensor& tensor : optimizer->state({})) EXPECT_EQ(tensor.dtype, DataType::bfloat16);
  Shard shard(1, 0);
  shard.gradient = {0.5f};
  std::vector<bfloat16> moments(2);
  UpdateRange range = shard.range();
  range.state = {{&moments[0], DataType::bfloat16, Shape{1}}, {&moments[1], DataType::bfloat16, Shape{1}}};
  apply(*optimizer, step_of(1, 0.1), range);
  EXPECT_EQ(moments[0], to_bfloat16((1 - 0.9f) * 0.5f));
}

TEST_F(OptimizerTest, SgdByHand) {
  // Powers of two make every figure exact: w = 1, g = 1/2, rate 1/2, momentum 1/2.
  const auto run = [&](const SgdOptions& options, int steps) {
    const auto optimizer = make_sgd(options);
    Shard shard(1, optimizer->state({}).size());
    shard.gradient = {0.5f};
    shard.master = {1.0f};
    for (int t = 1; t <= steps; ++t) apply(*optimizer, step_of(t, 0.5), shard);
    return shard.master[0];
  };
  EXPECT_EQ(run({}, 2), 0.5f);                                     // 1 - 1/4 - 1/4
  EXPECT_EQ(run({.momentum = 0.5}, 1), 0.75f);                     // b = 1/2
  EXPECT_EQ(run({.momentum = 0.5}, 2), 0.375f);                    // b = 1/4 + 1/2
  EXPECT_EQ(run({.momentum = 0.5, .nesterov = true}, 1), 0.625f);  // d = 1/2 + 1/4
  EXPECT_EQ(run({.momentum = 0.5, .dampening = 0.5}, 2), 0.5f);    // b = 1/2, then 1/4 + 1/4
  EXPECT_EQ(run({.weight_decay = 0.5}, 1), 0.5f);                  // g = 1/2 + 1/2
}

TEST_F(OptimizerTest, SgdHonoursItsGroup) {
  const auto optimizer = make_sgd({.weight_decay = 0.5});
  Shard shard(1, 0);
  shard.gradient = {0.5f};
  shard.master = {1.0f};
  apply(*optimizer, step_of(1, 0.5), shard, {.learning_rate_factor = 0.5, .decay = false});
  EXPECT_EQ(shard.master[0], 0.875f);  // 1 - 1/4 * 1/2
  shard.master = {1.0f};
  apply(*optimizer, step_of(1, 0.5), shard, {.learning_rate = 0.25, .weight_decay = 1});
  EXPECT_EQ(shard.master[0], 0.625f);  // 1 - 1/4 * (1/2 + 1)
}

TEST_F(OptimizerTest, NumbersAreReadWhenTheUpdateRuns) {
  for (const auto& optimizer : every_optimizer()) {
    Shard wanted(37, optimizer->state({}).size()), got = wanted;
    const std::unique_ptr<Stream> stream = device_->create_stream("update");
    const OptimizerStep step = step_of(3, 0.25);
    apply(*optimizer, step, wanted);
    std::promise<void> sent;
    std::vector<std::byte> numbers(optimizer->numbers(step, {}).size());
    const std::vector<TensorSegment> segments{{.count = 37}};
    UpdateRange range = got.range();
    range.numbers = numbers.data();
    range.segments = segments;
    stream->enqueue("wait", [arrived = sent.get_future().share()] { arrived.wait(); });
    optimizer->apply(*stream, step_of(9, 1), range);  // the step passed by value is ignored
    std::ranges::copy(optimizer->numbers(step, {}), numbers.begin());
    sent.set_value();
    stream->synchronize();
    EXPECT_EQ(got.master, wanted.master) << optimizer->name();
    EXPECT_EQ(got.state, wanted.state) << optimizer->name();
    EXPECT_NE(got.master, Shard(37, 0).master) << optimizer->name() << " did nothing";
  }
}

/// Three tensors in one range: one that decays, padding, one with a rate of its own, and one that does not
/// decay.
const std::vector<GroupOptions> three_groups{
    {}, {.learning_rate_factor = 0.5, .learning_rate = 0.5, .weight_decay = 0.25}, {.decay = false}};
const std::vector<TensorSegment> three_segments{{.first = 0, .count = 11, .first_element = 5, .group = 0},
                                                {.first = 16, .count = 1, .group = 1},
                                                {.first = 17, .count = 20, .group = 2}};

TEST_F(OptimizerTest, SegmentsOfARangeGiveTheBitsOfTheirParts) {
  for (const auto& optimizer : every_optimizer()) {
    Shard whole(40, optimizer->state({}).size()), parts = whole;
    const std::vector<float> start = whole.master;
    std::vector<bfloat16> weight(40), weight_of_parts(40);
    for (std::int64_t t = 1; t <= 3; ++t) {
      OptimizerStep step = step_of(t, 0.01);
      step.apply = t != 3;
      UpdateRange range = whole.range(), other = parts.range();
      range.weight = {weight.data(), DataType::bfloat16, Shape{40}};
      other.weight = {weight_of_parts.data(), DataType::bfloat16, Shape{40}};
      apply_to(device_->compute_stream(), *optimizer, step, range, three_segments, three_groups);
      for (const TensorSegment& segment : three_segments) {
        apply(*optimizer, step, other.part(segment), three_groups[static_cast<std::size_t>(segment.group)]);
      }
      EXPECT_EQ(whole.master, parts.master) << optimizer->name() << " step " << t;
      EXPECT_EQ(whole.state, parts.state) << optimizer->name() << " step " << t;
      EXPECT_EQ(weight, weight_of_parts) << optimizer->name() << " step " << t;
    }
    for (std::size_t i = 0; i < 40; ++i) {
      const bool padding = (i >= 11 && i < 16) || i >= 37;
      EXPECT_EQ(whole.master[i] == start[i], padding) << optimizer->name() << " element " << i;
      EXPECT_EQ(weight[i] == bfloat16{}, padding) << optimizer->name() << " element " << i;
    }
  }
}

TEST(UpdateRange, PartsAreTheSegmentsMemory) {
  Shard shard(40, 2);
  const UpdateRange range = shard.range();
  const UpdateRange part = range.part({.first = 16, .count = 3});
  EXPECT_EQ(part.gradient.data, &shard.gradient[16]);
  EXPECT_EQ(part.master.data, &shard.master[16]);
  EXPECT_EQ(part.state.at(1).data, &shard.state[1][16]);
  EXPECT_EQ(part.state.at(1).elements(), 3);
  EXPECT_EQ(part.weight.data, nullptr);
  EXPECT_TRUE(part.segments.empty());
}

TEST_F(OptimizerTest, DeclareTheirState) {
  const auto adam = make_adam({})->state({});
  ASSERT_EQ(adam.size(), 2U);
  EXPECT_EQ(adam[0].name, "exp_avg");
  EXPECT_EQ(adam[1].name, "exp_avg_sq");
  EXPECT_EQ(adam[0].dtype, DataType::float32);
  EXPECT_TRUE(make_sgd({})->state({}).empty());
  ASSERT_EQ(make_sgd({.momentum = 0.9})->state({}).size(), 1U);
  EXPECT_EQ(make_sgd({.momentum = 0.9})->state({})[0].name, "momentum_buffer");
  EXPECT_EQ(make_adam({})->sums({}), 0);
  EXPECT_FALSE(make_adam({})->needs_whole_matrices({}));
}

TEST_F(OptimizerTest, DescribeThemselves) {
  EXPECT_EQ(
      make_adam({.weight_decay = 0.1})->describe(),
      R"({"type": "AdamW", "betas": [0.9, 0.999], "eps": 1e-08, "weight_decay": 0.1, "amsgrad": false, )"
      R"("moments": "fp32"})");
  EXPECT_THAT(make_adam({.decoupled = false})->describe(), HasSubstr(R"("type": "Adam")"));
  EXPECT_EQ(make_sgd({.momentum = 0.5})->describe(),
            R"({"type": "SGD", "momentum": 0.5, "dampening": 0, "weight_decay": 0, "nesterov": false, )"
            R"("moments": "fp32"})");
}

TEST_F(OptimizerTest, RefuseWhatCannotBe) {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(message_of<InvalidArgument>([] { make_adam({.beta1 = 1}); }),
              HasSubstr("AdamW: betas are [1, 0.999]"));
  EXPECT_THAT(message_of<InvalidArgument>([] { make_adam({.beta2 = nan}); }), HasSubstr("[0.9, nan]"));
  EXPECT_THAT(message_of<InvalidArgument>([] { make_adam({.epsilon = -1}); }), HasSubstr("eps is -1"));
  EXPECT_THAT(message_of<InvalidArgument>([] { make_adam({.weight_decay = nan, .decoupled = false}); }),
              HasSubstr("Adam: weight_decay is nan"));
  EXPECT_THAT(message_of<InvalidArgument>([] { make_adam({.moment_dtype = DataType::float16}); }),
              HasSubstr("not fp16"));
  EXPECT_THAT(message_of<InvalidArgument>([] { make_sgd({.momentum = -0.5}); }),
              HasSubstr("momentum is -0.5"));
  EXPECT_THAT(message_of<InvalidArgument>([] { make_sgd({.dampening = nan}); }),
              HasSubstr("dampening is nan"));
  EXPECT_THAT(message_of<InvalidArgument>([] { make_sgd({.weight_decay = -1}); }),
              HasSubstr("weight_decay is -1"));
  EXPECT_THAT(message_of<InvalidArgument>([] { make_sgd({.nesterov = true}); }),
              HasSubstr("nesterov needs a momentum above 0"));
  EXPECT_THAT(
      message_of<InvalidArgument>([] { make_sgd({.momentum = 0.5, .dampening = 0.1, .nesterov = true}); }),
      HasSubstr("dampening of 0, not 0.5 and 0.1"));
  Shard shard(2, 1);
  EXPECT_THAT(message_of<InvalidArgument>([&] { apply(*make_adam({}), step_of(1, 0.1), shard); }),
              HasSubstr("AdamW: a range comes with 1 state tensors instead of 2"));
  EXPECT_THAT(message_of<InvalidArgument>([&] { apply(*make_sgd({}), step_of(1, 0.1), shard); }),
              HasSubstr("SGD: a range comes with 1 state tensors instead of 0"));
  Shard whole(2, 2);
  EXPECT_THAT(message_of<InvalidArgument>([&] { apply(*make_adam({}), step_of(0, 0.1), whole); }),
              HasSubstr("update number 0"));
}

}  // namespace
}  // namespace tranche::test
