// Compares Muon with torch.optim.Muon, and tests its routes, rates and refusals;
// kernels/newton_schulz_test.cpp tests the iterations.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "optimizer_testing.h"
#include "tests/core/error_text.h"
#include "tests/optim/golden_muon.h"
#include "tranche/kernels/newton_schulz.h"
#include "tranche/optim/rules.h"

namespace tranche::test {
namespace {

TrainableTensor hidden(Shape shape, int matrices = 1, bool outputs_first = true) {
  TrainableTensor tensor{"hidden", shape, {}};
  tensor.matrices = matrices;
  tensor.outputs_first = outputs_first;
  return tensor;
}

/// The matrices of scripts/muon_goldens.py, updated with the script's numbers in place of the orthogonal
/// factors.
class GoldenRun {
 public:
  explicit GoldenRun(const Optimizer& optimizer) : optimizer_(optimizer) {
    for (std::uint64_t t = 0; t < 2; ++t) {
      for (const double w : draw(1000 + t, tensors_[t].shape.elements())) {
        weights.push_back(static_cast<float>(0.5 * w));
      }
    }
    momentum.resize(weights.size());
    message_.resize(weights.size());
    scratch_.resize(weights.size());
  }

  /// `factors`: the factors by which adjust_lr_fn changes the rates of both matrices.
  void step(Stream& stream, int number, const std::array<int, 2>& factors) {
    OptimizerStep step = step_of(number, 0.01);
    step.gradient_scale = 0.125f;
    const std::vector<std::byte> numbers = optimizer_.numbers(step, {});
    std::size_t first = 0;
    for (std::size_t t = 0; t < 2; ++t) {
      const std::int64_t count = tensors_[t].shape.elements();
      std::vector<float> gradient;
      for (const double g : draw(100000 + 100 * static_cast<std::uint64_t>(number) + t, count)) {
        gradient.push_back(static_cast<float>(8 * g * std::ldexp(1.0, number % 3)));
      }
      const Shape shape{count};
      TensorSegment segment;
      segment.count = count;
      segment.tensor = &tensors_[t];
      UpdateRange range;
      range.gradient = {gradient.data(), DataType::float32, shape};
      range.master = {weights.data() + first, DataType::float32, shape};
      range.state = {{momentum.data() + first, DataType::float32, shape}};
      range.weight = {nullptr, DataType::float32, shape};
      range.numbers = numbers.data();
      range.numbers_stride = static_cast<std::int64_t>(numbers.size());
      range.segments = {&segment, 1};
      range.message = {message_.data() + first, DataType::bfloat16, shape};
      range.scratch = {scratch_.data() + first, DataType::float32, shape};
      optimizer_.prepare(stream, step, range);
      stream.synchronize();
      for (std::int64_t i = 0; i < count; ++i) {
        orthogonalized.resize(weights.size());
        orthogonalized[first + static_cast<std::size_t>(i)] =
            to_float(message_[first + static_cast<std::size_t>(i)]);
      }
      const std::vector<double> o = draw(500000 + 100 * static_cast<std::uint64_t>(number) + t, count);
      for (std::int64_t i = 0; i < count; ++i) {
        const double value = factors[t] * std::floor(8 * o[static_cast<std::size_t>(i)]) / 8;
        message_[first + static_cast<std::size_t>(i)] = to_bfloat16(static_cast<float>(value));
      }
      optimizer_.apply(stream, step, range);
      stream.synchronize();
      first += static_cast<std::size_t>(count);
    }
  }

  std::vector<float> weights, momentum, orthogonalized;

