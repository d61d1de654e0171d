#pragma once
/// Measures single kernels on operands that are not in a cache from their last use: the part of a calibration
/// without steps.

#include <functional>
#include <vector>

#include "core/clock.h"
#include "tranche/device/device.h"
#include "tranche/planner/machine.h"

namespace tranche::tools {

/// The clock for kernels with so many threads: for one thread its own processor time, so that other work on
/// the machine hardly affects the measurement; otherwise elapsed time.
double (*clock_of(int threads))();

/// Seconds of a call, according to `now`: the median of as many calls as fit into `seconds`, at least one. If
/// there are several, the first is not counted.
double time_calls(double seconds, const std::function<void()>& call, double (*now)() = &detail::seconds_now);

/// The bytes per second that the device's threads read and write.
double measure_memory(Device& device, double seconds);

/// Measures GEMMs of all dtypes and layouts within about `seconds`, in a calibration that takes `all`
/// seconds, on which the number of sizes depends.
std::vector<planner::ProductTable> measure_products(Device& device, double all, double seconds);

/// Measures, within about `seconds`, the kernels that the probing steps of calibrate_steps lack: those of
/// steps with several ranks, with states outside the device, or with another optimizer.
std::vector<planner::KernelTable> measure_kernels(Device& device, double seconds);

}  // namespace tranche::tools
