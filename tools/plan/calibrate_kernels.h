#pragma once
/// Kernels by themselves, on operands that no cache holds because they were just used: the part of a
/// calibration that needs no steps.

#include <functional>
#include <vector>

#include "core/clock.h"
#include "tranche/device/device.h"
#include "tranche/planner/machine.h"

namespace tranche::tools {

/// The clock for kernels of so many threads: one thread's own processor time, so that a machine which
/// does other things at the same time measures nearly the same; else what passes.
double (*clock_of(int threads))();

/// Seconds of a call, by `now`: the median of as many as fit into `seconds`, at least one; the first of
/// several is not counted.
double time_calls(double seconds, const std::function<void()>& call, double (*now)() = &detail::seconds_now);

/// Bytes a second that the device's threads read and write.
double measure_memory(Device& device, double seconds);

/// Products of all dtypes and layouts within about `seconds`, of a calibration of the share that takes `all`
/// seconds; how many sizes depends on that.
std::vector<planner::ProductTable> measure_products(Device& device, double all, double seconds);

/// The kernels that steps call with several ranks, with states outside the device, or with another optimizer,
/// and which the probing steps of calibrate_steps therefore lack; within about `seconds`.
std::vector<planner::KernelTable> measure_kernels(Device& device, double seconds);

}  // namespace tranche::tools
