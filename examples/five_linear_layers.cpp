// Five linear layers on five ranks, which are the stages of a pipeline. With one micro-batch a step only one
// rank works at a time, which uses a fifth of the ranks' time; more micro-batches use more of it. It runs
// alone, or as
//   mpirun -n 5 five_linear_layers pipeline=5      one micro-batch
//   mpirun -n 5 five_linear_layers pipeline=5 16   the given number of micro-batches
#include <tranche/pipeline/staged_model.h>
#include <tranche/tranche.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>
using namespace tranche;

constexpr std::int64_t width = 8, rows = 16;
constexpr int layers = 5;

using Clock = std::chrono::steady_clock;

TensorView view(std::vector<float>& values) {
  values.resize(rows * width);
  return {values.data(), DataType::float32, {rows, width}};
}

/// Layers of this size take almost no time, so pauses represent their work: one in forward, two in backward.
void work(double& worked, int pauses) {
  const auto begin = Clock::now();
  std::this_thread::sleep_for(std::chrono::milliseconds(10 * pauses));
  worked += std::chrono::duration<double>(Clock::now() - begin).count();
}

class Layers : public pipeline::StagedChunk {
 public:
  Layers(Engine& engine, const Engine::Chunk& chunk, std::int64_t first_sample, double& loss, double& worked)
      : engine_(engine), chunk_(chunk), first_sample_(first_sample), loss_(loss), worked_(worked) {}

  void forward(const ConstTensorView* input, const TensorView* output) override {
    Stream& stream = engine_.compute_stream();
    std::vector<float>& first = x_[chunk_.begin];
    if (input != nullptr) {
      kernels::copy(stream, *input, view(first));
    } else {
      view(first);
      for (std::int64_t i = 0; i < rows * width; ++i) first[i] = drawn(i);
    }
    for (int layer = chunk_.begin; layer < chunk_.end; ++layer) {
      work(worked_, 1);
      const GatheredUnit weights = engine_.gather({layer});
      kernels::matmul_bias(stream, view(x_[layer]), weights.tensor(0), weights.tensor(1), view(x_[layer + 1]),
                           engine_.workspace());
    }
    if (output != nullptr) return kernels::copy(stream, view(x_[chunk_.end]), *output);
    for (std::int64_t i = 0; i < rows * width; ++i) loss_ += 0.5 * error(i) * error(i);
  }

  void input_gradients(const ConstTensorView* output_gradient, const TensorView* input_gradient) override {
    Stream& stream = engine_.compute_stream();
    std::vector<float>& last = d_x_[chunk_.end];
    view(last);
    if (output_gradient != nullptr) {
      kernels::copy(stream, *output_gradient, view(last));
    } else {
      const float scale = engine_.loss_gradient_scale();
      for (std::int64_t i = 0; i < rows * width; ++i) last[i] = error(i) * scale;
    }
    for (int layer = chunk_.end - 1; layer >= chunk_.begin; --layer) {
      work(worked_, 2);
      const GatheredUnit weights = engine_.gather({layer});
      kernels::matmul(stream, {.transpose_b = true}, view(d_x_[layer + 1]), weights.tensor(0),
                      view(d_x_[layer]), engine_.workspace());
    }
    if (input_gradient != nullptr) kernels::copy(stream, view(d_x_[chunk_.begin]), *input_gradient);
  }

  void weight_gradients() override {
    Stream& stream = engine_.compute_stream();
    for (int layer = chunk_.end - 1; layer >= chunk_.begin; --layer) {
      UnitGradients gradients = engine_.gradients({layer});
      kernels::matmul(stream, {.transpose_a = true, .accumulate = true}, view(x_[layer]),
                      view(d_x_[layer + 1]), gradients.tensor(0), engine_.workspace());
      kernels::bias_gradient(stream, view(d_x_[layer + 1]), gradients.tensor(1));
      std::move(gradients).reduce();
    }
  }

