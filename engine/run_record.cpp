#include "engine/run_record.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "config/changes.h"
#include "core/json.h"
#include "engine/start_checks.h"

namespace tranche::detail {

using nlohmann::ordered_json;

namespace {

/// The parts of a fingerprint, separated by "; ", that another one lacks; the whole fingerprint if there are
/// none.
std::string parts_not_in(const std::string& fingerprint, const std::string& other) {
  const std::string divider = "; ", whole = divider + other + divider;
  std::string parts;
  for (std::size_t at = 0; at <= fingerprint.size();) {
    const std::size_t end = std::min(fingerprint.find(divider, at), fingerprint.size());
    const std::string part = fingerprint.substr(at, end - at);
    if (whole.find(divider + part + divider) == std::string::npos) {
      parts += (parts.empty() ? "" : divider) + part;
    }
    at = end + divider.size();
  }
  return parts.empty() ? fingerprint : parts;
}

}  // namespace

void RunRecord::describe(checkpoint::Manifest& manifest) const {
  const LossScalerState& scale = scaler_.state();
  manifest.stage = config_.stage;
  manifest.numerics = runtime_.numerics_fingerprint();
  manifest.reduction_group = std::max(reducer_.reduction_group(), 1);
  progress_.describe(manifest.run);
  manifest.run.random = ordered_json{{"seed", config_.seed}}.dump();
  if (config_.loss_scaling) {
    manifest.run.loss_scaler = ordered_json{
        {"scale", scale.scale},
        {"clean_steps", scale.clean_steps},
        {"hysteresis_left",
         scale.hysteresis_left}}.dump();
  }
  manifest.run.schedule = rule_.saved();
  manifest.run.optimizer = optimizer_.describe();
  manifest.run.config = config_.to_json();
}

void RunRecord::go_on_from(const checkpoint::Manifest& manifest, LoadResult& result) {
  progress_.go_on_from(manifest.run, result.notes);
  note_changes(manifest.run, result.changes);
  rule_.take_saved(manifest.run.schedule, result.notes);
  take_loss_scale(manifest.run, result.notes);
  take_order_of_sums(manifest, result.notes);
  note_defaults(manifest.run, result.notes);
  note_numerics(manifest.numerics, result.notes);
}

void RunRecord::note_changes(const checkpoint::RunState& run, std::vector<std::string>& changes) const {
  changes = configuration_changes(run.config, config_.to_json());
  const std::vector<std::string> of_configuration = changes;
  const auto told = [&](const std::string& key) {
    const std::string prefix = (key == "type" ? "optimizer." : "optimizer.params.") + key + " is ";
    return std::any_of(of_configuration.begin(), of_configuration.end(),
                       [&](const std::string& line) { return line.starts_with(prefix); });
  };
  // A program may bring its own optimizer, which the configuration does not describe.
  for (const ChangedValue& change : changed_values(run.optimizer, optimizer_.describe())) {
    if (!told(change.key)) changes.push_back("the optimizer's " + change.line());
  }
}

void RunRecord::take_loss_scale(const checkpoint::RunState& run, std::vector<std::string>& notes) {
  if (!config_.loss_scaling) return;
  LossScalerState scale = scaler_.state();
  const auto saved = parse_json(run.loss_scaler);
  const auto has_number = [&](const char* key) { return saved.contains(key) && saved[key].is_number(); };
  if (has_number("scale") && has_number("clean_steps") && has_number("hysteresis_left")) {
    scale = {saved["scale"], saved["clean_steps"], saved["hysteresis_left"]};
  }
  scaler_.restore(scale);
  if (run.loss_scaler == "{}") {
    notes.push_back("saved without loss scaling: it begins with a scale of " +
                    std::to_string(static_cast<std::int64_t>(scale.scale)));
  }
}

void RunRecord::take_order_of_sums(const checkpoint::Manifest& manifest, std::vector<std::string>& notes) {
  const auto saved = parse_json(manifest.run.config);
  const auto was = [&](const char* path, const ordered_json& value) {
    const ordered_json::json_pointer place(path);
    return saved.is_object() && saved.contains(place) && saved[place] == value;
  };
  const int saved_tensor_ranks = std::max(1, manifest.layout.axis(MeshAxis::tensor));
  // Chains have the sums of one rank for any size of the axis tensor.
  const bool saved_as_one = saved_tensor_ranks == 1 || was("/tranche/tensor_sums", "chain");
  const bool now_as_one = runtime_.tensor() == nullptr || config_.tensor_sums == TensorSums::chain;
  const bool other_parts =
      !(saved_as_one && now_as_one) && saved_tensor_ranks != runtime_.mesh().size(MeshAxis::tensor);
  const bool was_invariant = was("/tranche/world_size_invariant", true);
  if (config_.world_size_invariant) {
    if (was_invariant && was("/train_batch_size", config_.train_batch_size) &&
        was("/train_micro_batch_size_per_gpu", config_.micro_batch_size)) {
      if (other_parts) {
        notes.push_back(
            fmt::format("saved by tensor={}, loaded by tensor={}: with tranche.world_size_invariant the "
                        "number of data ranks "
                        "changes no bit, but sums over the ranks of tensor round differently from here on",
                        saved_tensor_ranks, runtime_.mesh().size(MeshAxis::tensor)));
      }
      return;
    }
    notes.emplace_back(
        "saved by a run without tranche.world_size_invariant, or with another train_batch_size or "
        "train_micro_batch_size_per_gpu: from here on the bits are the same for every number of ranks, but "
        "not those that the saved run would have computed");
    return;
  }
  if (was_invariant) {
    notes.emplace_back(
        "saved by a run with tranche.world_size_invariant, which this one is without: sums over ranks round "
        "differently from here on");
    return;
  }
  const int world = manifest.layout.world, ranks = runtime_.size(), data_ranks = runtime_.mesh().data_ranks();
  const int saved_context = std::max(1, manifest.layout.axis(MeshAxis::context));
  const bool other_context = saved_context != runtime_.mesh().size(MeshAxis::context);
  const int saved_stages = std::max(1, manifest.layout.axis(MeshAxis::pipeline));
  const int saved_data_ranks = world / saved_stages / saved_tensor_ranks / saved_context;
  const bool cut = other_context || (!(saved_as_one && now_as_one) &&
                                     (saved_tensor_ranks > 1 || runtime_.tensor() != nullptr));
  if (saved_data_ranks == data_ranks && !other_context && runtime_.replicas() == nullptr &&
      config_.reduction_group == 0) {
    // Replicas with this reduction group add gradients in the same order as a model sharded over all ranks.
    reducer_.set_reduction_group(manifest.reduction_group);
  }
  if (world != ranks || saved_data_ranks != data_ranks || other_context || other_parts) {
    const std::string on = runtime_.replicas() == nullptr && runtime_.pipeline() == nullptr &&
                                   runtime_.context() == nullptr && runtime_.tensor() == nullptr
                               ? ""
                               : " (" + runtime_.mesh().to_string() + ")";
    notes.push_back("saved by " + manifest.layout.saved_by() + ", loaded by " + std::to_string(ranks) + on +
                    ": state is equal to the bit" +
                    (saved_data_ranks != data_ranks || cut
                         ? ", sums over ranks round differently from here on"
                     : saved_stages > 1 || runtime_.pipeline() != nullptr
                         ? "; the bits from here on are those of a run that adds the gradients of tied "
                           "tensors by use (tranche.tie_sum), as a pipeline does"
                         : ", and sums over the axis tensor are chains, which have one rank's bits"));
  } else if (reducer_.reduction_group() != manifest.reduction_group) {
    notes.push_back("tranche.reduction_group is " + std::to_string(reducer_.reduction_group()) + ", was " +
                    std::to_string(manifest.reduction_group) + ": sums over ranks round differently");
  }
}

void RunRecord::note_defaults(const checkpoint::RunState& run, std::vector<std::string>& notes) const {
  // A comparison of the configurations does not say that these values were not given.
  const EarlierDefaults earlier = earlier_defaults(config_, run.config);
  if (earlier.bf16) {
    notes.emplace_back(
        "bf16.enabled: not given, which is fp32; the run was saved in bf16: write it to choose");
  }
  if (earlier.clipping) {
    notes.emplace_back(
        "gradient_clipping: not given, which is off; the run was saved with 1.0: write it to choose");
  }
}

void RunRecord::note_numerics(const std::string& saved, std::vector<std::string>& notes) const {
  const std::string numerics = runtime_.numerics_fingerprint();
  const std::string before = parts_not_in(saved, numerics);
  const bool of_threads = before.ends_with(" threads a rank") && before.find("; ") == std::string::npos &&
                          !threads_change_bits(config_, runtime_.device());
  if (saved != numerics && !(of_threads && config_.world_size_invariant)) {
    notes.push_back("in the numerics fingerprint '" + before + "' is '" + parts_not_in(numerics, saved) +
                    "' now: bits may differ from here on");
  }
}

}  // namespace tranche::detail
