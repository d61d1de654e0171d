#pragma once
/// The state of a unit under a Trainer: its parameters, its calls in a micro-batch, its gradients.

#include <torch/torch.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tranche/core/error.h"
#include "tranche/engine/engine.h"
#include "tranche/libtorch/detail/parameter.h"

namespace tranche::libtorch::detail {

/// The state that the units of a Trainer share in a micro-batch.
struct Pass {
  Engine* engine = nullptr;
  /// The input of every mark (graph.h): a scalar that requires a gradient. It lies on the device, because
  /// autograd has one queue for each device and the marks must be in the same queue as the units' nodes.
  at::Tensor anchor;
  /// The marks at the beginnings and ends of calls, which are roots of backward (graph.h).
  std::vector<at::Tensor> marks;
  /// True while backward recomputes calls. Graphs share it and may outlive the Trainer.
  std::shared_ptr<bool> backward = std::make_shared<bool>(false);
  bool first_run = false;  ///< the first forward of a recomputed unit, without a graph
};

class UnitState {
 public:
  UnitState(Pass& pass, std::string path, bool recompute)
      : pass_(pass), path_(std::move(path)), recompute_(recompute) {}
  UnitState(const UnitState&) = delete;
  UnitState& operator=(const UnitState&) = delete;

  const std::string& path() const { return path_; }
  Pass& pass() const { return pass_; }
  bool recompute() const { return recompute_; }
  bool trainable() const { return trainable_; }
  std::vector<Parameter>& parameters() { return parameters_; }
  const std::vector<Parameter>& parameters() const { return parameters_; }
  void add(std::string name, const at::Tensor& tensor) {
    parameters_.push_back({std::move(name), tensor});
    trainable_ = trainable_ || tensor.requires_grad();
  }
  void set_id(UnitId id) { id_ = id; }
  /// Lets parameters for which `frozen(name)` is true require no gradient from now on.
  template <class Frozen>
  void freeze(Frozen frozen) {
    trainable_ = false;
    for (Parameter& p : parameters_) {
      if (frozen(p.name)) p.tensor.set_requires_grad(false);
      trainable_ = trainable_ || p.tensor.requires_grad();
    }
  }

  /// Frees the parameters' own memory; from now on they use the engine's.
  void adopt(at::ScalarType type, at::Device device) {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      Parameter& p = parameters_[i];
      p.adopt(type, device);
      if (p.tensor.requires_grad()) {
        torch::autograd::impl::set_post_acc_grad_hooks(p.tensor, std::make_unique<Arrival>(*this, int(i)));
      }
    }
  }
  /// Called when the Trainer ends, since the hooks must not refer to it any longer.
  void abandon() noexcept {
    for (Parameter& p : parameters_) {
      if (p.storage && p.tensor.requires_grad()) {
        torch::autograd::impl::set_post_acc_grad_hooks(p.tensor, nullptr);
      }
    }
  }
  /// Makes autograd refuse a graph that outlives the step, because it would see other weights.
  void weights_changed() {
    for (Parameter& p : parameters_) p.tensor.unsafeGetTensorImpl()->bump_version();
  }

  void gather() {
    if (holders_ == 0) {
      held_ = pass_.engine->gather(id_);
      for (std::size_t i = 0; i < parameters_.size(); ++i) {
        parameters_[i].open(const_cast<void*>(held_.tensor(int(i)).data));
      }
    }
    ++holders_;
  }
  void release() noexcept {
    if (holders_ == 0 || --holders_ > 0) return;
    for (Parameter& p : parameters_) p.close();
    held_.release();
  }

  void begin_micro_batch() {
    expected_ = ended_ = 0;
    submitted_ = false;
  }
  /// Counts a call that backward will reach.
  void expect_call() {
    if (!*pass_.backward) ++expected_;
  }
  /// Called when all nodes of a call have run. After the last call the gradients are submitted.
  void end_call() {
    release();
    if (++ended_ == expected_) submit();
  }
  /// Submits the unit if backward did not reach it, so that all ranks submit the same units.
  void finish() {
    while (holders_ > 0) release();
    if (!submitted_) submit();
  }
  /// Cleans up after an error that was reported to the engine.
  void drop() noexcept {
    while (holders_ > 0) release();
    sums_.clear();
    gradients_.reset();
  }

  class Held {
   public:
    explicit Held(UnitState& unit) : unit_(unit) { unit.gather(); }
    ~Held() { unit_.release(); }
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;

   private:
    UnitState& unit_;
  };

 private:
  struct Arrival : torch::autograd::PostAccumulateGradHook {
    Arrival(UnitState& u, int i) : unit(u), index(i) {}
    void operator()(const at::Tensor& parameter) override { unit.take(index, parameter); }
    UnitState& unit;
    int index;
  };

  void take(int index, const at::Tensor& parameter) {
    const at::Tensor gradient = parameter.grad();
    if (!gradient.defined()) return;
    const std::string& name = parameters_[std::size_t(index)].name;
    if (gradient.layout() != at::kStrided) {
      throw InvalidArgument("the gradient of " + name +
                            " is sparse, and gradients are reduced dense: make its "
                            "Embedding without sparse(true)");
    }
    if (submitted_) {
      throw LogicError("a gradient of " + name + " came after those of its unit " + path_ +
                       " were reduced: use it only inside calls of the unit");
    }
    parameter.mutable_grad().reset();
    if (expected_ <= 1) return add(index, gradient);
    // A recomputed unit submits one gradient for each call, whereas for other units autograd adds these up
    // first. They are added here in the same way, so that both have the same bits.
    if (sums_.empty()) sums_.resize(parameters_.size());
    at::Tensor& sum = sums_[std::size_t(index)];
    sum = sum.defined() ? sum + gradient : gradient;
  }
  void add(int index, const at::Tensor& gradient) {
    if (!gradients_) gradients_.emplace(pass_.engine->gradients(id_));
    const GradientTarget target = gradients_->target(index);
    at::Tensor slot = at::from_blob(target.view.data, gradient.sizes(),
                                    at::TensorOptions().dtype(at::kFloat).device(gradient.device()));
    if (target.accumulate) {
      slot.add_(gradient);
    } else {
      slot.copy_(gradient);
    }
  }
  void submit() {
    submitted_ = true;
    for (std::size_t i = 0; i < sums_.size(); ++i) {
      if (sums_[i].defined()) add(static_cast<int>(i), sums_[i]);
    }
    sums_.clear();
    if (!gradients_) return pass_.engine->skip_gradients(id_);
    UnitGradients mine = std::move(*gradients_);
    gradients_.reset();
    std::move(mine).reduce();
  }

  Pass& pass_;
  std::string path_;
  bool recompute_;
  bool trainable_ = false;
  UnitId id_ = {};
  std::vector<Parameter> parameters_ = {};
  int holders_ = 0;
  GatheredUnit held_ = {};
  std::optional<UnitGradients> gradients_ = {};
  std::vector<at::Tensor> sums_ = {};  ///< by parameter: gradients of several calls, added up
  int expected_ = 0, ended_ = 0;       ///< calls that backward reaches, and calls that have ended
  bool submitted_ = false;
};

}  // namespace tranche::libtorch::detail
