#pragma once
#include <memory>

#include "tranche/device/device.h"

namespace tranche::detail {

/// Makes the cpu device: its compute stream runs inline; each further stream has one worker thread with one
/// kernel thread, because it runs beside the compute stream, which uses the cores. Throws ConfigurationError
/// on negative threads.
std::unique_ptr<Device> make_cpu_device(const DeviceOptions& options);

}  // namespace tranche::detail
