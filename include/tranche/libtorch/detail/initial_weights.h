#pragma once
/// Initial weights of a module's parameters, in the form in which the engine requests them.

#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "tranche/engine/model_spec.h"
#include "tranche/libtorch/detail/parameter.h"
#include "tranche/libtorch/detail/tensors.h"
#include "tranche/libtorch/unit.h"

namespace tranche::libtorch::detail {

/// The module of a deferred unit while its weights are drawn. Only one unit is rebuilt at a time.
struct Rebuilt {
  const UnitLink* of = nullptr;
  std::shared_ptr<torch::nn::Module> module = {};
  at::Tensor parameter(const UnitLink& link, const std::string& name) {
    if (of != &link) {
      of = nullptr;
      module.reset();
      module = link.rebuild();
      of = &link;
    }
    return module->named_parameters()[name];
  }
};

inline void write_values(const at::Tensor& tensor, std::int64_t first, std::span<float> values) {
  const at::NoGradGuard no_grad;
  const auto count = static_cast<std::int64_t>(values.size());
  const at::Tensor flat = tensor.detach().to(at::kCPU).contiguous().view({-1});
  at::from_blob(values.data(), {count}, at::kFloat).copy_(flat.slice(0, first, first + count));
}

/// The initializer of a parameter of the unit behind `link`; it outlives the engine's constructor.
inline Initializer initializer(const UnitLink& link, const Parameter& p,
                               const std::shared_ptr<Rebuilt>& rebuilt) {
  if (!link.rebuild) {
    return Initializer::from("torch " + hash_of(p.tensor),
                             [tensor = p.tensor](std::int64_t first, std::span<float> values) {
                               write_values(tensor, first, values);
                             });
  }
  const std::string inside = p.name.substr(link.state->path().size() + 1);
  return Initializer::from("torch deferred " + link.born,
                           [&link, inside, rebuilt](std::int64_t first, std::span<float> values) {
                             write_values(rebuilt->parameter(link, inside), first, values);
                           });
}

}  // namespace tranche::libtorch::detail
