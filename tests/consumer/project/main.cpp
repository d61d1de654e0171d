// A user's program: trains one unit towards zero and tries a dtype that is refused; ../run.cmake checks its
// output.
#include <tranche/tranche.h>

#include <cstdio>
#include <string>

using namespace tranche;

bool brings_its_own_state();      // state.cpp
bool brings_its_own_optimizer();  // optimizer.cpp

int main() {
  Runtime runtime;
  try {
    std::printf("brings its own state: %s\n", brings_its_own_state() ? "yes" : "no");
    std::printf("brings its own optimizer: %s\n", brings_its_own_optimizer() ? "yes" : "no");
    runtime =
        Runtime::from_config(R"({"bf16": {"enabled": false}, "gradient_clipping": 1.0, "train_batch_size": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})");
    ModelSpec model;
    const UnitId unit = model.add_unit({"unit", {{"weight", {1000}, Initializer::normal(1)}}});
    Engine engine(runtime, model, runtime.config());
    double first = 0, last = 0;
    for (int step = 0; step < 20; ++step) {
      engine.begin_micro_batch();
      double loss = 0;
      std::int64_t samples = 1;
      {
        const GatheredUnit weights = engine.gather(unit);
        UnitGradients gradients = engine.gradients(unit);
        const float* w = weights.tensor(0).as<float>();
        for (int i = 0; i < 1000; ++i) {
          loss += 0.5 * w[i] * w[i];
          gradients.tensor(0).as<float>()[i] += w[i] * engine.loss_gradient_scale();
        }
        std::move(gradients).reduce();
      }
      engine.end_micro_batch({&loss, DataType::float64, {}}, {&samples, DataType::int64, {}});
      last = engine.step().loss;
      if (step == 0) first = last;
    }
    std::printf("tranche %s trains: %s\n", version, last < 0.97 * first ? "yes" : "no");
    parse_data_type("fp31");
  } catch (const ConfigurationError& error) {
    std::printf("refused: %s\n", error.what());
    return 0;
  }
  return 1;
}
