// A small U-Net on the stages of a pipeline. It halves a signal's length and doubles it again, and its last
// layer also reads the output of the first one. This skip connection is sent once, directly from the first
// stage to the last one. It runs alone, or as
//   mpirun -n 2 u_net pipeline=2
//   mpirun -n 4 u_net pipeline=4
#include <tranche/pipeline/staged_model.h>
#include <tranche/tranche.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>
using namespace tranche;

using Numbers = std::vector<float>;
constexpr std::int64_t samples = 4, length = 32, channels = 8;  // of a micro-batch; of the first layer's
                                                                // output
constexpr std::int64_t crossing = samples * length * channels;  // numbers between any two layers
constexpr int encoder = 0, down = 1, bottleneck = 2, decoder = 3, layers = 4;

/// A convolution over three neighbours, followed by gelu except in the last layer. If the length is halved
/// the channels are doubled, so that every cut has messages of one shape.
struct Convolution {
  std::int64_t length, inputs, outputs;
  std::int64_t rows() const { return samples * length; }
};
constexpr Convolution convolutions[layers] = {{length, 1, channels},
                                              {length / 2, channels, 2 * channels},
                                              {length / 2, 2 * channels, 2 * channels},
                                              {length, 3 * channels, 1}};

TensorView view(Numbers& values, std::int64_t rows) {
  return {values.data(), DataType::float32, {rows, std::int64_t(values.size()) / rows}};
}

/// Calls visit(index in columns[rows, 3 * inputs], index in x[rows, inputs]) for each neighbour that exists.
template <class Visit>
void for_each_neighbour(const Convolution& of, const Visit& visit) {
  for (std::int64_t row = 0; row < of.rows(); ++row) {
    for (std::int64_t tap = 0; tap < 3; ++tap) {
      const std::int64_t place = row % of.length + tap - 1;
      if (place < 0 || place >= of.length) continue;
      for (std::int64_t c = 0; c < of.inputs; ++c) {
        visit((row * 3 + tap) * of.inputs + c, (row + tap - 1) * of.inputs + c);
      }
    }
  }
}

/// Sends the first layer's output to the last layer, and its gradient back. On one rank nothing is sent.
class Skips {
 public:
  explicit Skips(Engine& engine) : engine_(engine) {
    Communicator* stages = engine.runtime().pipeline();
    // This group's messages have an order of their own, independent of the pipeline's.
    if (stages != nullptr) group_ = stages->split(0, stages->rank());
  }
  bool needed() const { return group_ != nullptr && engine_.stage().last_stage != 0; }
  void send(const Numbers& values, int stage) {
    auto kept = std::make_unique<Numbers>(values);  // kept until it has been sent
    const Event sent = group_->send(kept->data(), crossing, DataType::float32, stage, {}, label_);
    under_way_.emplace_back(sent, std::move(kept));
  }
  Numbers receive(int stage) {
    Numbers values(crossing);
    engine_.wait_for_message(group_->recv(values.data(), crossing, DataType::float32, stage, {}, label_));
    return values;
  }
  void finish_step() {
    for (const auto& [sent, kept] : under_way_) sent.wait();
    under_way_.clear();
  }
  std::int64_t elements_sent() const {
    return group_ == nullptr ? 0 : group_->meter().total(Traffic::data).elements;
  }

 private:
  Engine& engine_;
  std::unique_ptr<Communicator> group_;
  std::vector<std::pair<Event, std::unique_ptr<Numbers>>> under_way_;
  OperationLabel label_{"skip connection", "u-net"};
};

/// State that the chunks of a micro-batch share on this rank.
struct Shared {
  Engine& engine;
  Skips& skips;
  std::int64_t first_sample;
  double loss = 0;
  Numbers skip, d_skip;  ///< used if both ends are on this rank
};

class Chunk : public pipeline::StagedChunk {
 public:
  Chunk(Shared& shared, const Engine::Chunk& chunk) : shared_(shared), chunk_(chunk) {}

