// Offloaded state: keys, checks and text of OffloadConfig.

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "config/reader.h"
#include "core/json.h"

namespace tranche::detail {
namespace {

constexpr const char* optimizer_device = "zero_optimization.offload_optimizer.device";
constexpr const char* optimizer_path = "zero_optimization.offload_optimizer.nvme_path";
constexpr const char* parameters_device = "zero_optimization.offload_param.device";
constexpr const char* parameters_path = "zero_optimization.offload_param.nvme_path";

/// Tiles begin on disk blocks in every dtype of state.
constexpr std::int64_t tile_step = 4096;
/// Reads the boolean key that older versions of DeepSpeed had instead of the block.
void read_older_key(const Values& values, const char* path, const char* older, OffloadTier& tier,
                    Config& config, Problems& problems) {
  if (!values.boolean(older).value_or(false)) return;
  if (values.has(path) && tier != OffloadTier::cpu) {
    problems.add(fmt::format("{}: true asks for cpu, but {} says {}; write the second only", older, path,
                             name_of(tier)));
    return;
  }
  config.notes.push_back(fmt::format("{}: taken as {}: \"cpu\", its present name", older, path));
  tier = OffloadTier::cpu;
}

/// With `parameters_too`, the path of a block without effect is read too.
void read_path(const Values& values, bool parameters_too, OffloadConfig& offload, Problems& problems) {
  const std::string own = values.text(optimizer_path).value_or("");
  const std::string other = parameters_too || own.empty() ? values.text(parameters_path).value_or("") : "";
  if (!own.empty() && !other.empty() && own != other) {
    problems.add(fmt::format("{} is '{}' and {} is '{}'; a rank has one swap file, so write one folder",
                             optimizer_path, own, parameters_path, other));
  }
  offload.nvme_path = own.empty() ? other : own;
}

}  // namespace

void read_offload(const Values& values, Config& config, Problems& problems) {
  OffloadConfig& offload = config.offload;
  read_older_key(values, optimizer_device, "zero_optimization.cpu_offload", offload.optimizer, config,
                 problems);
  read_older_key(values, parameters_device, "zero_optimization.cpu_offload_param", offload.parameters, config,
                 problems);
  const bool without_effect =
      offload.parameters != OffloadTier::none && config.stage >= 0 && config.stage < 3;
  if (without_effect) {
    config.notes.push_back(fmt::format(
        "{}: {} has no effect: at stage {} every rank has all weights; they leave the device at stage 3",
        parameters_device, name_of(offload.parameters), config.stage));
    offload.parameters = OffloadTier::none;
  }
  read_path(values, !without_effect, offload, problems);
  if (offload.activations && !config.activation_checkpointing) {
    config.notes.emplace_back(
        "activation_checkpointing.cpu_checkpointing: true has no effect: it moves what activation "
        "checkpointing keeps, which tranche.activation_checkpointing switches on");
    offload.activations = false;
  }

  if (const auto bound = values.integer("zero_optimization.sub_group_size")) {
    if (*bound == 0) {
      config.notes.emplace_back("zero_optimization.sub_group_size: 0 is taken as 1000000000, the default");
    } else if (*bound < 1) {
      problems.add(fmt::format("zero_optimization.sub_group_size: {} is not at least 1", *bound));
    } else {
      const std::int64_t whole = std::max(*bound / tile_step * tile_step, tile_step);
      if (whole != *bound && whole <= offload.tile_elements) {
        config.notes.push_back(
            fmt::format("zero_optimization.sub_group_size: {} is taken as {}: tiles are multiples of {}",
                        *bound, whole, tile_step));
      }
      offload.tile_elements = std::min(offload.tile_elements, whole);
    }
  }
}

void check_offload(Config& config, Problems& problems) {
  OffloadConfig& offload = config.offload;
  if (offload.ratio == 0) offload.optimizer = OffloadTier::none;
  if (offload.parameters != OffloadTier::none && config.stage != 3) {
    problems.add(
        fmt::format("{}: {} needs zero_optimization.stage 3, where weights are sharded and come "
                    "when they are used; the stage is {}",
                    parameters_device, name_of(offload.parameters), config.stage));
  }
  if (offload.uses_nvme() && offload.nvme_path.empty()) {
    const bool optimizer = offload.optimizer == OffloadTier::nvme;
    problems.add(fmt::format("{}: nvme needs {}, a folder on the disk for swap files",
                             optimizer ? optimizer_device : parameters_device,
                             optimizer ? optimizer_path : parameters_path));
  }
  if (!is_utf8(offload.nvme_path)) {
    problems.add(fmt::format("{}: '{}' is not UTF-8, as a configuration is; use a folder with another name",
                             optimizer_path, offload.nvme_path));
  }
  if (offload.activations && !config.activation_checkpointing) {
    problems.add(
        "activation_checkpointing.cpu_checkpointing moves what activation checkpointing keeps; set "
        "tranche.activation_checkpointing to true too");
  }
}

}  // namespace tranche::detail
