#pragma once
/// Companions: small files that accompany a model's weights, such as its tokenizer's. A checkpoint stores
/// them in a folder beside its shards, and the manifest has their digests.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/format.h"
#include "offload/file_system.h"

namespace tranche::checkpoint {

/// A companion in memory.
struct Companion {
  std::string name;
  std::string bytes;
  friend bool operator==(const Companion&, const Companion&) = default;
};
using Companions = std::vector<Companion>;

/// The companion with this name; nullptr when there is none.
const Companion* find_companion(const Companions& companions, std::string_view name);

/// The reason why a name is not allowed for a companion; empty if it is. A name consists of letters, digits,
/// '.', '_' and '-' and does not begin with a dot.
std::string problem_of_companion_name(std::string_view name);
/// The total bytes of all companions.
std::int64_t bytes_of(const Companions& companions);

/// Writes them durably into an unfinished checkpoint and returns the records for its manifest. Throws
/// IoError, and CheckpointError for names that are not allowed, files that are too large, or too many of
/// them.
std::vector<FileRecord> write_companions(detail::FileSystem& files, const std::string& checkpoint,
                                         const Companions& companions);
/// Reads the companions of a checkpoint and verifies their digests. Throws CheckpointError.
Companions read_companions(detail::FileSystem& files, const std::string& checkpoint,
                           const Manifest& manifest);

}  // namespace tranche::checkpoint