  void forward(const ConstTensorView* input, const TensorView* output) override {
    Numbers x(input != nullptr ? crossing : samples * length);
    if (input != nullptr) {
      std::copy_n(input->as<float>(), crossing, x.begin());
    } else {
      for (std::int64_t i = 0; i < samples * length; ++i) x[i] = clean(i) + 0.3f * noise(i);
    }
    for (int layer = chunk_.begin; layer < chunk_.end; ++layer) {
      const Convolution& of = convolutions[layer];
      if (layer == down) x = pooled(x);
      if (layer == decoder) x = joined(x, shared_.skips.needed() ? shared_.skips.receive(0) : shared_.skip);
      columns_[layer].assign(of.rows() * 3 * of.inputs, 0);
      for_each_neighbour(of, [&](std::int64_t to, std::int64_t from) { columns_[layer][to] = x[from]; });
      sums_[layer].resize(of.rows() * of.outputs);
      x.resize(of.rows() * of.outputs);
      const GatheredUnit weights = engine().gather({layer});
      kernels::matmul_bias(stream(), view(columns_[layer], of.rows()), weights.tensor(0), weights.tensor(1),
                           view(sums_[layer], of.rows()), engine().workspace());
      if (layer == decoder) return add_loss();
      kernels::gelu_forward(stream(), view(sums_[layer], of.rows()), view(x, of.rows()));
      if (layer != encoder) continue;
      if (shared_.skips.needed()) {
        shared_.skips.send(x, engine().stage().last_stage);
      } else {
        shared_.skip = x;
      }
    }
    std::copy(x.begin(), x.end(), output->as<float>());
  }

  void input_gradients(const ConstTensorView* output_gradient, const TensorView* input_gradient) override {
    Numbers d_x(crossing);  // gradient of the layer's input
    if (output_gradient != nullptr) std::copy_n(output_gradient->as<float>(), crossing, d_x.begin());
    for (int layer = chunk_.end - 1; layer >= chunk_.begin; --layer) {
      const Convolution& of = convolutions[layer];
      d_sums_[layer].resize(of.rows() * of.outputs);
      if (layer == decoder) {
        for (std::int64_t i = 0; i < samples * length; ++i) {
          d_sums_[layer][i] = (sums_[layer][i] - clean(i)) * engine().loss_gradient_scale();
        }
      } else {
        if (layer == encoder) {
          const Numbers d_skip =
              shared_.skips.needed() ? shared_.skips.receive(engine().stage().last_stage) : shared_.d_skip;
          for (std::int64_t i = 0; i < crossing; ++i) d_x[i] += d_skip[i];
        }
        kernels::gelu_backward(stream(), view(sums_[layer], of.rows()), view(d_x, of.rows()),
                               view(d_sums_[layer], of.rows()));
      }
      if (layer == encoder) return;  // the gradient of the signal is not needed
      Numbers d_columns(of.rows() * 3 * of.inputs);
      const GatheredUnit weights = engine().gather({layer});
      kernels::matmul(stream(), {.transpose_b = true}, view(d_sums_[layer], of.rows()), weights.tensor(0),
                      view(d_columns, of.rows()), engine().workspace());
      d_x.assign(of.rows() * of.inputs, 0);
      for_each_neighbour(of, [&](std::int64_t from, std::int64_t to) { d_x[to] += d_columns[from]; });
      if (layer == down) d_x = of_pooled(d_x);
      if (layer == decoder) {
        auto [of_input, of_skip] = parted(d_x);
        if (shared_.skips.needed()) {
          shared_.skips.send(of_skip, 0);
        } else {
          shared_.d_skip = of_skip;
        }
        d_x = of_input;
      }
    }
    std::copy(d_x.begin(), d_x.end(), input_gradient->as<float>());
  }

  void weight_gradients() override {
    for (int layer = chunk_.end - 1; layer >= chunk_.begin; --layer) {
      const std::int64_t rows = convolutions[layer].rows();
      UnitGradients gradients = engine().gradients({layer});
      kernels::matmul(stream(), {.transpose_a = true, .accumulate = true}, view(columns_[layer], rows),
                      view(d_sums_[layer], rows), gradients.tensor(0), engine().workspace());
      kernels::bias_gradient(stream(), view(d_sums_[layer], rows), gradients.tensor(1));
      std::move(gradients).reduce();
    }
  }

 private:
  Engine& engine() const { return shared_.engine; }
  Stream& stream() const { return engine().compute_stream(); }
  /// The target: a wave, different for each sample, that the network must find in the noise.
  float clean(std::int64_t i) const {
    const float phase = random_normal({.seed = 2}, shared_.first_sample + i / length);
    return std::sin(0.4f * float(i % length) + 3 * phase);
  }
  float noise(std::int64_t i) const { return random_normal({.seed = 1}, shared_.first_sample * length + i); }
  void add_loss() {
    for (std::int64_t i = 0; i < samples * length; ++i) {
      const float error = sums_[decoder][i] - clean(i);
      shared_.loss += 0.5 * error * error;
    }
  }
  /// Means of neighbouring pairs, [samples * length / 2, channels].
  static Numbers pooled(const Numbers& x) {
    Numbers y(crossing / 2);
    for (std::int64_t i = 0; i < crossing / 2; ++i) {
      const std::int64_t row = i / channels * 2 * channels + i % channels;
      y[i] = 0.5f * (x[row] + x[row + channels]);
    }
    return y;
  }
  static Numbers of_pooled(const Numbers& d_y) {
    Numbers d_x(crossing);
    for (std::int64_t i = 0; i < crossing; ++i)
      d_x[i] = 0.5f * d_y[i / (2 * channels) * channels + i % channels];
    return d_x;
  }
  /// Each row of x twice, beside the skip connection's row: [samples * length, 3 * channels].
  static Numbers joined(const Numbers& x, const Numbers& skip) {
    Numbers y(3 * crossing);
    for (std::int64_t row = 0; row < samples * length; ++row) {
      std::copy_n(&x[row / 2 * 2 * channels], 2 * channels, &y[row * 3 * channels]);
      std::copy_n(&skip[row * channels], channels, &y[row * 3 * channels + 2 * channels]);
    }
    return y;
  }
  static std::pair<Numbers, Numbers> parted(const Numbers& d_y) {
    Numbers d_x(crossing), d_skip(crossing);
    for (std::int64_t row = 0; row < samples * length; ++row) {
      for (std::int64_t c = 0; c < 2 * channels; ++c)
        d_x[row / 2 * 2 * channels + c] += d_y[row * 3 * channels + c];
      std::copy_n(&d_y[row * 3 * channels + 2 * channels], channels, &d_skip[row * channels]);
    }
    return {d_x, d_skip};
  }

