#pragma once
/// Runs the engine on thread ranks, and the fp64 reference on the same data and weights.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "reference_models.h"
#include "tests/comm/common_start.h"
#include "tranche/comm/backends.h"
#include "tranche/core/random.h"
#include "tranche/engine/engine.h"
#include "tranche/models/gpt.h"

namespace tranche::models {

/// Everything in fp32, AdamW without decay, no clipping, one thread per rank.
inline Config plain_config(std::int64_t batch, int ranks = 1) {
  Config config;
  config.train_batch_size = batch;
  config.micro_batch_size = batch / ranks;
  config.precision = {DataType::float32, DataType::float32, DataType::float32, DataType::float32};
  config.gradient_clipping = 0;
  config.optimizer.parameters["weight_decay"] = 0;
  config.threads = 1;
  config.communication_timeout = 60;
  config.workspace_bytes = kernels::minimum_workspace_bytes;
  config.staging_bytes = std::int64_t{1} << 20;
  return config;
}

/// The reference's optimizer for a configuration of AdamW or SGD.
inline reference_training::OptimizerOptions reference_optimizer(const Config& config) {
  const OptimizerConfig& from = config.optimizer;
  const auto value = [&](const char* key) {
    const auto at = from.parameters.find(key);
    return at == from.parameters.end() ? 0.0 : at->second.first;
  };
  return {.adam = from.type == "AdamW",
          .learning_rate = from.learning_rate,
          .weight_decay = value("weight_decay"),
          .momentum = value("momentum"),
          .clipping = config.gradient_clipping};
}

/// Seconds without a message after which so many thread ranks count as hung. A rank that waits sees its peers
/// compute one after the other where they share a core, so the limit of one rank on a core grows with the
/// ranks of a core.
inline double patience_of(int ranks) {
  constexpr double of_one = 60;
  const auto cores = static_cast<double>(std::max(1U, std::thread::hardware_concurrency()));
  return of_one * std::max(1.0, ranks / cores);
}

/// Creates an engine on every rank, and runs `body` there when all ranks have theirs.
inline void on_ranks(int ranks, const ModelSpec& spec, const Config& config,
                     const std::function<void(Engine&)>& body, DeviceKind device = DeviceKind::cpu) {
  test::CommonStart start(ranks);
  run_thread_ranks(ranks, [&](int, const CommunicatorFactory& factory) {
    test::CommonStart::Rank started(start);
    Config own = config;
    validate_config(own, ranks);
    RuntimeOptions options = RuntimeOptions::from(own);
    options.device = device;
    Runtime runtime(options, factory);
    Engine engine(runtime, spec, own);
    started.await_others();
    body(engine);
  });
}

/// Collective. All weights (or what `read` reads) in fp64 by name.
inline reference_training::Tensors read_all(Engine& engine, bool gradients = false) {
  reference_training::Tensors result;
  for (const auto& unit : engine.model().units()) {
    for (const auto& tensor : unit.tensors) {
      const auto values = gradients ? engine.read_gradient(tensor.name) : engine.read_weight(tensor.name);
      result[tensor.name].assign(values.begin(), values.end());
    }
  }
  return result;
}

/// |a - b| / |b| in the L2 norm; |a| when b is zero.
inline double relative_distance(const std::vector<double>& a, const std::vector<double>& b) {
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    difference += (a.at(i) - b[i]) * (a[i] - b[i]);
    size += b[i] * b[i];
  }
  return std::sqrt(size > 0 ? difference / size : difference);
}

/// fp32 values between -0.3 and 0.3 for a tensor, determined by its name.
inline std::vector<float> drawn_values(const std::string& name, std::int64_t elements) {
  RandomKey key{.seed = std::hash<std::string>()(name)};
  std::vector<float> values(static_cast<std::size_t>(elements));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = 0.6f * (random_uniform(key, static_cast<std::uint64_t>(i)) - 0.5f);
  return values;
}

