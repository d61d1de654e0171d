#pragma once
/// The one place where a kernel call meets the kind of device it runs on.

#include <string_view>
#include <utility>

#include "tranche/core/error.h"
#include "tranche/device/stream.h"
#include "tranche/kernels/meta/cost.h"

namespace tranche::kernels {

/// Counts `cost` on the stream and runs the call: on cpu `cpu()` is enqueued (it must own what it captures,
/// for it may run on another thread after this function has returned); on meta nothing more is done.
/// Arguments are validated before. Throws NotCompiled on cuda.
template <class Cpu>
void dispatch(Stream& stream, std::string_view name, const meta::Cost& cost, Cpu&& cpu) {
  if (stream.kind() == DeviceKind::cuda) throw NotCompiled("the CUDA kernels", "TRANCHE_CUDA");
  stream.count(cost.operations, cost.bytes_read, cost.bytes_written);
  if (stream.kind() == DeviceKind::cpu) stream.enqueue(name, std::forward<Cpu>(cpu));
}

}  // namespace tranche::kernels
