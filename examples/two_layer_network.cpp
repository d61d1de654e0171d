// A network of one's own under the engine: two layers learn which points of the plane lie in a disc.
//   two_layer_network [stage]                alone
//   mpirun -n 2 two_layer_network [stage]    partitioned over two ranks; every stage gives the same weights
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "tranche/core/random.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/kernels/matmul.h"
#include "tranche/tranche.h"
using namespace tranche;

void train(Runtime& runtime, int stage) {
  const std::int64_t hidden = 16, batch = 48, rows = batch / runtime.size();
  ModelSpec model;
  const UnitId first = model.add_unit({"first", {{"first.weight", {3, hidden}, Initializer::normal(1)}}});
  const UnitId second =
      model.add_unit({"second", {{"second.weight", {hidden, 1}, Initializer::normal(0.3f)}}});
  Config config;
  config.stage = stage;
  config.train_batch_size = batch, config.micro_batch_size = rows;
  config.precision.compute = config.precision.wire = DataType::float32;
  config.optimizer.learning_rate = 0.02;
  Engine engine(runtime, model, config);

  Stream& stream = engine.compute_stream();
  const auto multiply = [&](kernels::MatmulOptions how, const ConstTensorView& a, const ConstTensorView& b,
                            const TensorView& c) {
    kernels::matmul(stream, how, a, b, c, engine.workspace());
  };
  const auto view = [&](std::vector<float>& values) {
    return TensorView{values.data(), DataType::float32, {rows, std::int64_t(values.size()) / rows}};
  };
  std::vector<float> x(rows * 3), sum(rows * hidden), active(rows * hidden), d_sum(rows * hidden), y(rows);
  for (std::int64_t step = 0; step < 150; ++step) {
    for (std::int64_t i = 0; i < rows; ++i) {  // the same points for every number of ranks
      const RandomKey point{.seed = 1, .subject = std::uint64_t(step * batch + runtime.rank() * rows + i)};
      x[3 * i] = random_normal(point, 0), x[3 * i + 1] = random_normal(point, 1), x[3 * i + 2] = 1;
    }
    engine.begin_micro_batch();
    multiply({}, view(x), engine.gather(first).tensor(0), view(sum));
    kernels::gelu_forward(stream, view(sum), view(active));
    double loss = 0;
    {
      const GatheredUnit weights = engine.gather(second);
      UnitGradients gradients = engine.gradients(second);
      multiply({}, view(active), weights.tensor(0), view(y));
      for (std::int64_t i = 0; i < rows; ++i) {  // logistic loss; its gradient takes the place of y
        const bool inside = std::hypot(x[3 * i], x[3 * i + 1]) < 1.2f;
        loss += std::log1p(std::exp(inside ? -y[i] : y[i]));
        y[i] = (1 / (1 + std::exp(-y[i])) - inside) * engine.loss_gradient_scale();
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
    const StepResult result = engine.step();
    if (runtime.rank() == 0 && step % 50 == 49) std::printf("step %ld loss %.4f\n", step + 1, result.loss);
  }
  const auto digest = engine.weights_digest();
  if (runtime.rank() == 0) std::printf("weights %016lx%016lx\n", digest.lanes[0], digest.lanes[1]);
}

int main(int argc, char** argv) {
  Runtime runtime = Runtime::from_environment();
  try {
    train(runtime, argc > 1 ? std::atoi(argv[1]) : 3);
  } catch (...) {
    return runtime.fail(std::current_exception());
  }
}
