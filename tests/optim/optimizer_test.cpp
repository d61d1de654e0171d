// The optimizers' own part: scalars of a step, groups, masks, state. The loops are tested with the kernels.
#include "tranche/optim/optimizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <memory>

#include "tranche/core/error.h"
#include "tranche/device/device.h"

namespace tranche {
namespace {

using testing::HasSubstr;

/// A stretch of `n` elements with all of its buffers.
struct Shard {
  explicit Shard(std::size_t n, std::size_t states)
      : gradient(n), master(n), state(states, std::vector<float>(n)) {
    for (std::size_t i = 0; i < n; ++i) {
      gradient[i] = 0.25f * static_cast<float>(i) - 1.0f;
      master[i] = 1.0f - 0.125f * static_cast<float>(i);
    }
  }
  ShardView view() {
    const Shape shape{static_cast<std::int64_t>(gradient.size())};
    ShardView view;
    view.gradient = {gradient.data(), DataType::float32, shape};
    view.master = {master.data(), DataType::float32, shape};
    for (auto& tensor : state) view.state.push_back({tensor.data(), DataType::float32, shape});
    view.weight = {nullptr, DataType::float32, shape};
    view.tensor = "wte.weight";
    view.tensor_elements = shape.elements();
    view.group.decay = true;
    return view;
  }
  std::vector<float> gradient, master;
  std::vector<std::vector<float>> state;
};

class OptimizerTest : public testing::Test {
 protected:
  void apply(const Optimizer& optimizer, const OptimizerStep& step, Shard& shard) {
    optimizer.apply(device_->compute_stream(), step, shard.view(), {});
    device_->compute_stream().synchronize();
  }
  std::unique_ptr<Device> device_ = make_device({});
};

OptimizerStep step_of(std::int64_t step, double rate) {
  OptimizerStep result;
  result.step = step;
  result.learning_rate = rate;
  return result;
}

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.message();
  }
  return "nothing was thrown";
}

/// One element in double, straight from the papers (bias-corrected moments, not the kernel's folded form).
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
  // After one step m / (1 - beta1) = g and v / (1 - beta2) = g^2, so the step is rate * sign(g) (epsilon 1e-8
  // aside). Decay of 0.5 at rate 0.1 takes 0.05 of the weight first.
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
      // An epsilon beside which roots of moments are small shows whether it is corrected as they are.
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
        ShardView view = shard.view();
        view.group = {.learning_rate_factor = 3, .decay = decay};
        optimizer->apply(device_->compute_stream(), step, view, {});
        for (std::size_t i = 0; i < plain.size(); ++i) {
          plain[i].update(0.5 * shard.gradient[i], t, 3 * 0.01 / t, options, decay, 0.8);
        }
      }
      device_->compute_stream().synchronize();
      // 20 updates with a handful of fp32 roundings each, on weights of order 1: 20 * 8 * 6e-8 = 1e-5.
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
      step.momentum = 0.25;  // a schedule's, which the group does not follow either
      ShardView view = shard.view();
      view.group = group;
      optimizer->apply(device_->compute_stream(), step, view, {});
      for (std::size_t i = 0; i < plain.size(); ++i) {
        plain[i].update(shard.gradient[i], t, 0.03, own, true, own.beta1);
      }
    }
    device_->compute_stream().synchronize();
    // As above.
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
  EXPECT_THAT(message_of([&] { adam->check_group(group); }), HasSubstr("AdamW: betas are [0.5, 1]"));
  EXPECT_THAT(message_of([&] { sgd->check_group(group); }),
              HasSubstr("SGD: a parameter group sets betas, which SGD has not"));
  group.betas.reset();
  group.weight_decay = -1;
  EXPECT_THAT(message_of([&] { sgd->check_group(group); }), HasSubstr("SGD: weight_decay is -1"));
}

