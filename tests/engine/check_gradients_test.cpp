// Compares gradients with finite differences: for correct models, and for each kind of mistake.

#include "tranche/engine/check_gradients.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "device/cuda_probe.h"
#include "on_ranks.h"
#include "tests/core/rounds.h"

namespace tranche::test {
namespace {

using ::testing::HasSubstr;

/// The result on rank 0 of a check of the odd model, whose gradients are correct; it is equal on all ranks.
GradientCheck check_of(const OddRun& run, const GradientCheckOptions& options = {.elements = 4}) {
  GradientCheck result;
  std::vector<std::string> texts(static_cast<std::size_t>(run.ranks));
  on_ranks(
      run,
      [&](Engine& engine, Runtime& runtime) {
        const kernels::Digest before = engine.state_digest();
        GradientCheck mine = check_gradients(
            engine, [&] { whole_step(engine, runtime, 0); }, options);
        EXPECT_EQ(engine.state_digest(), before) << "weights and moments are as before";
        EXPECT_EQ(engine.applied_steps(), 0);
        texts[static_cast<std::size_t>(runtime.rank())] = mine.text();
        if (runtime.rank() == 0) result = std::move(mine);
      },
      [&](Config&, RuntimeOptions& made) { made.device = run.device; });
  for (const std::string& text : texts) EXPECT_EQ(text, texts[0]);
  return result;
}

#ifdef TRANCHE_ENGINE_TESTS_ON_GPU

TEST(CheckGradients, PassesAModelThatIsRightOnAGpu) {
  const detail::CudaProbe probe = detail::probe_cuda();
  if (probe.devices.empty()) GTEST_SKIP() << probe.problem;
  OddRun run;
  run.device = DeviceKind::cuda;
  run.stage = 3;
  run.single_unit = true;
  run.frozen = false;
  const GradientCheck check = check_of(run, {.elements = 1});  // one element, because each pass takes long on
                                                               // an emulated GPU
  EXPECT_TRUE(check.passed()) << check.text();
  EXPECT_THAT(check.text(), HasSubstr("tied.a [7]: 1 of 7 elements, worst ["));
}

#else

TEST(CheckGradients, PassesAModelThatIsRightAtEveryStage) {
  // The model has tied (used twice), frozen and tiny tensors; the run has two micro-batches and two ranks.
  OddRun run;
  run.ranks = 2;
  run.accumulation = 2;
  for (const int stage : {0, 3}) {
    if (!sampled(stage, 2)) continue;
    run.stage = stage;
    const GradientCheck check = check_of(run);
    EXPECT_TRUE(check.passed()) << check.text();
    ASSERT_EQ(check.tensors.size(), 8u);
    EXPECT_THAT(check.text(), ::testing::AllOf(HasSubstr("unit tied\n  tied.a [7]: "),
                                               HasSubstr("mixed.frozen [131]: frozen"),
                                               HasSubstr("all gradients agree\n")));
    for (const TensorCheck& tensor : check.tensors) {
      EXPECT_LT(tensor.error, 1e-3) << tensor.tensor;
      EXPECT_EQ(tensor.frozen, tensor.tensor == odd_frozen_tensor);
    }
  }
}

/// Mistakes that the backward of the network below can make.
enum class Mistake {
  none,
  scale,
  twice,
  mean,
  sign,
  term,
  transposed,
  element,
  bias,
  forgotten,
  other_batch,
  step
};

/// Half the squares of w (tanh(x A + a) B) - t, with rows of five numbers and a square B.
class Network {
 public:
  static constexpr std::int64_t rows = 12, inputs = 3, width = 5;
  static ModelSpec spec() {
    ModelSpec model;
    model.add_unit({"first",
                    {{"first.weight", {inputs, width}, Initializer::normal(1)},
                     {"first.bias", {width}, Initializer::normal(0.5f)}}});
    model.add_unit({"second",
                    {{"second.weight", {width, width}, Initializer::normal(0.5f)},
                     {"second.head", {width}, Initializer::normal(1)},
                     {"second.bias", {1}, Initializer::constant(0.25f)}}});
    return model;
  }

