#include "engine/formulas.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/exchange.h"
#include "engine/pipeline_order.h"
#include "pipeline/schedule/lower.h"
#include "tranche/core/error.h"
#include "tranche/kernels/quantization.h"

namespace tranche::detail {

StateFormulas::Bytes StateFormulas::bytes() const {
  const std::int64_t compute_bytes = size_of(config_.precision.compute);
  const std::int64_t accumulation_bytes = size_of(config_.precision.accumulation);
  Bytes bytes;
  const auto of_tier = [](OffloadTier tier) {
    return static_cast<std::size_t>(tier == OffloadTier::none  ? Tier::device
                                    : tier == OffloadTier::cpu ? Tier::host
                                                               : Tier::nvme);
  };
  const Residency& residency = store_.residency();
  for (const UnitState& unit : store_.units()) {
    for (const FlatBuffer& flat : unit.buffers) {
      if (flat.empty()) continue;
      const auto add_bytes = [&](ElementRange held, const auto& bytes_of_elements, std::int64_t& sum,
                                 std::int64_t& on_tier) {
        const std::int64_t all = bytes_of_elements(held.size());
        sum += all;
        on_tier += all;
        bytes.padding += all;
        for (const TensorPiece& piece : flat.layout.pieces(held)) {
          bytes.padding -= bytes_of_elements(piece.elements);
        }
      };
      const auto add = [&](ElementRange held, std::int64_t element_bytes, std::int64_t& sum,
                           std::int64_t& on_tier) {
        add_bytes(
            held, [&](std::int64_t elements) { return elements * element_bytes; }, sum, on_tier);
      };
      add(residency.parameters_range(flat), compute_bytes, bytes.parameters,
          bytes.tiers[of_tier(flat.parameters_tier)].parameters);
      const auto count_homes = [&](bool on_nvme, bool stays, std::int64_t of_buffer) {
        if (on_nvme || stays) bytes.asked_on_nvme += of_buffer;
        if (stays) bytes.stay_in_host += of_buffer;
      };
      count_homes(flat.parameters_tier == OffloadTier::nvme, flat.parameters_stay,
                  residency.parameter_bytes(flat));
      if (!flat.trainable) continue;
      if (flat.in_tiles()) {
        count_homes(flat.optimizer_tier == OffloadTier::nvme, flat.optimizer_stays,
                    residency.tile_bytes(flat));
      }
      const bool away = flat.optimizer_tier != OffloadTier::none;
      const ElementRange kept = residency.optimizer_range(flat);
      bytes.kept_elements += kept.size();
      if (away) bytes.moved_elements += kept.size();
      Bytes::OnTier& home = bytes.tiers[of_tier(flat.optimizer_tier)];
      for (int sum = residency.transient_gradients(flat) ? 1 : 0;
           sum < (residency.keeps_last_use(flat) ? 2 : 1); ++sum) {
        add(residency.gradients_range(flat), accumulation_bytes, bytes.gradients,
            bytes.tiers[static_cast<std::size_t>(Tier::device)].gradients);
      }
      if (away) {
        add(kept, accumulation_bytes, bytes.gradients,
            bytes.tiers[static_cast<std::size_t>(Tier::host)].gradients);
      }
      const bool master = residency.separate_master(flat) || flat.optimizer_tier == OffloadTier::nvme;
      add_bytes(
          kept,
          [&](std::int64_t elements) {
            return state_bytes(flat.states, elements) +
                   (master ? bytes_of(residency.master_type(flat), elements) : 0);
          },
          bytes.optimizer, home.optimizer);
    }
  }
  return bytes;
}

std::string StateFormulas::by_tier(const Bytes& bytes) {
  std::string text;
  for (const Tier tier : all_tiers) {
    const Bytes::OnTier& on = bytes.tiers[static_cast<std::size_t>(tier)];
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

std::vector<std::pair<std::string, std::string>> StateFormulas::offload_rows(
    const std::string& swap_file) const {
  std::vector<std::pair<std::string, std::string>> rows;
  if (!config_.offload.any()) return rows;
  const Bytes state = bytes();
  const OffloadConfig& asked = config_.offload;
  if (asked.optimizer != OffloadTier::none) {
    std::string text = fmt::format("optimizer on {}, updated on the host", name_of(asked.optimizer));
    if (asked.ratio < 1) {
      text = fmt::format(
          "ratio {:g} was asked for, {:.3g} of the optimizer state moves to {}: only whole units move, and "
          "those used first stay",
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
  if (asked.uses_nvme() && (asked.host_state > 0 || !asked.host_state_reason.empty())) {
    rows.emplace_back(
        "offload",
        fmt::format(
            "{} of {} of state that is asked for on nvme stay in host memory: tranche.host_state is {}{}",
            format_bytes(state.stay_in_host), format_bytes(state.asked_on_nvme),
            format_bytes(asked.host_state_bytes()), asked.host_state_reason));
  }
  if (!swap_file.empty()) rows.emplace_back("swap file", swap_file);
  const OffloadTraffic traffic = offload();
  rows.emplace_back("host link per step",
                    fmt::format("{} to the host, {} from it{}", format_bytes(traffic.to_host),
                                format_bytes(traffic.from_host),
                                asked.activations ? ", and kept inputs of blocks both ways" : ""));
  if (asked.uses_nvme()) {
    rows.emplace_back("nvme per step",
                      fmt::format("{} read, {} written (and padding to 4096 bytes)",
                                  format_bytes(traffic.nvme_read), format_bytes(traffic.nvme_written)));
  }
  return rows;
}

OffloadTraffic StateFormulas::offload() const {
  OffloadTraffic bytes;
  const std::int64_t weight = size_of(config_.precision.compute);
  const std::vector<std::int64_t> gathers = gathers_of_step(config_.gather_for);
  for (std::size_t u = 0; u < store_.units().size(); ++u) {
    for (const FlatBuffer& flat : store_.units()[u].buffers) {
      const std::int64_t kept = flat.trainable ? store_.residency().optimizer_range(flat).size() : 0;
      const std::int64_t tiles =
          bytes_of(store_.residency().master_type(flat), kept) + state_bytes(flat.states, kept);
      const bool brings = flat.parameters_tier != OffloadTier::none;
      if (flat.optimizer_tier != OffloadTier::none) {
        if (flat.whole_matrices) {
          for (const TensorPiece& piece : flat.layout.pieces(store_.residency().optimizer_range(flat))) {
            bytes.to_host += piece.elements * size_of(DataType::bfloat16);
            bytes.from_host += piece.elements * size_of(DataType::bfloat16);
          }
        }
        bytes.to_host += kept * size_of(config_.precision.accumulation);
        if (!brings) bytes.from_host += kept * weight;
        if (flat.optimizer_tier == OffloadTier::nvme) {
          const std::int64_t passes = flat.whole_matrices || updater_.has_sums() ? 2 : 1;
          bytes.nvme_read += passes * tiles;
          bytes.nvme_written += passes * tiles;
        }
      } else if (brings) {
        bytes.to_host += kept * weight;
      }
      if (!brings) continue;
      const std::int64_t brought = gathers[u] * flat.layout.shard_elements() * weight;
      bytes.from_host += brought;
      if (flat.parameters_tier != OffloadTier::nvme) continue;
      bytes.nvme_read += brought;
      bytes.nvme_written += kept * weight;
    }
  }
  return bytes;
}

std::int64_t StateFormulas::resident_bytes(int of_stage) const {
  Config other = config_;
  other.stage = of_stage;
  const Residency residency(other);
  const PrecisionConfig& precision = config_.precision;
  const std::int64_t compute_bytes = size_of(precision.compute);
  std::int64_t bytes = 0, tied = 0, largest_reduction = 0, largest_blocks = 0;
  std::vector<std::int64_t> gathered;
  for (const UnitState& unit : store_.units()) {
    std::int64_t whole_elements = 0;
    for (const FlatBuffer& flat : unit.buffers) {
      if (flat.empty()) continue;
      const std::int64_t elements = flat.layout.padded_elements();
      bytes += residency.parameters_range(flat).size() * compute_bytes;
      if (!residency.whole_parameters(flat)) whole_elements += elements;
      if (!flat.trainable) continue;
      const bool boundary = residency.policy(flat) == ReductionPolicy::boundary;
      bytes += residency.gradients_range(flat).size() * size_of(precision.accumulation);
      const std::int64_t kept = residency.optimizer_range(flat).size();
      bytes += residency.separate_master(flat) ? bytes_of(residency.master_type(flat), kept) : 0;
      bytes += state_bytes(flat.states, kept);
      // Kernels add into a separate slot unless they can add to the accumulator.
      const bool slot = !boundary || precision.accumulation != DataType::float32;
      const DataType source = boundary ? precision.accumulation : DataType::float32;
      const std::int64_t slot_bytes = slot ? size_of(DataType::float32) : 0;
      const GradientExchange::Bytes travels = flat.gradients_over->bytes(flat, source);
      const std::int64_t of_replica = flat.replicas == nullptr || residency.sums_replicas_once(flat)
                                          ? 0
                                          : flat.layout.shard_elements() * size_of(DataType::float32);
      // A unit with several uses in a micro-batch keeps its slot from the first use in backward to the last.
      const bool stays = unit.uses_per_micro_batch() > 1;
      if (stays) tied += elements * slot_bytes;
      largest_reduction = std::max(largest_reduction, elements * (stays ? 0 : slot_bytes) + travels.sent +
                                                          travels.received + of_replica);
      if (config_.quantized_weights) {
        largest_blocks = std::max(largest_blocks, kernels::quantized_bytes(elements));
      }
    }
    gathered.push_back(whole_elements * compute_bytes);
  }
  bytes += tied + largest_reduction + 2 * largest_blocks;
  std::sort(gathered.rbegin(), gathered.rend());
  const std::size_t at_once = config_.gather_for == GatherFor::step
                                  ? gathered.size()
                                  : std::min(gathered.size(), static_cast<std::size_t>(config_.depth));
  for (std::size_t i = 0; i < at_once; ++i) bytes += gathered[i];
  return bytes;
}

std::string StateFormulas::stages_for_comparison() const {
  if (config_.offload.any()) {
    return "model state takes, on this rank, " + by_tier(bytes()) +
           "; the units that a step holds, activations, workspace and staging buffer come on top";
  }
  int ranks = 1;
  for (const FlatBuffer* flat : store_.trainable()) {
    if (!flat->empty()) ranks = std::max(ranks, flat->owners());
  }
  const bool alike = stages_ == nullptr || stages_->count == 1;  // stages of a pipeline hold other units
  std::string text =
      fmt::format("model state and the units that a step holds take, on {}, ",
                  alike ? fmt::format("each of {} rank{}", ranks, ranks == 1 ? "" : "s") : "this rank");
  for (int of_stage = 0; of_stage <= 3; ++of_stage) {
    text +=
        fmt::format("{}{} at stage {}{}", of_stage > 0 ? ", " : "", format_bytes(resident_bytes(of_stage)),
                    of_stage, of_stage == config_.stage ? " (this one)" : "");
  }
  return text + "; activations, workspace and staging buffer come on top";
}

std::vector<std::int64_t> StateFormulas::gathers_of_step(GatherFor gather_for) const {
  const bool cut = stages_ != nullptr && stages_->count > 1 && model_.gathers_with_chunks;
  const std::vector<int> declared = cut ? model_.gathers_with_chunks(config_, stages_->begins)
                                    : model_.gathers_per_micro_batch
                                        ? model_.gathers_per_micro_batch(config_)
                                        : std::vector<int>(store_.units().size(), 2);
  if (declared.size() != store_.units().size()) {
    throw LogicError("the model declares gathers of " + std::to_string(declared.size()) + " units, but has " +
                     std::to_string(store_.units().size()));
  }
  std::vector<std::int64_t> gathers;
  for (std::size_t u = 0; u < declared.size(); ++u) {
    // A pipeline stage gathers a unit only for its own uses.
    const UnitState& unit = store_.units()[u];
    const int count = declared[u] * unit.uses_per_micro_batch() / std::max(unit.uses_in_model, 1);
    gathers.push_back(gather_for == GatherFor::step ? std::min(count, 1)
                      : gathers_chunks() ? chunk_gathers_of(*stages_, model_, stage_, static_cast<int>(u))
                                         : config_.accumulation_steps * count);
  }
  return gathers;
}

bool StateFormulas::gathers_chunks() const {
  return stages_ != nullptr && stages_->schedule != nullptr && pipeline::has_gathers(*stages_->schedule);
}

std::int64_t StateFormulas::declared_unit_gathers() const {
  if (!model_.gathers_per_micro_batch && !gathers_chunks()) return -1;
  const std::vector<std::int64_t> gathers = gathers_of_step(config_.gather_for);
  std::int64_t count = 0;
  for (std::size_t u = 0; u < gathers.size(); ++u) {
    if (store_.units()[u].gathered_elements() > 0) count += gathers[u];
  }
  return count;
}

std::int64_t StateFormulas::declared_gathers(GatherFor gather_for) const {
  if (!model_.gathers_per_micro_batch && gather_for == GatherFor::use && !gathers_chunks()) return -1;
  const std::vector<std::int64_t> gathers = gathers_of_step(gather_for);
  std::int64_t elements = 0;
  for (std::size_t u = 0; u < gathers.size(); ++u)
    elements += gathers[u] * store_.units()[u].gathered_elements();
  return elements;
}

std::int64_t StateFormulas::gathered_elements() const {
  std::int64_t elements = 0;
  for (const UnitState& unit : store_.units()) elements += unit.gathered_elements();
  return elements;
}

std::int64_t StateFormulas::published_elements(MeshAxis axis, int group) const {
  std::int64_t elements = 0;
  for (const FlatBuffer* flat : store_.trainable()) {
    const Residency& residency = store_.residency();
    if (flat->axis() != axis || flat->empty() || (group > 0 && flat->group->size() != group)) continue;
    if (flat->layout.ranks() > 1 && residency.whole_parameters(*flat) && !residency.whole_optimizer(*flat)) {
      elements += flat->layout.padded_elements();
    }
  }
  return elements;
}

}  // namespace tranche::detail
