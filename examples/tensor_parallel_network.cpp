// A network of one's own whose hidden layer the axis `tensor` of a mesh cuts. Alone, or on two ranks:
// mpirun -n 2 tensor_parallel_network tensor=2
#include <tranche/models/linear.h>
#include <tranche/models/tensor_rows.h>
#include <tranche/models/weight_gradients.h>
#include <tranche/tranche.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>
using namespace tranche;

void train(Runtime& runtime, std::optional<Engine>& made) {
  const Mesh& mesh = runtime.mesh();
  const std::int64_t width = 8, inner = 50, rows = 96 / mesh.data_ranks();
  const Dimension cut{"inner"}, whole{};
  ModelSpec model;
  model.tensor_dimensions = {"inner"};  // the engine divides dimensions of this name among the ranks
  const UnitId network = model.add_unit(
      {"network",
       {{.name = "up",
         .shape = {width, inner},
         .initializer = Initializer::normal(0.5f),
         .dimensions = {whole, cut}},
        {.name = "up.bias", .shape = {inner}, .initializer = Initializer::zeros(), .dimensions = {cut}},
        {.name = "down",
         .shape = {inner, width},
         .initializer = Initializer::normal(0.1f),
         .dimensions = {cut, whole}},
        {.name = "down.bias", .shape = {width}, .initializer = Initializer::zeros()}}});
  const models::Linear up{0, 1}, down{2, 3};
  Engine& engine = made.emplace(runtime, model, runtime.config());
  Stream& stream = engine.compute_stream();
  const models::Pass pass{.engine = engine,
                          .shape = {.width = width},
                          .batch = rows,
                          .time = 1,
                          .training = true,
                          .tensor = runtime.tensor()};
  const std::int64_t local = pass.local_rows(), first = pass.tensor_rank() * local,
                     hidden = pass.part_of(inner).count;
  std::vector<float> x(local * width), y(local * width), sum(rows * hidden), active(sum), d_active(sum);
  const auto view = [](std::vector<float>& values, std::int64_t height) {
    return TensorView{values.data(), DataType::float32, {height, std::int64_t(values.size()) / height}};
  };
  for (std::int64_t step = 0; step < 300; ++step) {
    const std::int64_t sample = (step * mesh.data_ranks() + mesh.data_rank(runtime.rank())) * rows;
    const auto point = [&](std::int64_t row, std::int64_t column) {
      return random_normal({.seed = 1}, (sample + row) * width + column);
    };
    for (std::int64_t i = 0; i < local * width; ++i) {  // this rank's rows
      x[i] = first + i / width < rows ? point(first + i / width, i % width) : 0;
    }
    engine.begin_micro_batch();
    double loss = 0;
    const std::int64_t elements = rows * width;
    {
      const GatheredUnit weights = engine.gather(network);
      models::GatheredRows all(pass, "inputs", view(x, local));
      models::linear_forward(engine, weights, up, all.view(), view(sum, rows));
      kernels::gelu_forward(stream, view(sum, rows), view(active, rows));
      models::row_linear_forward(pass, weights, down, view(active, rows), view(y, local));
      // Every rank adds up the loss of all rows and computes the gradient of its own rows.
      const models::GatheredRows outputs(pass, "outputs", view(y, local));
      for (std::int64_t i = 0; i < rows * width; ++i) {
        const std::int64_t row = i / width, mine = i - first * width;
        const float error = outputs.view().as<float>()[i] - std::sin(point(row, i % width));
        loss += 0.5 * error * error;
        if (row >= first && row < first + local) y[mine] = error * engine.loss_gradient_scale();
      }
      for (std::int64_t i = std::max(rows - first, std::int64_t{0}) * width; i < local * width; ++i) y[i] = 0;
      UnitGradients gradients = engine.gradients(network);
      models::WeightGradients added(gradients);
      const models::GatheredRows d_y(pass, "gradients of outputs", view(y, local));
      models::linear_input_gradient(engine, weights, down, d_y.view(), view(d_active, rows));
      models::row_linear_parameter_gradients(pass, weights, added, down, view(active, rows), d_y.view(),
                                             view(y, local));
      kernels::gelu_backward(stream, view(sum, rows), view(d_active, rows), view(d_active, rows));
      models::linear_parameter_gradients(engine, weights, gradients, up, all.view(), view(d_active, rows));
      std::move(gradients).reduce();
    }
    engine.end_micro_batch({&loss, DataType::float64, {}}, {&elements, DataType::int64, {}});
    const StepResult result = engine.step();
    if (runtime.rank() == 0 && step % 100 == 99) std::printf("step %ld loss %.4f\n", step + 1, result.loss);
  }
}

int main(int argc, char** argv) {
  Runtime runtime;
  std::optional<Engine> engine;  // outlives the try: peers hear of an error before the engine ends
  try {
    const std::string mesh = argc > 1 ? argv[1] : "";
    runtime = Runtime::from_config(R"({
      "train_batch_size": 96, "bf16": {"enabled": false},
      "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0}},
      "tranche": {"mesh": ")" + mesh +
                                   R"("}})");
    train(runtime, engine);
  } catch (...) {
    return runtime.fail(std::current_exception());
  }
}