 private:
  float drawn(std::int64_t element) const {
    return random_normal({.seed = 1}, first_sample_ * width + element);
  }
  /// The target is the sum of a sample's numbers before each position; the last layer must compute it.
  float error(std::int64_t element) const {
    float target = 0;
    for (std::int64_t i = element / width * width; i <= element; ++i) target += drawn(i);
    return x_[layers][element] - target;
  }
  Engine& engine_;
  Engine::Chunk chunk_;
  std::int64_t first_sample_;
  double &loss_, &worked_;
  std::vector<float> x_[layers + 1], d_x_[layers + 1];  // values before each layer and after the last one
};

class MicroBatch : public pipeline::StagedMicroBatch {
 public:
  MicroBatch(Engine& engine, std::int64_t first_sample, double& worked)
      : engine_(engine), first_sample_(first_sample), worked_(worked) {
    engine.begin_micro_batch_beside();
  }
  pipeline::Boundary boundary() const override { return {DataType::float32, {rows, width}}; }
  std::unique_ptr<pipeline::StagedChunk> begin(const Engine::Chunk& chunk) override {
    return std::make_unique<Layers>(engine_, chunk, first_sample_, loss_, worked_);
  }
  void end() override {
    const std::int64_t count = engine_.stage().last() ? rows * width : 0;
    engine_.end_micro_batch({&loss_, DataType::float64, {}}, {&count, DataType::int64, {}});
  }

 private:
  Engine& engine_;
  std::int64_t first_sample_;
  double& worked_;
  double loss_ = 0;
};

class Network : public pipeline::StagedModel {
 public:
  std::unique_ptr<pipeline::StagedMicroBatch> begin(Engine& engine, std::int64_t micro_batch, bool) override {
    return std::make_unique<MicroBatch>(engine, engine.samples() + micro_batch * rows, worked);
  }
  double worked = 0;  ///< seconds in which this rank's layers worked
};

void train(Runtime& runtime, std::optional<Engine>& made) {
  ModelSpec spec;
  for (int layer = 0; layer < layers; ++layer) {
    const std::string name = "layer" + std::to_string(layer);
    const UnitId unit = spec.add_unit(
        {name,
         {{.name = name + ".weight", .shape = {width, width}, .initializer = Initializer::normal(0.4f)},
          {.name = name + ".bias", .shape = {width}, .initializer = Initializer::zeros()}}});
    spec.forward.push_back({unit, 0, 2.0 * width * width});
  }
  spec.residual_width = width;
  Engine& engine = made.emplace(runtime, spec, runtime.config());
  Network network;
  double best = 0;  // share of the ranks' time in which they worked, in the step with the least waiting
  for (int step = 1; step <= 5; ++step) {
    network.worked = 0;
    const auto begin = Clock::now();
    pipeline::train_step(network, engine);
    double worked = network.worked, step_time = std::chrono::duration<double>(Clock::now() - begin).count();
    const OperationLabel label{"times", "example", Traffic::control, Tier::host};
    runtime.all().all_reduce(&worked, 1, DataType::float64, ReduceOperation::sum, label).wait();
    runtime.all().all_reduce(&step_time, 1, DataType::float64, ReduceOperation::maximum, label).wait();
    best = std::max(best, worked / (runtime.size() * step_time));
    const StepResult result = engine.step();
    if (runtime.rank() == 0) std::printf("step %d loss %.6f\n", step, result.loss);
  }
  if (runtime.rank() == 0) std::printf("%d ranks worked %.1f %% of their time\n", runtime.size(), 100 * best);
}

int main(int argc, char** argv) {
  Runtime runtime;
  std::optional<Engine> engine;  // outlives the try: peers hear of an error before the engine ends
  try {
    const std::string mesh = argc > 1 ? argv[1] : "", micro_batches = argc > 2 ? argv[2] : "1";
    runtime = Runtime::from_config(R"({
      "train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": )" +
                                   micro_batches + R"(,
      "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0}},
      "tranche": {"mesh": ")" + mesh +
                                   R"("}})");
    train(runtime, engine);
  } catch (...) {
    return runtime.fail(std::current_exception());
  }
}
