#pragma once
/// Whole text files that a user names: configurations, models, machines.

#include <cstdint>
#include <string>
#include <string_view>

namespace tranche::detail {

/// Refuses or allows pipes and devices. Opening a pipe without a writer blocks for ever.
enum class Pipes : std::uint8_t { refused, allowed };

/// A limit on the size of such a file; real ones are far smaller.
inline constexpr std::int64_t largest_text_file = std::int64_t{64} << 20;

/// Reads the file's bytes. Throws ConfigurationError, "WHAT 'PATH' cannot be read: why", when the file does
/// not exist, is a folder, a pipe or a device (unless `pipes` allows them), or a Git LFS pointer, or has more
/// than `most_bytes`.
std::string read_text_file(const std::string& path, const std::string& what, Pipes pipes = Pipes::refused,
                           std::int64_t most_bytes = largest_text_file);

/// True for the text of a Git LFS pointer, a few lines that replace a file stored elsewhere.
bool is_lfs_pointer(std::string_view text);
/// The advice that follows the name of a Git LFS pointer in an error.
extern const char* const lfs_advice;

}  // namespace tranche::detail
