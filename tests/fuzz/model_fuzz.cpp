// The files that --model names: a config.json of GPT-2, or a list of units.

#include "partition/flat_layout.h"
#include "tests/fuzz/fuzz_target.h"
#include "tranche/models/gpt.h"
#include "tranche/planner/plan_model.h"

namespace tranche::fuzz {

namespace {

/// The largest model of which an execution lists the tensors.
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
Target units_target() {
  return {"units", read_units, units_seeds, {ExitStatus::configuration}};
}

}  // namespace tranche::fuzz
