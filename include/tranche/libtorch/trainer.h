#pragma once
/// Trainer: trains the units of a torch::nn::Module with an Engine.

#include <torch/torch.h>

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tranche/engine/engine.h"
#include "tranche/libtorch/detail/buffers.h"
#include "tranche/libtorch/detail/cuda_device.h"
#include "tranche/libtorch/detail/export.h"
#include "tranche/libtorch/detail/model.h"
#include "tranche/libtorch/options.h"

namespace tranche::libtorch {

/// While a Trainer exists, its engine owns the parameters' memory, and parameters have values only in calls
/// of their units. The Runtime and the module must outlive it; afterwards the module's parameters have no
/// memory. An error of step(), evaluate() or inference(), also one of a closure, is reported to the peers
/// (Engine::fail) and ends the Trainer.
///
/// Each rank is a process of its own, because torch's random numbers, threads and allocator are global to a
/// process.
class Trainer {
  /// Reports an error to the peers before waiting for anything of the engine.
  template <class Function>
  auto guarded(Function&& function) {
    try {
      return function();
    } catch (...) {
      engine_->fail(std::current_exception());
      pass_.marks.clear();
      for (detail::UnitState& unit : units_.all()) unit.drop();
      throw;
    }
  }

 public:
  /// Collective, like the Engine's constructor. Initial weights are the module's and must be equal on all
  /// ranks (seed torch alike), else ConfigurationError. Throws InvalidArgument for a parameter in no unit and
  /// for a pattern that matches no unit, and ConfigurationError for settings that only Tranche's own models
  /// support.
  Trainer(Runtime& runtime, torch::nn::Module& model, TrainerOptions options = {})
      : runtime_(runtime),
        model_(model),
        device_(detail::torch_device(runtime.device())),
        broadcast_buffers_(options.broadcast_buffers),
        units_(model, pass_, options.recompute,
               (options.config ? *options.config : runtime.config()).activation_checkpointing) {
    Config config = options.config ? *options.config : runtime.config();
    detail::check(config);
    at::set_num_threads(runtime.host_threads());
    pass_.anchor = at::zeros({}, at::TensorOptions().device(device_)).requires_grad_();
    ModelSpec spec = units_.spec(config.frozen, options.matrices);
    units_.require_equal_values(runtime);
    spec.tokens_per_sample = options.tokens_per_sample;
    spec.flops_per_token = options.flops_per_token;
    spec.recomputes_activations = true;
    engine_.emplace(runtime, std::move(spec), std::move(config), std::move(options.engine));
    pass_.engine = &*engine_;
    units_.freeze(*engine_);
    units_.adopt(detail::scalar_type(engine_->config().precision.compute), device_);
    for (auto& buffer : model.named_buffers()) {
      if (buffer.value().device() != device_) buffer.value().set_data(buffer.value().to(device_));
    }
  }
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  /// The engine, for its members on state, digests, reports and traffic. Only the Trainer runs steps.
  Engine& engine() { return *engine_; }

  /// Collective. Runs one step: calls `forward(micro_batch)` for each micro-batch, which returns its Loss
  /// with the graph, and runs backward through it. Gradients are those of the mean over all tokens of the
  /// step.
  template <class Forward>
  StepResult step(Forward&& forward) {
    return guarded([&] {
      const detail::StreamScope stream(*engine_);
      share_buffers();
      const std::int64_t count = engine_->config().accumulation_steps;
      for (std::int64_t m = 0; m < count; ++m) {
        begin_micro_batch();
        Loss loss = forward(static_cast<int>(m));
        backward(loss);
        end_micro_batch(loss);
      }
      StepResult result = engine_->step();
      for (detail::UnitState& unit : units_.all()) unit.weights_changed();
      return result;
    });
  }
  /// Collective. Returns the mean loss of `micro_batches`, equal on all ranks, computed without gradients and
  /// with modules in evaluation mode. Each module's mode is restored afterwards.
  template <class Forward>
  EvaluationResult evaluate(std::int64_t micro_batches, Forward&& forward) {
    return guarded([&] {
      const detail::StreamScope stream(*engine_);
      const detail::EvaluationMode mode(model_);
      const at::NoGradGuard no_grad;
      share_buffers();
      engine_->begin_evaluation();
      for (std::int64_t m = 0; m < micro_batches; ++m) {
        engine_->begin_micro_batch();
        end_micro_batch(forward(static_cast<int>(m)));
      }
      return engine_->end_evaluation();
    });
  }
  /// Collective. Runs `forward()`, which may call the module, and returns its result.
  template <class Forward>
  auto inference(Forward&& forward) {
    return guarded([&] {
      const detail::StreamScope stream(*engine_);
      const detail::EvaluationMode mode(model_);
      const at::NoGradGuard no_grad;
      const InferenceScope scope(*engine_);
      return forward();
    });
  }