  void micro_batch(Engine& engine, Mistake mistake) {
    engine.begin_micro_batch();
    ++calls_;
    double loss = 0;
    float hidden[rows][width], d_hidden[rows][width] = {}, x[rows][inputs];
    {
      const GatheredUnit unit = engine.gather({0});
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t i = 0; i < inputs; ++i) {
          const auto draw = static_cast<std::uint64_t>(r * inputs + i);
          x[r][i] = random_normal({.seed = mistake == Mistake::other_batch ? calls_ : 1}, draw);
        }
        for (std::int64_t j = 0; j < width; ++j) {
          float sum = unit.tensor(1).as<float>()[j];
          for (std::int64_t i = 0; i < inputs; ++i)
            sum += x[r][i] * unit.tensor(0).as<float>()[i * width + j];
          hidden[r][j] = std::tanh(sum);
        }
      }
    }
    const float scale = mistake == Mistake::scale ? 1
                        : mistake == Mistake::twice
                            ? engine.loss_gradient_scale() * engine.loss_gradient_scale()
                        : mistake == Mistake::mean ? engine.loss_gradient_scale() / rows
                                                   : engine.loss_gradient_scale();
    {
      const GatheredUnit unit = engine.gather({1});
      UnitGradients gradients = engine.gradients({1});
      const auto* weight = unit.tensor(0).as<float>();
      const auto* head = unit.tensor(1).as<float>();
      for (std::int64_t r = 0; r < rows; ++r) {
        float inner[width] = {}, y = unit.tensor(2).as<float>()[0];
        for (std::int64_t j = 0; j < width; ++j) {
          for (std::int64_t i = 0; i < width; ++i) inner[j] += hidden[r][i] * weight[i * width + j];
          y += inner[j] * head[j];
        }
        const float error = y - static_cast<float>(r % 4);
        loss += 0.5 * static_cast<double>(error) * error;
        const float d_y = scale * error;
        if (mistake != Mistake::forgotten) gradients.tensor(2).as<float>()[0] += d_y;
        for (std::int64_t j = 0; j < width; ++j) {
          gradients.tensor(1).as<float>()[j] += (mistake == Mistake::sign ? -1 : 1) * d_y * inner[j];
          for (std::int64_t i = 0; i < width; ++i) {
            const bool turned = mistake == Mistake::transposed;
            gradients.tensor(0).as<float>()[turned ? j * width + i : i * width + j] +=
                d_y * head[j] * hidden[r][i];
            d_hidden[r][i] += d_y * head[j] * weight[i * width + j];
          }
        }
      }
      std::move(gradients).reduce();
    }
    UnitGradients gradients = engine.gradients({0});
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t j = 0; j < width; ++j) {
        const float slope = mistake == Mistake::term ? 1 : 1 - hidden[r][j] * hidden[r][j];
        const float d_sum = d_hidden[r][j] * slope;
        if (mistake != Mistake::bias || r == 0) gradients.tensor(1).as<float>()[j] += d_sum;
        for (std::int64_t i = 0; i < inputs; ++i) {
          const bool left_out = mistake == Mistake::element && i == 2 && j == 3;
          gradients.tensor(0).as<float>()[i * width + j] += left_out ? 0 : x[r][i] * d_sum;
        }
      }
    }
    std::move(gradients).reduce();
    engine.end_micro_batch({&loss, DataType::float64, {}}, {&rows, DataType::int64, {}});
    if (mistake == Mistake::step) (void)engine.step();
  }

 private:
  std::uint64_t calls_ = 0;
};

void on_network(const std::function<void(Engine&)>& body, const std::function<void(Config&)>& adjust = {},
                DeviceKind device = DeviceKind::cpu) {
  Config config;
  config.train_batch_size = config.micro_batch_size = Network::rows;
  config.precision.compute = config.precision.communication = DataType::float32;
  config.threads = 1;
  if (adjust) adjust(config);
  RuntimeOptions options = RuntimeOptions::from(config);
  options.log_level = LogLevel::off;
  options.device = device;
  Runtime runtime(options, make_self_communicator);
  Engine engine(runtime, Network::spec(), config);
  body(engine);
}

