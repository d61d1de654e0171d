#pragma once
/// Low-rank adapters (LoRA; Hu et al., 2021) beside the linear layers of a model whose own tensors are
/// frozen.

#include <string>
#include <string_view>

#include "tranche/config/lora.h"

namespace tranche {

class ModelSpec;
struct TensorSpec;

/// Name of the linear layer whose weight a tensor is: the tensor's name without ".weight", or that of its
/// first alias if it has one, which is the head of a tied embedding. Empty if it is not a linear layer's
/// weight.
std::string linear_name(const TensorSpec& tensor);
/// Names of an adapter's tensors, as in PEFT but without its prefix: "h.0.attn.c_attn.lora_A.weight".
std::string adapter_a_name(std::string_view linear);
std::string adapter_b_name(std::string_view linear);

/// Returns the model with adapters, placed after the other tensors of their units, and everything else
/// frozen; the model unchanged if `lora` has rank 0. Throws ConfigurationError for invalid values, a model
/// that names no linear layers, and a target that matches none, with the closest match.
ModelSpec with_adapters(ModelSpec model, const LoraConfig& lora);

}  // namespace tranche
