// Linear(16, 8), gelu and Linear(8, 4) on two ranks, along each axis of a mesh. It runs alone, or as
//   mpirun -n 2 two_linear_layers shard=2      a rank has both layers, and half of the samples
//   mpirun -n 2 two_linear_layers pipeline=2   a rank has one layer, and all samples
//   mpirun -n 2 two_linear_layers tensor=2     a rank has half of each layer, and all samples
#include <tranche/models/linear.h>
#include <tranche/models/tensor_rows.h>
#include <tranche/models/weight_gradients.h>
#include <tranche/pipeline/staged_model.h>
#include <tranche/tranche.h>

#include <cmath>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>
using namespace tranche;

constexpr std::int64_t inputs = 16, inner = 8, outputs = 4;

TensorView view(std::vector<float>& values, std::int64_t rows, std::int64_t columns) {
  values.resize(rows * columns);
  return {values.data(), DataType::float32, {rows, columns}};
}

/// The layers that this rank computes: use 0 of the model is the first one, use 1 the second.
class Layers : public pipeline::StagedChunk {
 public:
  Layers(Engine& engine, const Engine::Chunk& chunk, std::int64_t first_sample, std::int64_t rows,
         double& loss)
      : engine_(engine),
        chunk_(chunk),
        first_sample_(first_sample),
        rows_(rows),
        loss_(loss),
        pass_{.engine = engine,
              .shape = {.width = outputs},
              .batch = rows,
              .time = 1,
              .training = true,
              .tensor = engine.runtime().tensor()},
        part_(pass_.part_of(inner).count) {}  // with the axis tensor a part of the first layer's outputs

  void forward(const ConstTensorView* input, const TensorView* output) override {
    Stream& stream = engine_.compute_stream();
    if (chunk_.begin == 0) {
      const TensorView x = view(x_, rows_, inputs);
      for (std::int64_t i = 0; i < x.elements(); ++i) x_[i] = drawn(i);
      const GatheredUnit weights = engine_.gather({0});
      models::linear_forward(engine_, weights, {0, 1}, x, view(hidden_, rows_, part_));
      kernels::gelu_forward(stream, view(hidden_, rows_, part_), view(active_, rows_, part_));
    }
    if (input != nullptr) kernels::copy(stream, *input, view(active_, rows_, part_));
    if (output != nullptr) return kernels::copy(stream, view(active_, rows_, part_), *output);
    // With the axis tensor this layer has a part of the inputs. A rank receives its rows of the sum over the
    // ranks.
    const std::int64_t local = pass_.local_rows(), first = pass_.tensor_rank() * local;
    const GatheredUnit weights = engine_.gather({1});
    models::row_linear_forward(pass_, weights, {0, 1}, view(active_, rows_, part_), view(y_, local, outputs));
    const models::GatheredRows all(pass_, "outputs", view(y_, local, outputs));
    view(d_y_, local, outputs);
    for (std::int64_t i = 0; i < rows_ * outputs; ++i) {
      const float error = all.view().as<float>()[i] - std::sin(drawn(i / outputs * inputs + i % outputs));
      loss_ += 0.5 * error * error;
      const std::int64_t row = i / outputs - first;
      if (row >= 0 && row < local) d_y_[i - first * outputs] = error * engine_.loss_gradient_scale();
    }
  }

  void input_gradients(const ConstTensorView* output_gradient, const TensorView* input_gradient) override {
    Stream& stream = engine_.compute_stream();
    const TensorView d_active = view(d_active_, rows_, part_);
    if (output_gradient != nullptr) {
      kernels::copy(stream, *output_gradient, d_active);
    } else {
      all_d_y_ = models::GatheredRows(pass_, "gradients of outputs", view(d_y_, pass_.local_rows(), outputs));
      const GatheredUnit weights = engine_.gather({1});
      models::linear_input_gradient(engine_, weights, {0, 1}, all_d_y_.view(), d_active);
    }
    if (input_gradient != nullptr) return kernels::copy(stream, d_active, *input_gradient);
    kernels::gelu_backward(stream, view(hidden_, rows_, part_), d_active, d_active);
  }

  void weight_gradients() override {
    if (chunk_.end == 2) {
      const GatheredUnit weights = engine_.gather({1});
      UnitGradients gradients = engine_.gradients({1});
      models::WeightGradients added(gradients);
      models::row_linear_parameter_gradients(pass_, weights, added, {0, 1}, view(active_, rows_, part_),
                                             all_d_y_.view(), view(d_y_, pass_.local_rows(), outputs));
      std::move(gradients).reduce();
    }
    if (chunk_.begin == 0) {
      const GatheredUnit weights = engine_.gather({0});
      UnitGradients gradients = engine_.gradients({0});
      models::linear_parameter_gradients(engine_, weights, gradients, {0, 1}, view(x_, rows_, inputs),
                                         view(d_active_, rows_, part_));
      std::move(gradients).reduce();
    }
  }

