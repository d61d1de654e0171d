// State beside the device: keys, checks and text of OffloadConfig.

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "core/json.h"
#include "config/reader.h"

namespace tranche::detail {
namespace {

constexpr const char* optimizer_device = "zero_optimization.offload_optimizer.device";
constexpr const char* optimizer_path = "zero_optimization.offload_optimizer.nvme_path";
constexpr const char* parameters_device = "zero_optimization.offload_param.device";
constexpr const char* parameters_path = "zero_optimization.offload_param.nvme_path";

/// Tiles begin where blocks of disks do, in every dtype of state.
constexpr std::int64_t tile_step = 4096;
/// A tile of three fp32 tensors is 12 GiB then; larger ones are typing errors.
constexpr std::int64_t largest_tile = std::int64_t{1} << 30;
constexpr std::int64_t largest_block = std::int64_t{1} << 30;  ///< bytes of one transfer
constexpr int deepest_queue = 1024;

OffloadTier tier_of(const Values& values, const char* path, Problems& problems) {
  const std::string text = values.text(path).value_or("none");
  for (const OffloadTier tier : {OffloadTier::none, OffloadTier::cpu, OffloadTier::nvme}) {
    if (text == name_of(tier)) return tier;
  }
  problems.add(fmt::format("{}: '{}' is not one of none, cpu, nvme", path, text));
  return OffloadTier::none;
}

/// The boolean that stood where the block stands now.
OffloadTier tier_with_older_key(const Values& values, const char* path, const char* older, Config& config,
                                Problems& problems) {
  const OffloadTier tier = tier_of(values, path, problems);
  if (!values.boolean(older).value_or(false)) return tier;
  if (values.has(path) && tier != OffloadTier::cpu) {
    problems.add(fmt::format("{}: true asks for cpu, but {} says {}; write the second only", older, path,
                             name_of(tier)));
    return tier;
  }
  config.notes.push_back(fmt::format("{}: taken as {}: \"cpu\", its present name", older, path));
  return OffloadTier::cpu;
}

int count_of(const Values& values, const char* path, int otherwise, Problems& problems) {
  const std::int64_t value = values.integer(path).value_or(otherwise);
  if (value >= INT32_MIN && value <= INT32_MAX) return static_cast<int>(value);
  problems.add(fmt::format("{}: {} is out of range", path, value));
  return otherwise;
}

void between(std::int64_t value, std::int64_t least, std::int64_t most, const char* path,
             Problems& problems) {
  if (value >= least && value <= most) return;
  problems.add(fmt::format("{}: {} is not between {} and {}", path, value, least, most));
}

void at_least_zero(std::int64_t value, const char* path, Problems& problems) {
  if (value < 0) problems.add(fmt::format("{}: {} is not at least 0", path, value));
}

/// `parameters_too`: whether the path of a block without effect counts.
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
  offload.optimizer =
      tier_with_older_key(values, optimizer_device, "zero_optimization.cpu_offload", config, problems);
  offload.parameters =
      tier_with_older_key(values, parameters_device, "zero_optimization.cpu_offload_param", config, problems);
  const bool without_effect =
      offload.parameters != OffloadTier::none && config.stage >= 0 && config.stage < 3;
  if (without_effect) {
    config.notes.push_back(fmt::format(
        "{}: {} has no effect: at stage {} every rank has all weights; they leave the device at stage 3",
        parameters_device, name_of(offload.parameters), config.stage));
    offload.parameters = OffloadTier::none;
  }
  read_path(values, !without_effect, offload, problems);
  offload.ratio = values.number("zero_optimization.offload_optimizer.ratio").value_or(offload.ratio);
  offload.tile_buffers =
      count_of(values, "zero_optimization.offload_optimizer.buffer_count", offload.tile_buffers, problems);
  offload.parameter_buffers =
      count_of(values, "zero_optimization.offload_param.buffer_count", offload.parameter_buffers, problems);
  offload.activations =
      values.boolean("activation_checkpointing.cpu_checkpointing").value_or(offload.activations);
  if (offload.activations && !config.activation_checkpointing) {
    config.notes.emplace_back(
        "activation_checkpointing.cpu_checkpointing: true has no effect: it moves what activation "
        "checkpointing keeps, which tranche.activation_checkpointing switches on");
    offload.activations = false;
  }

