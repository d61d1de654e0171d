/// GEMMs of a GPT training step: forward, gradient of the input, gradient of the weight; in every dtype.

#include <map>

#include "bench/kernel_bench.h"

namespace tranche::kernels::bench {

double matmul_peak(DataType dtype, int threads) {
  static std::map<std::pair<DataType, int>, double> known;
  double& peak = known[{dtype, threads}];
  if (peak > 0) return peak;
  BenchMachine machine(threads);
  for (const std::int64_t size : {768, 1024, 2048}) {
    BenchTensor a(dtype, {size, size}), b(dtype, {size, size}), c(dtype, {size, size});
    for (int repetition = 0; repetition < 5; ++repetition) {
      const detail::Stopwatch watch;
      matmul(machine.stream(), {}, a.view(), b.view(), c.view(), machine.workspace());
      peak = std::max(peak, 2e0 * static_cast<double>(size * size * size) / watch.seconds());
    }
  }
  return peak;
}

namespace {

enum Pass { forward, input_gradient, weight_gradient };

/// A linear layer of `tokens` rows from `inputs` to `outputs` columns. The weight is stored [inputs,
/// outputs], or transposed with `transposed`, as in the Llama family.
void linear(benchmark::State& state, DataType dtype, Pass pass, bool transposed = false) {
  const std::int64_t tokens = state.range(0), inputs = state.range(1), outputs = state.range(2);
  const int threads = static_cast<int>(state.range(3));
  BenchMachine machine(threads);
  const Shape stored = transposed ? Shape{outputs, inputs} : Shape{inputs, outputs};
  BenchTensor x(dtype, {tokens, inputs}), weight(dtype, stored), y(dtype, {tokens, outputs});
  BenchTensor weight_sum(DataType::float32, stored);
  for (auto _ : state) {
    switch (pass) {
      case forward:
        matmul(machine.stream(), {.transpose_b = transposed}, x.view(), weight.view(), y.view(),
               machine.workspace());
        break;
      case input_gradient:
        matmul(machine.stream(), {.transpose_b = !transposed}, y.view(), weight.view(), x.view(),
               machine.workspace());
        break;
      case weight_gradient:
        matmul(machine.stream(), {.transpose_a = true, .accumulate = true}, transposed ? y.view() : x.view(),
               transposed ? x.view() : y.view(), weight_sum.view(), machine.workspace());
        break;
    }
  }
  report_operations(state, 2.0 * static_cast<double>(tokens * inputs * outputs), dtype, threads);
}

void layers(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"tokens", "inputs", "outputs", "threads"})->MeasureProcessCPUTime()->UseRealTime();
  for (const int threads : {1, 2}) {
    bench->Args({2048, 256, 768, threads})
        ->Args({2048, 256, 1024, threads})
        ->Args({2048, 1024, 256, threads});
    bench->Args({1024, 768, 3072, threads})
        ->Args({1024, 3072, 768, threads})
        ->Args({1024, 768, 768, threads});
  }
}

BENCHMARK_CAPTURE(linear, fp32_forward, DataType::float32, forward)->Apply(layers);
BENCHMARK_CAPTURE(linear, fp32_input_gradient, DataType::float32, input_gradient)->Apply(layers);
BENCHMARK_CAPTURE(linear, fp32_weight_gradient, DataType::float32, weight_gradient)->Apply(layers);
BENCHMARK_CAPTURE(linear, bf16_forward, DataType::bfloat16, forward)->Apply(layers);
BENCHMARK_CAPTURE(linear, bf16_input_gradient, DataType::bfloat16, input_gradient)->Apply(layers);
BENCHMARK_CAPTURE(linear, bf16_weight_gradient, DataType::bfloat16, weight_gradient)->Apply(layers);
BENCHMARK_CAPTURE(linear, bf16_transposed_forward, DataType::bfloat16, forward, true)->Apply(layers);
BENCHMARK_CAPTURE(linear, bf16_transposed_input_gradient, DataType::bfloat16, input_gradient, true)
    ->Apply(layers);
BENCHMARK_CAPTURE(linear, bf16_transposed_weight_gradient, DataType::bfloat16, weight_gradient, true)
    ->Apply(layers);
BENCHMARK_CAPTURE(linear, fp16_forward, DataType::float16, forward)->Apply(layers);

}  // namespace
}  // namespace tranche::kernels::bench
