// Files beside a model's weights: the configuration of PEFT adapters, and generation settings.

#include <algorithm>

#include "core/json_node.h"
#include "tests/fuzz/fuzz_target.h"
#include "tools/checkpoint/model_files.h"
#include "tools/checkpoint/peft.h"
#include "tools/checkpoint/peft_layers.h"

namespace tranche::fuzz {

namespace {

void read_adapter_config(std::string_view input) {
  const LoraConfig lora = tools::lora_from_peft(input, "adapter_config.json");
  require(lora.rank >= 1, "adapters have no rank");
  const tools::NamedLayers named(detail::JsonNode::read<ConfigurationError>(input, "adapter_config.json"));
  if (!named.any()) return;
  for (const char* module : {"model.layers.1.self_attn.q_proj", "transformer.h.0.mlp.c_fc", "lm_head"}) {
    try {
      (void)named.has(module, true);
    } catch (const InvalidArgument&) {  // an unsupported pattern
    }
  }
}

std::vector<std::string> adapter_config_seeds() {
  const std::string start =
      R"({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "use_rslora": null, )";
  return {
      start +
          R"("target_modules": ["q_proj", "lm_head"], "layers_to_transform": [0, 1], "layers_pattern": "layers"})",
      start +
          R"x("target_modules": ".*(q_proj|c_fc)", "exclude_modules": ["lm_head"], "fan_in_fan_out": false})x",
      start + R"("target_modules": "all-linear", "exclude_modules": "lm.*", "lora_dropout": 0.5})"};
}

void read_end_tokens(std::string_view input) {
  const std::vector<std::string_view> parts = split(input, 2);
  const std::vector<std::int32_t> tokens = tools::end_tokens(parts[0], parts[1], "folder");
  require(std::is_sorted(tokens.begin(), tokens.end()), "end tokens are not in order");
  require(tokens.empty() || tokens.front() >= 0, "an end token is negative");
}

std::vector<std::string> end_tokens_seeds() {
  return {join({R"({"eos_token_id": [7, 3, -1], "top_k": 3})", R"({"eos_token_id": 2})"}),
          join({R"({"eos_token_id": null})", R"({"eos_token_id": [128001, 128009]})"}), join({"", ""})};
}

}  // namespace

Target adapter_config_target() {
  return {"adapter_config", read_adapter_config, adapter_config_seeds, {ExitStatus::configuration}};
}
Target end_tokens_target() {
  return {"end_tokens", read_end_tokens, end_tokens_seeds, {ExitStatus::configuration}};
}

}  // namespace tranche::fuzz
