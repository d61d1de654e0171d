// Profiles the memory of a model of your own, a chain of layers: it is planned on the meta device first and
// then measured: mpirun -n 2 profile_model DIRECTORY [stage]
#include <tranche/tranche.h>

#include <cstdio>
using namespace tranche;

constexpr std::int64_t width = 384, layers = 8, batch = 256, steps = 8;

/// Rows of numbers in the engine's step memory, so that they are packed, tracked and profiled.
struct Matrix {
  StepBuffer memory;
  TensorView view;
  Matrix() = default;
  Matrix(Engine& engine, std::int64_t rows, const char* tag)
      : memory(engine.acquire(rows * width * 4, Category::activations, tag)),
        view{memory.data(), DataType::float32, {rows, width}} {}
};

/// The chain learns to return the points that it is given.
void forward_backward(Engine& engine, std::int64_t first_point) {
  Stream& stream = engine.compute_stream();
  const std::int64_t rows = engine.config().micro_batch_size;
  const auto multiply = [&](kernels::MatmulOptions how, ConstTensorView a, ConstTensorView b, TensorView c) {
    kernels::matmul(stream, how, a, b, c, engine.workspace());
  };
  engine.begin_micro_batch();
  const StepBuffer totals = engine.acquire(16, Category::activations, "loss and rows");
  const TensorView loss{totals.data(), DataType::float64, {}};
  const TensorView count{static_cast<double*>(totals.data()) + 1, DataType::int64, {}};
  kernels::fill_zero(stream, loss);
  kernels::fill_zero(stream, count);

  std::vector<Matrix> inputs(layers), sums(layers);
  inputs[0] = Matrix(engine, rows, "points");
  kernels::fill_normal(stream, inputs[0].view, {.seed = 1}, first_point * width, 0, 1);
  for (std::int64_t i = 0; i < layers; ++i) {
    const GatheredUnit weights = engine.gather({int(i)});
    sums[i] = Matrix(engine, rows, "sums");
    multiply({}, inputs[i].view, weights.tensor(0), sums[i].view);
    if (i + 1 == layers) break;
    inputs[i + 1] = Matrix(engine, rows, "activations");
    kernels::gelu_forward(stream, sums[i].view, inputs[i + 1].view);
  }
  Matrix gradient = std::move(sums.back());  // replaces the output
  kernels::squared_error(stream, gradient.view, inputs[0].view, loss, count);
  kernels::squared_error_gradient(stream, gradient.view, inputs[0].view, engine.loss_gradient_scale(),
                                  gradient.view);
  for (std::int64_t i = layers - 1; i >= 0; --i) {
    const GatheredUnit weights = engine.gather({int(i)});
    UnitGradients gradients = engine.gradients({int(i)});
    multiply({.transpose_a = true, .accumulate = true}, inputs[i].view, gradient.view, gradients.tensor(0));
    if (i > 0) {
      Matrix before(engine, rows, "gradient");
      multiply({.transpose_b = true}, gradient.view, weights.tensor(0), before.view);
      kernels::gelu_backward(stream, sums[i - 1].view, before.view, before.view);
      sums[i - 1].memory.release();
      gradient = std::move(before);
    }
    std::move(gradients).reduce();
    inputs[i].memory.release();
  }
  engine.end_micro_batch(loss, count);
}

/// The plan and the run use the same lines; only the Runtime differs.
void train(Runtime& runtime, const std::string& stage, MemoryProfile* profile) {
  ModelSpec model;
  for (std::int64_t i = 0; i < layers; ++i) {
    const std::string name = "layer." + std::to_string(i);
    model.add_unit({name, {{name + ".weight", {width, width}, Initializer::normal(0.05f)}}});
  }
  Engine engine(
      runtime, model,
      parse_config(R"({"train_batch_size": 256, "bf16": {"enabled": false}, "gradient_clipping": 1.0,
                  "zero_optimization": {"stage": )" +
                       stage + "}}",
                   runtime.size()));
  for (std::int64_t step = 0; step < steps; ++step) {
    forward_backward(engine, step * batch + runtime.rank() * engine.config().micro_batch_size);
    const StepResult result = engine.step();
    if (profile != nullptr) profile->end_step(result.step);
  }
}

int main(int argc, char** argv) {
  const std::string directory = argc > 1 ? argv[1] : "profile", stage = argc > 2 ? argv[2] : "3";
  RuntimeOptions options;
  options.trace = true;  // spans of compute and communication, for the trace
  Runtime runtime = Runtime::from_environment(options);
  try {
    MemoryProfile::require_directory(directory, runtime.rank());
    // On the meta device the same program computes and sends nothing; its ledger is the prediction.
    RuntimeOptions meta;
    meta.device = DeviceKind::meta;
    Runtime plan(meta, [&](const CommunicatorOptions& communicator) {
      return make_meta_communicator(runtime.rank(), runtime.size(), runtime.all().local_size(), communicator);
    });
    train(plan, stage, nullptr);
    const MemoryFigures predicted = MemoryFigures::of(plan.ledger());

    MemoryProfile profile(runtime);
    train(runtime, stage, &profile);
    std::printf("%s", profile.write(directory, &predicted).c_str());
  } catch (...) {
    return runtime.fail(std::current_exception());
  }
}
