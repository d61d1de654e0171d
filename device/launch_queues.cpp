#include "device/launch_queues.h"

#include <charconv>
#include <cstdlib>

#include "device/cuda_probe.h"

namespace tranche::detail {

std::string ask_for_launch_queues() {
  constexpr const char* variable = "CUDA_DEVICE_MAX_CONNECTIONS";
  const char* const text = std::getenv(variable);
  const std::string before = text == nullptr ? "" : text;
  int asked = 0;
  const auto [end, error] = std::from_chars(before.data(), before.data() + before.size(), asked);
  if (error == std::errc() && end == before.data() + before.size() && asked >= launch_queues) return {};
  setenv(variable, std::to_string(launch_queues).c_str(), 1);
  if (before.empty()) return {};
  return std::string(variable) + " was '" + before + "' in the environment and has been set to " +
         std::to_string(launch_queues) +
         ": with fewer queues, streams share them and wait for each other, and a stream that waits for the "
         "host would block the work that the host is waiting for; unset the variable";
}

std::string launch_queue_warning(const Device& device) {
  return device.kind() == DeviceKind::cuda ? probe_cuda().warning : std::string();
}

}  // namespace tranche::detail
