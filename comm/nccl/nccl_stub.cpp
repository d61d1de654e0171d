#include "comm/nccl/nccl_exchange.h"
#include "tranche/comm/backends.h"
#include "tranche/core/error.h"

namespace tranche {

namespace comm {

bool has_nccl() {
  return false;
}

std::string nccl_gpu_of(const Device&) {
  return {};
}

std::unique_ptr<DeviceExchange> make_nccl_exchange(const DeviceGroup&, bool) {
  throw NotCompiled("NCCL", "TRANCHE_NCCL");
}

}  // namespace comm

std::string nccl_version() {
  return "not compiled";
}

}  // namespace tranche
