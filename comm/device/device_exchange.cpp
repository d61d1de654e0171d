#include "comm/device/device_exchange.h"

#include <fmt/format.h>

#include "comm/transport/operation.h"
#include "tranche/core/error.h"
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

std::vector<int> DeviceGroup::neighbours() const {
  std::vector<int> result;
  if (line && rank() > 0) result.push_back(rank() - 1);
  if (line && rank() + 1 < size()) result.push_back(rank() + 1);
  if (ring && other_end() >= 0) result.push_back(other_end());
  return result;
}

int DeviceGroup::other_end() const {
  if (!line || size() < 3) return -1;
  return rank() == 0 ? size() - 1 : rank() == size() - 1 ? 0 : -1;
}

Issued DeviceExchange::issue(const std::shared_ptr<const DeviceCall>& call, const Event&) {
  throw LogicError(call->what() + " of device memory on a line of ranks, which has messages alone");
}

void copy_on_device(Stream& stream, void* to, const void* from, std::int64_t count, DataType dtype) {
  if (count == 0 || to == from) return;
  kernels::copy(stream, ConstTensorView{from, dtype, Shape{count}}, TensorView{to, dtype, Shape{count}});
}

void copy_own_part(Stream& stream, const DeviceCall& call, int rank) {
  copy_on_device(stream, call.place_received_from(rank), call.place_sent_to(rank), call.sent_to(rank).count,
                 call.dtype);
}

void require_equal_bytes(const DeviceGroup& group, const DeviceCall& call, int sender, std::int64_t sent,
                         int receiver, std::int64_t expected) {
  if (sent == expected) return;
  const auto name = [&](int rank) {
    return group.failure->rank_names().of(group.job_ranks[static_cast<std::size_t>(rank)]);
  };
  throw CommunicationError(fmt::format("{}: {} sent {} bytes where {} expects {}: the ranks' calls differ",
                                       call.what(), name(sender), sent, name(receiver), expected));
}

}  // namespace tranche::comm