 private:
  const Optimizer& optimizer_;
  TrainableTensor tensors_[2] = {hidden({100, 4}), hidden({25, 25})};
  std::vector<bfloat16> message_;
  std::vector<float> scratch_;
};

void expect_near(const std::vector<float>& got, const std::vector<float>& wanted, double relative,
                 const std::string& what) {
  ASSERT_EQ(got.size(), wanted.size());
  float largest = 0;
  for (const float value : wanted) largest = std::max(largest, std::abs(value));
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(got[i], wanted[i], relative * static_cast<double>(largest)) << what << ", element " << i;
  }
}

TEST(Muon, FollowsTorchWithTheFactorReplaced) {
  const auto device = make_device({});
  const RuleParameters parameters[] = {{{"weight_decay", 0.1}}, {{"momentum", 0.9}, {"nesterov", 0}}};
  const std::array<int, 2> factors[] = {{2, 1}, {5, 1}};
  ASSERT_EQ(golden_muon().size(), std::size(parameters));
  for (std::size_t i = 0; i < std::size(parameters); ++i) {
    const GoldenMuon& golden = golden_muon()[i];
    const auto optimizer = make_rule_optimizer("Muon", parameters[i]);
    GoldenRun run(*optimizer);
    for (int step = 1; step <= 20; ++step) run.step(device->compute_stream(), step, factors[i]);
    expect_near(run.weights, golden.weights, 1e-5, std::string(golden.name) + " weights");
    expect_near(run.momentum, golden.momentum, 1e-5, std::string(golden.name) + " momentum");
    // Messages are rounded to bf16.
    expect_near(run.orthogonalized, golden.orthogonalized, 0x1p-8, std::string(golden.name) + " message");
  }
}

/// The result of whole() for a tensor of drawn numbers.
std::vector<float> whole(const Optimizer& optimizer, const TrainableTensor& tensor) {
  const auto device = make_device({});
  std::vector<float> values;
  for (const double v : draw(7, tensor.shape.elements())) values.push_back(static_cast<float>(v));
  std::vector<double> scratch(static_cast<std::size_t>(optimizer.whole_work(tensor).scratch_bytes / 8 + 8));
  optimizer.whole(device->compute_stream(), step_of(1, 0.1), tensor,
                  {values.data(), DataType::float32, Shape{tensor.shape.elements()}},
                  {scratch.data(), static_cast<std::int64_t>(8 * scratch.size())});
  device->compute_stream().synchronize();
  return values;
}

double root_mean_square(const std::vector<float>& values) {
  double squares = 0;
  for (const float value : values) squares += static_cast<double>(value) * static_cast<double>(value);
  return std::sqrt(squares / static_cast<double>(values.size()));
}

TEST(Muon, ScalesTheFactorByShapeAndSideOfTheOutputs) {
  const auto matched = make_rule_optimizer("Muon", {});
  const auto original = make_rule_optimizer("Muon", {{"adjust_lr_fn", 1}});
  // An orthogonal factor of [m, n] has a root mean square of 1 / sqrt(max(m, n)), up to the error of the
  // steps.
  for (const Shape& shape : {Shape{16, 64}, Shape{64, 16}, Shape{32, 32}}) {
    EXPECT_NEAR(root_mean_square(whole(*matched, hidden(shape))), 0.2, 0.03) << shape.to_string();
    for (const bool outputs_first : {true, false}) {
      const auto outputs = static_cast<double>(shape[outputs_first ? 0 : 1]);
      const auto inputs = static_cast<double>(shape[outputs_first ? 1 : 0]);
      const double wanted = std::sqrt(std::max(1.0, outputs / inputs)) / std::sqrt(std::max(outputs, inputs));
      EXPECT_NEAR(root_mean_square(whole(*original, hidden(shape, 1, outputs_first))), wanted, 0.15 * wanted)
          << shape.to_string() << " " << outputs_first;
    }
  }
}

TEST(Muon, SplitsFusedMatricesAlongTheirOutputs) {
  for (const auto& parameters :
       {RuleParameters{}, RuleParameters{{"ns_coefficients", 1}, {"adjust_lr_fn", 1}, {"ns_steps", 7}}}) {
    const auto optimizer = make_rule_optimizer("Muon", parameters);
    // In [in, out], as in GPT-2's c_attn, the matrices are columns; in [out, in] they are consecutive rows.
    const std::vector<float> columns = whole(*optimizer, hidden({12, 36}, 3, false));
    const std::vector<float> one = whole(*optimizer, hidden({12, 36}, 1, false));
    EXPECT_NE(columns, one);
    const std::vector<float> rows = whole(*optimizer, hidden({36, 12}, 3, true));
    const std::vector<float> first = whole(*optimizer, hidden({12, 12}, 1, true));
    EXPECT_EQ(std::vector<float>(rows.begin(), rows.begin() + 144), first);
    EXPECT_EQ(optimizer->whole_work(hidden({12, 36}, 3, false)).operations,
              3 * optimizer->whole_work(hidden({12, 12})).operations);
  }
}

TEST(Muon, SaysWhatItDoesWithWhichTensors) {
  const auto optimizer = make_rule_optimizer("Muon", {});
  const TrainableTensor vector{"bias", Shape{4}, {}}, table{"table", Shape{50, 4}, {}};
  const TrainableTensor tensors[] = {vector, hidden({4, 12}, 3, false), table, hidden({4, 4})};
  EXPECT_EQ(optimizer->routing(tensors),
            "Muon 2 tensors of 4 matrices (64 elements), AdamW 2 tensors (204 elements)");
  EXPECT_EQ(message_of<InvalidArgument>([&] {
              (void)optimizer->routing({tensors, 1});
            }),
            "Muon: the model marks none of its trained tensors as a hidden matrix (TensorSpec::matrices), so "
            "AdamW would update all of them; choose AdamW, or mark the matrices");
  EXPECT_TRUE(optimizer->needs_whole_matrices(tensors[1]));
  EXPECT_FALSE(optimizer->needs_whole_matrices(table));
  EXPECT_EQ(optimizer->state(tensors[1]).size(), 1U);
  EXPECT_EQ(optimizer->state(table).size(), 2U);
  EXPECT_EQ(make_rule_optimizer("muon", {{"adam_lr", 0.01}})->describe(),
            R"({"type": "Muon", "momentum": 0.95, "nesterov": true, "weight_decay": 0, "ns_steps": 5, )"
            R"("ns_coefficients": "polar_express", "adjust_lr_fn": "match_rms_adamw", "muon_lr": null, )"
            R"("adam_lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-08, "moments": "fp32"})");
}

