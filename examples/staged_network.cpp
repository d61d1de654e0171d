// A network of one's own on the stages of a pipeline, under any schedule. Alone, or on two ranks:
// mpirun -n 2 staged_network pipeline=2 zb-h1
#include <tranche/pipeline/staged_model.h>
#include <tranche/tranche.h>

#include <cmath>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>
using namespace tranche;

constexpr std::int64_t width = 8, rows = 24;
constexpr int layers = 4;

TensorView view(std::vector<float>& values) {
  return {values.data(), DataType::float32, {rows, width}};
}

/// Computes the layers [begin, end) of a micro-batch: y = x W + b, and gelu between the layers.
class Layers : public pipeline::StagedChunk {
 public:
  Layers(Engine& engine, const Engine::Chunk& chunk, std::int64_t first_sample, double& loss)
      : engine_(engine), chunk_(chunk), first_sample_(first_sample), loss_(loss) {
    inputs_.assign(layers, std::vector<float>(rows * width));
    sums_ = gradients_ = inputs_;
  }

  void forward(const ConstTensorView* input, const TensorView* output) override {
    Stream& stream = engine_.compute_stream();
    std::vector<float>& first = inputs_[chunk_.begin];
    if (input != nullptr) {
      kernels::copy(stream, *input, view(first));
    } else {
      for (std::int64_t i = 0; i < rows * width; ++i) first[i] = point(i);
    }
    for (int layer = chunk_.begin; layer < chunk_.end; ++layer) {
      const GatheredUnit weights = engine_.gather({layer});
      kernels::matmul_bias(stream, view(inputs_[layer]), weights.tensor(0), weights.tensor(1),
                           view(sums_[layer]), engine_.workspace());
      if (layer + 1 == layers) {
        for (std::int64_t i = 0; i < rows * width; ++i) loss_ += 0.5 * error(i) * error(i);
        return;
      }
      std::vector<float>& next = layer + 1 < chunk_.end ? inputs_[layer + 1] : last_;
      next.resize(rows * width);
      kernels::gelu_forward(stream, view(sums_[layer]), view(next));
    }
    kernels::copy(stream, view(last_), *output);
  }

  void input_gradients(const ConstTensorView* output_gradient, const TensorView* input_gradient) override {
    Stream& stream = engine_.compute_stream();
    for (int layer = chunk_.end - 1; layer >= chunk_.begin; --layer) {
      if (layer + 1 == layers) {
        const float scale = engine_.loss_gradient_scale();
        for (std::int64_t i = 0; i < rows * width; ++i) gradients_[layer][i] = error(i) * scale;
      } else {
        kernels::gelu_backward(stream, view(sums_[layer]),
                               layer + 1 == chunk_.end ? *output_gradient : view(d_input_),
                               view(gradients_[layer]));
      }
      if (layer == 0) return;  // the gradient of the samples is not needed
      d_input_.resize(rows * width);
      const GatheredUnit weights = engine_.gather({layer});
      kernels::matmul(stream, {.transpose_b = true}, view(gradients_[layer]), weights.tensor(0),
                      layer == chunk_.begin ? *input_gradient : view(d_input_), engine_.workspace());
    }
  }

  void weight_gradients() override {
    Stream& stream = engine_.compute_stream();
    for (int layer = chunk_.end - 1; layer >= chunk_.begin; --layer) {
      UnitGradients gradients = engine_.gradients({layer});
      kernels::matmul(stream, {.transpose_a = true, .accumulate = true}, view(inputs_[layer]),
                      view(gradients_[layer]), gradients.tensor(0), engine_.workspace());
      kernels::bias_gradient(stream, view(gradients_[layer]), gradients.tensor(1));
      std::move(gradients).reduce();
    }
  }

 private:
  float point(std::int64_t element) const {
    return random_normal({.seed = 1}, first_sample_ * width + element);
  }
  float error(std::int64_t element) const { return sums_.back()[element] - std::sin(point(element)); }
  Engine& engine_;
  Engine::Chunk chunk_;
  std::int64_t first_sample_;
  double& loss_;
  std::vector<std::vector<float>> inputs_, sums_, gradients_;  // by layer
  std::vector<float> last_, d_input_;
};

class MicroBatch : public pipeline::StagedMicroBatch {
 public:
  MicroBatch(Engine& engine, std::int64_t first_sample) : engine_(engine), first_sample_(first_sample) {
    engine.begin_micro_batch_beside();
  }
  pipeline::Boundary boundary() const override { return {DataType::float32, {rows, width}}; }
  std::unique_ptr<pipeline::StagedChunk> begin(const Engine::Chunk& chunk) override {
    return std::make_unique<Layers>(engine_, chunk, first_sample_, loss_);
  }
  void end() override {
    const std::int64_t count = engine_.stage().last() ? rows * width : 0;
    engine_.end_micro_batch({&loss_, DataType::float64, {}}, {&count, DataType::int64, {}});
  }

 private:
  Engine& engine_;
  std::int64_t first_sample_;
  double loss_ = 0;
};

class Network : public pipeline::StagedModel {
 public:
  std::unique_ptr<pipeline::StagedMicroBatch> begin(Engine& engine, std::int64_t micro_batch,
                                                    bool /*training*/) override {
    const Mesh& mesh = engine.runtime().mesh();
    return std::make_unique<MicroBatch>(
        engine, engine.samples() +
                    (micro_batch * mesh.data_ranks() + mesh.data_rank(engine.runtime().rank())) * rows);
  }
};

void train(Runtime& runtime, std::optional<Engine>& made) {
  ModelSpec spec;
  for (int layer = 0; layer < layers; ++layer) {
    const std::string name = "layer" + std::to_string(layer);
    const UnitId unit = spec.add_unit(
        {name,
         {{.name = name + ".weight", .shape = {width, width}, .initializer = Initializer::normal(0.5f)},
          {.name = name + ".bias", .shape = {width}, .initializer = Initializer::zeros()}}});
    spec.forward.push_back({unit, 0, 2.0 * width * width});  // the pipeline can be cut between these uses
  }
  spec.residual_width = width;
  Engine& engine = made.emplace(runtime, spec, runtime.config());
  Network network;
  for (int step = 1; step <= 300; ++step) {
    pipeline::train_step(network, engine);
    const StepResult result = engine.step();
    if (runtime.rank() == 0 && step % 100 == 0) std::printf("step %d loss %.6f\n", step, result.loss);
  }
}

int main(int argc, char** argv) {
  Runtime runtime;
  std::optional<Engine> engine;  // outlives the try: peers hear of an error before the engine ends
  try {
    const std::string mesh = argc > 1 ? argv[1] : "", schedule = argc > 2 ? argv[2] : "1f1b";
    runtime = Runtime::from_config(R"({
      "train_micro_batch_size_per_gpu": 24, "gradient_accumulation_steps": 4,
      "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0}},
      "tranche": {"mesh": ")" + mesh +
                                   R"(", "pipeline_schedule": ")" + schedule + R"("}})");
    train(runtime, engine);
  } catch (...) {
    return runtime.fail(std::current_exception());
  }
}
