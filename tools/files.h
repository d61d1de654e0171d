#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace tranche::tools {

/// Throws ConfigurationError unless OutputFile could write there: a report that has no place is told before
/// the training, not after.
void require_writable(const std::string& path, std::string_view flag);

/// Throws CheckpointError unless files can be made in a folder, which is made if need be, and leaves the
/// probe with which all ranks look whether they share it. `token`: any number, equal on all ranks.
void place_probe(const std::string& folder, std::string_view flag, std::int64_t token);
/// Removes the probes of runs that were ended in the middle, which are all but this run's: the caller holds
/// the folder's lease.
void clear_probes(const std::string& folder, std::int64_t token) noexcept;
/// Throws CheckpointError unless this rank sees the probe and can make files beside it.
void require_probe(const std::string& folder, std::string_view flag, std::int64_t token, int rank);
void remove_probe(const std::string& folder, std::int64_t token) noexcept;

}  // namespace tranche::tools