 private:
  float drawn(std::int64_t element) const {
    return random_normal({.seed = 1}, first_sample_ * inputs + element);
  }
  Engine& engine_;
  Engine::Chunk chunk_;
  std::int64_t first_sample_, rows_;
  double& loss_;
  models::Pass pass_;
  std::int64_t part_;
  std::vector<float> x_, hidden_, active_, y_, d_y_, d_active_;
  models::GatheredRows all_d_y_;
};

class MicroBatch : public pipeline::StagedMicroBatch {
 public:
  explicit MicroBatch(Engine& engine) : engine_(engine) { engine.begin_micro_batch_beside(); }
  pipeline::Boundary boundary() const override { return {DataType::float32, {rows(), inner}}; }
  std::unique_ptr<pipeline::StagedChunk> begin(const Engine::Chunk& chunk) override {
    const std::int64_t part = engine_.runtime().mesh().data_rank(engine_.runtime().rank());
    return std::make_unique<Layers>(engine_, chunk, engine_.samples() + part * rows(), rows(), loss_);
  }
  void end() override {
    const std::int64_t count = engine_.stage().last() ? rows() * outputs : 0;
    engine_.end_micro_batch({&loss_, DataType::float64, {}}, {&count, DataType::int64, {}});
  }

 private:
  std::int64_t rows() const { return engine_.config().micro_batch_size; }
  Engine& engine_;
  double loss_ = 0;
};

class Network : public pipeline::StagedModel {
 public:
  std::unique_ptr<pipeline::StagedMicroBatch> begin(Engine& engine, std::int64_t, bool) override {
    return std::make_unique<MicroBatch>(engine);
  }
};

ModelSpec two_layers() {
  const Dimension cut{"inner"}, whole{};  // the axis tensor cuts dimensions of this name
  const auto layer = [](const std::string& name, std::int64_t in, std::int64_t out,
                        const Dimension& of_inputs, const Dimension& of_outputs) {
    return UnitSpec{name,
                    {{.name = name + ".weight",
                      .shape = {in, out},
                      .initializer = Initializer::normal(0.3f),
                      .dimensions = {of_inputs, of_outputs}},
                     {.name = name + ".bias",
                      .shape = {out},
                      .initializer = Initializer::zeros(),
                      .dimensions = {of_outputs}}}};
  };
  ModelSpec spec;
  spec.tensor_dimensions = {"inner"};
  const UnitId first = spec.add_unit(layer("first", inputs, inner, whole, cut)),
               second = spec.add_unit(layer("second", inner, outputs, cut, whole));
  spec.forward = {{first, 0, 2.0 * inputs * inner}, {second, 0, 2.0 * inner * outputs}};
  spec.residual_width = inner;  // width of the message from the first layer's rank to the second's
  return spec;
}

/// Elements that this rank has sent so far to all of its groups.
std::int64_t sent(Runtime& runtime) {
  std::int64_t elements = 0;
  for (Communicator* group :
       {&runtime.shard(), runtime.pipeline(), runtime.tensor(), runtime.tensor_and_shard()}) {
    if (group != nullptr) elements += group->meter().total(Traffic::data).elements;
  }
  return elements;
}

void train(Runtime& runtime, std::optional<Engine>& made) {
  Engine& engine = made.emplace(runtime, two_layers(), runtime.config());
  Network network;
  StepResult result;
  std::int64_t before = 0;
  for (int step = 1; step <= 300; ++step) {
    before = sent(runtime);
    pipeline::train_step(network, engine);
    result = engine.step();
    if (runtime.rank() == 0 && step % 100 == 0) std::printf("step %d loss %.6f\n", step, result.loss);
  }
  const InferenceScope scope(engine);
  std::int64_t held = 0;
  for (const Engine::Chunk& chunk : engine.stage().chunks) {
    for (int unit = chunk.begin; unit < chunk.end; ++unit) {
      const GatheredUnit weights = engine.gather({unit});
      held += weights.tensor(0).elements() + weights.tensor(1).elements();
    }
  }
  std::printf("rank %d computes with %ld of %ld parameters and sends %ld elements a step\n", runtime.rank(),
              held, engine.model().parameters(), sent(runtime) - before);
}

int main(int argc, char** argv) {
  Runtime runtime;
  std::optional<Engine> engine;  // outlives the try: peers hear of an error before the engine ends
  try {
    const std::string mesh = argc > 1 ? argv[1] : "";
    runtime = Runtime::from_config(R"({
      "train_batch_size": 32, "gradient_accumulation_steps": 1,
      "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0}},
      "tranche": {"mesh": ")" + mesh +
                                   R"("}})");
    train(runtime, engine);
  } catch (...) {
    return runtime.fail(std::current_exception());
  }
}
