#pragma once
/// Names of swap files, from which a later run tells who made one and whether it is debris. For offload/
/// only.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "tranche/offload/file_system.h"

namespace tranche {

/// A process, told apart from every other one, on this host and on others, now and earlier.
struct SwapOwner {
  std::string host;
  std::string kernel;         ///< of the boot and the container: within it, process numbers mean the same
  std::int64_t process = 0;   ///< its number...
  std::uint64_t started = 0;  ///< ...and when it was started (ticks since the boot), as numbers come again
  friend bool operator==(const SwapOwner&, const SwapOwner&) = default;
};
/// This process.
SwapOwner swap_owner();

/// "tranche-swap-<host>-<kernel>-<process>-<started>-<rank>-<random>", all numbers but rank hexadecimal.
std::string swap_name(const SwapOwner& owner, int rank);
/// nullopt for names of any other form.
std::optional<SwapOwner> owner_of_swap(std::string_view name);

/// Says, as long as the file is open, that someone uses it. Best effort: false where the file system has no
/// locks, someone else has locked it, or the file has no native().
bool lock_swap(File& file);
/// Whether the file of this name in `directory` was left behind. Only files of this host can be: of a process
/// that is no more, or, where that cannot be asked (of an earlier boot, of another container), such as can be
/// locked.
bool is_swap_debris(FileSystem& files, const std::string& directory, const std::string& name,
                    const SwapOwner& self);

}  // namespace tranche
