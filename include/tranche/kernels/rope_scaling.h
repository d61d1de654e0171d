#pragma once
/// Scaling of rotary positions beyond the sequence length with which a model was trained.

#include <cstdint>

namespace tranche::kernels {

/// transformers' "rope_type": default (none), linear (Chen et al., 2023) or llama3 (Llama 3.1, 2024).
/// `factor` is used by the last two, the other values by llama3 only.
struct RopeScaling {
  enum class Kind : std::uint8_t { none, linear, llama3 };
  Kind kind = Kind::none;
  double factor = 1;                    ///< frequencies are divided by it
  double low_frequency_factor = 1;      ///< wavelengths above original_positions / this are fully scaled
  double high_frequency_factor = 4;     ///< wavelengths below original_positions / this are not scaled
  std::int64_t original_positions = 0;  ///< the longest sequence before scaling

  friend bool operator==(const RopeScaling&, const RopeScaling&) = default;
};

}  // namespace tranche::kernels
