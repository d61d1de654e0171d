#include "tranche/kernels/master_weights.h"

#include "kernels/check.h"
#include "kernels/cpu/master_weights.h"
#include "kernels/cuda/master_weights.h"
#include "kernels/dispatch.h"
#include "kernels/meta/master_weights_cost.h"

namespace tranche::kernels {

namespace {

void check_halves(std::string_view kernel, const ConstTensorView& values, const ConstTensorView& high,
                  const ConstTensorView& low) {
  check_dtype(kernel, "values", values.dtype, {DataType::float32});
  check_tensor(kernel, "high", high, {DataType::bfloat16}, values.elements());
  if (low.data != nullptr) check_tensor(kernel, "low", low, {DataType::uint16}, values.elements());
}

}  // namespace

void split_halves(Stream& stream, const ConstTensorView& values, const TensorView& high,
                  const TensorView& low) {
  constexpr std::string_view name = "split_halves";
  check_halves(name, values, high, low);
  dispatch(
      stream, name, meta::split_halves(values, high, low),
      [threads = stream.threads(), values, high, low] { cpu::split_halves(threads, values, high, low); },
      [&] { cuda::split_halves(stream, values, high, low); });
}

void join_halves(Stream& stream, const ConstTensorView& high, const ConstTensorView& low,
                 const TensorView& values) {
  constexpr std::string_view name = "join_halves";
  if (low.data == nullptr && values.elements() > 0) refuse(name, "the address of `low` is null");
  check_halves(name, values, high, low);
  dispatch(
      stream, name, meta::join_halves(high, low, values),
      [threads = stream.threads(), high, low, values] { cpu::join_halves(threads, high, low, values); },
      [&] { cuda::join_halves(stream, high, low, values); });
}

}  // namespace tranche::kernels
