// DeepSpeed's configuration files, and the values of --set.

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>

#include "tests/fuzz/fuzz_target.h"
#include "tools/train/settings.h"
#include "tranche/config/config.h"
#include "tranche/optim/optimizer.h"
#include "tranche/optim/schedule.h"

namespace tranche::fuzz {

namespace {

void use(Config config, int ranks) {
  const std::string text = config.to_json();
  require(parse_config(text, ranks).to_json() == text, "a configuration changes when it is written");
  if (config.total_steps_hint == 0) config.total_steps_hint = 100;
  (void)make_optimizer(config);
  (void)make_schedule(config);
}

void read_config_file(std::string_view input) {
  const int ranks = input.size() % 2 == 0 ? 1 : 4;
  use(parse_config(input, ranks, {}, input.size() % 3 == 0), ranks);
}

/// Files as users write them, smallest first.
std::vector<std::string> config_seeds() {
  std::vector<std::string> seeds;
  for (const auto& entry : std::filesystem::directory_iterator(TRANCHE_CONFIGS)) {
    if (entry.path().filename() == "outcomes.json") continue;
    std::ifstream file(entry.path(), std::ios::binary);
    seeds.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  std::sort(seeds.begin(), seeds.end());
  seeds.insert(seeds.begin(), Config{}.to_json());
  return seeds;
}

/// The input is --nvme-path, --config, and any number of --set.
void read_set(std::string_view input) {
  const std::vector<std::string_view> parts = split(input, 6);
  tools::Options options;
  if (!parts[0].empty()) {
    options.offload_optimizer = "nvme";
    options.nvme_path = std::string(parts[0]);
  }
  for (std::size_t i = 2; i < parts.size(); ++i) {
    if (!parts[i].empty()) options.set.emplace_back(parts[i]);
  }
  const std::string text = parts[1].empty() ? tools::default_configuration(options) : std::string(parts[1]);
  use(parse_config(text, 2, tools::overrides_of(options, text)), 2);
}

std::vector<std::string> set_seeds() {
  return {join({"", "", "tranche.seed=7", "optimizer.params.lr=1e-3"}),
          join({"/tmp/swap", "", "zero_optimization.stage=3", "tranche.nvme_space=\"4GiB\""}),
          join({"", "{zero_optimization: {cpu_offload: true}}", "fp16.enabled=true", "bf16.enabled=false",
                "scheduler={\"type\":\"WarmupLR\",\"params\":{}}"}),
          join({"", "{}", "optimizer.params.betas=[0.9,0.95]", "tranche.frozen=[\"h.0.*\"]",
                "train_batch_size=8"})};
}

}  // namespace

Target config_target() {
  return {"config", read_config_file, config_seeds, {ExitStatus::configuration}};
}
Target set_target() {
  return {"set", read_set, set_seeds, {ExitStatus::configuration}};
}

}  // namespace tranche::fuzz
