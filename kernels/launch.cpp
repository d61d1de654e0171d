#include "tranche/kernels/launch.h"

#include <fmt/core.h>

#include <cmath>

#include "kernels/check.h"
#include "kernels/dispatch.h"

namespace tranche::kernels {

void launch(Stream& stream, std::string_view name, const KernelCost& cost, const KernelWork& work) {
  if (name.empty()) throw InvalidArgument("kernels::launch: the name is empty; traces and plans show it");
  for (const double value : {cost.operations, cost.bytes_read, cost.bytes_written}) {
    if (!(value >= 0) || !std::isfinite(value)) {
      refuse(name, "the cost has numbers that are negative or not finite");
    }
  }
  const DeviceKind kind = stream.kind();
  if ((kind == DeviceKind::cpu && !work.cpu) || (kind == DeviceKind::cuda && !work.cuda)) {
    refuse(name, fmt::format("the kernel has no work for {} streams; set KernelWork::{}", name_of(kind),
                             name_of(kind)));
  }
  dispatch(stream, name, {cost.operations, cost.bytes_read, cost.bytes_written}, work.cpu, [&] {
    const StreamSpan span(stream, name);
    work.cuda(stream.native_handle());
  });
}

}  // namespace tranche::kernels
