// A kernel of one's own: runs on the stream's device, is counted in plans by the meta device, and named in
// traces.
#include <tranche/tranche.h>

#include <cmath>
#include <cstdio>
using namespace tranche;

/// y = x / (1 + exp(-x)). On a GPU, work.cuda would launch the same on the stream it is given:
///   .cuda = [=](void* stream) { launch_swish(x, y, static_cast<cudaStream_t>(stream)); }
/// where launch_swish is in a source that nvcc compiles.
void swish(Stream& stream, const ConstTensorView& x, const TensorView& y) {
  const double elements = static_cast<double>(x.elements());
  const kernels::KernelCost cost{4 * elements, 4 * elements, 4 * elements};
  kernels::launch(stream, "swish", cost,
                  {.cpu =
                       [=] {
                         for (std::int64_t i = 0; i < x.elements(); ++i) {
                           const float value = x.as<float>()[i];
                           y.as<float>()[i] = value / (1 + std::exp(-value));
                         }
                       },
                   .cuda = {}});
}

int main() {
  for (const DeviceKind kind : {DeviceKind::cpu, DeviceKind::meta}) {
    const std::unique_ptr<Device> device = make_device({.kind = kind});
    Stream& stream = device->compute_stream();
    const Buffer memory(device->memory(Tier::device), 2 * 1000 * 4, Category::activations, "numbers");
    const TensorView x{memory.data(), DataType::float32, {1000}};
    const TensorView y{static_cast<float*>(memory.data()) + 1000, DataType::float32, {1000}};
    kernels::fill_constant(stream, x, 1);  // ordered before the kernel, as all work of a stream is
    swish(stream, x, y);
    float last = 0;
    device->copy_to_host(stream, &last, y.as<float>() + 999, sizeof(last));
    stream.synchronize();
    const WorkCount& work = stream.work();
    std::printf("%s: %.4f, %lld kernels, %.0f operations\n", name_of(kind).data(), last,
                static_cast<long long>(work.kernels), work.floating_point_operations);
  }
}
