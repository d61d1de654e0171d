#include "tranche/tools/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "tranche/version.h"

namespace tranche::tools {

using nlohmann::ordered_json;

namespace {

/// JSON has no infinities and no NaN: null stands for them.
ordered_json number(double value) {
  return std::isfinite(value) ? ordered_json(value) : ordered_json(nullptr);
}

ordered_json bytes_json(const OffloadTraffic& bytes) {
  return {{"to_host", bytes.to_host},
          {"from_host", bytes.from_host},
          {"nvme_read", bytes.nvme_read},
          {"nvme_written", bytes.nvme_written}};
}

ordered_json step_object(const StepResult& result) {
  ordered_json object{{"step", result.step},
                      {"loss", number(result.loss)},
                      {"grad_norm", number(result.gradient_norm)},
                      {"clip_coefficient", number(result.clip_coefficient)},
                      {"applied", result.applied},
                      {"skipped_because", result.skipped_because},
                      {"lr", number(result.learning_rate)},
                      {"loss_scale", number(result.loss_scale)},
                      {"tokens", result.tokens},
                      {"seconds", number(result.seconds)},
                      {"between_seconds", number(result.between_seconds)},
                      {"update_seconds", number(result.update_seconds)},
                      {"exposed_gather_seconds", number(result.exposed_gather_seconds)},
                      {"exposed_reduce_seconds", number(result.exposed_reduce_seconds)},
                      {"exposed_offload_seconds", number(result.exposed_offload_seconds)},
                      {"offload",
                       {{"to_host_seconds", number(result.offload.to_host)},
                        {"from_host_seconds", number(result.offload.from_host)},
                        {"host_update_seconds", number(result.offload.host_update)},
                        {"disk_seconds", number(result.offload.disk)}}},
                      {"offload_bytes", bytes_json(result.offload_traffic)}};
  if (result.forward_seconds > 0 || result.backward_seconds > 0) {  // measured
    object["forward_seconds"] = number(result.forward_seconds);
    object["backward_seconds"] = number(result.backward_seconds);
  }
  return object;
}

}  // namespace

struct Report::Impl {
  ordered_json document = ordered_json::object();
  ordered_json steps = ordered_json::array();
  ordered_json validation = ordered_json::array();
  ordered_json checkpoints = ordered_json::array();
};

Report::Report() : impl_(std::make_unique<Impl>()) {
  impl_->document["schema"] = report_schema;
  impl_->document["version"] = version;
}
Report::~Report() = default;

std::string format_digest(const kernels::Digest& digest) {
  return fmt::format("{:016x}{:016x}", digest.lanes[0], digest.lanes[1]);
}

void Report::set_start(int world, int stage, const std::string& config_json, const std::string& fingerprint,
                       const std::string& model_name, const std::string& data_path) {
  ordered_json& document = impl_->document;
  document["world"] = world;
  document["stage"] = stage;
  document["numerics_fingerprint"] = fingerprint;
  document["model_name"] = model_name;
  document["data"] = data_path;
  document["config"] = ordered_json::parse(config_json);
}

void Report::add_step(const StepResult& result) {
  impl_->steps.push_back(step_object(result));
}

void Report::add_step_digest(const kernels::Digest& weights, const kernels::Digest& state) {
  impl_->steps.back()["weights_digest"] = format_digest(weights);
  impl_->steps.back()["state_digest"] = format_digest(state);
}

void Report::add_validation(std::int64_t step, const EvaluationResult& result) {
  impl_->validation.push_back({{"step", step}, {"loss", number(result.loss)}, {"tokens", result.tokens}});
  impl_->document["validation_loss"] = number(result.loss);
}

void Report::set_ngrams(const NgramEntropies& entropies) {
  impl_->document["unigram_entropy"] = number(entropies.unigram);
  impl_->document["bigram_entropy"] = number(entropies.bigram);
  impl_->document["trigram_entropy"] = number(entropies.trigram);
}

void Report::set_engine(const std::string& memory, const std::string& traffic, const std::string& model) {
  impl_->document["memory"] = ordered_json::parse(memory);
  impl_->document["traffic"] = ordered_json::parse(traffic);
  impl_->document["model"] = ordered_json::parse(model);
}

void Report::set_digests(const kernels::Digest& weights, const kernels::Digest& state) {
  impl_->document["weights_digest"] = format_digest(weights);
  impl_->document["state_digest"] = format_digest(state);
}

void Report::set_speed(double tokens_per_second, double peak_flops, double peak_share) {
  impl_->document["tokens_per_second"] = number(tokens_per_second);
  impl_->document["matmul_peak_flops"] = number(peak_flops);
  impl_->document["matmul_peak_share"] = number(peak_share);
}

void Report::set_processor_seconds(const std::vector<double>& steps) {
  for (std::size_t i = 0; i < std::min(steps.size(), impl_->steps.size()); ++i) {
    impl_->steps[i]["cpu_seconds"] = number(steps[i]);
  }
}

void Report::set_placement(const Placement& placement) {
  impl_->document["placement"] = {{"ranks_on_host", placement.ranks_on_host},
                                  {"threads", placement.threads},
                                  {"cores", placement.cores},
                                  {"host_cores", placement.host_cores}};
}

void Report::set_sample(const std::string& text) {
  impl_->document["sample"] = text;
}

void Report::add_checkpoint(const CheckpointRecord& record) {
  impl_->checkpoints.push_back({{"step", record.step},
                                {"path", record.path},
                                {"pause_seconds", number(record.pause_seconds)},
                                {"seconds", number(record.seconds)}});
}

void Report::set_resumed(const LoadResult& loaded, bool weights_only, const kernels::Digest& weights,
                         const kernels::Digest& state, const std::vector<std::string>& changes) {
  impl_->document["resumed"] = {{"path", loaded.folder},
                                {"weights_only", weights_only},
                                {"step", loaded.step},
                                {"samples", loaded.samples},
                                {"world", loaded.world},
                                {"stage", loaded.stage},
                                {"weights_digest", format_digest(weights)},
                                {"state_digest", format_digest(state)},
                                {"changes", changes}};
}

void Report::set_stopped(const std::string& signal) {
  impl_->document["stopped_by"] = signal;
}

std::string Report::to_json() const {
  ordered_json document = impl_->document;
  document["checkpoints"] = impl_->checkpoints;
  document["validation"] = impl_->validation;
  document["steps"] = impl_->steps;
  // Bytes that are no UTF-8 (a sample may hold any) are replaced, not refused.
  return document.dump(1, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

std::string note_on_cores(const Placement& placement) {
  const auto counted = [](int count, const char* of) {
    return fmt::format("{} {}{}", count, of, count == 1 ? "" : "s");
  };
  const int threads = placement.ranks_on_host * placement.threads;
  if (threads > placement.host_cores) {
    return fmt::format("{} of {} share {} of this host: fewer of either would be as fast",
                       counted(placement.ranks_on_host, "rank"), counted(placement.threads, "thread"),
                       counted(placement.host_cores, "core"));
  }
  if (placement.cores >= placement.host_cores) return {};
  const std::string bound = fmt::format("this rank may run on {} of the host's {}", placement.cores,
                                        counted(placement.host_cores, "core"));
  if (placement.threads > placement.cores) {
    return fmt::format(
        "{}, which its {} share; where it was mpirun that bound it, mpirun --bind-to none lifts that", bound,
        counted(placement.threads, "thread"));
  }
  if (placement.ranks_on_host > 1 && placement.ranks_on_host * placement.cores < placement.host_cores) {
    return bound + "; where it was mpirun that bound it, mpirun --bind-to none lifts that";
  }
  return {};
}

std::string step_line(const StepResult& result) {
  return step_object(result).dump();
}

std::string validation_line(std::int64_t step, const EvaluationResult& result) {
  return ordered_json{{"step", step}, {"validation_loss", number(result.loss)}, {"tokens", result.tokens}}
      .dump();
}

}  // namespace tranche::tools
