#pragma once
/// Checkpoints all of whose values are zero, with the digests that are right for them: what a manifest says
/// is then read to the end, and not turned back at its first digest.

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/format.h"
#include "tests/fuzz/memory_files.h"

namespace tranche::fuzz {

/// A manifest's text from all but its first line, which holds the digest of the others.
std::string with_digest(std::string_view body);
/// The reverse of it.
std::string without_digest(std::string_view text);

/// The files of a checkpoint by name, the manifest among them. Block digests of the manifest are replaced by
/// those of zeros; of a shard's table of digests the first few hundred entries are right.
std::vector<std::pair<std::string, MemoryFiles::Content>> zero_checkpoint(checkpoint::Manifest manifest);

/// A small model's manifest: two units, frozen and tied tensors, optimizer state, arrays of a program's own,
/// the run of a GPT. In boxes: of two ranks, which hold every other row each.
checkpoint::Manifest sample_manifest(int world, bool in_boxes = false);

}  // namespace tranche::fuzz
