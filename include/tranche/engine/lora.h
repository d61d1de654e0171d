#pragma once
/// Low-rank adapters (LoRA; Hu et al., 2021) beside the linear layers of a model whose own tensors are
/// frozen.

#include <string>
#include <string_view>

#include "tranche/config/lora.h"

namespace tranche {

class ModelSpec;
struct TensorSpec;

/// Name of the linear layer that a tensor is the weight of: without ".weight", and that of its first alias
/// where it has any, which is the head of a tied embedding. Empty: it is no linear layer's.
std::string linear_name(const TensorSpec& tensor);
/// Names of an adapter's tensors, as PEFT has them but for its prefix: "h.0.attn.c_attn.lora_A.weight".
std::string adapter_a_name(std::string_view linear);
std::string adapter_b_name(std::string_view linear);

/// The model with adapters, behind the other tensors of their units, and all else frozen; the model itself
/// where `lora` has rank 0. Throws ConfigurationError for values that cannot be, a model that names no linear
/// layers, and a target that matches none, with the closest match.
ModelSpec with_adapters(ModelSpec model, const LoraConfig& lora);

}  // namespace tranche
