// The fused Adam update beside a plain copy. The update is bound by memory, so its bytes a second over the
// copy's, measured in the same run, say how far from the machine's floor it is.

#include <benchmark/benchmark.h>

#include <vector>

#include "tranche/device/device.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/kernels/optimizer_update.h"

namespace {

using namespace tranche;

constexpr std::int64_t elements = std::int64_t{1} << 24;  // 256 MiB of state and gradient, beyond the caches

std::unique_ptr<Device> device_of(const benchmark::State& state) {
  return make_device({DeviceKind::cpu, 0, static_cast<int>(state.range(0))});
}

/// Bytes of one call by the kernels' own cost functions.
void report(benchmark::State& state, const WorkCount& work) {
  const auto calls = static_cast<double>(work.kernels);
  const double bytes = (work.bytes_read + work.bytes_written) / calls;
  state.SetBytesProcessed(static_cast<std::int64_t>(bytes) * static_cast<std::int64_t>(state.iterations()));
  state.SetItemsProcessed(elements * static_cast<std::int64_t>(state.iterations()));
}

void copy_fp32(benchmark::State& state) {
  const auto device = device_of(state);
  std::vector<float> from(elements, 1.0f);
  std::vector<float> to(elements);
  const ConstTensorView source{from.data(), DataType::float32, Shape{elements}};
  const TensorView target{to.data(), DataType::float32, Shape{elements}};
  for (auto _ : state) kernels::copy(device->compute_stream(), source, target);
  report(state, device->compute_stream().work());
}

template <class Gradient, class Moment>
void adam(benchmark::State& state) {
  const auto device = device_of(state);
  std::vector<Gradient> gradient(elements, from_float<Gradient>(0.01f));
  std::vector<float> master(elements, 1.0f);
  std::vector<Moment> first(elements, from_float<Moment>(0.0f));
  std::vector<Moment> second(elements, from_float<Moment>(0.0f));
  std::vector<bfloat16> weight(elements);
  const Shape shape{elements};
  kernels::AdamArguments arguments;
  arguments.learning_rate = arguments.step_size = 1e-4f;
  arguments.weight_decay = 0.1f;
  for (auto _ : state) {
    kernels::adam_update(
        device->compute_stream(), arguments, {gradient.data(), data_type_of<Gradient>(), shape},
        {master.data(), DataType::float32, shape}, {first.data(), data_type_of<Moment>(), shape},
        {second.data(), data_type_of<Moment>(), shape}, {weight.data(), DataType::bfloat16, shape});
  }
  report(state, device->compute_stream().work());
}

BENCHMARK(copy_fp32)->Arg(1)->Arg(2)->UseRealTime();
BENCHMARK(adam<float, float>)->Name("adam_fp32_gradient")->Arg(1)->Arg(2)->UseRealTime();
BENCHMARK(adam<bfloat16, float>)->Name("adam_bf16_gradient")->Arg(1)->Arg(2)->UseRealTime();
BENCHMARK(adam<bfloat16, bfloat16>)->Name("adam_bf16_moments")->Arg(1)->Arg(2)->UseRealTime();

}  // namespace
