// What the engine says of itself: memory, traffic, formulas, the start-up table.

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tranche/engine/engine_impl.h"
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
  return result.dump();
}

std::string Engine::model_report() const {
  return ordered_json{{"parameters", impl_->model.parameters()},
                      {"flops_per_token", impl_->model.flops_per_token}}
      .dump();
}

Engine::StateBytes Engine::state_bytes() const {
  const Impl& impl = *impl_;
  const std::int64_t compute_bytes = size_of(impl.config.precision.compute);
  const std::int64_t accumulation_bytes = size_of(impl.config.precision.accumulation);
  std::int64_t optimizer_bytes = impl.config.precision.compute == DataType::float32 ? 0 : 4;
  for (const OptimizerStateTensor& state : impl.state_tensors) optimizer_bytes += size_of(state.dtype);
  StateBytes bytes;
  for (const UnitState& unit : impl.units) {
    for (const FlatState* flat : {&unit.trainable, &unit.frozen}) {
      const bool trainable = flat == &unit.trainable;
      const FlatLayout& layout = flat->layout;
      const auto add = [&](bool whole, std::int64_t element_bytes, std::int64_t& sum) {
        const std::int64_t held = whole ? layout.padded_elements() : layout.shard_elements();
        const std::int64_t used = whole ? layout.elements() : layout.owned_elements(impl.rank);
        sum += held * element_bytes;
        bytes.padding += (held - used) * element_bytes;
      };
      add(impl.whole_parameters(), compute_bytes, bytes.parameters);
      if (!trainable) continue;
      add(impl.whole_gradients(), accumulation_bytes, bytes.gradients);
      add(impl.whole_optimizer(), optimizer_bytes, bytes.optimizer);
    }
  }
  return bytes;
}

std::int64_t Engine::Impl::resident_bytes(int of_stage) const {
  Config other = config;
  other.stage = of_stage;
  const bool boundary = other.effective_reduction() == ReductionPolicy::boundary;
  const std::int64_t compute_bytes = size_of(config.precision.compute);
  std::int64_t optimizer_bytes = config.precision.compute == DataType::float32 ? 0 : 4;
  for (const OptimizerStateTensor& state : state_tensors) optimizer_bytes += size_of(state.dtype);
  std::int64_t bytes = 0;
  std::vector<std::int64_t> sizes;
  for (const UnitState& unit : units) {
    const FlatLayout& layout = unit.trainable.layout;
    const auto held = [&](bool whole) { return whole ? layout.padded_elements() : layout.shard_elements(); };
    bytes += held(of_stage < 3) * compute_bytes;
    bytes += held(of_stage == 0 || boundary) * size_of(config.precision.accumulation);
    bytes += held(of_stage == 0) * optimizer_bytes;
    sizes.push_back(unit.gathered_elements());
  }
  std::sort(sizes.rbegin(), sizes.rend());
  // What a step needs beside: units gathered at once; a gradient slot with its rounded copy under way.
  if (of_stage == 3) {
    for (std::size_t i = 0; i < sizes.size() && i < static_cast<std::size_t>(config.depth); ++i) {
      bytes += sizes[i] * compute_bytes;
    }
  }
  if (!boundary) {
    const bool rounded = config.precision.wire != DataType::float32;
    bytes += sizes.front() * (4 + (rounded ? size_of(config.precision.wire) : 0));
  }
  return bytes;
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
  row("model state, this rank",
      fmt::format(
          "{} parameters + {} gradients + {} optimizer = {} ({} of it padding)",
          format_bytes(bytes.parameters), format_bytes(bytes.gradients), format_bytes(bytes.optimizer),
          format_bytes(bytes.parameters + bytes.gradients + bytes.optimizer), format_bytes(bytes.padding)));
  std::string resident = format_bytes(config.workspace_bytes) + " workspace";
  if (!impl.whole_parameters()) {
    resident += fmt::format(", up to {} x {} gathered", config.depth,
                            format_bytes(largest * size_of(config.precision.compute)));
  }
  if (impl.ranks > 1)
    resident += ", " + format_bytes(config.communication_slab_bytes) + " communication slab";
  row("also resident", resident);
  for (int lower = impl.stage - 1; lower >= 0 && impl.ranks > 1; --lower) {
    const std::int64_t here = impl.resident_bytes(impl.stage), there = impl.resident_bytes(lower);
    if (there >= here) continue;
    row("note",
        fmt::format("stage {} would take less memory here: {} against {} (state and the units a step holds)",
                    lower, format_bytes(there), format_bytes(here)));
    break;
  }
  const double gather_elements = impl.stage < 3
                                     ? static_cast<double>(padded)
                                     : 2.0 * static_cast<double>(padded * config.accumulation_steps);
  const std::int64_t reductions = impl.policy == ReductionPolicy::boundary ? 1 : config.accumulation_steps;
  const double share = static_cast<double>(impl.ranks - 1) / impl.ranks;
  const DataType gather_dtype = impl.stage == 0 ? config.precision.accumulation : config.precision.compute;
  if (impl.ranks == 1) {
    row("wire per step, rank", "nothing");
  } else {
    row("wire per step, rank",
        fmt::format("{} gradients + {}{} {}",
                    format_bytes(static_cast<std::int64_t>(static_cast<double>(reductions * padded) * share) *
                                 size_of(config.precision.wire)),
                    impl.stage == 3 ? "about " : "",
                    format_bytes(static_cast<std::int64_t>(gather_elements * share) * size_of(gather_dtype)),
                    impl.stage == 0 ? "reduced gradients" : "parameters"));
  }
  for (const std::string& note : config.notes) row("note", note);
  return text;
}

}  // namespace tranche
