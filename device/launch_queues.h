#pragma once
/// The number of a GPU's hardware queues over which the streams of this process are spread.

#include <string>

#include "tranche/device/device.h"

namespace tranche::detail {

/// The most that CUDA offers, which Tranche requests. The default of 8 is too few for several ranks in one
/// process.
inline constexpr int launch_queues = 32;

/// Sets CUDA_DEVICE_MAX_CONNECTIONS to launch_queues unless the environment has at least that many; the
/// driver reads it when it starts. Returns a warning when a smaller number was raised, else an empty text.
std::string ask_for_launch_queues();
/// The warning from the creation of this process's first device; empty for devices without queues.
std::string launch_queue_warning(const Device& device);

}  // namespace tranche::detail
