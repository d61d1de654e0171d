// Compares generation on a GPU, or its emulation, with the CPU.
#include <gtest/gtest.h>

#include "device/cuda_probe.h"
#include "tests/models/tiny_llama.h"
#include "tests/models/training_fixture.h"
#include "tranche/models/generate.h"
#include "tranche/models/llama.h"

namespace tranche::models {
namespace {

using models::on_ranks;

TEST(GpuGeneration, WritesWhatTheCpuWrites) {
  const detail::CudaProbe probe = detail::probe_cuda();
  if (probe.devices.empty()) GTEST_SKIP() << probe.problem;
  models::LlamaConfig windowed = models::tiny_llama(models::LlamaKind::mistral);
  windowed.head_dim = 8;
  const models::Llama mistral(windowed);
  const models::Gpt gpt(models::tiny_gpt());
  const std::vector<std::vector<std::int32_t>> prompts{{5, 17, 60}, {1}, {9, 9, 2, 4, 40, 3, 8}};
  for (const models::LanguageModel* model : {static_cast<const models::LanguageModel*>(&mistral),
                                             static_cast<const models::LanguageModel*>(&gpt)}) {
    std::vector<Generation> texts[2];
    reference_training::Tensors start;
    for (const DeviceKind device : {DeviceKind::cpu, DeviceKind::cuda}) {
      on_ranks(
          1, model->spec(8), models::plain_config(1),
          [&](Engine& engine) {
            if (device == DeviceKind::cpu) start = models::read_all(engine);
            for (const auto& [name, values] : start) {
              std::vector<float> larger(values.begin(), values.end());
              for (float& value : larger) value *= 4;  // so that no two logits are close
              engine.write_weight(name, larger);
            }
            GenerationOptions options{.tokens = 12, .context = 16, .sampling = {.temperature = 0}};
            texts[device == DeviceKind::cuda] = generate(engine, *model, prompts, options);
          },
          device);
    }
    ASSERT_EQ(texts[1].size(), 3u);
    for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(texts[1][i].tokens, texts[0][i].tokens) << i;
  }
}

}  // namespace
}  // namespace tranche::models
