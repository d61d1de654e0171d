#pragma once
/// The memory-bound kernels of a training step, in one list for every device. The scripts in scripts/gpu/ and
/// scripts/bench.py parse the names: `<kernel>/<key>:<value>/...`.

#include <functional>
#include <string>

#include "bench/device_bench.h"

namespace tranche::kernels::bench {

/// Registers a bench: its name, the function that makes operands and call, and the traffic of a call if its
/// cost function does not count the necessary bytes, or which of them are updated in place.
using AddBench = std::function<void(const std::string& name, const DeviceBench::Prepare&, const Traffic&)>;

/// `flat`: elements of operands without a shape, more than any cache holds; small devices use fewer.
void add_memory_bound_kernels(std::int64_t flat, const AddBench& add);

}  // namespace tranche::kernels::bench
