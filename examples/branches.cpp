// A block of four branches on ranks of their own. The ranks meet at two points: forward adds up the outputs
// of the branches, backward adds up the gradients of their inputs. It runs alone, or as
//   mpirun -n 4 branches pipeline=4 [FOLDER]     which writes a trace of each rank to FOLDER
// The axis pipeline gives each rank its own units with their state. Here the units work at the same time
// instead of one after the other, so the program itself determines what they compute and send.
#include <tranche/tranche.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>
using namespace tranche;

using Numbers = std::vector<float>;
constexpr std::int64_t width = 16, rows = 32;
constexpr int branches = 4;
constexpr int depth[branches] = {1, 2, 3, 6};  // layers

TensorView view(Numbers& values) {
  values.resize(rows * width);
  return {values.data(), DataType::float32, {rows, width}};
}

/// Unit 0 is the stem, a layer before the block; it is on the rank of the first branch. Units 1 to 4 are the
/// branches: layers, each followed by gelu.
class Block {
 public:
  explicit Block(Engine& engine) : engine_(engine), ranks_(engine.runtime().pipeline()) {}

  /// output = the sum over branches of branch(stem(input)), on all ranks.
  void forward(const Numbers& input, Numbers& output) {
    input_ = input;
    if (has(0)) product({}, 0, 0, input_, stem_);
    view(stem_);
    if (ranks_ != nullptr) {
      ranks_->broadcast(stem_.data(), rows * width, DataType::float32, 0, {}, label("stem")).wait();
    }
    std::vector<Numbers> results(branches);
    for (int b = 0; b < branches; ++b) {
      if (!has(b)) continue;
      timed("forward of branch " + std::to_string(b), [&] {
        x_[b] = {stem_};
        sums_[b].assign(depth[b], {});
        for (int layer = 0; layer < depth[b]; ++layer) {
          product({}, 1 + b, layer, x_[b][layer], sums_[b][layer]);
          x_[b].emplace_back();
          kernels::gelu_forward(stream(), view(sums_[b][layer]), view(x_[b][layer + 1]));
        }
        results[b] = x_[b].back();
      });
    }
    add_up(results, "sum of outputs", output);
  }

  /// Adds the gradients of all weights, given the gradient of the output.
  void backward(const Numbers& d_output) {
    std::vector<Numbers> d_inputs(branches);
    for (int b = 0; b < branches; ++b) {
      if (!has(b)) continue;
      timed("backward of branch " + std::to_string(b), [&] {
        UnitGradients gradients = engine_.gradients({1 + b});
        Numbers d_x = d_output, d_sum;
        for (int layer = depth[b] - 1; layer >= 0; --layer) {
          kernels::gelu_backward(stream(), view(sums_[b][layer]), view(d_x), view(d_sum));
          kernels::matmul(stream(), {.transpose_a = true, .accumulate = true}, view(x_[b][layer]),
                          view(d_sum), gradients.tensor(layer), engine_.workspace());
          product({.transpose_b = true}, 1 + b, layer, d_sum, d_x);
        }
        std::move(gradients).reduce();
        d_inputs[b] = d_x;
      });
    }
    Numbers d_stem;
    add_up(d_inputs, "sum of input gradients", d_stem);
    if (!has(0)) return;
    UnitGradients gradients = engine_.gradients({0});
    kernels::matmul(stream(), {.transpose_a = true, .accumulate = true}, view(input_), view(d_stem),
                    gradients.tensor(0), engine_.workspace());
    std::move(gradients).reduce();
  }

 private:
  bool has(int branch) const { return ranks_ == nullptr || ranks_->rank() == branch; }
  Stream& stream() const { return engine_.compute_stream(); }
  static OperationLabel label(const char* what) { return {"block", what, Traffic::data, Tier::host}; }

