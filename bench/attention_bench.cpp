/// Causal attention, forward and backward, held against the fp32 matmul peak: its products run in fp32.

#include "bench/kernel_bench.h"
#include "tranche/kernels/attention.h"

namespace tranche::kernels::bench {
namespace {

void attention(benchmark::State& state, DataType dtype, bool backward) {
  const std::int64_t batch = state.range(0), time = state.range(1), width = state.range(2);
  const int threads = static_cast<int>(state.range(4));
  AttentionOptions options;
  options.heads = state.range(3);
  std::vector<std::int64_t> samples(static_cast<std::size_t>(batch), 0);
  options.dropout.samples = samples;
  options.dropout.probability = static_cast<float>(state.range(5)) / 100.0f;
  BenchMachine machine(threads);
  BenchTensor packed(dtype, {batch, time, 3 * width}), gradient(dtype, {batch, time, 3 * width});
  BenchTensor out(dtype, {batch, time, width}), d_out(dtype, {batch, time, width});
  BenchTensor log_sum_exp(DataType::float32, {batch, options.heads, time});
  const auto run_forward = [&] {
    attention_forward(machine.stream(), options, {packed.view()}, {packed.view(), width},
                      {packed.view(), 2 * width}, out.view(), log_sum_exp.view(), machine.workspace());
  };
  run_forward();
  for (auto _ : state) {
    if (backward) {
      attention_backward(machine.stream(), options, d_out.view(), {packed.view()}, {packed.view(), width},
                         {packed.view(), 2 * width}, out.view(), log_sum_exp.view(), {gradient.view()},
                         {gradient.view(), width}, {gradient.view(), 2 * width}, machine.workspace());
    } else {
      run_forward();
    }
  }
  const double pairs = static_cast<double>(batch) * static_cast<double>(time) * static_cast<double>(time) / 2;
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

BENCHMARK_CAPTURE(attention, bf16_forward, DataType::bfloat16, false)->Apply(sizes);
BENCHMARK_CAPTURE(attention, bf16_backward, DataType::bfloat16, true)->Apply(sizes);
BENCHMARK_CAPTURE(attention, fp32_forward, DataType::float32, false)->Apply(sizes);
BENCHMARK_CAPTURE(attention, fp32_backward, DataType::float32, true)->Apply(sizes);

}  // namespace
}  // namespace tranche::kernels::bench
