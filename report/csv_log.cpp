#include <dirent.h>
#include <fmt/format.h>
#include <sys/file.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "core/output_file.h"
#include "report/log_folder.h"
#include "tranche/core/error.h"
#include "tranche/report/scalar_log.h"

namespace tranche {

namespace {

class CsvLog : public ScalarLog {
 public:
  CsvLog(std::string folder, std::int64_t last_step, std::function<void(const std::string&)> say)
      : folder_(std::move(folder)), last_step_(last_step), say_(std::move(say)), lock_(nullptr, &::closedir) {
    detail::make_log_folder(folder_);
    lock_.reset(::opendir(folder_.c_str()));
    // A file system without locks gives other errors, and is used without.
    if (lock_ && ::flock(::dirfd(lock_.get()), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
      throw ConfigurationError(
          fmt::format("CSV files in '{}' are being written by another run; name another folder", folder_));
    }
    if (last_step_ > 0) return;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      if (entry.path().extension() != ".csv") continue;
      throw ConfigurationError(fmt::format(
          "'{}' has the CSV files of another run; name another folder, remove it, or go on with that run",
          folder_));
    }
  }

  void add(std::int64_t step, std::span<const Scalar> scalars) override {
    for (const Scalar& scalar : scalars) {
      auto [place, first] = files_.try_emplace(scalar.tag);
      const std::string path = path_of(scalar.tag);
      if (first) place->second = open(path, scalar.tag.substr(scalar.tag.rfind('/') + 1));
      if (!(place->second << fmt::format("{},{}\n", step, scalar.value)).flush()) detail::fail_to_log(path);
    }
  }

 private:
  std::string path_of(std::string tag) const {
    std::replace_if(
        tag.begin(), tag.end(), [](char c) { return c == '/' || c == ' '; }, '_');
    return (std::filesystem::path(folder_) / (tag + ".csv")).string();
  }

  /// The file, positioned after the rows from which the run continues; a row cut short by a kill is removed
  /// too.
  std::ofstream open(const std::string& path, const std::string& header) const {
    std::string kept = "step," + header + "\n";
    std::int64_t removed = 0;
    std::ifstream before(path);
    for (std::string line; last_step_ > 0 && std::getline(before, line) && !before.eof();) {
      std::int64_t step = 0;
      const auto read = std::from_chars(line.data(), line.data() + line.size(), step);
      if (read.ec != std::errc() || read.ptr == line.data() + line.size() || *read.ptr != ',') continue;
      if (step <= last_step_) {
        kept += line + "\n";
      } else {
        ++removed;
      }
    }
    if (removed > 0 && say_) {
      say_(fmt::format("'{}': {} row{} behind {}, from which the run goes on, {} removed", path, removed,
                       removed == 1 ? "" : "s", last_step_, removed == 1 ? "is" : "are"));
    }
    detail::write_output_file(path, kept);
    return std::ofstream(path, std::ios::app);
  }

  std::string folder_;
  std::int64_t last_step_;
  std::function<void(const std::string&)> say_;
  std::unique_ptr<DIR, int (*)(DIR*)> lock_;
  std::map<std::string, std::ofstream> files_;  ///< by tag
};

}  // namespace

std::unique_ptr<ScalarLog> make_csv_log(const std::string& folder, std::int64_t last_step,
                                        std::function<void(const std::string&)> say) {
  return std::make_unique<CsvLog>(folder, last_step, std::move(say));
}

}  // namespace tranche
