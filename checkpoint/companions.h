#pragma once
/// Companions: small files that travel with a model's weights, such as those of its tokenizer. A checkpoint
/// keeps them in a folder beside its shards, and the manifest has their digests.

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

/// nullptr when there is none of this name.
const Companion* find_companion(const Companions& companions, std::string_view name);

/// Why a name cannot be a companion's; empty: it can. It is a plain name of letters, digits, '.', '_' and
/// '-' that does not begin with a dot.
std::string problem_of_companion_name(std::string_view name);
/// Bytes of all.
std::int64_t bytes_of(const Companions& companions);

/// Writes them durably into a checkpoint that is being made; the records for its manifest. Throws IoError,
/// and CheckpointError for names that cannot be, files that are too large, or too many of them.
std::vector<FileRecord> write_companions(detail::FileSystem& files, const std::string& checkpoint,
                                         const Companions& companions);
/// Reads those of a checkpoint and compares them with their digests. Throws CheckpointError.
Companions read_companions(detail::FileSystem& files, const std::string& checkpoint,
                           const Manifest& manifest);

}  // namespace tranche::checkpoint
