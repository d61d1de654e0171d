#include "tranche/device/device.h"

#include "device/cpu/cpu_device.h"
#include "device/cuda_probe.h"
#include "device/meta/meta_device.h"
#include "tranche/core/error.h"

namespace tranche {

std::unique_ptr<Device> make_device(const DeviceOptions& options) {
  switch (options.kind) {
    case DeviceKind::cpu:
      return detail::make_cpu_device(options);
    case DeviceKind::meta:
      return detail::make_meta_device(options);
    case DeviceKind::cuda:
      return detail::make_cuda_device(options);
  }
  throw InvalidArgument("unknown device kind " + std::to_string(static_cast<int>(options.kind)));
}

int numbered_devices(DeviceKind kind) {
  if (kind != DeviceKind::cuda) return 0;
  const int devices = static_cast<int>(detail::probe_cuda().devices.size());
  if (devices == 0) (void)make_device({kind, 0, 1});  // throws the reason
  return devices;
}

}  // namespace tranche