  Shared& shared_;
  Engine::Chunk chunk_;
  Numbers columns_[layers], sums_[layers], d_sums_[layers];
};

class MicroBatch : public pipeline::StagedMicroBatch {
 public:
  MicroBatch(Engine& engine, Skips& skips, std::int64_t first_sample) : shared_{engine, skips, first_sample} {
    engine.begin_micro_batch_beside();
  }
  pipeline::Boundary boundary() const override { return {DataType::float32, {samples * length, channels}}; }
  std::unique_ptr<pipeline::StagedChunk> begin(const Engine::Chunk& chunk) override {
    return std::make_unique<Chunk>(shared_, chunk);
  }
  void end() override {
    const std::int64_t count = shared_.engine.stage().last() ? samples * length : 0;
    shared_.engine.end_micro_batch({&shared_.loss, DataType::float64, {}}, {&count, DataType::int64, {}});
  }

 private:
  Shared shared_;
};

class UNet : public pipeline::StagedModel {
 public:
  explicit UNet(Skips& skips) : skips_(skips) {}
  std::unique_ptr<pipeline::StagedMicroBatch> begin(Engine& engine, std::int64_t micro_batch, bool) override {
    return std::make_unique<MicroBatch>(engine, skips_, engine.samples() + micro_batch * samples);
  }

 private:
  Skips& skips_;
};

void train(Runtime& runtime, std::optional<Engine>& made) {
  ModelSpec spec;
  const char* const names[layers] = {"encoder", "down", "bottleneck", "decoder"};
  for (int layer = 0; layer < layers; ++layer) {
    const std::string name = names[layer];
    const std::int64_t in = 3 * convolutions[layer].inputs, out = convolutions[layer].outputs;
    const UnitId unit =
        spec.add_unit({name,
                       {{.name = name + ".weight",
                         .shape = {in, out},
                         .initializer = Initializer::normal(1 / std::sqrt(float(in)))},
                        {.name = name + ".bias", .shape = {out}, .initializer = Initializer::zeros()}}});
    spec.forward.push_back({unit, 0, 1});
  }
  spec.residual_width = channels;
  spec.tokens_per_sample = length;
  Engine& engine = made.emplace(runtime, spec, runtime.config());
  Skips skips(engine);
  UNet network(skips);
  std::int64_t before = 0;
  for (int step = 1; step <= 200; ++step) {
    before = skips.elements_sent();
    pipeline::train_step(network, engine);
    skips.finish_step();
    const StepResult result = engine.step();
    if (runtime.rank() == 0 && step % 50 == 0) std::printf("step %d loss %.9g\n", step, result.loss);
  }
  const kernels::Digest digest = engine.state_digest();
  if (runtime.rank() == 0) std::printf("state %016lx%016lx\n", digest.lanes[0], digest.lanes[1]);
  std::printf("rank %d sends %ld numbers of skip connections a step\n", runtime.rank(),
              skips.elements_sent() - before);
}

int main(int argc, char** argv) {
  Runtime runtime;
  std::optional<Engine> engine;  // outlives the try: peers hear of an error before the engine ends
  try {
    const std::string mesh = argc > 1 ? argv[1] : "", schedule = argc > 2 ? argv[2] : "1f1b";
    runtime = Runtime::from_config(R"({
      "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4,
      "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0}},
      "tranche": {"mesh": ")" + mesh +
                                   R"(", "pipeline_cuts": "equal", "pipeline_schedule": ")" + schedule +
                                   R"("}})");
    train(runtime, engine);
  } catch (...) {
    return runtime.fail(std::current_exception());
  }
}