/// Gives adapters values other than zero, as training does.
inline void write_adapters(Engine& engine) {
  for (const UnitSpec& unit : engine.model().units()) {
    for (const LowRankAdapter& adapter : unit.adapters) {
      for (const int index : {adapter.a, adapter.b}) {
        const TensorSpec& tensor = unit.tensors[static_cast<std::size_t>(index)];
        engine.write_weight(tensor.name, drawn_values(tensor.name, tensor.shape.elements()));
      }
    }
  }
}

/// Sequences that can be learned: an affine walk over the vocabulary with a drawn start and occasional
/// deviations. Sample s is the same for every caller. Optionally every 13th target is ignored.
struct TokenData {
  std::int64_t time;
  std::int64_t vocabulary;
  bool ignore_some;
  std::vector<std::int32_t> tokens, targets;
  std::vector<std::int64_t> samples;
  std::vector<std::int32_t> document_begin, positions;  ///< empty: a row is one document

  TokenData(std::int64_t length, std::int64_t vocabulary_size, bool ignored)
      : time(length), vocabulary(vocabulary_size), ignore_some(ignored) {}

  void draw(std::int64_t first, std::int64_t count) {
    tokens.clear();
    targets.clear();
    samples.clear();
    for (std::int64_t s = first; s < first + count; ++s) {
      const RandomKey key{.seed = 7, .subject = static_cast<std::uint64_t>(s)};
      std::int64_t token = random_bits(key, 0) % static_cast<std::uint64_t>(vocabulary);
      for (std::int64_t t = 0; t < time; ++t) {
        tokens.push_back(static_cast<std::int32_t>(token));
        const std::uint32_t slip = random_bits(key, static_cast<std::uint64_t>(t) + 1);
        token = slip % 8 == 0 ? slip / 8 % vocabulary : (token * 5 + 3) % vocabulary;
        const bool ignored = ignore_some && (3 * s + t) % 13 == 5;
        targets.push_back(ignored ? -100 : static_cast<std::int32_t>(token));
      }
      samples.push_back(s);
    }
  }
  /// Divides each drawn row into four documents, at positions that its sample determines.
  void split_in_four() {
    document_begin.clear();
    positions.clear();
    for (const std::int64_t sample : samples) {
      std::int64_t begin = 0;
      for (std::int64_t t = 0; t < time; ++t) {
        if (t > begin && (t + sample) % (time / 3) == 0) begin = t;
        document_begin.push_back(static_cast<std::int32_t>(begin));
        positions.push_back(static_cast<std::int32_t>(t - begin));
      }
    }
  }
  /// Divides each drawn row into two documents, at a position that its sample determines.
  void split() {
    document_begin.clear();
    positions.clear();
    for (const std::int64_t sample : samples) {
      const std::int64_t second = 1 + sample % (time - 1);
      for (std::int64_t t = 0; t < time; ++t) {
        const std::int64_t begin = t < second ? 0 : second;
        document_begin.push_back(static_cast<std::int32_t>(begin));
        positions.push_back(static_cast<std::int32_t>(t - begin));
      }
    }
  }
  TokenBatch batch() const {
    const Shape shape{static_cast<std::int64_t>(samples.size()), time};
    TokenBatch made{
        {tokens.data(), DataType::int32, shape}, {targets.data(), DataType::int32, shape}, samples};
    if (!document_begin.empty()) {
      made.document_begin = {document_begin.data(), DataType::int32, shape};
      made.positions = {positions.data(), DataType::int32, shape};
    }
    return made;
  }
};