GradientCheck check_of(Mistake mistake) {
  GradientCheck result;
  on_network([&](Engine& engine) {
    Network network;
    result = check_gradients(engine, [&] { network.micro_batch(engine, mistake); });
  });
  return result;
}

/// The names of the tensors that are reported, with the text for each.
std::vector<std::string> wrong_of(const GradientCheck& check) {
  std::vector<std::string> findings;
  for (const TensorCheck& tensor : check.tensors) {
    if (!tensor.finding.empty()) findings.push_back(tensor.tensor + ": " + tensor.finding);
  }
  EXPECT_EQ(check.passed(), findings.empty());
  return findings;
}
std::vector<std::string> wrong_of(Mistake mistake) {
  return wrong_of(check_of(mistake));
}

TEST(CheckGradients, PassesARightNetworkWithElementsThatAreNamed) {
  const GradientCheck check = check_of(Mistake::none);
  EXPECT_TRUE(check.passed()) << check.text();
  EXPECT_THAT(check.text(),
              ::testing::AllOf(HasSubstr("  first.weight [3, 5]: 15 of 15 elements, worst ["),
                               HasSubstr("  second.bias [1]: 1 of 1 elements, worst [0]: backward "),
                               ::testing::Not(HasSubstr("WRONG")), ::testing::Not(HasSubstr("note"))));
  for (const TensorCheck& tensor : check.tensors) EXPECT_LT(tensor.error, 2e-3) << check.text();
}

TEST(CheckGradients, NamesAFactorAndItsReason) {
  const auto all_five = [](const char* text) {
    return ::testing::AllOf(::testing::SizeIs(5), ::testing::Each(HasSubstr(text)));
  };
  EXPECT_THAT(wrong_of(Mistake::scale),
              all_five("its gradient is 16 times what it should be, in all elements: the loss's gradient is "
                       "not multiplied by loss_gradient_scale()"));
  EXPECT_THAT(wrong_of(Mistake::twice), all_five("loss_gradient_scale() is multiplied in twice"));
  EXPECT_THAT(wrong_of(Mistake::mean), all_five("it is the gradient of the mean loss, not of the sum"));
  EXPECT_THAT(wrong_of(Mistake::sign),
              ::testing::ElementsAre(::testing::AllOf(HasSubstr("second.head: its gradient is -1 times"),
                                                      HasSubstr("the sign is swapped"))));
}

TEST(CheckGradients, NamesTheTensorAndTheElement) {
  EXPECT_THAT(wrong_of(Mistake::transposed),
              ::testing::ElementsAre("second.weight: its gradient is transposed"));
  EXPECT_THAT(
      wrong_of(Mistake::forgotten),
      ::testing::ElementsAre("second.bias: nothing is added to its gradient, which is 0 everywhere, but "
                             "the loss depends on it"));
  EXPECT_THAT(wrong_of(Mistake::bias), ::testing::ElementsAre(HasSubstr("first.bias: ")));
  const GradientCheck element = check_of(Mistake::element);
  EXPECT_THAT(element.text(), HasSubstr("worst [2, 3]: backward 0, "));
  EXPECT_EQ(wrong_of(element),
            std::vector<std::string>{
                "first.weight: 1 of 15 elements are wrong: a term is missing, or a wrong one is added"});
  const GradientCheck term = check_of(Mistake::term);
  EXPECT_THAT(term.text(), HasSubstr("2 of 5 tensors are wrong; begin with unit first, "));
}

TEST(CheckGradients, SaysWhatABatchCannotShow) {
  on_network(
      [](Engine& engine) {
        Network network;
        EXPECT_THAT(
            check_gradients(engine, [&] { network.micro_batch(engine, Mistake::none); }).text(),
            HasSubstr("note: loss_gradient_scale() is 1 with this batch, so a backward that leaves it out "
                      "passes: check with more samples too\n"));
      },
      [](Config& config) { config.train_batch_size = config.micro_batch_size = 1; });
}

