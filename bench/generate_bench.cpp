// Tokens per second that a model of random weights generates, with a key-value cache and, in alternation, by
// passes over the whole text. See bench_generate --help.
#include <fmt/core.h>

#include <chrono>
#include <string>
#include <vector>

#include "bench/figures.h"
#include "bench/flags.h"
#include "tranche/comm/backends.h"
#include "tranche/core/error.h"
#include "tranche/engine/engine.h"
#include "tranche/models/generate.h"
#include "tranche/models/model_registry.h"

namespace tranche::bench {

namespace {

struct Settings {
  std::string model = "gpt2", dtype = "fp32", whole = "1";
  std::int64_t prompt = 16, tokens = 256, batch = 1, rounds = 3;
  int threads = 0;
};

/// Seconds of one call that adds `tokens` tokens to each prompt. Returns the tokens of the first prompt as
/// well.
double seconds_of(Engine& engine, const models::LanguageModel& model,
                  const std::vector<std::vector<std::int32_t>>& prompts,
                  const models::GenerationOptions& options, std::vector<std::int32_t>& first) {
  const Seconds start = clocks_now();
  first = models::generate(engine, model, prompts, options).front().tokens;
  return (clocks_now() - start).wall;
}

void measure(const Settings& settings) {
  const auto model = models::ModelRegistry::with_builtin().resolve(settings.model);
  Config config;
  config.micro_batch_size = config.train_batch_size = 1;
  config.threads = settings.threads;
  const ModelSpec spec = model->spec(settings.prompt + settings.tokens);
  for (const UnitSpec& unit : spec.units()) {  // matrices get neither gradients nor optimizer state
    for (const TensorSpec& tensor : unit.tensors) {
      if (tensor.shape.rank() > 1) config.frozen.push_back(tensor.name);
    }
  }
  if (settings.dtype == "fp32") config.precision.compute = config.precision.communication = DataType::float32;
  Runtime runtime(RuntimeOptions::from(config),
                  [](const CommunicatorOptions& options) { return make_self_communicator(options); });
  Engine engine(runtime, spec, config);
  std::vector<std::vector<std::int32_t>> prompts;
  for (std::int64_t i = 0; i < settings.batch; ++i) {
    prompts.emplace_back();
    for (std::int64_t t = 0; t < settings.prompt; ++t) {
      prompts.back().push_back(static_cast<std::int32_t>((t * 37 + i * 11) % model->shape().vocabulary));
    }
  }
  models::GenerationOptions options{
      .tokens = settings.tokens, .max_batch = settings.batch, .sampling = {.temperature = 0}};
  std::vector<double> cached, whole;
  std::vector<std::int32_t> with_cache, without_cache;
  for (std::int64_t round = 0; round < settings.rounds; ++round) {
    options.cache = true;
    cached.push_back(seconds_of(engine, *model, prompts, options, with_cache));
    options.cache = false;
    if (settings.whole == "0" || round > 0) continue;  // it takes long and varies little
    whole.push_back(seconds_of(engine, *model, prompts, options, without_cache));
    if (without_cache != with_cache) fmt::print("note: rounding chose other tokens without a cache\n");
  }
  const auto tokens = static_cast<double>(settings.tokens * settings.batch);
  fmt::print("model={} dtype={} prompt={} tokens={} batch={} cached_tokens_per_s={:.2f}", settings.model,
             settings.dtype, settings.prompt, settings.tokens, settings.batch, tokens / median(cached));
  if (!whole.empty()) {
    fmt::print(" whole_tokens_per_s={:.2f} speed_up={:.1f}", tokens / median(whole),
               median(whole) / median(cached));
  }
  fmt::print("\n");
}

}  // namespace

}  // namespace tranche::bench

int main(int argc, char** argv) {
  using namespace tranche::bench;
  return run_program("bench_generate", [&] {
    Settings settings;
    parse_flags(
        argc, argv,
        {text_flag("--model", settings.model), choice_flag("--dtype", settings.dtype, {"fp32", "bf16"}),
         number_flag("--prompt", settings.prompt), number_flag("--tokens", settings.tokens),
         number_flag("--batch", settings.batch), number_flag("--rounds", settings.rounds),
         number_flag("--threads", settings.threads), choice_flag("--whole", settings.whole, {"0", "1"})});
    measure(settings);
  });
}
