#pragma once
#include "tranche/kernels/optimizer_update.h"

namespace tranche::kernels::cpu {

/// As kernels::adam_update, arguments checked, on the calling thread and `threads - 1` more.
void adam_update(int threads, const AdamArguments& arguments, const ConstTensorView& gradient,
                 const TensorView& master, const TensorView& exp_avg, const TensorView& exp_avg_sq,
                 const TensorView& weight);
/// As kernels::sgd_update.
void sgd_update(int threads, const SgdArguments& arguments, const ConstTensorView& gradient,
                const TensorView& master, const TensorView& momentum_buffer, const TensorView& weight);

}  // namespace tranche::kernels::cpu