  void product(const kernels::MatmulOptions& options, int unit, int tensor, Numbers& a, Numbers& out) {
    const GatheredUnit weights = engine_.gather({unit});
    kernels::matmul(stream(), options, view(a), weights.tensor(tensor), view(out), engine_.workspace());
    // Layers of this size take almost no time, so a pause represents their work.
    if (unit > 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }

  /// sum = the sum over branches, in their order. Each rank gathers the branches of the others and adds them
  /// up, so the bits are those of one rank.
  void add_up(const std::vector<Numbers>& of_branches, const char* what, Numbers& sum) {
    constexpr std::int64_t count = rows * width;
    Numbers all(branches * count);
    for (int b = 0; b < branches; ++b)
      std::copy(of_branches[b].begin(), of_branches[b].end(), &all[b * count]);
    timed(what, [&] {
      if (ranks_ != nullptr) {
        ranks_
            ->all_gather(&all[ranks_->rank() * count], all.data(), count, DataType::float32, 0, {},
                         label(what))
            .wait();
      }
      sum.assign(count, 0);
      for (int b = 0; b < branches; ++b) {
        for (std::int64_t i = 0; i < count; ++i) sum[i] += all[b * count + i];
      }
    });
  }

  /// Runs `work` as a span of the rank's trace.
  void timed(const std::string& name, const std::function<void()>& work) {
    const auto now = [] {
      return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    };
    const double begin = now();
    work();
    if (TraceRecorder* trace = engine_.runtime().trace()) trace->span("block", name, begin, now());
  }

  Engine& engine_;
  Communicator* ranks_;  ///< of the branches; null: this rank has all of them
  Numbers input_, stem_;
  std::vector<Numbers> x_[branches], sums_[branches];  ///< inputs of each layer, and inputs of each gelu
};

void train(Runtime& runtime, std::optional<Engine>& made) {
  ModelSpec spec;
  const auto add_unit = [&](const std::string& name, int layers) {
    UnitSpec unit{name, {}};
    for (int layer = 0; layer < layers; ++layer) {
      unit.tensors.push_back({.name = name + "." + std::to_string(layer),
                              .shape = {width, width},
                              .initializer = Initializer::normal(0.3f)});
    }
    spec.forward.push_back({spec.add_unit(unit), 0, 1});
  };
  add_unit("stem", 1);
  for (int b = 0; b < branches; ++b) add_unit("branch" + std::to_string(b), depth[b]);
  spec.residual_width = width;
  Engine& engine = made.emplace(runtime, spec, runtime.config());
  Block block(engine);
  Numbers input(rows * width), output;
  for (int step = 1; step <= 20; ++step) {
    for (std::int64_t i = 0; i < rows * width; ++i) {
      input[i] = random_normal({.seed = 1}, engine.samples() * width + i);
    }
    engine.begin_micro_batch();
    block.forward(input, output);
    double loss = 0;  // all ranks have the output; the last stage of the pipeline reports its loss
    for (std::int64_t i = 0; i < rows * width; ++i) {
      const float error = output[i] - std::sin(input[i]);
      loss += 0.5 * error * error;
      output[i] = error * engine.loss_gradient_scale();
    }
    block.backward(output);
    const std::int64_t count = engine.stage().last() ? rows * width : 0;
    if (count == 0) loss = 0;
    engine.end_micro_batch({&loss, DataType::float64, {}}, {&count, DataType::int64, {}});
    const StepResult result = engine.step();
    if (runtime.rank() == 0) std::printf("step %d loss %.9g\n", step, result.loss);
  }
  const kernels::Digest digest = engine.state_digest();
  if (runtime.rank() == 0) std::printf("state %016lx%016lx\n", digest.lanes[0], digest.lanes[1]);
}

int main(int argc, char** argv) {
  Runtime runtime;
  std::optional<Engine> engine;  // outlives the try: peers hear of an error before the engine ends
  try {
    const std::string mesh = argc > 1 ? argv[1] : "";
    RuntimeOptions options;
    options.trace = argc > 2;
    runtime = Runtime::from_config(R"({
      "train_micro_batch_size_per_gpu": 32, "gradient_accumulation_steps": 1,
      "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0}},
      "tranche": {"mesh": ")" + mesh + R"(", "pipeline_cuts": )" +
                                       (mesh.empty() ? R"("equal")" : "[2, 3, 4]") + "}}",
                                   options);
    train(runtime, engine);
    if (options.trace) {
      runtime.trace()->save(std::string(argv[2]) + "/rank" + std::to_string(runtime.rank()) + ".json");
    }
  } catch (...) {
    return runtime.fail(std::current_exception());
  }
}
