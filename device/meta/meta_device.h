#pragma once
#include <memory>

#include "tranche/device/device.h"

namespace tranche::detail {

/// Makes the meta device: its memory is addresses that must not be accessed, work is dropped, every event has
/// passed. Costs are still counted on its streams, so a plan runs the same code as training.
std::unique_ptr<Device> make_meta_device(const DeviceOptions& options);

}  // namespace tranche::detail
