#pragma once
/// The deterministic sum of every communicator's reduce_scatter, on every kind of device. Private to comm/.

#include <span>

#include "tranche/comm/communicator.h"
#include "tranche/kernels/reduction.h"

namespace tranche::comm {

/// out = the deterministic sum of `pieces` (one range of elements from each rank), or out += that sum
/// (options.accumulate). A single piece is rounded to options.round_to on the way; if it already is the sum
/// in place, nothing is done.
void deterministic_sum(Stream& stream, std::span<const void* const> pieces, DataType dtype,
                       const ReductionOptions& options, const TensorView& out,
                       kernels::SumTarget target = kernels::SumTarget::caches);

}  // namespace tranche::comm
