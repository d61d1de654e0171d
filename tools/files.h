#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tranche::tools {

/// A file, and the flag that names it. The path may be empty.
struct NamedFile {
  std::string_view flag;
  std::string path;
};

/// Throws ConfigurationError if a file to write is one that is read, or that another flag writes: one content
/// would take the place of the other. Devices and pipes may be shared.
void require_apart(const std::vector<NamedFile>& written, const std::vector<NamedFile>& read);

/// Throws ConfigurationError unless OutputFile could write there, so that a wrong path is reported before the
/// training, not after.
void require_writable(const std::string& path, std::string_view flag);

/// Throws CheckpointError unless files can be created in a folder, which is created if necessary. Leaves the
/// probe file with which all ranks check whether they share the folder. `token`: any number, equal on all
/// ranks.
void place_probe(const std::string& folder, std::string_view flag, std::int64_t token);
/// Removes the probes of interrupted runs, which are all except this run's, because the caller holds the
/// folder's lease.
void clear_probes(const std::string& folder, std::int64_t token) noexcept;
/// Throws CheckpointError unless this rank sees the probe and can create files beside it.
void require_probe(const std::string& folder, std::string_view flag, std::int64_t token, int rank);
void remove_probe(const std::string& folder, std::int64_t token) noexcept;

}  // namespace tranche::tools
