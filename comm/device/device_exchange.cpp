#include "comm/device/device_exchange.h"

#include "comm/transport/operation.h"
#include "tranche/kernels/elementwise.h"

namespace tranche::comm {

std::string DeviceCall::what() const {
  return describe(name, unit, phase);
}

std::vector<int> DeviceGroup::peers() const {
  std::vector<int> result;
  for (int step = 1; step < size(); ++step) result.push_back((rank() + step) % size());
  return result;
}

void copy_on_device(Stream& stream, void* to, const void* from, std::int64_t count, DataType dtype) {
  if (count == 0 || to == from) return;
  kernels::copy(stream, ConstTensorView{from, dtype, Shape{count}}, TensorView{to, dtype, Shape{count}});
}

}  // namespace tranche::comm
