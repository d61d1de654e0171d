#pragma once
#include <memory>

#include "tranche/device/device.h"

namespace tranche::detail {

/// The meta device: memory is addresses that nothing may touch, work is dropped, every event has passed.
/// Costs are still counted on its streams, so a plan runs the code that training runs.
std::unique_ptr<Device> make_meta_device(const DeviceOptions& options);

}  // namespace tranche::detail
