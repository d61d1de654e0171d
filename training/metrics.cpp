#include "tranche/training/metrics.h"

#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/json.h"
#include "core/output_file.h"
#include "training/metrics_json.h"
#include "tranche/core/error.h"

namespace tranche::training {

using nlohmann::ordered_json;

namespace {

ordered_json bytes_json(const OffloadTraffic& bytes) {
  return {{"to_host", bytes.to_host},
          {"from_host", bytes.from_host},
          {"nvme_read", bytes.nvme_read},
          {"nvme_written", bytes.nvme_written}};
}

/// The step of a complete line of such a file; -1 for other lines.
std::int64_t step_of(const std::string& line) {
  const auto object = detail::parse_json(line);
  return object.is_object() && object.contains("step") ? detail::json_integer(object["step"]).value_or(-1)
                                                       : -1;
}

}  // namespace

ordered_json json_number(double value) {
  return std::isfinite(value) ? ordered_json(value) : ordered_json(nullptr);
}

ordered_json loss_json(const EvaluationResult& result) {
  return result.tokens > 0 ? json_number(result.loss) : ordered_json(nullptr);
}

ordered_json step_json(const StepResult& result) {
  ordered_json object{{"step", result.step},
                      {"loss", json_number(result.loss)},
                      {"grad_norm", json_number(result.gradient_norm)},
                      {"clip_coefficient", json_number(result.clip_coefficient)},
                      {"applied", result.applied},
                      {"skipped_because", result.skipped_because},
                      {"lr", json_number(result.learning_rate)},
                      {"loss_scale", json_number(result.loss_scale)},
                      {"tokens", result.tokens},
                      {"positions", result.positions},
                      {"seconds", json_number(result.seconds)},
                      {"between_seconds", json_number(result.between_seconds)},
                      {"update_seconds", json_number(result.update_seconds)},
                      {"exposed_gather_seconds", json_number(result.exposed_gather_seconds)},
                      {"exposed_reduce_seconds", json_number(result.exposed_reduce_seconds)},
                      {"exposed_offload_seconds", json_number(result.exposed_offload_seconds)},
                      {"exposed_message_seconds", json_number(result.exposed_message_seconds)},
                      {"offload",
                       {{"to_host_seconds", json_number(result.offload.to_host)},
                        {"from_host_seconds", json_number(result.offload.from_host)},
                        {"host_update_seconds", json_number(result.offload.host_update)},
                        {"disk_seconds", json_number(result.offload.disk)}}},
                      {"disk_idle",
                       {{"nothing_asked_seconds", json_number(result.disk_idle.nothing_asked)},
                        {"no_buffer_seconds", json_number(result.disk_idle.no_buffer)},
                        {"norm_seconds", json_number(result.disk_idle.norm)}}},
                      {"offload_bytes", bytes_json(result.offload_traffic)}};
  if (result.noise.measured) {
    object["gradient_noise_scale"] = json_number(result.noise.scale);
    object["gradient_variance"] = json_number(result.noise.variance);
    object["gradient_squares"] = json_number(result.noise.squares);
  }
  if (result.forward_seconds > 0 || result.backward_seconds > 0) {  // measured
    object["forward_seconds"] = json_number(result.forward_seconds);
    object["backward_seconds"] = json_number(result.backward_seconds);
  }
  return object;
}

std::string step_line(const StepResult& result) {
  return step_json(result).dump();
}

std::string validation_line(std::int64_t step, const EvaluationResult& result, const std::string& set) {
  ordered_json object{{"step", step}, {"validation_loss", loss_json(result)}, {"tokens", result.tokens}};
  if (!set.empty()) object["set"] = set;
  return object.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
}

std::vector<Scalar> step_scalars(const StepResult& result, bool scales_loss) {
  std::vector<Scalar> scalars{{"Train/Samples/train_loss", result.loss},
                              {"Train/Samples/lr", result.learning_rate},
                              {"Train/Samples/gradient_norm", result.gradient_norm}};
  if (result.tokens == 0 && std::isnan(result.loss)) scalars.erase(scalars.begin());  // there is no loss
  if (scales_loss) scalars.push_back({"Train/Samples/loss_scale", result.loss_scale});
  if (result.noise.measured && std::isfinite(result.noise.scale)) {
    scalars.push_back({"Train/Samples/gradient_noise_scale", result.noise.scale});
  }
  if (result.seconds > 0) {
    if (result.tokens != result.positions) {
      scalars.push_back(
          {"Train/Samples/learned_tokens_per_second", static_cast<double>(result.tokens) / result.seconds});
    }
    scalars.push_back(
        {"Train/Samples/tokens_per_second", static_cast<double>(result.positions) / result.seconds});
  }
  return scalars;
}

Scalar validation_scalar(const EvaluationResult& result, const std::string& set) {
  return {fmt::format("Validation/{}/loss", set.empty() ? "Samples" : set), result.loss};
}

void MetricsFile::require(const std::string& path, bool goes_on, std::string_view called) {
  try {
    detail::require_output_file(path);
  } catch (const IoError& problem) {
    throw ConfigurationError(fmt::format("{} {}", called, problem.message()));
  }
  std::error_code none;
  if (std::filesystem::exists(path, none) && !std::filesystem::is_regular_file(path, none)) {
    throw ConfigurationError(fmt::format("{} '{}' is there and no regular file; name another", called, path));
  }
  const auto size = std::filesystem::file_size(path, none);
  if (!goes_on && !none && size > 0) {
    throw ConfigurationError(fmt::format(
        "{} '{}' has lines of another run; name another file, remove it, or resume that run", called, path));
  }
}

MetricsFile::MetricsFile(std::string path, std::int64_t step, std::string called)
    : path_(std::move(path)), called_(std::move(called)), file_(nullptr, &std::fclose) {
  const auto not_written = [this] {
    return ConfigurationError(
        fmt::format("{} '{}' cannot be written: {}", called_, path_, std::strerror(errno)));
  };
  file_.reset(std::fopen(path_.c_str(), "ae"));
  if (!file_) throw not_written();
  // A file system without locks gives other errors, and is used without.
  if (::flock(::fileno(file_.get()), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    throw ConfigurationError(
        fmt::format("{} '{}' is being written by another run; name another file", called_, path_));
  }
  std::string kept;  // behind the first `whole` bytes, which stay as they are
  std::int64_t whole = 0, removed = 0, first = step, last = step;
  bool cut = false;
  std::ifstream before(path_);
  for (std::string line; std::getline(before, line);) {
    const std::int64_t at = step_of(line);
    if (at < 0 && !before.eof()) {
      throw ConfigurationError(fmt::format(
          "{} '{}' has lines that are not of such a file; name another, or remove it", called_, path_));
    }
    const bool stays = at >= 0 && at <= step && !before.eof();
    if (stays && !cut) whole += static_cast<std::int64_t>(line.size()) + 1;
    if (stays && cut) kept += line + "\n";
    cut |= !stays;
    if (at <= step) continue;
    first = removed++ == 0 ? at : std::min(first, at);
    last = std::max(last, at);
  }
  if (!cut) return;
  if (::ftruncate(::fileno(file_.get()), whole) != 0) throw not_written();
  if (std::fwrite(kept.data(), 1, kept.size(), file_.get()) != kept.size() || std::fflush(file_.get()) != 0)
    throw not_written();
  if (removed == 0) return;
  note_ = fmt::format("{} '{}': {} line{} of step{} behind step {}, from which the run goes on, {} removed",
                      called_, path_, removed, removed == 1 ? "" : "s",
                      first == last ? fmt::format(" {}", first) : fmt::format("s {} to {}", first, last),
                      step, removed == 1 ? "is" : "are");
}

std::string MetricsFile::add(const std::string& line) {
  if (!file_) return {};
  const std::string whole = line + "\n";
  if (std::fwrite(whole.data(), 1, whole.size(), file_.get()) == whole.size() &&
      std::fflush(file_.get()) == 0) {
    return {};
  }
  const std::string why = std::strerror(errno);
  file_.reset();
  return fmt::format("{} '{}' cannot be written any more: {}; training goes on without", called_, path_, why);
}

}  // namespace tranche::training
