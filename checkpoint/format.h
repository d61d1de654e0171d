#pragma once
/// The parts of a checkpoint: names, files, the manifest; layout.h describes the stored tensors.
/// docs/reference/checkpoint-format.md specifies the format, byte for byte; these types represent it in C++.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/layout.h"

namespace tranche::checkpoint {

/// The version that is written. All earlier ones can be read too. Minor version 1 adds state classes, and is
/// written when there are several.
inline constexpr std::int64_t format_version = 2, format_minor = 1;
inline constexpr std::string_view manifest_name = "manifest.json";
inline constexpr std::string_view master_name = "model.h5";
inline constexpr std::string_view latest_name = "latest";
/// The folder of the companions (companions.h), and limits on them.
inline constexpr std::string_view companion_folder = "companions";
inline constexpr std::size_t most_companions = 32;
inline constexpr std::int64_t companion_limit = std::int64_t{64} << 20;
/// The limit for reading the file `latest`; a larger one is damaged.
inline constexpr std::int64_t small_file_bytes = 64 * 1024;

/// "step-00000012". Throws InvalidArgument on a negative step, as the functions below do on invalid
/// arguments.
std::string step_name(std::int64_t step);
/// "shard-00001-of-00003.h5"
std::string shard_name(int rank, int world);
/// The step of a folder named by step_name(); -1 for every other name.
std::int64_t parse_step_name(std::string_view name);

/// The manifest's record of a file.
struct FileRecord {
  std::string name;
  std::int64_t bytes = 0;
  /// The bytes from the start that `blocks` cover; the rest (a shard's digest table) is a function of them.
  std::int64_t digested_bytes = 0;
  std::vector<std::uint64_t> blocks;  ///< digest of each 4 MiB block (digest.h)
  friend bool operator==(const FileRecord&, const FileRecord&) = default;
};

/// One rank's file. Each rank sends its record to rank 0 as text.
struct ShardRecord {
  int rank = 0;
  FileRecord file;
  std::vector<std::int64_t> offsets;        ///< byte offset of each section's dataset; -1: no elements here
  std::vector<std::int64_t> array_offsets;  ///< byte offset of each array's dataset; -1: none
  friend bool operator==(const ShardRecord&, const ShardRecord&) = default;
};
std::string to_text(const ShardRecord& record);
/// The inverse of to_text. Throws CheckpointError naming `origin` and the key.
ShardRecord shard_record_from_text(std::string_view text, std::string_view origin);

/// The state besides tensors that a run needs to continue. Texts are JSON objects, "{}" when empty; they are
/// kept as given, except for white space.
struct RunState {
  std::int64_t step = 0;     ///< completed steps, skipped ones included
  std::int64_t applied = 0;  ///< updates applied (Adam's bias correction counts them)
  std::int64_t samples = 0;  ///< global samples consumed; the next step starts at this number
  std::int64_t tokens = 0;   ///< tokens consumed
  std::int64_t skipped = 0;  ///< consecutive skipped steps at the end; 0: the last step was applied
  bool in_doubt = false;     ///< the last loss or gradient computed from these weights was not finite
  std::string random = "{}";
  std::string loss_scaler = "{}";
  std::string gradient_noise = "{}";  ///< the averages of the noise over steps; not written when empty
  std::string schedule = "{}";
  std::string optimizer = "{}";
  std::string config = "{}";  ///< the effective configuration
  std::string user = "{}";    ///< the caller's own JSON; at most user_limit bytes
  friend bool operator==(const RunState&, const RunState&) = default;
};
inline constexpr std::size_t user_limit = 1 << 20;

/// The frozen weights that a checkpoint of adapters alone does not store.
struct BaseRecord {
  std::string folder;  ///< the checkpoint from which they were loaded; empty: drawn from a seed
  std::string dtype;   ///< in which they were held, "bf16"
  std::string digest;  ///< of their values in that dtype, 32 hexadecimal digits; empty: unknown
  /// The seed from which the base was drawn, if so; nullopt also for earlier versions, which did not write
  /// it.
  std::optional<std::int64_t> seed = {};
  friend bool operator==(const BaseRecord&, const BaseRecord&) = default;
};

struct Manifest {
  std::int64_t version = format_version;  ///< of the text from which it was read
  std::int64_t minor = 0;
  std::string library;        ///< version of Tranche
  std::string hdf5;           ///< version of the HDF5 library
  std::int64_t sequence = 0;  ///< counts saves into a folder; the largest is the newest
  std::int64_t created = 0;   ///< seconds since 1970, UTC; for people
  /// The run that saved it, last, after the runs from which it descends, oldest first. A run is its
  /// RunFolder's number. Empty for versions without lineages.
  std::vector<std::uint64_t> lineage;
  /// For each run in `lineage`, RunState::applied of the checkpoint from which the run continued: 0 for a run
  /// from scratch or if unknown. Empty when the version that saved did not write it.
  std::vector<std::int64_t> branches;
  int stage = 0;            ///< of the run that saved
  std::string numerics;     ///< its numerics_fingerprint
  int reduction_group = 1;  ///< of the run's sums over ranks
  Layout layout;
  std::vector<ShardRecord> shards;     ///< by rank
  FileRecord master;                   ///< model.h5
  std::vector<FileRecord> companions;  ///< files in companion_folder
  RunState run;
  std::optional<BaseRecord> base;  ///< nullopt if the checkpoint holds the whole model
  friend bool operator==(const Manifest&, const Manifest&) = default;

  std::int64_t bytes() const;  ///< total bytes of all files that it lists
};

/// The manifest's text in the newest version, including its own digest. Throws InvalidArgument when a text of
/// `run` is not a JSON object or is too large.
std::string to_text(const Manifest& manifest);
/// The inverse. It is strict: a wrong digest, an unknown version, a missing key, a wrong type or an
/// inconsistent layout throws CheckpointError naming `origin` (the file) and the key. Unknown keys are
/// ignored, so that later versions can add some.
Manifest manifest_from_text(std::string_view text, std::string_view origin);

/// The version of the linked HDF5 library, "1.10.8".
std::string hdf5_version();

}  // namespace tranche::checkpoint
