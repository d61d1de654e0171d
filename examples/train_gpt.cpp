#include <tranche/models/gpt.h>
#include <tranche/tranche.h>

#include <cstdio>
using namespace tranche;

int main() {
  Runtime runtime = Runtime::from_config(R"({"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": true},
    "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}})");  // or the path of a ds_config.json
  const models::Gpt gpt(models::GptConfig::preset("gpt-nano"));
  Engine engine(runtime, models::Gpt::spec(gpt.config(), 32), runtime.config());
  const std::int64_t first = 2 * runtime.rank(), samples[] = {first, first + 1};  // this rank's share
  std::vector<std::int32_t> text(65);
  for (std::size_t i = 0; i < text.size(); ++i) text[i] = static_cast<std::int32_t>((first + i) % 17);
  for (int step = 1; step <= 100; ++step) {
    gpt.forward_backward(
        engine,
        {{text.data(), DataType::int32, {2, 32}}, {text.data() + 1, DataType::int32, {2, 32}}, samples});
    const StepResult result = engine.step();  // agree on the norm, update
    if (runtime.rank() == 0 && step % 25 == 0) std::printf("step %d loss %.4f\n", step, result.loss);
  }
}
