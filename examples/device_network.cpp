// A network of one's own in device memory, so that the same lines train on CPUs and GPUs, and plan on the
// meta device: device_network [cpu|cuda]. Alone, or partitioned over ranks: mpirun -n 2 device_network
#include <tranche/tranche.h>

#include <cstdio>
#include <optional>
#include <string>
#include <vector>
using namespace tranche;

constexpr std::int64_t width = 64, rows = 48;  // rows: samples of a rank's micro-batch

/// Rows of numbers in the engine's step memory: on the device, the same place in every step.
struct Matrix {
  StepBuffer memory;
  TensorView view;
  Matrix(Engine& engine, std::int64_t columns, const char* tag)
      : memory(engine.acquire(rows * columns * 4, Category::activations, tag)),
        view{memory.data(), DataType::float32, {rows, columns}} {}
  void read(Engine& engine, const std::vector<float>& from) {
    engine.device().copy_from_host(engine.compute_stream(), memory.data(), from.data(),
                                   std::int64_t(from.size()) * 4);
  }
};

void forward_backward(Engine& engine, const std::vector<float>& points, const std::vector<float>& answers) {
  Stream& stream = engine.compute_stream();
  const auto multiply = [&](kernels::MatmulOptions how, ConstTensorView a, ConstTensorView b, TensorView c) {
    kernels::matmul(stream, how, a, b, c, engine.workspace());
  };
  engine.begin_micro_batch();
  const StepBuffer totals = engine.acquire(16, Category::activations, "loss and rows");
  const TensorView loss{totals.data(), DataType::float64, {}};
  const TensorView count{static_cast<double*>(totals.data()) + 1, DataType::int64, {}};
  kernels::fill_zero(stream, loss);
  kernels::fill_zero(stream, count);

  Matrix x(engine, 2, "points"), target(engine, 1, "answers"), sum(engine, width, "sum");
  Matrix active(engine, width, "active"), y(engine, 1, "output");
  x.read(engine, points);
  target.read(engine, answers);
  multiply({}, x.view, engine.gather({0}).tensor(0), sum.view);
  kernels::gelu_forward(stream, sum.view, active.view);
  {
    const GatheredUnit weights = engine.gather({1});
    UnitGradients gradients = engine.gradients({1});
    multiply({}, active.view, weights.tensor(0), y.view);
    kernels::squared_error(stream, y.view, target.view, loss, count);
    kernels::squared_error_gradient(stream, y.view, target.view, engine.loss_gradient_scale(), y.view);
    multiply({.transpose_a = true, .accumulate = true}, active.view, y.view, gradients.tensor(0));
    multiply({.transpose_b = true}, y.view, weights.tensor(0), active.view);
    std::move(gradients).reduce();
  }
  kernels::gelu_backward(stream, sum.view, active.view, active.view);
  UnitGradients gradients = engine.gradients({0});
  multiply({.transpose_a = true, .accumulate = true}, x.view, active.view, gradients.tensor(0));
  std::move(gradients).reduce();
  engine.end_micro_batch(loss, count);
}

/// Trains, and returns the most device memory that it held.
std::int64_t train(Runtime& runtime, std::optional<Engine>& made) {
  ModelSpec model;
  model.add_unit({"first", {{"first.weight", {2, width}, Initializer::normal(1)}}});
  model.add_unit({"second", {{"second.weight", {width, 1}, Initializer::normal(0.1f)}}});
  Engine& engine = made.emplace(runtime, model,
                                parse_config(R"({"train_micro_batch_size_per_gpu": 48,
      "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "zero_optimization": {"stage": 3}})",
                                             runtime.size()));
  std::vector<float> points(rows * 2), answers(rows);
  for (std::int64_t step = 0; step < 300; ++step) {
    const std::int64_t first = (step * runtime.size() + runtime.rank()) * rows;
    for (std::int64_t i = 0; i < rows; ++i) {
      points[2 * i] = random_normal({.seed = 1}, 2 * (first + i));
      points[2 * i + 1] = random_normal({.seed = 1}, 2 * (first + i) + 1);
      answers[i] = points[2 * i] * points[2 * i + 1];
    }
    forward_backward(engine, points, answers);
    const StepResult result = engine.step();
    if (runtime.device().kind() != DeviceKind::meta && runtime.rank() == 0 && step % 100 == 99) {
      std::printf("step %ld loss %.4f\n", step + 1, result.loss);
    }
  }
  return MemoryFigures::of(runtime.ledger()).peak[std::size_t(Tier::device)];
}

int main(int argc, char** argv) {
  RuntimeOptions options, meta;
  options.device = argc > 1 && std::string(argv[1]) == "cuda" ? DeviceKind::cuda : DeviceKind::cpu;
  meta.device = DeviceKind::meta;
  Runtime runtime = Runtime::from_environment(options);
  std::optional<Engine> planned, engine;
  try {
    Runtime plan(meta, [&](const CommunicatorOptions& communicator) {
      return make_meta_communicator(runtime.rank(), runtime.size(), runtime.all().local_size(), communicator);
    });
    const std::int64_t predicted = train(plan, planned);
    planned.reset();
    const std::int64_t held = train(runtime, engine);
    if (runtime.rank() == 0) std::printf("device memory: planned %ld bytes, held %ld\n", predicted, held);
    return predicted == held ? 0 : 1;
  } catch (...) {
    return runtime.fail(std::current_exception());
  }
}