TEST_F(OptimizerTest, BiasCorrectionBelongsToTheBetaThatTheKernelUses) {
  // 1 - 0.999999 is 1e-6, but 1.0133e-6 for the nearest float: a correction from the unrounded beta would be
  // off by more than a percent. With beta1 = 0 the first step from v = 0 must move by the rate whatever beta2
  // is.
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
  // beta1 = 0: the moment is the gradient itself, and no correction remains.
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
  for (const auto& optimizer : {make_adam({.weight_decay = 0.1}), make_sgd({.momentum = 0.9})}) {
    Shard shard(7, optimizer->state().size());
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
  ShardView view = shard.view();
  view.weight = {weight.data(), DataType::bfloat16, Shape{3}};
  optimizer->apply(device_->compute_stream(), step_of(1, 0.1), view, {});
  device_->compute_stream().synchronize();
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(weight[i], to_bfloat16(shard.master[i])) << i;
}

TEST_F(OptimizerTest, MomentsMayBeKeptInBf16) {
  const auto optimizer = make_adam({.moment_dtype = DataType::bfloat16});
  for (const OptimizerStateTensor& tensor : optimizer->state()) EXPECT_EQ(tensor.dtype, DataType::bfloat16);
  Shard shard(1, 0);
  shard.gradient = {0.5f};
  std::vector<bfloat16> moments(2);
  ShardView view = shard.view();
  view.state = {{&moments[0], DataType::bfloat16, Shape{1}}, {&moments[1], DataType::bfloat16, Shape{1}}};
  optimizer->apply(device_->compute_stream(), step_of(1, 0.1), view, {});
  device_->compute_stream().synchronize();
  EXPECT_EQ(moments[0], to_bfloat16((1 - 0.9f) * 0.5f));
}

TEST_F(OptimizerTest, SgdByHand) {
  // Powers of two, so every figure is exact: w = 1, g = 1/2, rate 1/2, momentum 1/2.
  const auto run = [&](const SgdOptions& options, int steps) {
    const auto optimizer = make_sgd(options);
    Shard shard(1, optimizer->state().size());
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
  ShardView view = shard.view();
  view.group = {.learning_rate_factor = 0.5, .decay = false};
  optimizer->apply(device_->compute_stream(), step_of(1, 0.5), view, {});
  device_->compute_stream().synchronize();
  EXPECT_EQ(shard.master[0], 0.875f);  // 1 - 1/4 * 1/2
  view.group = {};
  view.group.learning_rate = 0.25;
  view.group.weight_decay = 1;
  shard.master = {1.0f};
  optimizer->apply(device_->compute_stream(), step_of(1, 0.5), view, {});
  device_->compute_stream().synchronize();
  EXPECT_EQ(shard.master[0], 0.625f);  // 1 - 1/4 * (1/2 + 1)
}

TEST_F(OptimizerTest, ArgumentsInDeviceMemoryGiveTheSameBits) {
  AdamOptions adam;
  adam.weight_decay = 0.1;
  SgdOptions sgd;
  sgd.momentum = 0.9;
  sgd.weight_decay = 0.01;
  SgdOptions plain;
  const std::unique_ptr<Optimizer> optimizers[] = {make_adam(adam), make_sgd(sgd), make_sgd(plain)};
  for (const auto& optimizer : optimizers) {
    Shard by_value(37, optimizer->state().size()), by_address(37, optimizer->state().size());
    std::vector<std::byte> arguments(static_cast<std::size_t>(optimizer->argument_bytes()));
    ASSERT_GT(arguments.size(), 0u) << optimizer->name();
    for (std::int64_t t = 1; t <= 3; ++t) {
      OptimizerStep step = step_of(t, 0.01 * static_cast<double>(t));
      step.momentum = t == 2 ? 0.5 : -1;  // a schedule's
      step.gradient_scale = 0.25f;
      step.apply = t != 3;
      ShardView view = by_value.view(), other = by_address.view();
      view.group = other.group = {0.5, t == 1};
      optimizer->apply(device_->compute_stream(), step, view, {});
      optimizer->write_arguments(step, other.group, arguments.data());
      optimizer->apply_with(device_->compute_stream(), arguments.data(), other);
      EXPECT_EQ(by_value.master, by_address.master) << optimizer->name() << " step " << t;
      EXPECT_EQ(by_value.state, by_address.state) << optimizer->name() << " step " << t;
    }
    EXPECT_NE(by_value.master, Shard(37, 0).master) << optimizer->name() << " did nothing";
  }
}

/// Three tensors of one stretch: one that decays, padding, one with a rate of its own, one that does not
/// decay.
std::vector<OptimizerSegment> three_segments() {
  return {{.first = 0,
           .count = 11,
           .group = {},
           .tensor = "wte.weight",
           .first_element = 5,
           .tensor_elements = 16},
          {.first = 16,
           .count = 1,
           .group = {.learning_rate_factor = 0.5, .learning_rate = 0.5, .weight_decay = 0.25},
           .tensor = "head",
           .tensor_elements = 1},
          {.first = 17, .count = 20, .group = {.decay = false}, .tensor = "norm", .tensor_elements = 20}};
}

TEST_F(OptimizerTest, SegmentsOfAStretchGiveTheBitsOfTheirPieces) {
  for (const auto& optimizer :
       {make_adam({.weight_decay = 0.1}), make_sgd({.momentum = 0.9, .weight_decay = 0.1}),
        make_sgd({.weight_decay = 0.1})}) {
    Shard whole(40, optimizer->state().size()), pieces = whole;
    const std::vector<float> start = whole.master;
    std::vector<bfloat16> weight(40), weight_of_pieces(40);
    for (std::int64_t t = 1; t <= 3; ++t) {
      OptimizerStep step = step_of(t, 0.01);
      step.apply = t != 3;
      ShardView stretch = whole.view(), view = pieces.view();
      stretch.weight = {weight.data(), DataType::bfloat16, Shape{40}};
      view.weight = {weight_of_pieces.data(), DataType::bfloat16, Shape{40}};
      EXPECT_TRUE(optimizer->apply_segments(device_->compute_stream(), step, stretch, three_segments()));
      EXPECT_FALSE(
          optimizer->Optimizer::apply_segments(device_->compute_stream(), step, view, three_segments()));
      device_->compute_stream().synchronize();
      EXPECT_EQ(whole.master, pieces.master) << optimizer->name() << " step " << t;
      EXPECT_EQ(whole.state, pieces.state) << optimizer->name() << " step " << t;
      EXPECT_EQ(weight, weight_of_pieces) << optimizer->name() << " step " << t;
    }
    for (std::size_t i = 0; i < 40; ++i) {
      const bool padding = (i >= 11 && i < 16) || i >= 37;
      EXPECT_EQ(whole.master[i] == start[i], padding) << optimizer->name() << " element " << i;
      EXPECT_EQ(weight[i] == bfloat16{}, padding) << optimizer->name() << " element " << i;
    }
  }
}

/// A user's rule: sets weights to their tensor's statistic, and remembers what it was asked.
class Recorder final : public Optimizer {
 public:
  std::string name() const override { return "recorder"; }
  std::vector<OptimizerStateTensor> state() const override { return {{"a", DataType::float32, 0}}; }
  int statistics_per_tensor() const override { return 1; }
  void apply(Stream&, const OptimizerStep&, const ShardView& shard,
             std::span<const double> reduced) const override {
    asked.push_back(std::string(shard.tensor) + " " + std::to_string(shard.first_element) + " of " +
                    std::to_string(shard.tensor_elements) + (shard.weight.data == nullptr ? "" : " weight") +
                    (shard.group.decay ? " decay" : ""));
    for (std::int64_t i = 0; i < shard.master.elements(); ++i) {
      shard.master.as<float>()[i] = static_cast<float>(reduced[0]);
      shard.state.at(0).as<float>()[i] = shard.gradient.as<float>()[i];
    }
  }
  std::string describe() const override { return "{}"; }
  mutable std::vector<std::string> asked;
};

TEST_F(OptimizerTest, ARuleWithoutSegmentsOfItsOwnIsAppliedPieceByPiece) {
  const Recorder recorder;
  Shard shard(40, 1);
  const Shard before = shard;
  const double statistics[] = {101, 102, 103};
  auto segments = three_segments();
  for (std::size_t i = 0; i < 3; ++i) segments[i].reduced = std::span(&statistics[i], 1);
  EXPECT_FALSE(recorder.apply_segments(device_->compute_stream(), step_of(1, 0.1), shard.view(), segments));
  EXPECT_EQ(recorder.asked,
            (std::vector<std::string>{"wte.weight 5 of 16 decay", "head 0 of 1 decay", "norm 0 of 20"}));
  for (std::size_t i = 0; i < 40; ++i) {
    const bool padding = (i >= 11 && i < 16) || i >= 37;
    const float statistic = i < 11 ? 101.0f : i < 17 ? 102.0f : 103.0f;
    const float wanted = padding ? before.master[i] : statistic;
    EXPECT_EQ(shard.master[i], wanted) << i;
    EXPECT_EQ(shard.state[0][i], padding ? 0.0f : before.gradient[i]) << i;
  }
}

TEST_F(OptimizerTest, SegmentsThatCannotBeAreRefusedByTensor) {
  const auto refused = [&](const Optimizer& optimizer, std::size_t states, auto change) {
    Shard shard(40, states);
    auto segments = three_segments();
    change(segments);
    return message_of([&] {
      optimizer.apply_segments(device_->compute_stream(), step_of(1, 0.1), shard.view(), segments);
    });
  };
  const auto overlap = [](auto& segments) { segments[2].first = 16; };
  const auto beyond = [](auto& segments) { segments[2].count = 24; };
  const std::string wanted =
      "the segment of tensor 'norm' from element 16 with 20 elements does not lie between element 17, where "
      "the "
      "one before it ends, and 40, the end of the stretch; pass segments in ascending order";
  EXPECT_EQ(refused(*make_adam({}), 2, overlap), "AdamW: " + wanted);
  EXPECT_EQ(refused(*make_sgd({}), 0, overlap), "SGD: " + wanted);
  EXPECT_EQ(refused(Recorder{}, 1, overlap), "recorder: " + wanted);
  EXPECT_THAT(refused(*make_adam({}), 2, beyond), HasSubstr("from element 17 with 24 elements"));
  EXPECT_THAT(refused(*make_adam({}), 1, [](auto&) {}), HasSubstr("1 state tensors instead of 2"));
}

TEST_F(OptimizerTest, DeclareTheirState) {
  const auto adam = make_adam({})->state();
  ASSERT_EQ(adam.size(), 2U);
  EXPECT_EQ(adam[0].name, "exp_avg");
  EXPECT_EQ(adam[1].name, "exp_avg_sq");
  EXPECT_EQ(adam[0].dtype, DataType::float32);
  EXPECT_TRUE(make_sgd({})->state().empty());
  ASSERT_EQ(make_sgd({.momentum = 0.9})->state().size(), 1U);
  EXPECT_EQ(make_sgd({.momentum = 0.9})->state()[0].name, "momentum_buffer");
  EXPECT_EQ(make_adam({})->statistics_per_tensor(), 0);
}

TEST_F(OptimizerTest, DescribeThemselves) {
  EXPECT_EQ(
      make_adam({.weight_decay = 0.1})->describe(),
      R"({"type": "AdamW", "betas": [0.9, 0.999], "eps": 1e-08, "weight_decay": 0.1, "moments": "fp32"})");
  EXPECT_THAT(make_adam({.decoupled = false})->describe(), HasSubstr(R"("type": "Adam")"));
  EXPECT_EQ(make_sgd({.momentum = 0.5})->describe(),
            R"({"type": "SGD", "momentum": 0.5, "dampening": 0, "weight_decay": 0, "nesterov": false})");
}

TEST_F(OptimizerTest, RefuseWhatCannotBe) {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(message_of([] { make_adam({.beta1 = 1}); }), HasSubstr("AdamW: betas are [1, 0.999]"));
  EXPECT_THAT(message_of([] { make_adam({.beta2 = nan}); }), HasSubstr("[0.9, nan]"));
  EXPECT_THAT(message_of([] { make_adam({.epsilon = -1}); }), HasSubstr("eps is -1"));
  EXPECT_THAT(message_of([] { make_adam({.weight_decay = nan, .decoupled = false}); }),
              HasSubstr("Adam: weight_decay is nan"));
  EXPECT_THAT(message_of([] { make_adam({.moment_dtype = DataType::float16}); }), HasSubstr("not fp16"));
  EXPECT_THAT(message_of([] { make_sgd({.momentum = -0.5}); }), HasSubstr("momentum is -0.5"));
  EXPECT_THAT(message_of([] { make_sgd({.dampening = nan}); }), HasSubstr("dampening is nan"));
  EXPECT_THAT(message_of([] { make_sgd({.weight_decay = -1}); }), HasSubstr("weight_decay is -1"));
  EXPECT_THAT(message_of([] { make_sgd({.nesterov = true}); }),
              HasSubstr("nesterov needs a momentum above 0"));
  EXPECT_THAT(message_of([] { make_sgd({.momentum = 0.5, .dampening = 0.1, .nesterov = true}); }),
              HasSubstr("dampening of 0, not 0.5 and 0.1"));
  Shard shard(2, 1);
  EXPECT_THAT(message_of([&] { apply(*make_adam({}), step_of(1, 0.1), shard); }),
              HasSubstr("'wte.weight' comes with 1 state tensors instead of 2"));
  EXPECT_THAT(message_of([&] { apply(*make_sgd({}), step_of(1, 0.1), shard); }),
              HasSubstr("'wte.weight' comes with 1 state tensors instead of 0"));
  Shard whole(2, 2);
  EXPECT_THAT(message_of([&] { apply(*make_adam({}), step_of(0, 0.1), whole); }),
              HasSubstr("update number 0"));
}

}  // namespace
}  // namespace tranche
