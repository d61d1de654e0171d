// The engine's reports: memory, traffic, formulas, the start-up table.

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "engine/engine_impl.h"
#include "engine/offloaded_state.h"
#include "tranche/kernels/matmul.h"
#include "tranche/kernels/quantization.h"

namespace tranche {

using namespace detail;

using nlohmann::ordered_json;

namespace {

/// Micro-batches of a step from which on a pipeline's start says what stage 3 gathers in each of them.
constexpr std::int64_t noted_micro_batches = 4;

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
    impl.world
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
    // The device's own figure, so that the account closes: all that is taken there and is not this rank's is
    // the driver's, the libraries' and that of other processes (ranks that share the device among them).
    std::int64_t values[] = {info.total, info.mapped, info.mapped - info.placed,
                             info.total - info.free - info.mapped};
    impl.world
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
  const Impl& impl = *impl_;
  ordered_json result = traffic_json(impl.recorder.traffic().data());
  result["control"] = traffic_json(impl.recorder.traffic().control());
  result["formula_elements"] = formula_traffic_elements();
  result["formula_bytes"] = formula_traffic_bytes();
  // Data goes to groups of the axes alone; to all ranks at once goes control.
  std::map<MeshAxis, TrafficCount> axes{{MeshAxis::shard, {}}};
  const std::vector<TrafficCount>& sent = impl.recorder.traffic().data_of_groups();
  for (std::size_t i = 0; i < sent.size(); ++i) {
    TrafficCount& of = axes[impl.axes[i]];
    of.elements += sent[i].elements;
    of.bytes += sent[i].bytes;
  }
  ordered_json by_axis = ordered_json::array();
  for (const auto& [axis, count] : axes) {
    const TrafficCount formula = impl.formula_traffic(axis);
    by_axis.push_back({{"axis", name_of(axis)},
                       {"elements", count.elements},
                       {"bytes", count.bytes},
                       {"formula_elements", formula.elements},
                       {"formula_bytes", formula.bytes}});
  }
  result["by_axis"] = std::move(by_axis);
  return result.dump();
}

std::optional<Engine::CrossingBytes> Engine::bytes_to_other_nodes() const {
  const Impl& impl = *impl_;
  for (const Communicator* group : impl.communicators) {
    if (!group->counts_nodes()) return std::nullopt;
  }
  CrossingBytes bytes;
  const std::vector<TrafficCount>& sent = impl.recorder.traffic().data_of_groups();
  for (std::size_t i = 0; i < sent.size(); ++i) {
    bytes.rank += sent[i].to_other_nodes;
    // The node's other ranks are in groups of their own that do the same.
    bytes.node += sent[i].node_to_other_nodes * impl.world.local_size() / impl.communicators[i]->local_size();
  }
  return bytes;
}

std::string Engine::model_report() const {
  return ordered_json{{"parameters", impl_->model.parameters()},
                      {"flops_per_token", impl_->model.flops_per_token}}
      .dump();
}

Engine::StateBytes Engine::state_bytes() const {
  return impl_->formulas.bytes();
}

Engine::StepMemory Engine::step_memory() const {
  return {impl_->arena->block_bytes(), impl_->arena->live_peak("train"), impl_->arena->packings()};
}

TrafficCount Engine::Impl::formula_traffic(MeshAxis axis) const {
  if (axis != MeshAxis::tensor) return formula_traffic(axis, 0);
  TrafficCount sent;
  if (tensor != nullptr && model.tensor_messages) {
    const int uses = static_cast<int>(model.forward.size());
    const TensorMessages messages =
        model.tensor_messages(config, stages.count > 1 ? stages.begin(stage()) : 0,
                              stages.count > 1 ? stages.end(model, stage()) : uses);
    const std::int64_t tokens = config.micro_batch_size * model.tokens_per_sample,
                       others = tensor->size() - 1;
    const std::int64_t times = config.accumulation_steps * others;
    const std::int64_t rows =
        times * divide_round_up(tokens, tensor->size()) * model.residual_width * messages.rows;
    const std::int64_t numbers = times * tokens * messages.numbers;
    sent.elements = rows + numbers;
    sent.bytes = rows * size_of(config.precision.compute) + numbers * size_of(DataType::float32);
  }
  // Whole tensors and those that some ranks share are summed over groups of different sizes.
  std::set<int> sizes;
  for (const FlatBuffer* flat : store.trainable()) {
    if (flat->empty() || flat->axis() != axis || !sizes.insert(flat->group->size()).second) continue;
    const TrafficCount of_group = formula_traffic(axis, flat->group->size());
    sent.elements += of_group.elements;
    sent.bytes += of_group.bytes;
  }
  return sent;
}

TrafficCount Engine::Impl::formula_traffic(MeshAxis axis, int group) const {
  const PrecisionConfig& precision = config.precision;
  TrafficCount sent;
  if (axis == MeshAxis::replicate) {
    for (const FlatBuffer* flat : store.trainable()) {
      if (flat->empty() || flat->replicas == nullptr) continue;
      // A rank's own part is reduced each time, in fp32, and gathered once: the sums, or new weights.
      const std::int64_t sums = replica_reductions(*flat);
      const std::int64_t part = flat->owned().size() * (flat->replicas->size() - 1);
      const DataType gathered =
          store.residency().over_replicas(*flat) ? precision.compute : precision.accumulation;
      sent.elements += (sums + 1) * part;
      sent.bytes += (sums * size_of(DataType::float32) + size_of(gathered)) * part;
    }
    return sent;
  }
  const bool of_stages = axis == MeshAxis::pipeline;
  if (of_stages) {
    // The residual to the next stage, its gradient to the one before.
    const int neighbours = (stage() > 0 ? 1 : 0) + (stage() + 1 < stages.count ? 1 : 0);
    const std::int64_t rows = divide_round_up(config.micro_batch_size * model.tokens_per_sample,
                                              tensor == nullptr ? 1 : tensor->size());
    sent.elements = config.accumulation_steps * rows * model.residual_width * neighbours;
    sent.bytes = sent.elements * size_of(precision.compute);
  } else if (axis == MeshAxis::shard) {
    sent = matrices.sent();
  }
  ReductionOptions options;
  options.group_size = reducer.reduction_group();
  options.bucket_elements = config.reduce_bucket_elements;
  std::int64_t gathered = 0, reduced = 0, summed = 0, blocks = 0;
  std::int64_t wider_sums = 0;  // of uses, which are fp32 before they are sent
  int shards = 1;
  for (const FlatBuffer* flat : store.trainable()) {
    if (flat->empty() || flat->axis() != axis || (group > 0 && flat->group->size() != group)) continue;
    shards = flat->group->size();
    if (axis != MeshAxis::shard) options.group_size = flat->givers_a_data_rank();
    const std::int64_t elements = flat->layout.padded_elements();
    gathered += elements;
    if (store.residency().quantizes_gradients(*flat)) {  // all ranks send, whoever has samples
      blocks += reductions(*flat) * kernels::quantized_bytes(elements);
      continue;
    }
    reduced += sent_reductions(*flat) * elements;
    if (flat->sums_uses()) wider_sums += sent_reductions(*flat) * elements;
    if (flat->sums_uses()) continue;  // which is fp32 already
    summed += reductions(*flat) * flat->group->summed_elements_sent(flat->layout.shard_elements(),
                                                                    precision.communication, options);
  }
  // Stages 0-2 gather once per step (the main gradient, or new weights); stage 3 as its schedule says, and
  // the new weights of what it keeps whole.
  if (config.stage > 0) {
    const std::int64_t published = formulas.published_elements(axis, group);
    const bool of_shards = axis == MeshAxis::shard;
    const std::int64_t quantized =
        config.quantized_weights ? published + (of_shards ? recorded_quantized_elements : 0) : 0;
    gathered = published + (of_shards ? recorded_gather_elements : 0) - quantized;
    blocks += kernels::quantized_bytes(quantized);
  }
  const std::int64_t gathered_bytes =
      gathered * size_of(config.stage == 0 ? precision.accumulation : precision.compute);
  // Sums that cross between nodes are fp32 whatever travels otherwise.
  const std::int64_t wider = size_of(DataType::float32) - size_of(precision.communication);
  // The bytes of blocks count as elements.
  sent.elements += (reduced + gathered + blocks) / shards * (shards - 1);
  sent.bytes += (reduced * size_of(precision.communication) + wider_sums * wider + gathered_bytes + blocks) /
                    shards * (shards - 1) +
                summed * wider;
  return sent;
}

std::int64_t Engine::formula_traffic_elements() const {
  std::int64_t elements = 0;
  for (const MeshAxis axis : {MeshAxis::shard, MeshAxis::replicate, MeshAxis::pipeline, MeshAxis::tensor}) {
    elements += impl_->formula_traffic(axis).elements;
  }
  return elements;
}

std::int64_t Engine::formula_traffic_bytes() const {
  std::int64_t bytes = 0;
  for (const MeshAxis axis : {MeshAxis::shard, MeshAxis::replicate, MeshAxis::pipeline, MeshAxis::tensor}) {
    bytes += impl_->formula_traffic(axis).bytes;
  }
  return bytes;
}

std::string Engine::Impl::describe_stages() const {
  std::string text;
  for (int s = 0; s < stages.count; ++s) {
    text += (s == 0 ? "" : " | ") + model.name_of_uses(stages.begin(s), stages.end(model, s));
  }
  return fmt::format("{} stages, schedule {}: {}", stages.count, name_of(config.pipeline_schedule), text);
}

std::string Engine::summary(bool verbose) const {
  const Impl& impl = *impl_;
  const Config& config = impl.config;
  const StateBytes bytes = state_bytes();
  const int shards = impl.shard.size();  // which is what the stages share state among
  const Residency& residency = impl.store.residency();
  const std::vector<UnitState>& units = impl.store.units();
  std::int64_t padded = 0, reduced = 0, blocks = 0, largest = 0;
  for (const FlatBuffer* flat : impl.store.trainable()) {
    if (flat->empty() || flat->axis() != MeshAxis::shard) continue;
    padded += flat->layout.padded_elements();
    const std::int64_t elements = flat->layout.padded_elements();
    if (residency.quantizes_gradients(*flat)) {
      blocks += impl.reductions(*flat) * elements;
    } else {
      reduced += impl.sent_reductions(*flat) * elements;
    }
  }
  bool gathers = false;
  for (const UnitState& unit : units) {
    largest = std::max(largest, unit.gathered_elements());
    gathers = gathers || residency.gathers(unit);
  }
  std::string text;
  const auto row = [&text](std::string_view name, const std::string& value) {
    text += fmt::format("  {:<22} {}\n", name, value);
  };
  row("parameters", fmt::format("{:L} in {} units ({:L} with padding)", impl.model.parameters(), units.size(),
                                impl.store.placement().padded_elements()));
  const FlatBuffer& any = *impl.store.trainable().front();
  row("ranks, stage",
      fmt::format("{} x stage {}, {} reduction{}", impl.ranks, config.stage, name_of(residency.policy(any)),
                  impl.ranks == 1 ? " (one rank: all stages hold the same)"
                  : shards == 1 && !residency.over_replicas(any)
                      ? " (nothing is sharded: all stages hold the same)"
                      : ""));
  if (impl.replicas != nullptr || impl.pipeline != nullptr || impl.tensor != nullptr) {
    row("mesh", fmt::format("{}; this is {}", impl.runtime.mesh().to_string(),
                            impl.runtime.mesh().name_of_rank(impl.rank)));
  }
  if (impl.pipeline != nullptr) row("pipeline", impl.describe_stages());
  if (impl.pipeline == nullptr && config.tie_sum == TieSum::by_use) {
    row("note",
        "tranche.tie_sum by_use: tensors that two uses of a unit read keep the gradients of each use, and "
        "add "
        "them up in fp32");
  }
  row("batch", config.batch_text(impl.data_ranks));
  row("dtypes", config.dtypes_text());
  row("matmul", std::string(kernels::matmul_path(impl.runtime.device().kind(), config.precision.compute)));
  if (!impl.routing.empty()) row("optimizer", impl.routing);
  row("device", impl.runtime.device().description());
  row("collectives",
      fmt::format("{}{}", impl.world.backend(),
                  impl.ranks == 1                ? ""
                  : config.collectives == "nccl" ? ", sums by NCCL: their bits may differ from run to run"
                                                 : ", fixed-order sums"));
  if (config.offload.any()) {
    row("model state, this rank",
        fmt::format("{}; {} of it padding", StateFormulas::by_tier(bytes), format_bytes(bytes.padding)));
    const std::string swap_file =
        config.offload.uses_nvme() ? impl.store.offload()->swap()->description() : std::string();
    for (const auto& [name, value] : impl.formulas.offload_rows(swap_file)) row(name, value);
  } else {
    row("model state, this rank",
        fmt::format(
            "{} parameters + {} gradients + {} optimizer = {} ({} of it padding)",
            format_bytes(bytes.parameters), format_bytes(bytes.gradients), format_bytes(bytes.optimizer),
            format_bytes(bytes.parameters + bytes.gradients + bytes.optimizer), format_bytes(bytes.padding)));
  }
  std::string resident = format_bytes(config.workspace_bytes) + " workspace";
  const std::int64_t weight = size_of(config.precision.compute);
  if (gathers && config.gather_for == GatherFor::step) {
    resident += fmt::format(", {} gathered, kept for the step",
                            format_bytes(impl.formulas.gathered_elements() * weight));
  } else if (gathers) {
    resident += fmt::format(", up to {} x {} gathered", config.depth, format_bytes(largest * weight));
  }
  if (impl.ranks > 1) resident += ", " + format_bytes(config.staging_bytes) + " staging buffer";
  row("also resident", resident);
  // Stages are compared where all of their state is on the device.
  for (int lower = config.stage - 1; lower >= 0 && shards > 1 && !config.offload.any(); --lower) {
    const std::int64_t here = impl.formulas.resident_bytes(config.stage),
                       there = impl.formulas.resident_bytes(lower);
    if (there >= here) continue;
    row("note",
        fmt::format("stage {} would take less memory here: {} against {} (state and the units a step holds)",
                    lower, format_bytes(there), format_bytes(here)));
    break;
  }
  if (config.activation_checkpointing && !impl.model.recomputes_activations) {
    row("note",
        "activation_checkpointing has no effect: this model computes nothing again, all that backward needs "
        "is kept");
  } else if (config.activation_checkpointing) {
    std::string gather_text;
    if (gathers && config.gather_for == GatherFor::use) {
      gather_text = config.checkpoint_every <= config.depth
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
                    config.offload.activations ? " in host memory" : "", gather_text));
  }
  const bool weights_as_blocks = config.stage > 0 && config.quantized_weights;
  const auto sent = [&](std::int64_t elements, DataType of, std::int64_t as_blocks) {
    return format_bytes((kernels::quantized_bytes(as_blocks) + elements * size_of(of)) / shards *
                        (shards - 1));
  };
  if (impl.pipeline != nullptr && gathers && config.gather_for == GatherFor::use &&
      config.accumulation_steps >= noted_micro_batches) {
    const auto parameters = [&](GatherFor gather_for) {
      const std::int64_t elements = impl.formulas.declared_gathers(gather_for);
      return sent(weights_as_blocks ? 0 : elements, config.precision.compute,
                  weights_as_blocks ? elements : 0);
    };
    row("note",
        fmt::format(
            "ZeRO stage 3 gathers the weights of pipeline stage {} anew for each of {} micro-batches: "
            "a rank sends {} of parameters a step; tranche.gather_for step sends {}, and keeps {} "
            "gathered",
            impl.stage(), config.accumulation_steps, parameters(GatherFor::use), parameters(GatherFor::step),
            format_bytes(impl.formulas.gathered_elements() * weight)));
  }
  if (impl.ranks == 1) {
    row("traffic per step, rank", "nothing");
  } else {
    const std::int64_t declared = impl.formulas.declared_gathers();
    const std::int64_t gathered =
        config.stage < 3
            ? padded
            : impl.formulas.published_elements() +
                  (declared >= 0 ? declared
                                 : 2 * config.accumulation_steps * impl.formulas.gathered_elements());
    const std::string matrices =
        impl.matrices.any() ? fmt::format(
                                  " + {} matrices to their owners and back, whose work is at most {:.3g} of "
                                  "the mean",
                                  format_bytes(impl.matrices.sent().bytes), impl.matrices.load_ratio())
                            : "";
    row("traffic per step, rank",
        fmt::format("{} gradients + {}{} {}{}{}", sent(reduced, config.precision.communication, blocks),
                    config.stage == 3 && declared < 0 ? "about " : "",
                    sent(weights_as_blocks ? 0 : gathered,
                         config.stage == 0 ? config.precision.accumulation : config.precision.compute,
                         weights_as_blocks ? gathered : 0),
                    config.stage == 0 ? "reduced gradients" : "parameters", matrices,
                    impl.replicas == nullptr
                        ? ""
                        : " + " + format_bytes(impl.formula_traffic(MeshAxis::replicate).bytes) +
                              " sums over replicas") +
            (impl.pipeline == nullptr ? ""
                                      : " + " + format_bytes(impl.formula_traffic(MeshAxis::pipeline).bytes) +
                                            " to other stages"));
  }
  if (verbose) {
    for (const IgnoredKey& key : config.ignored) row("note", describe(key));
  } else if (!config.ignored.empty()) {
    row("note", describe(config.ignored));
  }
  for (const std::string& note : config.notes) row("note", note);
  for (const std::string& note : impl.start_notes) row("note", note);
  return text;
}

}  // namespace tranche