  offload.tile_elements = values.integer("tranche.offload_tile").value_or(offload.tile_elements);
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
  offload.io_engine = values.text("tranche.io_engine").value_or(offload.io_engine);
  offload.io_block_bytes = values.size("aio.block_size").value_or(offload.io_block_bytes);
  offload.io_depth = count_of(values, "aio.queue_depth", offload.io_depth, problems);
  offload.host_memory_limit = values.size("tranche.host_memory").value_or(offload.host_memory_limit);
  offload.nvme_limit = values.size("tranche.nvme_space").value_or(offload.nvme_limit);
  config.debug.host_link_bytes_per_second =
      static_cast<double>(values.size("tranche.debug.host_link_bandwidth")
                              .value_or(static_cast<std::int64_t>(config.debug.host_link_bytes_per_second)));
}

void check_offload(Config& config, Problems& problems) {
  OffloadConfig& offload = config.offload;
  if (!(offload.ratio >= 0 && offload.ratio <= 1)) {
    problems.add(
        fmt::format("zero_optimization.offload_optimizer.ratio: {} is not between 0 and 1", offload.ratio));
  }
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
  if (offload.tile_elements < tile_step || offload.tile_elements > largest_tile ||
      offload.tile_elements % tile_step != 0) {
    problems.add(fmt::format("tranche.offload_tile: {} is not a multiple of {} between {} and {}",
                             offload.tile_elements, tile_step, tile_step, largest_tile));
  }
  between(offload.tile_buffers, 3, 64, "zero_optimization.offload_optimizer.buffer_count", problems);
  between(offload.parameter_buffers, 2, 64, "zero_optimization.offload_param.buffer_count", problems);
  if (offload.activations && !config.activation_checkpointing) {
    problems.add(
        "activation_checkpointing.cpu_checkpointing moves what activation checkpointing keeps; set "
        "tranche.activation_checkpointing to true too");
  }
  if (offload.io_engine != "automatic" && offload.io_engine != "uring" && offload.io_engine != "threads") {
    problems.add(
        fmt::format("tranche.io_engine: '{}' is not one of automatic, uring, threads", offload.io_engine));
  }
  if (offload.io_block_bytes != 0 &&
      (offload.io_block_bytes < 4096 || offload.io_block_bytes > largest_block ||
       offload.io_block_bytes % 4096 != 0)) {
    problems.add(
        fmt::format("aio.block_size: {} is neither 0 (calibrated) nor a multiple of 4096 bytes up to {}",
                    offload.io_block_bytes, largest_block));
  }
  if (offload.io_depth < 0 || offload.io_depth > deepest_queue) {
    problems.add(fmt::format("aio.queue_depth: {} is neither 0 (calibrated) nor between 1 and {}",
                             offload.io_depth, deepest_queue));
  }
  at_least_zero(offload.host_memory_limit, "tranche.host_memory", problems);
  at_least_zero(offload.nvme_limit, "tranche.nvme_space", problems);
  const double bandwidth = config.debug.host_link_bytes_per_second;
  if (!(bandwidth >= 0) || !(bandwidth <= 0x1p53) || bandwidth != std::floor(bandwidth)) {
    problems.add(fmt::format(
        "tranche.debug.host_link_bandwidth: {} is neither 0 (no bound) nor whole bytes per second",
        bandwidth));
  }
}

void write_offload(const Config& config, Json& json) {
  const OffloadConfig& offload = config.offload;
  Json& zero = json["zero_optimization"];
  Json& optimizer = zero["offload_optimizer"];
  optimizer["device"] = name_of(offload.optimizer);
  optimizer["ratio"] = offload.ratio;
  optimizer["buffer_count"] = offload.tile_buffers;
  Json& parameters = zero["offload_param"];
  parameters["device"] = name_of(offload.parameters);
  parameters["buffer_count"] = offload.parameter_buffers;
  if (!offload.nvme_path.empty()) optimizer["nvme_path"] = parameters["nvme_path"] = offload.nvme_path;
  json["activation_checkpointing"]["cpu_checkpointing"] = offload.activations;
  json["aio"]["block_size"] = offload.io_block_bytes;
  json["aio"]["queue_depth"] = offload.io_depth;
  const auto limit = [](std::int64_t bytes) { return bytes == 0 ? Json(nullptr) : Json(bytes); };
  Json& own = json["tranche"];
  own["offload_tile"] = offload.tile_elements;
  own["io_engine"] = offload.io_engine;
  own["host_memory"] = limit(offload.host_memory_limit);
  own["nvme_space"] = limit(offload.nvme_limit);
  own["debug"]["host_link_bandwidth"] = static_cast<std::int64_t>(config.debug.host_link_bytes_per_second);
}

}  // namespace tranche::detail
