#pragma once
/// The parts of a checkpoint: names, files, the manifest; layout.h has what is stored.
/// docs/reference/checkpoint-format.md is the specification, byte for byte; this is its image in C++.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/layout.h"

namespace tranche::checkpoint {

/// The version that is written. All before it are read too. Minor version 1 knows state classes, and is
/// written where there are several.
inline constexpr std::int64_t format_version = 2, format_minor = 1;
inline constexpr std::string_view manifest_name = "manifest.json";
inline constexpr std::string_view master_name = "model.h5";
inline constexpr std::string_view latest_name = "latest";
/// The folder of the small files that travel with a checkpoint (companions.h), and their bounds.
inline constexpr std::string_view companion_folder = "companions";
inline constexpr std::size_t most_companions = 32;
inline constexpr std::int64_t companion_limit = std::int64_t{64} << 20;
/// Upper bound for reading the file `latest`; a larger one is damaged.
inline constexpr std::int64_t small_file_bytes = 64 * 1024;

/// "step-00000012". Throws InvalidArgument on a negative step, as do the functions below on what cannot be.
std::string step_name(std::int64_t step);
/// "shard-00001-of-00003.h5"
std::string shard_name(int rank, int world);
/// The step of a folder named as step_name() does it, -1 for every other name.
std::int64_t parse_step_name(std::string_view name);

/// A file of the checkpoint as the manifest knows it.
struct FileRecord {
  std::string name;
  std::int64_t bytes = 0;
  /// Bytes from the start that `blocks` cover; what follows (a shard's digest table) is a function of them.
  std::int64_t digested_bytes = 0;
  std::vector<std::uint64_t> blocks;  ///< digest of each 4 MiB block (digest.h)
  friend bool operator==(const FileRecord&, const FileRecord&) = default;
};

/// One rank's file. A rank hands it to rank 0 as text.
struct ShardRecord {
  int rank = 0;
  FileRecord file;
  std::vector<std::int64_t> offsets;  ///< byte in the file of each section's dataset; -1: no elements here
  std::vector<std::int64_t> array_offsets;  ///< likewise of each array's
  friend bool operator==(const ShardRecord&, const ShardRecord&) = default;
};
std::string to_text(const ShardRecord& record);
/// Throws CheckpointError naming `origin` and the key.
ShardRecord shard_record_from_text(std::string_view text, std::string_view origin);

/// The state besides tensors that a run needs to go on. Texts are JSON objects, "{}" when there is nothing;
/// they are kept as they are given but for white space.
struct RunState {
  std::int64_t step = 0;     ///< completed steps, skipped ones included
  std::int64_t applied = 0;  ///< updates applied (what Adam's bias correction counts)
  std::int64_t samples = 0;  ///< global samples consumed: the next step starts with this number
  std::int64_t tokens = 0;   ///< tokens consumed
  std::int64_t skipped = 0;  ///< steps in a row at its end that were skipped; 0: the last one was taken
  bool in_doubt = false;     ///< the last loss or gradient that these weights gave was not finite
  std::string random = "{}";
  std::string loss_scaler = "{}";
  std::string schedule = "{}";
  std::string optimizer = "{}";
  std::string config = "{}";  ///< the effective configuration
  std::string user = "{}";    ///< the caller's own; at most user_limit bytes
  friend bool operator==(const RunState&, const RunState&) = default;
};
inline constexpr std::size_t user_limit = 1 << 20;

/// The frozen weights that a checkpoint of adapters alone does not hold.
struct BaseRecord {
  std::string folder;  ///< the checkpoint that they were loaded from; empty: they were drawn
  std::string dtype;   ///< that they were held in, "bf16"
  std::string digest;  ///< of their values in it, 32 hexadecimal digits; empty: not known
  /// The seed that the base was drawn from, if it was drawn; none: an earlier version did not write it.
  std::optional<std::int64_t> seed = {};
  friend bool operator==(const BaseRecord&, const BaseRecord&) = default;
};

struct Manifest {
  std::int64_t version = format_version;  ///< of the text that it was read from
  std::int64_t minor = 0;
  std::string library;        ///< version of Tranche
  std::string hdf5;           ///< version of the HDF5 library
  std::int64_t sequence = 0;  ///< of saves into a folder, not of tokens: the largest is the newest
  std::int64_t created = 0;   ///< seconds since 1970, UTC; for people
  /// The run that saved it, last, and before it those that it went on from, the first one first; a run is
  /// its RunFolder's number. Empty: of a version that knew none.
  std::vector<std::uint64_t> lineage;
  /// For each run of `lineage`, RunState::applied of the checkpoint that the run went on from. It is 0 for a
  /// run from scratch and where it is not known, and empty when the version that saved did not write it.
  std::vector<std::int64_t> branches;
  int stage = 0;            ///< of the run that saved
  std::string numerics;     ///< its numerics_fingerprint
  int reduction_group = 1;  ///< of its sums over ranks
  Layout layout;
  std::vector<ShardRecord> shards;     ///< by rank
  FileRecord master;                   ///< model.h5
  std::vector<FileRecord> companions;  ///< files in companion_folder
  RunState run;
  std::optional<BaseRecord> base;  ///< nothing where the checkpoint holds the whole model
  friend bool operator==(const Manifest&, const Manifest&) = default;

  std::int64_t bytes() const;  ///< of all files that it lists
};

/// The manifest's text in the newest version, its own digest included. Throws InvalidArgument when a text of
/// `run` is not a JSON object or is too large.
std::string to_text(const Manifest& manifest);
/// The reverse; strict: a wrong digest, an unknown version, a missing key, a wrong type or a layout that
/// contradicts itself is a CheckpointError naming `origin` (the file) and the key. Keys that it does not know
/// are left alone, so that later versions can add some.
Manifest manifest_from_text(std::string_view text, std::string_view origin);

/// Version of the HDF5 library this was linked with, "1.10.8".
std::string hdf5_version();

}  // namespace tranche::checkpoint
