/// Causal attention, forward and backward, relative to the fp32 matmul peak, because its GEMMs run in fp32.
/// Only pairs of a query and a key that it sees count as operations. So if a kernel saves all work outside
/// the window, the figure does not change with the window.

#include <algorithm>

#include "bench/kernel_bench.h"
#include "tranche/kernels/attention.h"

namespace tranche::kernels::bench {
namespace {

void attention(benchmark::State& state, DataType dtype, bool backward, std::int64_t group,
               std::int64_t window) {
  const std::int64_t batch = state.range(0), time = state.range(1), width = state.range(2);
  const int threads = static_cast<int>(state.range(4));
  AttentionOptions options;
  options.heads = state.range(3);
  options.key_value_heads = options.heads / group;
  options.window = window;
  const std::int64_t key_width = width / group;
  std::vector<std::int64_t> samples(static_cast<std::size_t>(batch), 0);
  options.dropout.samples = samples;
  options.dropout.probability = static_cast<float>(state.range(5)) / 100.0f;
  BenchMachine machine(threads);
  BenchTensor packed(dtype, {batch, time, width + 2 * key_width}),
      gradient(dtype, {batch, time, width + 2 * key_width});
  BenchTensor out(dtype, {batch, time, width}), d_out(dtype, {batch, time, width});
  BenchTensor log_sum_exp(DataType::float32, {batch, options.heads, time});
  const auto run_forward = [&] {
    attention_forward(machine.stream(), options, {packed.view()}, {packed.view(), width},
                      {packed.view(), width + key_width}, out.view(), log_sum_exp.view(),
                      machine.workspace());
  };
  run_forward();
  for (auto _ : state) {
    if (backward) {
      attention_backward(machine.stream(), options, d_out.view(), {packed.view()}, {packed.view(), width},
                         {packed.view(), width + key_width}, out.view(), log_sum_exp.view(),
                         {gradient.view()}, {gradient.view(), width}, {gradient.view(), width + key_width},
                         machine.workspace());
    } else {
      run_forward();
    }
  }
  const auto seen = static_cast<double>(window > 0 ? std::min(window, time) : time);
  const double pairs = static_cast<double>(batch) * seen * (static_cast<double>(time) - seen / 2);
  report_operations(state, pairs * static_cast<double>(width) * (backward ? 10 : 4), DataType::float32,
                    threads);
  state.counters["tokens/s"] =
      benchmark::Counter(static_cast<double>(batch * time * state.iterations()), benchmark::Counter::kIsRate);
}

void sizes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"batch", "time", "width", "heads", "threads", "dropout%"})
      ->MeasureProcessCPUTime()
      ->UseRealTime();
  bench->Args({8, 256, 256, 8, 1, 0})->Args({8, 256, 256, 4, 1, 0})->Args({8, 256, 256, 4, 1, 10});
  bench->Args({8, 256, 256, 4, 2, 0})->Args({1, 1024, 768, 12, 1, 0})->Args({1, 1024, 768, 12, 2, 0});
}

BENCHMARK_CAPTURE(attention, bf16_forward, DataType::bfloat16, false, 1, 0)->Apply(sizes);
BENCHMARK_CAPTURE(attention, bf16_backward, DataType::bfloat16, true, 1, 0)->Apply(sizes);
BENCHMARK_CAPTURE(attention, fp32_forward, DataType::float32, false, 1, 0)->Apply(sizes);
BENCHMARK_CAPTURE(attention, fp32_backward, DataType::float32, true, 1, 0)->Apply(sizes);

// Four heads share a key, as in Llama 3 and Mistral.
void long_rows(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"batch", "time", "width", "heads", "threads", "dropout%"})
      ->MeasureProcessCPUTime()
      ->UseRealTime();
  bench->Args({1, 1024, 768, 12, 2, 0})->Args({1, 4096, 768, 12, 2, 0});
}
BENCHMARK_CAPTURE(attention, bf16_grouped_forward, DataType::bfloat16, false, 4, 0)->Apply(long_rows);
BENCHMARK_CAPTURE(attention, bf16_grouped_backward, DataType::bfloat16, true, 4, 0)->Apply(long_rows);
BENCHMARK_CAPTURE(attention, bf16_window_forward, DataType::bfloat16, false, 4, 256)->Apply(long_rows);
BENCHMARK_CAPTURE(attention, bf16_window_backward, DataType::bfloat16, true, 4, 256)->Apply(long_rows);

}  // namespace
}  // namespace tranche::kernels::bench
