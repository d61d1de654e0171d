#pragma once
/// Checkpoints in which all values are zero, with correct digests. So a reader follows the manifest to the
/// end instead of failing at the first digest.

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/format.h"
#include "tests/fuzz/memory_files.h"

namespace tranche::fuzz {

/// The text of a manifest, from all lines but the first, which has the digest of the others.
std::string with_digest(std::string_view body);
/// The inverse of with_digest().
std::string without_digest(std::string_view text);

/// The files of a checkpoint by name, including the manifest. Block digests in the manifest are replaced by
/// those of zeros; in a shard's table of digests the first few hundred entries are correct.
std::vector<std::pair<std::string, MemoryFiles::Content>> zero_checkpoint(checkpoint::Manifest manifest);

/// The manifest of a small model: two units, frozen and tied tensors, optimizer state, arrays of a program's
/// own, and the user JSON of a GPT run. With `in_boxes` it belongs to two ranks, which hold alternate rows.
checkpoint::Manifest sample_manifest(int world, bool in_boxes = false);

}  // namespace tranche::fuzz
