#pragma once
/// The only code that selects a kernel's version by the kind of device.

#include <string_view>
#include <type_traits>
#include <utility>

#include "device/work_recorder.h"
#include "kernels/built_with.h"
#include "kernels/meta/cost.h"
#include "tranche/core/error.h"
#include "tranche/device/stream.h"

namespace tranche::kernels {

/// Passes the call to the stream's recorder.
void note_work(Stream& stream, std::string_view name, const meta::Cost& cost);

inline constexpr bool cuda_is_built = TRANCHE_KERNELS_ON_CUDA != 0;

/// Runs call(), which uses the CUDA kernels. A build without CUDA throws NotCompiled and has no code for the
/// call, so that the functions it names need no definition there.
template <class Call>
std::invoke_result_t<Call> with_cuda(Call&& call) {
  if constexpr (cuda_is_built) {
    return std::forward<Call>(call)();
  } else {
    throw NotCompiled("the CUDA kernels", "TRANCHE_CUDA");
  }
}

/// Counts `cost` on the stream and runs the call. cpu: `cpu()` is enqueued (it must own its captures, because
/// it may run on another thread after this function has returned). cuda: `cuda()` launches on the stream at
/// once, on the calling thread; in a build without CUDA this throws NotCompiled. meta: nothing more is done.
/// Arguments are validated before.
template <class Cpu, class Cuda>
void dispatch(Stream& stream, std::string_view name, const meta::Cost& cost, Cpu&& cpu, Cuda&& cuda) {
  switch (stream.kind()) {  // no default: the compiler then names this place for a new kind
    case DeviceKind::cuda:
      with_cuda(std::forward<Cuda>(cuda));
      break;
    case DeviceKind::cpu:
    case DeviceKind::meta:
      break;
  }
  stream.count(cost.operations, cost.bytes_read, cost.bytes_written);
  if (stream.recorder() != nullptr) note_work(stream, name, cost);
  if (stream.kind() == DeviceKind::cpu) stream.enqueue(name, std::forward<Cpu>(cpu));
}

/// For kernels without a CUDA version.
template <class Cpu>
void dispatch(Stream& stream, std::string_view name, const meta::Cost& cost, Cpu&& cpu) {
  dispatch(stream, name, cost, std::forward<Cpu>(cpu),
           [] { throw NotCompiled("the CUDA kernels", "TRANCHE_CUDA"); });
}

}  // namespace tranche::kernels
