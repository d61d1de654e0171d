// An optimizer in one file of this project, selected by its name in the configuration: compared with its
// formula, saved and loaded, and with states in bf16.
#include <tranche/tranche.h>

#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

using namespace tranche;

namespace {

constexpr int elements = 1000, steps = 5;

/// Runs steps with the loss w * w / 2.
void train(Engine& engine, UnitId unit) {
  engine.begin_micro_batch();
  double loss = 0;
  std::int64_t samples = 1;
  {
    const GatheredUnit weights = engine.gather(unit);
    UnitGradients gradients = engine.gradients(unit);
    for (int i = 0; i < elements; ++i) {
      gradients.tensor(0).as<float>()[i] += weights.tensor(0).as<float>()[i] * engine.loss_gradient_scale();
    }
    std::move(gradients).reduce();
  }
  engine.end_micro_batch({&loss, DataType::float64, {}}, {&samples, DataType::int64, {}});
  engine.step();
}

double by_formula(double w) {
  double m = 0, d = 0, v = 0, before = 0;
  for (int t = 1; t <= steps; ++t) {
    const double g = w, difference = t == 1 ? 0 : g - before, ahead = g + 0.92 * difference;
    m = 0.98 * m + 0.02 * g;
    d = 0.92 * d + 0.08 * difference;
    v = 0.99 * v + 0.01 * ahead * ahead;
    before = g;
    const double direction = m / (1 - std::pow(0.98, t)) + 0.92 * d / (1 - std::pow(0.92, t));
    w -= 0.01 * direction / (std::sqrt(v / (1 - std::pow(0.99, t))) + 1e-8);
  }
  return w;
}

}  // namespace

bool brings_its_own_optimizer() {
  bool good = true;
  for (const char* moments : {"fp32", "bf16"}) {
    Runtime runtime = Runtime::from_config(
        std::string(R"({"bf16": {"enabled": false}, "gradient_clipping": 0, "train_batch_size": 1,
        "optimizer": {"type": "adan", "params": {"lr": 0.01}}, "tranche": {"moments": ")") +
        moments + R"("}})");
    ModelSpec model;
    const UnitId unit = model.add_unit({"unit", {{"weight", {elements}, Initializer::normal(1)}}});
    Engine engine(runtime, model, runtime.config());
    std::vector<double> wanted;
    for (const float w : engine.read_weight("weight")) wanted.push_back(by_formula(w));
    for (int step = 0; step < steps; ++step) train(engine, unit);
    double furthest = 0;
    const std::vector<float> got = engine.read_weight("weight");
    for (int i = 0; i < elements; ++i) {
      furthest = std::fmax(furthest, std::fabs(static_cast<double>(got[static_cast<std::size_t>(i)]) -
                                               wanted[static_cast<std::size_t>(i)]));
    }
    good = good && furthest < (moments[0] == 'f' ? 1e-5 : 1e-2);
    const std::string folder = (std::filesystem::temp_directory_path() /
                                ("tranche_consumer_optimizer." + std::to_string(::getpid())))
                                   .string();
    std::filesystem::remove_all(folder);
    engine.save(folder, {.wait = true});
    train(engine, unit);
    const kernels::Digest went_on = engine.state_digest();
    engine.load(folder);
    good = good && !(engine.state_digest() == went_on);
    train(engine, unit);
    good = good && engine.state_digest() == went_on;
    std::filesystem::remove_all(folder);
  }
  return good;
}
