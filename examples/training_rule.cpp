// A program's own parts of the training rule: a schedule of its own, a parameter group, a rate set by
// hand, gradients changed or a step skipped before the update, a batch that grows; and the trained weights
// asked for predictions. The model is a line through noisy points. Runs alone or as `mpirun -n N
// training_rule STAGE`.

#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "tranche/core/random.h"
#include "tranche/tranche.h"

using namespace tranche;

namespace {

constexpr std::int64_t width = 8;

/// The rate rises over twenty updates, then falls in proportion to one over the square root of their number.
class RootSchedule final : public Schedule {
 public:
  double learning_rate(std::int64_t step) const override {
    const auto number = static_cast<double>(step);
    return step < 20 ? 0.1 * number / 20 : 0.1 * std::sqrt(20 / number);
  }
  std::string describe() const override { return R"({"type": "RootSchedule", "peak": 0.1, "warmup": 20})"; }
};

float coordinate(std::int64_t sample, std::int64_t i) {
  return random_normal({.seed = 1}, static_cast<std::uint64_t>(sample * (width + 1) + i));
}
float truth(std::int64_t i) {
  return 0.5f * static_cast<float>(i) - 1;
}

struct Line {
  UnitId unit;
  /// The weights are `slope` and `offset`, in this order.
  static float at(const GatheredUnit& weights, std::int64_t sample) {
    float y = *weights.tensor(1).as<float>();
    for (std::int64_t i = 0; i < width; ++i) y += weights.tensor(0).as<float>()[i] * coordinate(sample, i);
    return y;
  }
  static float point(std::int64_t sample) {
    float y = 3 + 0.01f * coordinate(sample, width);
    for (std::int64_t i = 0; i < width; ++i) y += truth(i) * coordinate(sample, i);
    return sample % 500 == 99 ? 1e6f : y;  // an occasional outlier
  }
  /// Runs all micro-batches of a step, whose number may have changed.
  void accumulate(Engine& engine) const {
    const std::int64_t size = engine.config().micro_batch_size, first = engine.samples();
    for (std::int64_t m = 0; m < engine.config().accumulation_steps; ++m) {
      engine.begin_micro_batch();
      double loss = 0;
      {
        const GatheredUnit weights = engine.gather(unit);
        UnitGradients gradients = engine.gradients(unit);
        for (std::int64_t s = 0; s < size; ++s) {
          const std::int64_t sample =
              first + (m * engine.runtime().size() + engine.runtime().rank()) * size + s;
          const float error = at(weights, sample) - point(sample);
          loss += 0.5 * error * error;
          const float scaled = error * engine.loss_gradient_scale();
          for (std::int64_t i = 0; i < width; ++i) {
            gradients.tensor(0).as<float>()[i] += scaled * coordinate(sample, i);
          }
          *gradients.tensor(1).as<float>() += scaled;
        }
        std::move(gradients).reduce();
      }
      engine.end_micro_batch({&loss, DataType::float64, {}}, {&size, DataType::int64, {}});
    }
  }
};

void train(Runtime& runtime, const std::string& stage) {
  ModelSpec model;
  const Line line{model.add_unit(
      {"line", {{"slope", {width}, Initializer::zeros()}, {"offset", {1}, Initializer::zeros()}}})};
  Engine engine(runtime, model,
                parse_config(R"({"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": false},
                  "gradient_clipping": 0, "optimizer": {"type": "AdamW", "params": {"lr": 1}},
                  "tranche": {"reduction": "micro_batch",
                    "parameter_groups": [{"pattern": "offset", "betas": [0.8, 0.95], "eps": 1e-6}]},
                  "zero_optimization": {"stage": )" +
                                 stage + "}}",
                             runtime.size()),
                {.schedule = std::make_unique<RootSchedule>()});

  // Called after the ranks have agreed and before the update: skips a step, or limits the gradient of a
  // tensor.
  int skipped = 0;
  engine.set_gradient_hook([&](const StepResult& found) -> std::string {
    if (found.gradient_norm > 1000) return "an outlier among the points";
    std::vector<float> slope = engine.read_gradient("slope");
    for (float& value : slope) value = std::fmin(std::fmax(value, -5.0f), 5.0f);
    engine.write_gradient("slope", slope);
    return {};
  });
  StepResult result;
  for (int step = 0; step < 240; ++step) {
    if (step == 80) engine.set_batch(8, 2);  // the batch grows ...
    if (step == 239)
      engine.set_batch(1, 1);                          // ... and the last batch has only the samples that are
                                                       // left
    if (step == 200) engine.set_learning_rate(0.005);  // a rate chosen while the run was observed
    line.accumulate(engine);
    result = engine.step();
    skipped += result.applied ? 0 : 1;
  }

  float error = 0;
  {
    const InferenceScope scope(engine);  // neither a loss nor a token count
    const GatheredUnit weights = engine.gather(line.unit);
    error = std::fabs(Line::at(weights, 1) - Line::point(1));
  }
  const kernels::Digest digest = engine.weights_digest();
  if (runtime.rank() != 0) return;
  std::printf("steps %ld applied %ld skipped %d samples %ld rate %g error %.3f\n", engine.steps(),
              engine.applied_steps(), skipped, engine.samples(), result.learning_rate, error);
  std::printf("weights %016lx%016lx\n", digest.lanes[0], digest.lanes[1]);
}

}  // namespace

int main(int argc, char** argv) {
  Runtime runtime = Runtime::from_environment();
  try {
    train(runtime, argc > 1 ? argv[1] : "3");
  } catch (...) {
    return runtime.fail(std::current_exception());
  }
}
