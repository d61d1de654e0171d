#pragma once
/// The memory-bound kernels of a training step, one list for every device. Names are an agreement with
/// scripts/gpu/ and scripts/bench.py: `<kernel>/<key>:<value>/...`.

#include <functional>
#include <string>

#include "bench/device_bench.h"

namespace tranche::kernels::bench {

/// Takes a bench: its name, how to make operands and call, and the traffic of a call where its cost function
/// does not say what must be moved, or what of it is in place.
using AddBench = std::function<void(const std::string& name, const DeviceBench::Prepare&, const Traffic&)>;

/// `flat`: elements of operands that have no shape, beyond what any cache holds; small devices take fewer.
void add_memory_bound_kernels(std::int64_t flat, const AddBench& add);

}  // namespace tranche::kernels::bench
