#pragma once
/// Names of swap files, from which a later run tells who made one and whether it is stale. For offload/
/// only.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/process.h"
#include "offload/file_system.h"

namespace tranche::detail {

/// "tranche-swap-<host>-<kernel>-<process>-<started>-<rank>-<random>", all numbers but rank hexadecimal.
std::string swap_name(const ProcessIdentity& owner, int rank);
/// nullopt for names of any other form.
std::optional<ProcessIdentity> owner_of_swap(std::string_view name);

/// Says, as long as the file is open, that someone uses it. Best effort: false where the file system has no
/// locks, someone else has locked it, or the file has no native().
bool lock_swap(File& file);
/// True when the file of this name in `directory` was left behind. Only files of this node can be: of a
/// process that is no more, or, where that cannot be asked (of an earlier boot, of another container), such
/// as can be locked.
bool is_stale_swap_file(FileSystem& files, const std::string& directory, const std::string& name,
                        const ProcessIdentity& self);

}  // namespace tranche::detail
