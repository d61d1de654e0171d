#pragma once
/// State of a module that is not in its parameters: buffers, training mode, torch's random state.

#include <torch/torch.h>

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tranche/engine/engine.h"
#include "tranche/libtorch/detail/tensors.h"

namespace tranche::libtorch::detail {

/// Sets all modules to evaluation mode, and restores each module's own mode at the end.
class EvaluationMode {
 public:
  explicit EvaluationMode(torch::nn::Module& model) {
    keep(model);
    for (const auto& module : model.modules(/*include_self=*/false)) keep(*module);
    model.eval();
  }
  ~EvaluationMode() {
    for (auto entry = were_.rbegin(); entry != were_.rend(); ++entry) entry->first->train(entry->second);
  }
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;

 private:
  void keep(torch::nn::Module& module) { were_.emplace_back(&module, module.is_training()); }
  std::vector<std::pair<torch::nn::Module*, bool>> were_;
};

inline void broadcast_from_rank_0(Runtime& runtime, const TensorView& values, std::string_view name,
                                  std::string_view phase) {
  if (values.elements() == 0) return;
  runtime.all()
      .broadcast(values.data, values.bytes(), DataType::uint8, 0, {},
                 OperationLabel{name, phase, Traffic::control, Tier::host})
      .wait();
}

/// Collective. Copies rank 0's buffers to all ranks.
inline void broadcast_buffers(Runtime& runtime, const torch::nn::Module& model) {
  const at::NoGradGuard no_grad;
  for (const auto& item : model.named_buffers()) {
    if (!item.value().defined()) continue;
    const at::Tensor values = item.value().detach().to(at::kCPU).contiguous();
    broadcast_from_rank_0(runtime, view_of(values, item.key()), item.key(), "buffers");
    if (!values.is_alias_of(item.value())) item.value().detach().copy_(values);
  }
}

/// Torch's generators of random numbers that a module on `device` may use, with the names of their states.
inline std::vector<std::pair<std::string, at::Generator>> generators(at::Device device) {
  std::vector<std::pair<std::string, at::Generator>> all{
      {"torch/generator", at::detail::getDefaultCPUGenerator()}};
  if (!device.is_cpu()) {
    all.emplace_back("torch/generator of the device", at::globalContext().defaultGenerator(device));
  }
  return all;
}

/// Collective. Copies of a module's buffers: each as this rank's own array, and as rank 0's, which runs with
/// another number of ranks load; and the state of torch's generator.
class SavedBuffers {
 public:
  SavedBuffers(Runtime& runtime, const torch::nn::Module& model, at::Device device) {
    for (const auto& item : model.named_buffers()) {
      if (!item.value().defined()) continue;
      const at::Tensor mine = item.value().detach().to(at::kCPU).contiguous().clone();
      const at::Tensor first = mine.clone();
      const TensorView whole = view_of(first, item.key());
      broadcast_from_rank_0(runtime, whole, item.key(), "save");
      keep(SavedArray::of_rank("torch/buffers/" + item.key(), view_of(mine, item.key())), mine);
      keep(SavedArray::whole("torch/buffers of rank 0/" + item.key(), whole), first);
    }
    for (auto& [name, generator] : generators(device)) {
      const at::Tensor state = generator.get_state();
      keep(SavedArray::of_rank(name, view_of(state, name)), state);
    }
  }
  std::vector<SavedArray>& arrays() { return arrays_; }

 private:
  void keep(SavedArray array, const at::Tensor& values) {
    arrays_.push_back(std::move(array));
    values_.push_back(values);
  }
  std::vector<SavedArray> arrays_;
  std::vector<at::Tensor> values_;
};

/// Collective. Throws CheckpointError for a buffer that the checkpoint does not have in this shape and dtype.
inline void load_buffers(Engine& engine, const torch::nn::Module& model, at::Device device,
                         const LoadResult& loaded, bool random_state) {
  const bool own = loaded.world == engine.runtime().size();
  const auto find = [&](const std::string& name) -> const ArrayInfo* {
    for (const ArrayInfo& array : loaded.arrays) {
      if (array.name == name) return &array;
    }
    return nullptr;
  };
  std::vector<ArrayTarget> targets;
  std::vector<std::pair<at::Tensor, at::Tensor>> read;
  for (const auto& item : model.named_buffers()) {
    if (!item.value().defined()) continue;
    const std::string name = (own ? "torch/buffers/" : "torch/buffers of rank 0/") + item.key();
    const at::Tensor values = at::empty_like(item.value(), at::TensorOptions().device(at::kCPU)).contiguous();
    const TensorView view = view_of(values, item.key());
    const ArrayInfo* saved = find(name);
    if (saved == nullptr || saved->dtype != view.dtype || saved->shape != view.shape) {
      const std::string found =
          saved == nullptr ? "none" : std::string(name_of(saved->dtype)) + saved->shape.to_string();
      throw CheckpointError(loaded.folder + " has no buffer " + item.key() + " of " +
                            std::string(name_of(view.dtype)) + view.shape.to_string() + " (it has " + found +
                            "): it was saved by another module, or by Engine::save()");
    }
    targets.push_back({name, view});
    read.emplace_back(item.value(), values);
  }
  std::vector<std::pair<at::Generator, at::Tensor>> states;
  for (auto& [name, generator] : generators(device)) {
    const at::Tensor state = generator.get_state();
    const ArrayInfo* saved = find(name);
    if (!random_state || !own || saved == nullptr || saved->shape != shape_of(state)) continue;
    targets.push_back({name, view_of(state, name)});
    states.emplace_back(generator, state);
  }
  engine.load_arrays(loaded.folder, targets);
  const at::NoGradGuard no_grad;
  for (auto& [buffer, values] : read) buffer.detach().copy_(values);
  for (auto& [generator, state] : states) generator.set_state(state);
}

}  // namespace tranche::libtorch::detail
