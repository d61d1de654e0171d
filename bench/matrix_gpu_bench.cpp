// GEMMs and attention on a GPU as fractions of the matmul peak measured in the same run: bf16 8192^3 with
// random data. (The data is random because a GPU's clock depends on it: with zeros it runs a third faster.)

#include <algorithm>
#include <cstdio>
#include <vector>

#include "bench/kernel_bench.h"
#include "device/cuda_probe.h"
#include "kernels/gpu_matmul_peak.h"
#include "tranche/kernels/attention.h"
#include "tranche/kernels/elementwise.h"

namespace tranche::kernels::bench {
namespace {

constexpr auto bf16 = DataType::bfloat16;

/// The GPU, and tensors of small random values in its memory.
class Gpu {
 public:
  Gpu() : device_(make_device({.kind = DeviceKind::cuda})) {
    memory_.emplace_back(device_->memory(Tier::device), workspace_bytes, Category::workspace, "bench");
    workspace_ = {memory_.back().data(), workspace_bytes};
  }
  ~Gpu() { stream().synchronize(); }
  Stream& stream() { return device_->compute_stream(); }
  const Workspace& workspace() const { return workspace_; }
  TensorView tensor(DataType dtype, const Shape& shape) {
    memory_.emplace_back(device_->memory(Tier::device),
                         std::max<std::int64_t>(shape.elements() * size_of(dtype), 256), Category::other,
                         "bench");
    const TensorView view{memory_.back().data(), dtype, shape};
    const Buffer wide(device_->memory(Tier::device), shape.elements() * 4, Category::other, "bench");
    const TensorView drawn{wide.data(), DataType::float32, shape};
    fill_uniform(stream(), drawn, {.seed = 1, .subject = memory_.size()}, 0, -1.0f, 1.0f);
    cast(stream(), drawn, view);
    stream().synchronize();
    return view;
  }
  Device& device() { return *device_; }
  template <class Run>
  double seconds_of(const Run& run) {
    return median_seconds(stream(), run);
  }

