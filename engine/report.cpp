// What the engine says of itself: memory, traffic, formulas, the start-up table.

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tranche/engine/offloading.h"
#include "tranche/kernels/matmul.h"

namespace tranche {

using nlohmann::ordered_json;

namespace {

ordered_json traffic_json(const std::map<std::string, TrafficCount>& counts) {
  ordered_json result = ordered_json::object();
  for (const auto& [operation, count] : counts) {
    result[operation] = {{"calls", count.calls}, {"elements", count.elements}, {"bytes", count.bytes}};
  }
  return result;
}

}  // namespace

std::string Engine::memory_report() {
  Impl& impl = *impl_;
  ordered_json result = ordered_json::object();
  for (const Tier tier : all_tiers) {
    const TierAccount account = impl.runtime.ledger().account(tier);
    std::vector<std::int64_t> values{account.peak};
    for (const Category category : all_categories) values.push_back(account.category_peak[category]);
    for (const Category category : all_categories) values.push_back(account.persistent[category]);
    impl.shard
        .all_reduce(values.data(), static_cast<std::int64_t>(values.size()), DataType::int64,
                    ReduceOperation::maximum,
                    OperationLabel{"report", "memory", Traffic::control, Tier::host})
        .wait();
    if (values[0] == 0) continue;
    ordered_json categories = ordered_json::object(), persistent = ordered_json::object();
    for (std::size_t c = 0; c < all_categories.size(); ++c) {
      categories[std::string(name_of(all_categories[c]))] = values[1 + c];
      persistent[std::string(name_of(all_categories[c]))] = values[1 + category_count + c];
    }
    result[std::string(name_of(tier))] = {
        {"peak_bytes", values[0]}, {"by_category", categories}, {"persistent", persistent}};
  }
  const MemoryInfo info = impl.runtime.device().memory_info();
  if (info.total > 0) {
    // What the device itself says, so that the books close: all that is taken there and is not this rank's is
    // the driver's, the libraries' and that of other processes (ranks that share the device among them).
    std::int64_t values[] = {info.total, info.mapped, info.mapped - info.placed,
                             info.total - info.free - info.mapped};
    impl.shard
        .all_reduce(values, std::size(values), DataType::int64, ReduceOperation::maximum,
                    OperationLabel{"report", "memory", Traffic::control, Tier::host})
        .wait();
    result[std::string(name_of(Tier::device))]["physical"] = {{"total_bytes", values[0]},
                                                              {"mapped_bytes", values[1]},
                                                              {"rounding_bytes", values[2]},
                                                              {"unaccounted_bytes", values[3]}};
  }
  return result.dump();
}

std::string Engine::traffic_report() const {
  ordered_json result = traffic_json(impl_->step_traffic);
  result["control"] = traffic_json(impl_->step_control_traffic);
  result["formula_elements"] = formula_wire_elements();
  result["formula_bytes"] = formula_wire_bytes();
  return result.dump();
}

std::string Engine::model_report() const {
  return ordered_json{{"parameters", impl_->model.parameters()},
                      {"flops_per_token", impl_->model.flops_per_token}}
      .dump();
}

Engine::StateBytes Engine::state_bytes() const {
  return impl_->state_bytes();
}

Engine::StateBytes Engine::Impl::state_bytes() const {
  const std::int64_t compute_bytes = size_of(config.precision.compute);
  const std::int64_t accumulation_bytes = size_of(config.precision.accumulation);
  std::int64_t moment_bytes = 0;
  for (const OptimizerStateTensor& state : state_tensors) moment_bytes += size_of(state.dtype);
  StateBytes bytes;
  const auto of_tier = [](OffloadTier tier) {
    return static_cast<std::size_t>(tier == OffloadTier::none  ? Tier::device
                                    : tier == OffloadTier::cpu ? Tier::host
                                                               : Tier::nvme);
  };
  for (const UnitState& unit : units) {
    for (const FlatState* flat : {&unit.trainable, &unit.frozen}) {
      const bool trainable = flat == &unit.trainable;
      const FlatLayout& layout = flat->layout;
      if (layout.padded_elements() == 0) continue;
      const auto add = [&](bool whole, std::int64_t element_bytes, std::int64_t& sum, std::int64_t& on_tier) {
        const std::int64_t held = whole ? layout.padded_elements() : layout.shard_elements();
        const std::int64_t used = whole ? layout.elements() : layout.owned_elements(rank);
        sum += held * element_bytes;
        on_tier += held * element_bytes;
        bytes.padding += (held - used) * element_bytes;
      };
      add(whole_parameters(), compute_bytes, bytes.parameters,
          bytes.tiers[of_tier(flat->parameters_tier)].parameters);
      if (!trainable) continue;
      const bool away = flat->optimizer_tier != OffloadTier::none;
      const std::int64_t kept = optimizer_range(*flat).size();
      bytes.kept_elements += kept;
      if (away) bytes.moved_elements += kept;
      StateBytes::OnTier& home = bytes.tiers[of_tier(flat->optimizer_tier)];
      if (!lends_gradients(*flat)) {
        add(whole_gradients(), accumulation_bytes, bytes.gradients,
            bytes.tiers[static_cast<std::size_t>(Tier::device)].gradients);
      }
      if (away) {
        add(whole_optimizer(), accumulation_bytes, bytes.gradients,
            bytes.tiers[static_cast<std::size_t>(Tier::host)].gradients);
      }
      const bool master = config.precision.compute != DataType::float32 ||
                          flat->optimizer_tier != flat->parameters_tier ||
                          flat->optimizer_tier == OffloadTier::nvme;
      add(whole_optimizer(), moment_bytes + (master ? size_of(DataType::float32) : 0), bytes.optimizer,
          home.optimizer);
    }
  }
  return bytes;
}

std::string Engine::Impl::by_tier(const StateBytes& bytes) {
  std::string text;
  for (const Tier tier : all_tiers) {
    const StateBytes::OnTier& on = bytes.tiers[static_cast<std::size_t>(tier)];
    const std::int64_t all = on.parameters + on.gradients + on.optimizer;
    if (all == 0) continue;
    std::string parts;
    for (const auto& [name, part] :
         {std::pair("parameters", on.parameters), std::pair("gradients", on.gradients),
          std::pair("optimizer", on.optimizer)}) {
      if (part > 0) parts += fmt::format("{}{} {}", parts.empty() ? "" : " + ", format_bytes(part), name);
    }
    text += fmt::format("{}{} {} ({})", text.empty() ? "" : ", ", format_bytes(all),
                        tier == Tier::device ? "on the device"
                        : tier == Tier::host ? "in host memory"
                                             : "on nvme",
                        parts);
  }
  return text;
}

std::vector<std::pair<std::string, std::string>> Engine::Impl::offload_rows() const {
  std::vector<std::pair<std::string, std::string>> rows;
  if (!config.offload.any()) return rows;
  const StateBytes state = state_bytes();
  const OffloadConfig& asked = config.offload;
  if (asked.optimizer != OffloadTier::none) {
    std::string text = fmt::format("optimizer on {}, updated on the host", name_of(asked.optimizer));
    if (asked.ratio < 1) {
      text = fmt::format(
          "ratio {:g} asked, {:.3g} of the optimizer state moves to {}: whole units do, those used "
          "first stay",
          asked.ratio,
          static_cast<double>(state.moved_elements) /
              static_cast<double>(std::max<std::int64_t>(state.kept_elements, 1)),
          name_of(asked.optimizer));
    }
    rows.emplace_back("offload", text);
  }
  if (asked.parameters != OffloadTier::none) {
    rows.emplace_back("offload",
                      fmt::format("parameters on {}, brought for each gather", name_of(asked.parameters)));
  }
  if (offload && offload->swap) rows.emplace_back("swap file", offload->swap->description());
  const OffloadTraffic bytes = formula_offload();
  rows.emplace_back(
      "host link per step",
      fmt::format("{} to the host, {} from it{}", format_bytes(bytes.to_host), format_bytes(bytes.from_host),
                  asked.activations ? ", and kept inputs of blocks both ways" : ""));
  if (asked.uses_nvme()) {
    rows.emplace_back("nvme per step",
                      fmt::format("{} read, {} written (and padding to 4096 bytes)",
                                  format_bytes(bytes.nvme_read), format_bytes(bytes.nvme_written)));
  }
  return rows;
}

OffloadTraffic Engine::Impl::formula_offload() const {
  OffloadTraffic bytes;
  const std::int64_t weight = size_of(config.precision.compute);
  std::int64_t state_bytes = size_of(DataType::float32);
  for (const OptimizerStateTensor& state : state_tensors) state_bytes += size_of(state.dtype);
  const std::vector<int> gathers =
      model.gathers_per_pass ? model.gathers_per_pass(config) : std::vector<int>(units.size(), 2);
  const bool brings = config.offload.parameters != OffloadTier::none;
  const bool from_disk = config.offload.parameters == OffloadTier::nvme;
  for (std::size_t u = 0; u < units.size(); ++u) {
    const UnitState& unit = units[u];
    const std::int64_t kept = optimizer_range(unit.trainable).size();
    if (unit.trainable.optimizer_tier != OffloadTier::none) {
      bytes.to_host += kept * size_of(config.precision.accumulation);
      if (!brings) bytes.from_host += kept * weight;
      if (unit.trainable.optimizer_tier == OffloadTier::nvme) {
        bytes.nvme_read += kept * state_bytes;
        bytes.nvme_written += kept * state_bytes;
      }
    } else if (brings) {
      bytes.to_host += kept * weight;
    }
    if (!brings) continue;
    const std::int64_t shards = unit.trainable.layout.shard_elements() + unit.frozen.layout.shard_elements();
    const std::int64_t brought = config.accumulation_steps * gathers[u] * shards * weight;
    bytes.from_host += brought;
    if (!from_disk) continue;
    bytes.nvme_read += brought;
    bytes.nvme_written += kept * weight;
  }
  return bytes;
}

std::int64_t Engine::Impl::resident_bytes(int of_stage) const {
  Config other = config;
  other.stage = of_stage;
  const bool boundary = other.effective_reduction(ranks) == ReductionPolicy::boundary;
  const PrecisionConfig& precision = config.precision;
  const std::int64_t compute_bytes = size_of(precision.compute);
  std::int64_t optimizer_bytes = precision.compute == DataType::float32 ? 0 : 4;
  for (const OptimizerStateTensor& state : state_tensors) optimizer_bytes += size_of(state.dtype);
  // Kernels add into a slot of their own unless the accumulator itself can be one; what is sent is a copy
  // unless it is in the wire dtype already, or rounded on the way into G, by a rank alone.
  const bool slot = !boundary || precision.accumulation != DataType::float32;
  const DataType source = boundary ? precision.accumulation : DataType::float32;
  const std::int64_t slot_bytes = slot ? size_of(DataType::float32) : 0;
  const bool copied = source != precision.wire && !(ranks == 1 && source == DataType::float32);
  const std::int64_t wire_bytes = copied ? size_of(precision.wire) : 0;
  std::int64_t bytes = 0, tied = 0, largest_reduction = 0;
  std::vector<std::int64_t> gathered;
  for (const UnitState& unit : units) {
    const auto held = [&](const FlatLayout& layout, bool whole) {
      return whole || ranks == 1 ? layout.padded_elements() : layout.shard_elements();
    };
    const FlatLayout& layout = unit.trainable.layout;
    bytes += (held(layout, of_stage < 3) + held(unit.frozen.layout, of_stage < 3)) * compute_bytes;
    bytes += held(layout, of_stage == 0 || boundary) * size_of(precision.accumulation);
    bytes += held(layout, of_stage == 0) * optimizer_bytes;
    gathered.push_back(unit.gathered_elements() * compute_bytes);
    // A unit that is used several times a pass keeps its slot from the first use in backward to the last.
    const std::int64_t elements = layout.padded_elements();
    const bool stays = unit.uses_per_pass > 1;
    if (stays) tied += elements * slot_bytes;
    largest_reduction = std::max(largest_reduction, elements * ((stays ? 0 : slot_bytes) + wire_bytes));
  }
  bytes += tied + largest_reduction;
  if (of_stage == 3 && ranks > 1) {
    std::sort(gathered.rbegin(), gathered.rend());
    for (std::size_t i = 0; i < gathered.size() && i < static_cast<std::size_t>(config.depth); ++i) {
      bytes += gathered[i];
    }
  }
  return bytes;
}

std::string Engine::Impl::stages_for_comparison() const {
  if (config.offload.any()) {
    return "model state takes, on this rank, " + by_tier(state_bytes()) +
           "; the units that a step holds, activations, workspace and exchange buffer come on top";
  }
  std::string text = fmt::format("model state and the units that a step holds take, on each of {} rank{}, ",
                                 ranks, ranks == 1 ? "" : "s");
  for (int of_stage = 0; of_stage <= 3; ++of_stage) {
    text +=
        fmt::format("{}{} at stage {}{}", of_stage > 0 ? ", " : "", format_bytes(resident_bytes(of_stage)),
                    of_stage, of_stage == stage ? " (this one)" : "");
  }
  return text + "; activations, workspace and exchange buffer come on top";
}

std::int64_t Engine::Impl::declared_gathers() const {
  if (!model.gathers_per_pass) return -1;
  const std::vector<int> gathers = model.gathers_per_pass(config);
  require(gathers.size() == units.size(), "the model declares gathers of " + std::to_string(gathers.size()) +
                                              " units, but has " + std::to_string(units.size()));
  std::int64_t elements = 0;
  for (std::size_t u = 0; u < units.size(); ++u) elements += gathers[u] * units[u].gathered_elements();
  return elements;
}

std::int64_t Engine::Impl::gathered_elements() const {
  std::int64_t elements = 0;
  for (const UnitState& unit : units) elements += unit.gathered_elements();
  return elements;
}

Engine::StepMemory Engine::step_memory() const {
  return {impl_->arena->block_bytes(), impl_->arena->live_peak("train")};
}

std::int64_t Engine::formula_wire_elements() const {
  const Impl& impl = *impl_;
  if (impl.ranks == 1) return 0;
  std::int64_t padded = 0;
  for (const UnitState& unit : impl.units) padded += unit.trainable.layout.padded_elements();
  const std::int64_t reductions =
      impl.policy == ReductionPolicy::boundary ? 1 : impl.config.accumulation_steps;
  std::int64_t elements = reductions * padded;
  // Stages 0-2 gather once per step (G, or new weights); stage 3 as its schedule says.
  elements += impl.stage < 3 ? padded : impl.recorded_gather_elements;
  return elements / impl.ranks * (impl.ranks - 1);
}

std::int64_t Engine::formula_wire_bytes() const {
  const Impl& impl = *impl_;
  if (impl.ranks == 1) return 0;
  const PrecisionConfig& precision = impl.config.precision;
  OrderedSumOptions options;
  options.group_size = impl.reduction_group;
  options.bucket_elements = impl.config.reduce_bucket_elements;
  std::int64_t padded = 0, summed = 0;
  for (const UnitState& unit : impl.units) {
    const FlatLayout& layout = unit.trainable.layout;
    padded += layout.padded_elements();
    if (layout.padded_elements() == 0) continue;
    summed += impl.shard.summed_elements_sent(layout.shard_elements(), precision.wire, options);
  }
  const std::int64_t reductions =
      impl.policy == ReductionPolicy::boundary ? 1 : impl.config.accumulation_steps;
  std::int64_t bytes = reductions * padded * size_of(precision.wire);
  bytes += impl.stage < 3 ? padded * size_of(impl.stage == 0 ? precision.accumulation : precision.compute)
                          : impl.recorded_gather_elements * size_of(precision.compute);
  // Sums that cross between hosts are fp32 whatever travels otherwise.
  const std::int64_t wider = size_of(DataType::float32) - size_of(precision.wire);
  return bytes / impl.ranks * (impl.ranks - 1) + reductions * summed * wider;
}

std::string Engine::summary() const {
  const Impl& impl = *impl_;
  const Config& config = impl.config;
  const StateBytes bytes = state_bytes();
  const auto dtype = [](DataType d) { return std::string(name_of(d)); };
  std::int64_t padded = 0, largest = 0;
  for (const UnitState& unit : impl.units) {
    padded += unit.trainable.layout.padded_elements();
    largest = std::max(largest, unit.gathered_elements());
  }
  std::string text;
  const auto row = [&text](std::string_view name, const std::string& value) {
    text += fmt::format("  {:<22} {}\n", name, value);
  };
  row("parameters", fmt::format("{:L} in {} units ({:L} with padding)", impl.model.parameters(),
                                impl.units.size(), padded));
  row("ranks, stage",
      fmt::format("{} x stage {}, {} reduction{}", impl.ranks, impl.stage, name_of(impl.policy),
                  impl.ranks == 1 ? " (one rank: all stages hold the same)" : ""));
  row("batch", fmt::format("{} = {} per micro-batch x {} accumulated x {} ranks", config.train_batch_size,
                           config.micro_batch_size, config.accumulation_steps, impl.ranks));
  row("dtypes", fmt::format("compute {}, wire {}, accumulation {}, master fp32, moments {}",
                            dtype(config.precision.compute), dtype(config.precision.wire),
                            dtype(config.precision.accumulation), dtype(config.precision.moments)));
  row("matmul", std::string(kernels::matmul_path(impl.runtime.device().kind(), config.precision.compute)));
  row("device", impl.runtime.device().description());
  row("collectives",
      fmt::format("{}{}", impl.shard.backend(),
                  impl.ranks == 1                ? ""
                  : config.collectives == "nccl" ? ", sums by NCCL: their bits may differ from run to run"
                                                 : ", ordered sums"));
  if (config.offload.any()) {
    row("model state, this rank",
        fmt::format("{}; {} of it padding", Impl::by_tier(bytes), format_bytes(bytes.padding)));
    for (const auto& [name, value] : impl.offload_rows()) row(name, value);
  } else {
    row("model state, this rank",
        fmt::format(
            "{} parameters + {} gradients + {} optimizer = {} ({} of it padding)",
            format_bytes(bytes.parameters), format_bytes(bytes.gradients), format_bytes(bytes.optimizer),
            format_bytes(bytes.parameters + bytes.gradients + bytes.optimizer), format_bytes(bytes.padding)));
  }
  std::string resident = format_bytes(config.workspace_bytes) + " workspace";
  if (!impl.whole_parameters()) {
    resident += fmt::format(", up to {} x {} gathered", config.depth,
                            format_bytes(largest * size_of(config.precision.compute)));
  }
  if (impl.ranks > 1)
    resident += ", " + format_bytes(config.communication_slab_bytes) + " communication slab";
  row("also resident", resident);
  // What stages hold is compared where all of it is on the device.
  for (int lower = impl.stage - 1; lower >= 0 && impl.ranks > 1 && !config.offload.any(); --lower) {
    const std::int64_t here = impl.resident_bytes(impl.stage), there = impl.resident_bytes(lower);
    if (there >= here) continue;
    row("note",
        fmt::format("stage {} would take less memory here: {} against {} (state and the units a step holds)",
                    lower, format_bytes(there), format_bytes(here)));
    break;
  }
  if (config.activation_checkpointing) {
    std::string gathers;
    if (!impl.whole_parameters()) {
      gathers = config.checkpoint_every <= config.depth
                    ? "; one gather serves recomputation and backward"
                    : fmt::format(
                          "; groups are larger than tranche.depth {}: one gather more for all but the "
                          "last unit of each",
                          config.depth);
    }
    row("activations",
        fmt::format("the input of every {} is kept{}, the rest computed again{}",
                    config.checkpoint_every == 1 ? "block"
                                                 : fmt::format("group of {} blocks", config.checkpoint_every),
                    config.offload.activations ? " in host memory" : "", gathers));
  }
  if (impl.ranks == 1) {
    row("wire per step, rank", "nothing");
  } else {
    const std::int64_t declared = impl.declared_gathers();
    const std::int64_t gathered =
        impl.stage < 3
            ? padded
            : config.accumulation_steps * (declared >= 0 ? declared : 2 * impl.gathered_elements());
    const std::int64_t reduced =
        (impl.policy == ReductionPolicy::boundary ? 1 : config.accumulation_steps) * padded;
    const auto sent = [&](std::int64_t elements, DataType of) {
      return format_bytes(elements / impl.ranks * (impl.ranks - 1) * size_of(of));
    };
    row("wire per step, rank", fmt::format("{} gradients + {}{} {}", sent(reduced, config.precision.wire),
                                           impl.stage == 3 && declared < 0 ? "about " : "",
                                           sent(gathered, impl.stage == 0 ? config.precision.accumulation
                                                                          : config.precision.compute),
                                           impl.stage == 0 ? "reduced gradients" : "parameters"));
  }
  for (const std::string& note : config.notes) row("note", note);
  return text;
}

}  // namespace tranche
