#include "tools/metrics_file.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/json.h"
#include "core/output_file.h"
#include "tools/files.h"
#include "tranche/core/error.h"

namespace tranche::tools {

namespace {

/// The step of a whole line of such a file; -1 of anything else.
std::int64_t step_of(const std::string& line) {
  const auto object = detail::parse_json(line);
  return object.is_object() && object.contains("step") ? detail::json_integer(object["step"]).value_or(-1)
                                                       : -1;
}

}  // namespace

void require_metrics(const std::string& path, bool goes_on) {
  if (path.empty()) return;
  require_writable(path, "--metrics");
  std::error_code none;
  if (std::filesystem::exists(path, none) && !std::filesystem::is_regular_file(path, none)) {
    throw ConfigurationError(fmt::format("--metrics '{}' is there and no regular file; name another", path));
  }
  const auto size = std::filesystem::file_size(path, none);
  if (!goes_on && !none && size > 0) {
    throw ConfigurationError(fmt::format(
        "--metrics '{}' has lines of another run; name another file, remove it, or go on with --resume",
        path));
  }
}

MetricsFile::MetricsFile(const std::string& path, std::int64_t step)
    : path_(path), file_(nullptr, &std::fclose) {
  std::string kept;
  std::ifstream before(path);
  for (std::string line; std::getline(before, line);) {
    const std::int64_t at = step_of(line);
    if (at < 0 && !before.eof()) {
      throw ConfigurationError(fmt::format(
          "--metrics '{}' has lines that are not of such a file; name another, or remove it", path));
    }
    if (at >= 0 && at <= step) kept += line + "\n";
  }
  if (before.is_open()) detail::write_output_file(path, kept);
  file_.reset(std::fopen(path.c_str(), "a"));
  if (!file_) {
    throw ConfigurationError(fmt::format("--metrics '{}' cannot be written: {}", path, std::strerror(errno)));
  }
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
  return fmt::format("--metrics '{}' cannot be written any more: {}; training goes on without", path_, why);
}

}  // namespace tranche::tools