 private:
  static constexpr std::int64_t workspace_bytes = std::int64_t{32} << 20;
  std::unique_ptr<Device> device_;
  std::vector<Buffer> memory_;
  Workspace workspace_;
};

/// Skips the bench with the reason if there is no GPU.
bool absent(benchmark::State& state) {
  const detail::CudaProbe probe = detail::probe_cuda();
  if (probe.devices.empty()) state.SkipWithError(probe.problem.c_str());
  return probe.devices.empty();
}
/// On the emulated GPU the bench only shows that it runs.
std::int64_t scaled(std::int64_t size, std::int64_t tiny) {
  return detail::probe_cuda().emulated ? tiny : size;
}

/// Operations per second of the device's fastest GEMM; trainings are compared to it too.
double peak() {
  static const double known = [] {
    Gpu gpu;
    return gpu_matmul_peak(gpu.device(), bf16);
  }();
  return known;
}

/// One iteration of the bench is one median. `floor` is the fraction that the project guarantees; 0 for none.
template <class Run>
void measure(benchmark::State& state, Gpu& gpu, double operations, double floor, const Run& run) {
  double seconds = 0;
  for (auto _ : state) {
    seconds = gpu.seconds_of(run);
    state.SetIterationTime(seconds);
  }
  state.counters["TFLOP/s"] = operations / seconds * 1e-12;
  state.counters["of_peak"] = operations / seconds / peak();
  state.counters["peak_TFLOP/s"] = peak() * 1e-12;
  if (floor > 0) state.counters["floor"] = floor;
}

void peak_matmul(benchmark::State& state) {
  if (absent(state)) return;
  for (auto _ : state) state.SetIterationTime(1.0 / peak());
  state.counters["peak_TFLOP/s"] = peak() * 1e-12;
}

enum Kind : int { forward, forward_bias, forward_bias_gelu, input_gradient, weight_gradient };

void linear(benchmark::State& state, Kind kind) {
  if (absent(state)) return;
  const std::int64_t tokens = scaled(state.range(0), 16), inputs = scaled(state.range(1), 24),
                     outputs = scaled(state.range(2), 32);
  Gpu gpu;
  const TensorView x = gpu.tensor(bf16, {tokens, inputs}), weight = gpu.tensor(bf16, {inputs, outputs}),
                   bias = gpu.tensor(bf16, {outputs}), y = gpu.tensor(bf16, {tokens, outputs}),
                   activated = gpu.tensor(bf16, {tokens, outputs}),
                   gradient = gpu.tensor(DataType::float32, {inputs, outputs});
  const double operations =
      2.0 * static_cast<double>(tokens) * static_cast<double>(inputs) * static_cast<double>(outputs);
  measure(state, gpu, operations, 0, [&] {
    Stream& stream = gpu.stream();
    switch (kind) {
      case forward:
        return matmul(stream, {}, x, weight, y, gpu.workspace());
      case forward_bias:
        return matmul_bias(stream, x, weight, bias, y, gpu.workspace());
      case forward_bias_gelu:
        return matmul_bias_gelu(stream, x, weight, bias, y, activated, gpu.workspace());
      case input_gradient:
        return matmul(stream, {.transpose_b = true}, y, weight, x, gpu.workspace());
      case weight_gradient:
        return matmul(stream, {.transpose_a = true, .accumulate = true}, x, y, gradient, gpu.workspace());
    }
  });
}

/// Counts the operations of pairs of a query and a key that it sees: 2 GEMMs forward and 5 backward, even if
/// a kernel computes some twice. `group` heads share a key; a window of 0 means none.
void attention(benchmark::State& state, bool backward, std::int64_t group, std::int64_t window) {
  if (absent(state)) return;
  const std::int64_t head = state.range(0), time = scaled(state.range(1), 32),
                     heads = group * scaled(2048 / head / group, 1), batch = scaled(state.range(2), 1),
                     width = heads * head, key_width = width / group;
  Gpu gpu;
  AttentionOptions options;
  options.heads = heads;
  options.key_value_heads = heads / group;
  options.window = window;
  const TensorView packed = gpu.tensor(bf16, {batch, time, width + 2 * key_width}),
                   gradient = gpu.tensor(bf16, packed.shape), out = gpu.tensor(bf16, {batch, time, width}),
                   d_out = gpu.tensor(bf16, out.shape),
                   log_sum_exp = gpu.tensor(DataType::float32, {batch, heads, time});
  const auto seen = static_cast<double>(window > 0 ? std::min(window, time) : time);
  const double pairs = static_cast<double>(batch) * seen * (static_cast<double>(time) - seen / 2);
  const ConstHeads query{packed}, key{packed, width}, value{packed, width + key_width};
  const auto run_forward = [&] {
    attention_forward(gpu.stream(), options, query, key, value, out, log_sum_exp, gpu.workspace());
  };
  run_forward();
  const double width_pairs = pairs * static_cast<double>(width);
  if (!backward) {
    const bool long_rows = state.range(1) >= 4096;
    const double floor = head == 64 ? (long_rows ? 0.35 : 0.28) : (long_rows ? 0.42 : 0.35);
    measure(state, gpu, 4 * width_pairs, window > 0 ? 0 : floor, run_forward);
  } else {
    const double forward_rate = 4 * width_pairs / gpu.seconds_of(run_forward);
    measure(state, gpu, 10 * width_pairs, 0, [&] {
      attention_backward(gpu.stream(), options, d_out, query, key, value, out, log_sum_exp, {gradient},
                         {gradient, width}, {gradient, width + key_width}, gpu.workspace());
    });
    state.counters["of_forward"] = state.counters["of_peak"] * peak() / forward_rate;
    state.counters["floor_of_forward"] = 0.8;
  }
  state.SetLabel(std::string(attention_path(DeviceKind::cuda, bf16, head, 0)));
}

/// The layers of GPT-2 124M and 1.5B at 16 and 8 sequences of 1024.
void layers(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"tokens", "inputs", "outputs"})->UseManualTime()->Iterations(1);
  for (const std::int64_t width : {768, 1600}) {
    const std::int64_t tokens = width == 768 ? 16384 : 8192;
    bench->Args({tokens, width, 3 * width})->Args({tokens, width, width});
    bench->Args({tokens, width, 4 * width})->Args({tokens, 4 * width, width});
  }
}
void head_layers(benchmark::internal::Benchmark* bench) {
  layers(bench);
  bench->Args({8192, 768, 50304})->Args({8192, 1600, 50304});
}
void sequences(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"head", "time", "batch"})->UseManualTime()->Iterations(1);
  for (const std::int64_t head : {64, 128}) bench->Args({head, 1024, 16})->Args({head, 4096, 4});
}

BENCHMARK(peak_matmul)->Name("matmul_peak")->UseManualTime()->Iterations(1);
BENCHMARK_CAPTURE(linear, forward, forward)->Name("linear_forward")->Apply(head_layers);
BENCHMARK_CAPTURE(linear, forward_bias, forward_bias)->Name("linear_forward_bias")->Apply(layers);
BENCHMARK_CAPTURE(linear, forward_bias_gelu, forward_bias_gelu)
    ->Name("linear_forward_bias_gelu")
    ->Apply(layers);
BENCHMARK_CAPTURE(linear, input_gradient, input_gradient)->Name("linear_input_gradient")->Apply(head_layers);
BENCHMARK_CAPTURE(linear, weight_gradient, weight_gradient)
    ->Name("linear_weight_gradient")
    ->Apply(head_layers);
BENCHMARK_CAPTURE(attention, forward, false, 1, 0)->Name("attention_forward")->Apply(sequences);
BENCHMARK_CAPTURE(attention, backward, true, 1, 0)->Name("attention_backward")->Apply(sequences);
// Four heads share a key, as in Llama 3 and Mistral. The window is Mistral's, scaled to these rows.
BENCHMARK_CAPTURE(attention, grouped_forward, false, 4, 0)
    ->Name("attention_grouped_forward")
    ->Apply(sequences);
BENCHMARK_CAPTURE(attention, grouped_backward, true, 4, 0)
    ->Name("attention_grouped_backward")
    ->Apply(sequences);
BENCHMARK_CAPTURE(attention, window_forward, false, 4, 512)
    ->Name("attention_window_forward")
    ->Apply(sequences);
BENCHMARK_CAPTURE(attention, window_backward, true, 4, 512)
    ->Name("attention_window_backward")
    ->Apply(sequences);

}  // namespace
}  // namespace tranche::kernels::bench
