#include "tranche/device/stream.h"

namespace tranche {

std::string_view name_of(DeviceKind kind) {
  switch (kind) {
    case DeviceKind::cpu:
      return "cpu";
    case DeviceKind::cuda:
      return "cuda";
    case DeviceKind::meta:
      return "meta";
  }
  return "unknown";
}

}  // namespace tranche
