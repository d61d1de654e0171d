#pragma once
/// The state of the arithmetic of all kernels.

namespace tranche::kernels {

/// Counted up whenever what a kernel gives on the same machine, by the same libraries, changes in any bit.
/// Part of Runtime::numerics_fingerprint(), so that a run which goes on from older state says that bits may
/// differ. 2: Adam's bias corrections are folded into its step size and epsilon. 3: the gradient norm
/// and sums of losses are exact, rounded once. 4: SwiGLU in bf16 has a shorter exponential on CPUs. 5:
/// elements of an 8-bit block are multiplied by the inverse of its scale.
inline constexpr int arithmetic_revision = 5;

}  // namespace tranche::kernels