TEST(CheckGradients, DrawsElementsOfLargeTensors) {
  const GradientCheck check = check_of(OddRun{}, {.elements = 3, .seed = 7});
  EXPECT_TRUE(check.passed()) << check.text();
  EXPECT_THAT(check.text(), HasSubstr("prime.c [1009]: 3 of 1009 elements"));
}

/// max(x + bias, 0) * head. One row of the argument is exactly 0, where `slope` is the slope of max().
GradientCheck rectified(float slope) {
  ModelSpec model;
  model.add_unit(
      {"rectifier", {{"bias", {1}, Initializer::zeros()}, {"head", {1}, Initializer::constant(0.75f)}}});
  Config config;
  config.train_batch_size = config.micro_batch_size = 3;
  config.precision.compute = config.precision.communication = DataType::float32;
  RuntimeOptions options = RuntimeOptions::from(config);
  options.log_level = LogLevel::off;
  Runtime runtime(options, make_self_communicator);
  Engine engine(runtime, model, config);
  return check_gradients(engine, [&] {
    engine.begin_micro_batch();
    double loss = 0;
    {
      const GatheredUnit unit = engine.gather({0});
      UnitGradients gradients = engine.gradients({0});
      const float bias = *unit.tensor(0).as<float>(), head = *unit.tensor(1).as<float>();
      for (const float x : {0.0f, 0.5f, -2.0f}) {
        const float sum = x + bias, error = std::max(sum, 0.0f) * head - 1;
        loss += 0.5 * static_cast<double>(error) * error;
        const float d_out = engine.loss_gradient_scale() * error;
        *gradients.tensor(1).as<float>() += d_out * std::max(sum, 0.0f);
        *gradients.tensor(0).as<float>() += d_out * head * (sum > 0 ? 1 : sum == 0 ? slope : 0);
      }
      std::move(gradients).reduce();
    }
    const std::int64_t rows = 3;
    engine.end_micro_batch({&loss, DataType::float64, {}}, {&rows, DataType::int64, {}});
  });
}

TEST(CheckGradients, TakesEachSlopeBetweenTheSidesOfAKink) {
  for (const float slope : {0.0f, 0.3f, 1.0f}) {
    const GradientCheck check = rectified(slope);
    EXPECT_TRUE(check.passed()) << check.text();
    EXPECT_TRUE(check.tensors[0].untold);
    EXPECT_EQ(check.tensors[0].kinks, 1);
    EXPECT_EQ(check.tensors[1].kinks, 0);
    EXPECT_THAT(check.text(),
                ::testing::AllOf(
                    HasSubstr("; 1 at a kink of the loss, with backward between the slopes on its two sides"),
                    HasSubstr("no gradient disagrees, but those of 1 of 2 tensors could not be checked")));
  }
  for (const float slope : {-0.5f, 1.5f}) {
    const GradientCheck check = rectified(slope);
    EXPECT_FALSE(check.passed()) << check.text();
    EXPECT_THAT(check.text(), HasSubstr("bias [1]: 1 of 1 elements"));
  }
}

TEST(CheckGradients, GivesUpTheStepThatAnExceptionLeavesOpen) {
  // Fails at each place of a pass, in the first pass and after the first difference; afterwards the engine
  // works as before.
  int point = 0;
  for (const int place : {0, 1, 2, 3, 4}) {
    for (const int pass : {1, 5}) {
      if (!sampled(point++, 3)) continue;
      on_network(
          [&](Engine& engine) {
            const kernels::Digest before = engine.state_digest();
            Network network;
            int passes = 0;
            const auto failing = [&] {
              const bool fails = ++passes == pass;
              const auto fail_at = [&](int at) {
                if (fails && place == at) throw std::runtime_error("mine");
              };
              network.micro_batch(engine, Mistake::none);
              fail_at(0);
              if (fails && place == 4) return;  // a micro-batch is missing
              if (!fails) return network.micro_batch(engine, Mistake::none);
              engine.begin_micro_batch();
              fail_at(1);
              const GatheredUnit unit = engine.gather({1});
              fail_at(2);
              const UnitGradients gradients = engine.gradients({1});
              fail_at(3);
            };
            if (place == 4) {
              EXPECT_THAT(message_of<LogicError>([&] { (void)check_gradients(engine, failing); }),
                          HasSubstr("step() after 1 of 2 micro-batches"));
            } else {
              EXPECT_THROW((void)check_gradients(engine, failing), std::runtime_error);
            }
            EXPECT_EQ(engine.state_digest(), before) << "place " << place << ", pass " << pass;
            const GradientCheck again = check_gradients(engine, [&] {
              network.micro_batch(engine, Mistake::none);
              network.micro_batch(engine, Mistake::none);
            });
            EXPECT_TRUE(again.passed()) << again.text();
          },
          [](Config& config) {
            config.accumulation_steps = 2;
            config.train_batch_size = 2 * Network::rows;
          });
    }
  }
}

