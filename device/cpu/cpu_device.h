#pragma once
#include <memory>

#include "tranche/device/device.h"

namespace tranche::detail {

/// The cpu device: compute stream inline, further streams with one worker thread and one kernel thread each
/// (they run beside the compute stream, which has the cores). Throws ConfigurationError on negative threads.
std::unique_ptr<Device> make_cpu_device(const DeviceOptions& options);

}  // namespace tranche::detail
