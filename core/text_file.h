#pragma once
/// Whole files of text that a user names: configurations, models, machines.

#include <cstdint>
#include <string>
#include <string_view>

namespace tranche::detail {

/// Refuses or allows pipes and devices. Opening a pipe that nobody writes to waits for ever.
enum class Pipes : std::uint8_t { refused, allowed };

/// Larger than any such file that is meant.
inline constexpr std::int64_t largest_text_file = std::int64_t{64} << 20;

/// The file's bytes. Throws ConfigurationError, "WHAT 'PATH' cannot be read: why", when there is no such
/// file, when it is a folder, a pipe or a device (unless `pipes` allows them), a Git LFS pointer, or has more
/// than `most_bytes`.
std::string read_text_file(const std::string& path, const std::string& what, Pipes pipes = Pipes::refused,
                           std::int64_t most_bytes = largest_text_file);

/// True for the few lines that stand in for a file which Git LFS keeps elsewhere.
bool is_lfs_pointer(std::string_view text);
/// The advice that follows the name of such a file in an error.
extern const char* const lfs_advice;

}  // namespace tranche::detail
