#include "tranche/kernels/swiglu.h"

#include <string_view>

#include "kernels/check.h"
#include "kernels/cpu/swiglu.h"
#include "kernels/cuda/swiglu.h"
#include "kernels/dispatch.h"
#include "kernels/meta/swiglu_cost.h"

namespace tranche::kernels {

void swiglu_forward(Stream& stream, const ConstTensorView& gate, const ConstTensorView& up,
                    const TensorView& out) {
  constexpr std::string_view name = "swiglu_forward";
  check_floating(name, "gate", gate.dtype);
  check_tensor(name, "up", up, {gate.dtype}, gate.elements());
  check_tensor(name, "out", out, {gate.dtype}, gate.elements());
  dispatch(
      stream, name, meta::swiglu_forward_cost(gate),
      [threads = stream.threads(), gate, up, out] { cpu::swiglu_forward(threads, gate, up, out); },
      [&] { cuda::swiglu_forward(stream, gate, up, out); });
}

void swiglu_forward_backward(Stream& stream, const ConstTensorView& gate, const ConstTensorView& up,
                             const ConstTensorView& d_out, const TensorView& out, const TensorView& d_gate,
                             const TensorView& d_up) {
  constexpr std::string_view name = "swiglu_forward_backward";
  check_floating(name, "gate", gate.dtype);
  check_tensor(name, "up", up, {gate.dtype}, gate.elements());
  check_tensor(name, "d_out", d_out, {gate.dtype}, gate.elements());
  check_tensor(name, "out", out, {gate.dtype}, gate.elements());
  check_tensor(name, "d_gate", d_gate, {gate.dtype}, gate.elements());
  check_tensor(name, "d_up", d_up, {gate.dtype}, gate.elements());
  dispatch(
      stream, name, meta::swiglu_forward_backward_cost(gate),
      [threads = stream.threads(), gate, up, d_out, out, d_gate, d_up] {
        cpu::swiglu_forward_backward(threads, gate, up, d_out, out, d_gate, d_up);
      },
      [&] { cuda::swiglu_forward_backward(stream, gate, up, d_out, out, d_gate, d_up); });
}

}  // namespace tranche::kernels
