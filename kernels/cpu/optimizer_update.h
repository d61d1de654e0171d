#pragma once
#include <cstdint>

#include "tranche/kernels/optimizer_update.h"

namespace tranche::kernels::cpu {

/// The fastest settings for a processor; they change no bit.
struct UpdateTuning {
  std::int64_t prefetch_bytes = 384;  ///< distance of software prefetches ahead of the loop
};
/// The settings of the processor that runs this, as measured. Zen 4: 1024 bytes are 6 to 17 % slower than 384
/// from memory. Sapphire Rapids: 512 bytes are 2 to 3 % slower than 1024. Others, none of them measured, are
/// taken for the former.
UpdateTuning update_tuning();

/// As kernels::rule_update, operands checked, on the calling thread and `threads - 1` more. The weights
/// written are seen by any thread that is ordered after the call.
void rule_update(int threads, const UpdateRule& rule, RulePhase phase, const RuleOperands& operands,
                 const UpdateTuning& tuning = update_tuning());

}  // namespace tranche::kernels::cpu
