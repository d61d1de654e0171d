#include "tools/train/evaluation.h"

#include <algorithm>
#include <vector>

#include "tranche/models/generate.h"

namespace tranche::tools {

std::string sample_text(Engine& engine, const models::LanguageModel& model, std::string_view prompt,
                        std::int64_t count, std::int64_t context, double temperature, std::uint64_t seed) {
  std::vector<std::vector<std::int32_t>> prompts(1);
  for (const char c : prompt) prompts.front().push_back(static_cast<unsigned char>(c));
  const models::GenerationOptions options{
      .tokens = count,
      .context = context,
      .max_batch = 1,
      .sampling = {.temperature = temperature, .seed = seed},
      .writable = std::min<std::int64_t>(model.shape().vocabulary, 256)};  // bytes only
  const std::vector<models::Generation> texts = models::generate(engine, model, prompts, options);
  std::string text;
  for (const std::int32_t token : texts.front().tokens) {
    text.push_back(static_cast<char>(static_cast<unsigned char>(token)));
  }
  return text;
}

}  // namespace tranche::tools
