#include "engine/start_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "engine/offloaded_state.h"
#include "tranche/kernels/matmul.h"
#include "tranche/kernels/quantization.h"

namespace tranche::detail {

namespace {

/// With at least so many micro-batches in a step, a pipeline's table notes that stage 3 gathers in each of
/// them.
constexpr std::int64_t noted_micro_batches = 4;

}  // namespace

StartTable::StartTable(const Runtime& runtime, const Config& config, const ModelSpec& model,
                       const Stages& stages, const StateStore& store, const StateFormulas& formulas,
                       const TrafficFormulas& traffic, const WholeMatrices& matrices)
    : runtime_(runtime),
      config_(config),
      model_(model),
      stages_(stages),
      store_(store),
      formulas_(formulas),
      traffic_(traffic),
      matrices_(matrices),
      shards_(runtime.shard().size()) {
  gathers_ = std::any_of(store.units().begin(), store.units().end(),
                         [&](const UnitState& unit) { return store.residency().gathers(unit); });
}

std::string StartTable::text(const std::string& routing, const std::vector<std::string>& notes,
                             bool verbose) {
  text_.clear();
  add_ranks();
  add_compute(routing);
  add_state();
  add_resident();
  add_activations();
  add_traffic();
  add_notes(notes, verbose);
  return std::move(text_);
}

void StartTable::row(std::string_view name, std::string_view value) {
  text_ += fmt::format("  {:<22} {}\n", name, value);
}

void StartTable::add_ranks() {
  row("parameters", fmt::format("{:L} in {} units ({:L} with padding)", model_.parameters(),
                                store_.units().size(), store_.placement().padded_elements()));
  const FlatBuffer& any = *store_.trainable().front();
  const Residency& residency = store_.residency();
  const int ranks = runtime_.size();
  row("ranks, stage",
      fmt::format("{} x stage {}, {} reduction{}", ranks, config_.stage, name_of(residency.policy(any)),
                  ranks == 1 ? " (one rank: all stages hold the same)"
                  : shards_ == 1 && !residency.over_replicas(any) && runtime_.tensor() == nullptr
                      ? " (nothing is sharded: all stages hold the same)"
                      : ""));
  const Mesh& mesh = runtime_.mesh();
  if (runtime_.replicas() != nullptr || runtime_.pipeline() != nullptr || runtime_.context() != nullptr ||
      runtime_.tensor() != nullptr) {
    row("mesh", fmt::format("{}; this is {}", mesh.to_string(), mesh.name_of_rank(runtime_.rank())));
  }
  if (runtime_.pipeline() != nullptr) {
    std::string text;
    for (int s = 0; s < stages_.count; ++s) {
      text += (s == 0 ? "" : " | ") + stages_.name_of(model_, s);
    }
    row("pipeline",
        fmt::format("{} stages{}, schedule {}: {}", stages_.count,
                    stages_.chunks() == stages_.count ? "" : fmt::format(" of {} chunks", stages_.chunks()),
                    config_.pipeline_schedule, text));
  } else if (config_.tie_sum == TieSum::by_use) {
    row("note",
        "tranche.tie_sum by_use: tensors that two uses of a unit read keep the gradients of each use, and "
        "add them up in fp32");
  }
}

void StartTable::add_compute(const std::string& routing) {
  row("batch", config_.batch_text(runtime_.mesh().data_ranks()));
  row("dtypes", config_.dtypes_text());
  row("matmul", kernels::matmul_path(runtime_.device().kind(), config_.precision.compute));
  if (!routing.empty()) row("optimizer", routing);
  row("device", runtime_.device().description());
  row("collectives",
      fmt::format("{}{}", runtime_.all().backend(),
                  runtime_.size() == 1            ? ""
                  : config_.collectives == "nccl" ? ", sums by NCCL: their bits may differ from run to run"
                                                  : ", fixed-order sums"));
}

void StartTable::add_state() {
  const StateBytes bytes = formulas_.bytes();
  const std::string padding = format_bytes(bytes.padding);
  if (!config_.offload.any()) {
    row("model state, this rank",
        fmt::format("{} parameters + {} gradients + {} optimizer = {} ({} of it padding)",
                    format_bytes(bytes.parameters), format_bytes(bytes.gradients),
                    format_bytes(bytes.optimizer),
                    format_bytes(bytes.parameters + bytes.gradients + bytes.optimizer), padding));
    return;
  }
  row("model state, this rank", fmt::format("{}; {} of it padding", StateFormulas::by_tier(bytes), padding));
  const std::string swap_file =
      config_.offload.uses_nvme() ? store_.offload()->swap()->description() : std::string();
  for (const auto& [name, value] : formulas_.offload_rows(swap_file)) row(name, value);
}

void StartTable::add_resident() {
  const std::int64_t weight = size_of(config_.precision.compute);
  std::string resident = format_bytes(config_.workspace_bytes) + " workspace";
  if (gathers_each_use()) {
    std::int64_t largest = 0;
    for (const UnitState& unit : store_.units()) largest = std::max(largest, unit.gathered_elements());
    resident += fmt::format(", up to {} x {} gathered", config_.depth, format_bytes(largest * weight));
  } else if (gathers_) {
    resident +=
        fmt::format(", {} gathered, kept for the step", format_bytes(formulas_.gathered_elements() * weight));
  }
  if (runtime_.size() > 1) resident += ", " + format_bytes(config_.staging_bytes) + " staging buffer";
  row("also resident", resident);
  // Stages are compared if all of their state is on the device.
  for (int lower = config_.stage - 1; lower >= 0 && shards_ > 1 && !config_.offload.any(); --lower) {
    const std::int64_t here = formulas_.resident_bytes(config_.stage),
                       there = formulas_.resident_bytes(lower);
    if (there >= here) continue;
    row("note",
        fmt::format("stage {} would take less memory here: {} against {} (state and the units a step holds)",
                    lower, format_bytes(there), format_bytes(here)));
    break;
  }
}

void StartTable::add_activations() {
  if (!config_.activation_checkpointing) return;
  if (!model_.recomputes_activations) {
    row("note",
        "activation_checkpointing has no effect: this model computes nothing again, all that backward needs "
        "is kept");
    return;
  }
  std::string gathers;
  if (gathers_each_use()) {
    gathers = config_.checkpoint_every <= config_.depth
                  ? "; one gather serves recomputation and backward"
                  : fmt::format(
                        "; groups are larger than tranche.depth {}: all units of a group but the last are "
                        "gathered once more",
                        config_.depth);
  }
  row("activations",
      fmt::format("the input of every {} is kept{}, the rest computed again{}",
                  config_.checkpoint_every == 1 ? "block"
                                                : fmt::format("group of {} blocks", config_.checkpoint_every),
                  config_.offload.activations ? " in host memory" : "", gathers));
}

std::string StartTable::sent(std::int64_t elements, DataType dtype, std::int64_t as_blocks) const {
  return format_bytes((kernels::quantized_bytes(as_blocks) + elements * size_of(dtype)) / shards_ *
                      (shards_ - 1));
}

std::string StartTable::sent_parameters(std::int64_t elements) const {
  const bool as_blocks = config_.stage > 0 && config_.quantized_weights;
  const PrecisionConfig& precision = config_.precision;
  return sent(as_blocks ? 0 : elements, config_.stage == 0 ? precision.accumulation : precision.compute,
              as_blocks ? elements : 0);
}

void StartTable::add_traffic() {
  if (runtime_.pipeline() != nullptr && gathers_each_use() && !formulas_.gathers_chunks() &&
      config_.accumulation_steps >= noted_micro_batches) {
    const auto parameters = [&](GatherFor gather_for) {
      return sent_parameters(formulas_.declared_gathers(gather_for));
    };
    row("note",
        fmt::format(
            "ZeRO stage 3 gathers the weights of pipeline stage {} anew for each of {} micro-batches: "
            "a rank sends {} of parameters a step; tranche.gather_for step sends {}, and keeps {} "
            "gathered",
            traffic_.stage(), config_.accumulation_steps, parameters(GatherFor::use),
            parameters(GatherFor::step),
            format_bytes(formulas_.gathered_elements() * size_of(config_.precision.compute))));
  }
  if (stages_.chunks() > stages_.count && gathers_each_use()) {
    const std::int64_t gathers = formulas_.declared_unit_gathers();
    row("note",
        fmt::format("ZeRO stage 3 gathers {} on pipeline stage {} under schedule {}{}",
                    gathers < 0 ? "units anew for each use" : fmt::format("a unit {} times a step", gathers),
                    traffic_.stage(), config_.pipeline_schedule,
                    formulas_.gathers_chunks()
                        ? ""
                        : "; breadth-first gathers a chunk for all micro-batches at once"));
  }
  if (runtime_.size() == 1) {
    row("traffic per step, rank", "nothing");
    return;
  }
  std::int64_t padded = 0, reduced = 0, blocks = 0;
  for (const FlatBuffer* flat : store_.trainable()) {
    if (flat->empty() || flat->axis() != MeshAxis::shard) continue;
    const std::int64_t elements = flat->layout.padded_elements();
    padded += elements;
    if (store_.residency().quantizes_gradients(*flat)) {
      blocks += traffic_.reductions(*flat) * elements;
    } else {
      reduced += traffic_.sent_reductions(*flat) * elements;
    }
  }
  const std::int64_t declared = formulas_.declared_gathers();
  const std::int64_t for_use =
      declared >= 0 ? declared : 2 * config_.accumulation_steps * formulas_.gathered_elements();
  const std::int64_t gathered = config_.stage < 3 ? padded : formulas_.published_elements() + for_use;
  std::string text =
      fmt::format("{} gradients + {}{} {}", sent(reduced, config_.precision.communication, blocks),
                  config_.stage == 3 && declared < 0 ? "about " : "", sent_parameters(gathered),
                  config_.stage == 0 ? "reduced gradients" : "parameters");
  if (matrices_.any()) {
    text += fmt::format(
        " + {} matrices to their owners and back (no owner has more than {:.3g} times the mean work)",
        format_bytes(matrices_.sent().bytes), matrices_.load_ratio());
  }
  const auto along = [&](MeshAxis axis) { return format_bytes(traffic_.along(axis).bytes); };
  if (runtime_.replicas() != nullptr) text += " + " + along(MeshAxis::replicate) + " sums over replicas";
  if (runtime_.pipeline() != nullptr) text += " + " + along(MeshAxis::pipeline) + " to other stages";
  if (runtime_.context() != nullptr) text += " + " + along(MeshAxis::context) + " over the axis context";
  if (runtime_.tensor() != nullptr) {
    text += traffic_.knows(MeshAxis::tensor)
                ? " + " + along(MeshAxis::tensor) + " over the axis tensor"
                : " + sums over the axis tensor as chains, which have no formula (tranche plan counts them)";
  }
  row("traffic per step, rank", text);
  add_messages_between_nodes();
}

void StartTable::add_messages_between_nodes() {
  add_messages_between_nodes(runtime_.context(), MeshAxis::context, traffic_.of_sequences().bytes);
  add_messages_between_nodes(runtime_.tensor(), MeshAxis::tensor, traffic_.of_rows().bytes);
}

void StartTable::add_messages_between_nodes(const Communicator* group, MeshAxis axis, std::int64_t bytes) {
  if (group == nullptr) return;
  const Mesh& mesh = runtime_.mesh();
  const int size = group->size(), per_node = std::max(1, runtime_.all().local_size());
  // Nodes have consecutive ranks. All groups of an axis have the same stride.
  const std::vector<int> first = mesh.group({axis}, 0);
  const int stride = first[1] - first[0];
  int elsewhere = size - group->local_size();
  for (int rank = 0; rank < mesh.ranks(); ++rank) {
    const int begin = rank - mesh.coordinate(axis, rank) * stride;
    int beside = 0;
    for (int i = 0; i < size; ++i) beside += (begin + i * stride) / per_node == rank / per_node ? 1 : 0;
    elsewhere = std::max(elsewhere, size - beside);
  }
  if (elsewhere == 0) return;
  row("note", fmt::format("tranche.mesh \"{}\": ranks of {} are on several nodes: layers wait for {} a rank "
                          "sends the others in each step, and {} of it go to other nodes",
                          mesh.to_string(), name_of(axis), bytes > 0 ? format_bytes(bytes) + " that" : "what",
                          bytes > 0 ? format_bytes(bytes / (size - 1) * elsewhere)
                                    : fmt::format("{} of {} parts", elsewhere, size - 1)));
}

void StartTable::add_notes(const std::vector<std::string>& notes, bool verbose) {
  if (verbose) {
    for (const IgnoredKey& key : config_.ignored) row("note", describe(key));
  } else if (!config_.ignored.empty()) {
    row("note", describe(config_.ignored));
  }
  for (const std::string& note : config_.notes) row("note", note);
  for (const std::string& note : notes) row("note", note);
}

}  // namespace tranche::detail