TEST(CheckGradients, SaysWhereNothingWasCompared) {
  GradientCheck check;
  check.tensors.resize(1);
  check.tensors[0].frozen = true;
  EXPECT_FALSE(check.passed());
  EXPECT_THAT(check.text(), HasSubstr("nothing was compared: every tensor is frozen, or has a gradient and "
                                      "differences of 0\n"));
  // A loss that depends on no weight.
  on_network([](Engine& engine) {
    const GradientCheck flat = check_gradients(engine, [&] {
      engine.begin_micro_batch();
      engine.skip_gradients({0});
      engine.skip_gradients({1});
      const double loss = 1;
      engine.end_micro_batch({&loss, DataType::float64, {}}, {&Network::rows, DataType::int64, {}});
    });
    EXPECT_FALSE(flat.passed());
    EXPECT_THAT(flat.text(),
                ::testing::AllOf(HasSubstr("nothing was compared"), ::testing::Not(HasSubstr("agree"))));
  });
}

TEST(CheckGradients, RefusesWhatItCannotCompare) {
  const auto refused = [](const std::function<void(Config&)>& adjust, DeviceKind device = DeviceKind::cpu) {
    std::string text;
    on_network(
        [&](Engine& engine) {
          text = message_of<ConfigurationError>([&] { (void)check_gradients(engine, [] {}); });
        },
        adjust, device);
    return text;
  };
  EXPECT_THAT(refused([](Config& config) { config.precision.compute = DataType::bfloat16; }),
              HasSubstr("compares in fp32, but the engine computes in bf16"));
  EXPECT_THAT(refused([](Config& config) { config.precision.communication = DataType::bfloat16; }),
              HasSubstr("compares in fp32, but the engine reduces in bf16"));
  EXPECT_THAT(refused([](Config& config) {
                config.stage = 2;
                config.quantized_gradients = true;
              }),
              HasSubstr("weights or gradients travel as int8 blocks"));
  EXPECT_THAT(refused([](Config& config) {
                config.update = UpdateTime::as_reduced;
                config.gradient_clipping = 0;
              }),
              HasSubstr("takes steps that change nothing, and tranche.update: as_reduced has none: make an "
                        "engine with at_the_boundary"));
  EXPECT_THAT(refused({}, DeviceKind::meta), HasSubstr("on the meta device, which computes nothing"));
  const auto wrong = [](Mistake mistake) { return message_of<LogicError>([&] { (void)check_of(mistake); }); };
  EXPECT_THAT(wrong(Mistake::step), HasSubstr("the micro-batches that it was given called step()"));
  EXPECT_THAT(wrong(Mistake::other_batch),
              ::testing::AllOf(HasSubstr("gave a loss of "), HasSubstr("give the same batch each time")));
  on_network([](Engine& engine) {
    const std::vector<float> infinite{std::numeric_limits<float>::infinity()};
    engine.write_weight("second.bias", infinite);
    Network network;
    EXPECT_THAT(message_of<NumericalError>([&] {
                  (void)check_gradients(engine, [&] { network.micro_batch(engine, Mistake::none); });
                }),
                HasSubstr("check_gradients(): the loss is inf"));
  });
}

#endif

}  // namespace
}  // namespace tranche::test
