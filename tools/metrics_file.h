#pragma once
/// --metrics: a line of JSON for every step, in the file as soon as the step is done.

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>

namespace tranche::tools {

/// Throws ConfigurationError unless such a file can be written; where `goes_on` is false (the run resumes
/// nothing) also when it is there and not empty, as it is of another run.
void require_metrics(const std::string& path, bool goes_on);

class MetricsFile {
 public:
  /// Goes on behind the lines of steps up to `step`: those of later steps, which were done after the
  /// checkpoint that the run goes on from, are taken out, and a line that a kill cut short. Throws
  /// ConfigurationError.
  MetricsFile(const std::string& path, std::int64_t step);
  /// Returns what to say when it cannot be written: once, since training goes on without. Empty otherwise.
  std::string add(const std::string& line);

 private:
  std::string path_;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
};

}  // namespace tranche::tools
