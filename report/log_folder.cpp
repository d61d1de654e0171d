#include "report/log_folder.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "tranche/core/error.h"

namespace tranche::detail {

void make_log_folder(const std::string& folder) {
  std::error_code problem;
  std::filesystem::create_directories(folder, problem);
  if (problem)
    throw IoError(fmt::format("'{}' cannot be made: {}", folder, problem.message()), problem.value());
}

void fail_to_log(const std::string& path) {
  const int error = errno;
  throw IoError(fmt::format("'{}' cannot be written: {}", path, std::strerror(error)), error);
}

}  // namespace tranche::detail