/// A batch in device memory, for devices that cannot reach host memory.
class DeviceBatch {
 public:
  explicit DeviceBatch(Engine& engine) : engine_(engine) {}
  /// The returned batch is valid until the next call.
  TokenBatch of(const TokenData& data) {
    TokenBatch batch = data.batch();
    Device& device = engine_.device();
    if (device.host_accessible()) return batch;
    const std::int64_t bytes = aligned_bytes(batch.tokens.bytes());
    if (!buffer_) {
      buffer_ = Buffer(engine_.runtime().memory(Tier::device), 4 * bytes, Category::other, "test batch");
    }
    std::byte* at = static_cast<std::byte*>(buffer_.data());
    std::vector<ConstTensorView*> views{&batch.tokens, &batch.targets};
    if (batch.document_begin) views.insert(views.end(), {&*batch.document_begin, &*batch.positions});
    for (ConstTensorView* view : views) {
      device.copy_from_host(engine_.compute_stream(), at, view->data, view->bytes());
      view->data = at;
      at += bytes;
    }
    return batch;
  }

 private:
  Engine& engine_;
  Buffer buffer_;
};

/// A GPT small enough for 50 quick steps; head width and time are not multiples of a vector.
inline GptConfig tiny_gpt() {
  auto config = GptConfig::preset("gpt-nano");
  config.width = 24;
  config.vocabulary = 61;
  config.positions = 16;
  return config;
}

struct GptRun {
  std::vector<double> losses, norms;
  reference_training::Tensors weights;
  reference_training::Tensors gradients;  ///< of the last step, if requested
  kernels::Digest digest;
  std::vector<GradientNoise> noise;  ///< of each step, if measured
};

/// Trains `steps` steps; the global batch of step n is samples [n * B, (n + 1) * B). Each rank takes its part
/// of each micro-batch; neighbours on the axis `tensor` take the same. `start` replaces the drawn weights.
inline GptRun train_model(int ranks, const LanguageModel& model, const Config& config, int steps,
                          std::int64_t time, bool ignore_some = false, DeviceKind device = DeviceKind::cpu,
                          const reference_training::Tensors* start = nullptr, bool want_gradients = false) {
  GptRun run;
  std::mutex mutex;
  on_ranks(
      ranks, model.spec(time), config,
      [&](Engine& engine) {
        const int rank = engine.runtime().rank();
        // The ranks of the axes `context` and `tensor`, which vary fastest, see the same samples.
        const Mesh& mesh = engine.runtime().mesh();
        const int parts = mesh.size(MeshAxis::context) * mesh.size(MeshAxis::tensor);
        const Config& used = engine.config();
        TokenData data(time, model.shape().vocabulary, ignore_some);
        DeviceBatch device_batch(engine);
        std::vector<double> losses, norms;
        std::vector<GradientNoise> noise;
        reference_training::Tensors gradients;
        if (start != nullptr) {
          for (const auto& [name, values] : *start) {
            engine.write_weight(name, std::vector<float>(values.begin(), values.end()));
          }
        }
        for (int step = 0; step < steps; ++step) {
          for (std::int64_t m = 0; m < used.accumulation_steps; ++m) {
            const std::int64_t block = m * (ranks / parts) + rank / parts;
            data.draw(step * used.train_batch_size + block * used.micro_batch_size, used.micro_batch_size);
            model.forward_backward(engine, device_batch.of(data));
          }
          if (want_gradients && step + 1 == steps) gradients = read_all(engine, true);
          const StepResult result = engine.step();
          losses.push_back(result.loss);
          norms.push_back(result.gradient_norm);
          if (result.noise.measured) noise.push_back(result.noise);
        }
        auto weights = read_all(engine);
        const auto digest = engine.weights_digest();
        if (rank != 0) return;
        const std::lock_guard lock(mutex);
        run = {std::move(losses),    std::move(norms), std::move(weights),
               std::move(gradients), digest,           std::move(noise)};
      },
      device);
  return run;
}

inline GptRun train_gpt(int ranks, const GptConfig& model, const Config& config, int steps, std::int64_t time,
                        bool ignore_some = false, DeviceKind device = DeviceKind::cpu,
                        const reference_training::Tensors* start = nullptr, bool want_gradients = false) {
  return train_model(ranks, Gpt(model), config, steps, time, ignore_some, device, start, want_gradients);
}

}  // namespace tranche::models
