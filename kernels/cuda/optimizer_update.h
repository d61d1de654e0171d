#pragma once
#include "tranche/kernels/optimizer_update.h"

namespace tranche::kernels::cuda {

/// As in kernels/optimizer_update.h, arguments checked; one launch each.
void adam_update(Stream& stream, const AdamArguments& arguments, const ConstTensorView& gradient,
                 const TensorView& master, const TensorView& exp_avg, const TensorView& exp_avg_sq,
                 const TensorView& weight);
void adam_update(Stream& stream, const AdamArguments* device_arguments, const ConstTensorView& gradient,
                 const TensorView& master, const TensorView& exp_avg, const TensorView& exp_avg_sq,
                 const TensorView& weight);
void sgd_update(Stream& stream, const SgdArguments& arguments, const ConstTensorView& gradient,
                const TensorView& master, const TensorView& momentum_buffer, const TensorView& weight);
void sgd_update(Stream& stream, const SgdArguments* device_arguments, const ConstTensorView& gradient,
                const TensorView& master, const TensorView& momentum_buffer, const TensorView& weight);

}  // namespace tranche::kernels::cuda