TEST(Muon, NamesItselfWhereAGroupsOptionsAreRefused) {
  const auto optimizer = make_rule_optimizer("Muon", {});
  GroupOptions group;
  group.betas = std::array<double, 2>{1.5, 0.9};
  const std::string text = message_of<InvalidArgument>([&] { optimizer->check_group(group); });
  EXPECT_TRUE(text.starts_with("Muon: ")) << text;
  EXPECT_EQ(text.find("AdamW"), std::string::npos) << text;
  group.betas = std::array<double, 2>{0.8, 0.9};
  EXPECT_NO_THROW(optimizer->check_group(group));
}

/// One step of AdamW from zero moments moves each weight by the rate.
TEST(Muon, HasARateOfItsOwnForAdamW) {
  const auto device = make_device({});
  const auto optimizer = make_rule_optimizer("Muon", {{"adam_lr", 0.005}}, DataType::float32, 0.02);
  OptimizerStep step = step_of(1, 0.01);  // half of lr, as under a schedule
  const std::vector<std::byte> numbers = optimizer->numbers(step, {});
  const TrainableTensor vector{"bias", Shape{1}, {}};
  TensorSegment segment;
  segment.count = 1;
  segment.tensor = &vector;
  float weight = 1, gradient = 3, moments[2] = {};
  UpdateRange range;
  range.gradient = {&gradient, DataType::float32, Shape{1}};
  range.master = {&weight, DataType::float32, Shape{1}};
  for (float& moment : moments) range.state.push_back({&moment, DataType::float32, Shape{1}});
  range.weight = {nullptr, DataType::float32, Shape{1}};
  range.numbers = numbers.data();
  range.numbers_stride = static_cast<std::int64_t>(numbers.size());
  range.segments = {&segment, 1};
  optimizer->apply(device->compute_stream(), step, range);
  device->compute_stream().synchronize();
  EXPECT_NEAR(weight, 1 - 0.0025, 1e-7);
}

TEST(Muon, RefusesWhatIsOutOfRange) {
  const auto refusal = [](const RuleParameters& parameters, double rate = 0.1,
                          DataType moments = DataType::float32) {
    return message_of<InvalidArgument>([&] { (void)make_rule_optimizer("Muon", parameters, moments, rate); });
  };
  EXPECT_EQ(refusal({{"ns_steps", 2.5}}), "Muon: ns_steps is 2.5; it must be a whole number from 1 to 100");
  EXPECT_EQ(refusal({{"ns_steps", 0}}), "Muon: ns_steps is 0; it must be a whole number from 1 to 100");
  EXPECT_EQ(refusal({{"adjust_lr_fn", 2}}), "Muon: adjust_lr_fn is choice 2 of 2");
  EXPECT_EQ(refusal({{"muon_lr", 0.1}}, 0),
            "Muon: muon_lr is taken relative to lr, which schedules set, so lr has to be above 0, not 0");
  EXPECT_EQ(refusal({}, 0.1, DataType::float16),
            "Muon: moments can be kept in fp32, bf16 or block8, not fp16");
}

}  // namespace
}  // namespace tranche::test
