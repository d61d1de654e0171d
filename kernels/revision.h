#pragma once
/// The revision of all kernels' arithmetic.

namespace tranche::kernels {

/// Increased whenever any bit of a kernel's result changes on the same machine with the same libraries. It is
/// part of Runtime::numerics_fingerprint(), so that a run that continues from older state reports that bits
/// may differ. 2: Adam's bias corrections are folded into its step size and epsilon. 3: the gradient norm and
/// sums of losses are exact, rounded once. 4: SwiGLU in bf16 has a shorter exponential on CPUs. 5: elements
/// of an 8-bit block are multiplied by the inverse of its scale.
inline constexpr int arithmetic_revision = 5;

}  // namespace tranche::kernels
