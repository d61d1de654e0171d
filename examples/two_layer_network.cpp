// A network of one's own under the engine. Alone, or partitioned over ranks: mpirun -n 2 two_layer_network
// [stage]
#include <tranche/tranche.h>

#include <cmath>
#include <cstdio>
#include <optional>
using namespace tranche;

void train(Runtime& runtime, std::optional<Engine>& made) {
  const std::int64_t width = 64, batch = 96, rows = batch / runtime.size();
  ModelSpec model;  // units: what is gathered, reduced and freed together
  const UnitId first = model.add_unit({"first", {{"first.weight", {2, width}, Initializer::normal(1)}}});
  const UnitId second =
      model.add_unit({"second", {{"second.weight", {width, 1}, Initializer::normal(0.1f)}}});
  Engine& engine = made.emplace(runtime, model, runtime.config());
  Stream& stream = engine.compute_stream();
  std::vector<float> x(rows * 2), sum(rows * width), active(rows * width), d_sum(rows * width), y(rows);
  const auto view = [&](std::vector<float>& values) {
    return TensorView{values.data(), DataType::float32, {rows, std::int64_t(values.size()) / rows}};
  };
  const auto multiply = [&](kernels::MatmulOptions how, ConstTensorView a, ConstTensorView b, TensorView c) {
    kernels::matmul(stream, how, a, b, c, engine.workspace());
  };
  const auto micro_batch = [&](std::int64_t step) {
    for (std::int64_t i = 0; i < rows * 2; ++i) {  // the same points for every number of ranks
      x[i] = random_normal({.seed = 1}, (step * batch + runtime.rank() * rows) * 2 + i);
    }
    engine.begin_micro_batch();
    multiply({}, view(x), engine.gather(first).tensor(0), view(sum));
    kernels::gelu_forward(stream, view(sum), view(active));
    double loss = 0;
    {
      const GatheredUnit weights = engine.gather(second);
      UnitGradients gradients = engine.gradients(second);
      multiply({}, view(active), weights.tensor(0), view(y));
      for (std::int64_t i = 0; i < rows; ++i) {  // squared error; its gradient takes the place of y
        const float error = y[i] - std::sin(x[2 * i]) * x[2 * i + 1];
        loss += 0.5 * error * error;
        y[i] = error * engine.loss_gradient_scale();
      }
      multiply({.transpose_a = true, .accumulate = true}, view(active), view(y), gradients.tensor(0));
      multiply({.transpose_b = true}, view(y), weights.tensor(0), view(d_sum));
      std::move(gradients).reduce();
    }
    kernels::gelu_backward(stream, view(sum), view(d_sum), view(d_sum));
    UnitGradients gradients = engine.gradients(first);
    multiply({.transpose_a = true, .accumulate = true}, view(x), view(d_sum), gradients.tensor(0));
    std::move(gradients).reduce();
    engine.end_micro_batch({&loss, DataType::float64, {}}, {&rows, DataType::int64, {}});
  };
  const GradientCheck check = check_gradients(engine, [&] { micro_batch(0); });
  if (runtime.rank() == 0) std::printf("%s", check.text().c_str());
  for (std::int64_t step = 0; step < 300; ++step) {
    micro_batch(step);
    const StepResult result = engine.step();
    if (runtime.rank() == 0 && step % 100 == 99) std::printf("step %ld loss %.4f\n", step + 1, result.loss);
  }
  const kernels::Digest digest = engine.weights_digest();
  if (runtime.rank() == 0) std::printf("weights %016lx%016lx\n", digest.lanes[0], digest.lanes[1]);
}

int main(int argc, char** argv) {
  Runtime runtime;
  std::optional<Engine> engine;  // outlives the try: peers hear of an error before the engine ends
  try {
    const std::string stage = argc > 1 ? argv[1] : "3";
    runtime = Runtime::from_config(R"({
      "train_batch_size": 96, "bf16": {"enabled": false}, "gradient_clipping": 1.0,
      "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
      "zero_optimization": {"stage": )" +
                                   stage + "}}");
    train(runtime, engine);
  } catch (...) {
    return runtime.fail(std::current_exception());
  }
}
