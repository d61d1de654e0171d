#pragma once
#include <filesystem>
#include <string>

namespace tranche {

/// DeepSpeed's monitor blocks: curves for viewers such as TensorBoard (tranche/report/scalar_log.h).
struct MonitorConfig {
  bool enabled = false;
  std::string output_path;
  std::string job_name = "DeepSpeedJobName";
  /// "OUTPUT_PATH/JOB_NAME"; without a path only the job's name.
  std::string folder() const { return (std::filesystem::path(output_path) / job_name).string(); }
};

}  // namespace tranche
