// The files that --model accepts: a config.json of GPT-2 or of the Llama family, or a list of units.

#include "partition/flat_layout.h"
#include "tests/fuzz/fuzz_target.h"
#include "tranche/models/gpt.h"
#include "tranche/models/llama_config.h"
#include "tranche/planner/plan_model.h"

namespace tranche::fuzz {

namespace {

/// The largest model whose tensors an execution lists.
constexpr std::int64_t most_layers = 16;

void read_gpt_config(std::string_view input) {
  const models::GptConfig config = models::GptConfig::from_json(input, "config.json");
  require(models::GptConfig::from_json(config.to_json(), "again") == config,
          "a model's configuration changes when it is written");
  require(config.parameters() > 0, "a model has no parameters");
  (void)config.flops_per_token(config.positions);
  if (config.layers <= most_layers) {
    require(models::Gpt::spec(config, config.positions).parameters() == config.parameters(),
            "a model's tensors are not its parameters");
  }
}

std::vector<std::string> gpt_config_seeds() {
  std::vector<std::string> seeds;
  for (const char* name : {"gpt2", "gpt-nano"}) seeds.push_back(models::GptConfig::preset(name).to_json());
  seeds.push_back(
      R"({"model_type": "gpt2", "n_ctx": 16, "n_embd": 8, "n_head": 2, "n_inner": 9, "scale_attn_weights": true,
                      "reorder_and_upcast_attn": false, "add_cross_attention": false, "unused": [1, {"a": null}]})");
  return seeds;
}

void read_llama_config(std::string_view input) {
  const models::LlamaConfig config = models::LlamaConfig::from_json(input, "config.json");
  require(models::LlamaConfig::from_json(config.to_json(), "again") == config,
          "a model's configuration changes when it is written");
  require(config.parameters() > 0, "a model has no parameters");
  (void)config.flops_per_token(config.positions);
}

std::vector<std::string> llama_config_seeds() {
  std::vector<std::string> seeds;
  for (const char* name : {"llama-nano", "qwen3-nano", "llama-3.1-8b", "mistral-7b"}) {
    seeds.push_back(models::LlamaConfig::preset(name).to_json());
  }
  seeds.push_back(
      R"({"model_type": "qwen2", "num_hidden_layers": 2, "use_sliding_window": true, "sliding_window": 8, "layer_types":
          ["full_attention", "sliding_attention"], "rope_parameters": {"rope_type": "linear", "factor": 2.0,
          "rope_theta": 1e6}, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "pretraining_tp": 1})");
  return seeds;
}

void read_units(std::string_view input) {
  const planner::PlanModel model = planner::parse_unit_list(input, "units.json");
  (void)model.list.parameters();
  for (const UnitSpec& unit : model.list.units()) {
    std::vector<std::int64_t> elements;
    for (const TensorSpec& tensor : unit.tensors) elements.push_back(tensor.shape.elements());
    (void)detail::FlatLayout(elements, 1);
    if (&unit == &model.list.units().front()) (void)detail::FlatLayout(elements, 64).shard_pieces(63);
  }
}

std::vector<std::string> units_seeds() {
  return {R"({"tokens_per_sample": 128, "flops_per_token": 1e9, "units": [
              {"name": "embedding", "tensors": {"weight": [1000, 64]}, "uses_per_pass": 2},
              {"name": "block", "repeat": 3, "tensors": {"w": [64, 256], "b": [256]}}]})",
          R"({"units": [{"name": "a", "tensors": {"w": [3]}}]})"};
}

}  // namespace

Target gpt_config_target() {
  return {"gpt_config", read_gpt_config, gpt_config_seeds, {ExitStatus::configuration}};
}
Target llama_config_target() {
  return {"llama_config", read_llama_config, llama_config_seeds, {ExitStatus::configuration}};
}
Target units_target() {
  return {"units", read_units, units_seeds, {ExitStatus::configuration}};
}

}  // namespace tranche::fuzz
