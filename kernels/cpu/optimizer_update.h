#pragma once
#include <cstdint>

#include "tranche/kernels/optimizer_update.h"

namespace tranche::kernels::cpu {

/// The fastest settings for a processor; they change no bit.
struct UpdateTuning {
  std::int64_t prefetch_bytes = 384;  ///< distance of software prefetches ahead of the loop
};
/// The measured settings of this processor. On Zen 4, 1024 bytes are 6 to 17 % slower than 384 from memory;
/// on Sapphire Rapids, 512 bytes are 2 to 3 % slower than 1024. Other processors, none of them measured, use
/// Zen 4's setting.
UpdateTuning update_tuning();

/// Like kernels::rule_update with checked operands, on the calling thread and `threads - 1` more. The written
/// weights are visible to any thread that is ordered after the call.
void rule_update(int threads, const UpdateRule& rule, RulePhase phase, const RuleOperands& operands,
                 const UpdateTuning& tuning = update_tuning());

}  // namespace tranche::kernels::cpu
