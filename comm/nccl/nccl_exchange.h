#pragma once
/// Exchange of device memory by NCCL; a stub without TRANCHE_NCCL. Private to comm/.

#include <memory>
#include <string>

#include "comm/device/device_exchange.h"

namespace tranche::comm {

bool has_nccl();
/// The PCI bus id of a GPU of this process, "0000:3b:00.0"; empty without NCCL or for other devices.
std::string nccl_gpu_of(const Device& device);
/// Collective. With `own_reductions` NCCL reduces; otherwise it only transfers data, and the
/// deterministic-sum kernel adds.
std::unique_ptr<DeviceExchange> make_nccl_exchange(const DeviceGroup& group, bool own_reductions);

}  // namespace tranche::comm