  /// Collective. Engine::save(), with each rank's own buffers of the module and random state of torch in
  /// addition.
  std::string save(const std::string& directory, SaveOptions options = {}) {
    detail::SavedBuffers buffers(runtime_, model_, device_);
    for (SavedArray& array : buffers.arrays()) options.arrays.push_back(std::move(array));
    return engine_->save(directory, options);
  }
  /// Collective. Engine::load(). With as many ranks as at the save, each rank gets its own buffers and random
  /// state back. Otherwise all get rank 0's buffers and keep their random state.
  LoadResult load(const std::string& path, const LoadOptions& options = {}) {
    LoadResult result = engine_->load(path, options);
    detail::load_buffers(*engine_, model_, device_, result, !options.weights_only);
    for (detail::UnitState& unit : units_.all()) unit.weights_changed();
    return result;
  }

  /// Collective. Rank 0 writes the weights (fp32) and buffers under their names to a safetensors file, one
  /// tensor at a time. A tensor with several names is written under the first. Throws IoError on all ranks.
  void export_safetensors(const std::string& path) {
    detail::write_safetensors(*engine_, model_, units_.all(), path);
  }
  /// Collective. Rank 0 writes the module with fp32 weights as torch::save does, for torch::load into a
  /// module of the same class; it holds the whole model meanwhile. Throws IoError on all ranks.
  void export_torch(const std::string& path) { detail::write_archive(*engine_, model_, units_.all(), path); }

 private:
  void share_buffers() {
    if (broadcast_buffers_) detail::broadcast_buffers(runtime_, model_);
  }
  void begin_micro_batch() {
    engine_->begin_micro_batch();
    pass_.marks.clear();
    *pass_.backward = pass_.first_run = false;
    for (detail::UnitState& unit : units_.all()) unit.begin_micro_batch();
  }
  void backward(const Loss& loss) {
    detail::check(loss);
    if (!loss.sum.requires_grad()) {
      throw InvalidArgument(
          "the loss of a micro-batch wants no gradient: it was computed without a graph "
          "(NoGradGuard), or of nothing that is trained");
    }
    *pass_.backward = true;
    std::vector<at::Tensor> roots{loss.sum * engine_->loss_gradient_scale()};
    for (at::Tensor& mark : pass_.marks) roots.push_back(std::move(mark));
    pass_.marks.clear();
    torch::autograd::backward(roots);
    for (auto unit = units_.all().rbegin(); unit != units_.all().rend(); ++unit) {
      if (!unit->parameters().empty()) unit->finish();
    }
  }
  void end_micro_batch(const Loss& loss) {
    detail::check(loss);
    const at::NoGradGuard no_grad;
    const at::Tensor sum = loss.sum.detach().to(device_, at::kDouble).contiguous();
    const at::Tensor tokens = at::full({}, loss.tokens, at::TensorOptions().dtype(at::kLong).device(device_));
    engine_->end_micro_batch({sum.data_ptr(), DataType::float64, {}},
                             {tokens.data_ptr(), DataType::int64, {}});
  }

  Runtime& runtime_;
  torch::nn::Module& model_;
  at::Device device_;
  bool broadcast_buffers_;
  detail::Pass pass_;
  std::optional<Engine> engine_;  ///< outlives the handles that units hold
  detail::ModelUnits units_;
};

}  // namespace tranche::libtorch
