#pragma once
#include "tranche/kernels/optimizer_update.h"

namespace tranche::kernels::cpu {

/// As kernels::adam_update_segments, arguments checked, on the calling thread and `threads - 1` more. The
/// weights written are seen by any thread that is ordered after the call.
void adam_update(int threads, std::span<const AdamArguments> groups, std::span<const UpdateSegment> segments,
                 const ConstTensorView& gradient, const TensorView& master, const TensorView& exp_avg,
                 const TensorView& exp_avg_sq, const TensorView& weight);
/// As kernels::sgd_update_segments.
void sgd_update(int threads, std::span<const SgdArguments> groups, std::span<const UpdateSegment> segments,
                const ConstTensorView& gradient, const TensorView& master, const TensorView& momentum_buffer,
                const TensorView& weight);

}  // namespace tranche::kernels::cpu
