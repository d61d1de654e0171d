#pragma once
/// Names of swap files. A later run reads from them which process made a file and whether it is stale. For
/// offload/ only.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/process.h"
#include "offload/file_system.h"

namespace tranche::detail {

/// "tranche-swap-<host>-<kernel>-<process>-<started>-<rank>-<random>"; all numbers but rank are hexadecimal.
std::string swap_name(const ProcessIdentity& owner, int rank);
/// The process that made the file; nullopt for names of any other form.
std::optional<ProcessIdentity> owner_of_swap(std::string_view name);

/// Locks the open file to mark it as used. Best effort: false if the file system has no locks, another
/// process has locked it, or the file has no native().
bool lock_swap(File& file);
/// True when the file of this name in `directory` was left behind. Only files of this node are considered.
/// The file is stale if its process has ended. If the process belongs to an earlier boot or another
/// container, it cannot be looked up; then the file is stale if it can be locked.
bool is_stale_swap_file(FileSystem& files, const std::string& directory, const std::string& name,
                        const ProcessIdentity& self);

}  // namespace tranche::detail
