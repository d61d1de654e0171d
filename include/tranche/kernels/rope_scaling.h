#pragma once
/// The ways in which rotary positions are stretched beyond the length that a model was trained with.

#include <cstdint>

namespace tranche::kernels {

/// transformers' "rope_type": default (none), linear (Chen et al., 2023) or llama3 (Llama 3.1, 2024).
/// `factor` is read by the last two, the others by llama3 alone.
struct RopeScaling {
  enum class Kind : std::uint8_t { none, linear, llama3 };
  Kind kind = Kind::none;
  double factor = 1;                    ///< frequencies are divided by it
  double low_frequency_factor = 1;      ///< waves longer than original_positions / this are divided whole
  double high_frequency_factor = 4;     ///< waves shorter than original_positions / this stay as they are
  std::int64_t original_positions = 0;  ///< the longest sequence before the stretch

  friend bool operator==(const RopeScaling&, const RopeScaling&) = default;
};

}  // namespace tranche::kernels
