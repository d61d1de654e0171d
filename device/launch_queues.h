#pragma once
/// How many of a GPU's hardware queues the streams of this process are spread over.

#include <string>

#include "tranche/device/device.h"

namespace tranche::detail {

/// The most that CUDA offers, and what Tranche asks for. The default of 8 is few for the ranks of one
/// process.
inline constexpr int launch_queues = 32;

/// Sets CUDA_DEVICE_MAX_CONNECTIONS to launch_queues unless the environment asks for as many; the driver
/// reads it when it starts. Returns the warning that is due when a smaller number was raised, else nothing.
std::string ask_for_launch_queues();
/// That warning, when it was due as the first device of this process was made; empty for devices without
/// queues.
std::string launch_queue_warning(const Device& device);

}  // namespace tranche::detail
