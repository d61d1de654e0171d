#pragma once
/// The parts of a checkpoint: names, the layout of what is stored, the manifest.
/// docs/reference/checkpoint-format.md is the specification, byte for byte; this is its image in C++.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "partition/flat_layout.h"
#include "tranche/core/dtype.h"
#include "tranche/core/shape.h"

namespace tranche::checkpoint {

inline constexpr std::int64_t format_version = 1;
inline constexpr std::string_view manifest_name = "manifest.json";
inline constexpr std::string_view master_name = "model.h5";
inline constexpr std::string_view latest_name = "latest";
/// Upper bound for reading the file `latest`; a larger one is damaged.
inline constexpr std::int64_t small_file_bytes = 64 * 1024;

/// "step-00000012". Throws InvalidArgument on a negative step, as do the functions below on what cannot be.
std::string step_name(std::int64_t step);
/// "shard-00001-of-00003.h5"
std::string shard_name(int rank, int world);
/// The step of a folder named as step_name() does it, -1 for every other name.
std::int64_t parse_step_name(std::string_view name);

/// One tensor of a unit.
struct TensorRecord {
  std::string name;
  Shape shape;
  bool frozen = false;               ///< stored once, in its own dtype, without optimizer state
  std::vector<std::string> aliases;  ///< other names of the same elements (tied tensors), stored once
  std::int64_t offset = 0;           ///< first element in its unit's trainable or frozen flat buffer
  friend bool operator==(const TensorRecord&, const TensorRecord&) = default;
};

/// A unit and its two flat buffers. Rank r stores elements [cuts[r], cuts[r + 1]) of each.
struct UnitRecord {
  std::string name;
  int uses_per_micro_batch = 1;
  std::vector<TensorRecord> tensors;         ///< in declared order
  std::vector<std::int64_t> trainable_cuts;  ///< ranks + 1 of them, from 0 to the padded elements
  std::vector<std::int64_t> frozen_cuts;     ///< likewise; all 0 when nothing is frozen
  const std::vector<std::int64_t>& cuts(bool frozen) const { return frozen ? frozen_cuts : trainable_cuts; }
  friend bool operator==(const UnitRecord&, const UnitRecord&) = default;
};

/// One quantity (weights, exp_avg ...) of every element of the trainable or of the frozen buffers: one HDF5
/// dataset in each rank's file, in which the units' shards follow each other without gaps.
struct SectionRecord {
  std::string dataset;  ///< path in the file: "weights", "frozen", "state/exp_avg"
  std::string kind;     ///< "weight", or the name of an optimizer state
  DataType dtype = DataType::float32;
  bool frozen = false;
  friend bool operator==(const SectionRecord&, const SectionRecord&) = default;
};

/// An array of the user's program: either global, of which rank r stores elements [cuts[r], cuts[r + 1]), or
/// `per_rank`: each rank stores one of its own shape. A dataset of its own in the file of each rank that has
/// elements of it.
struct ArrayRecord {
  std::string name;
  DataType dtype = DataType::float32;  ///< any
  bool per_rank = false;
  std::vector<Shape> shapes;       ///< global: one; per_rank: by rank
  std::vector<std::int64_t> cuts;  ///< global: ranks + 1 of them; per_rank: none
  std::string dataset() const { return "arrays/" + name; }
  const Shape& shape(int rank) const { return shapes.at(per_rank ? static_cast<std::size_t>(rank) : 0); }
  /// The elements of shape(rank) that `rank` stores.
  detail::ElementRange range(int rank) const;
  friend bool operator==(const ArrayRecord&, const ArrayRecord&) = default;
};

/// The contents of a checkpoint and their places; equal on all ranks and, but for arrays, computable by each.
struct Layout {
  int world = 1;
  std::vector<UnitRecord> units;
  std::vector<SectionRecord> sections;
  std::vector<ArrayRecord> arrays;

  /// Elements of `section` in `rank`'s file.
  std::int64_t section_elements(int section, int rank) const;
  /// First element of `unit`'s shard in `rank`'s dataset of `section`.
  std::int64_t unit_begin(int section, int unit, int rank) const;
  /// The part of `unit` that `rank` stores in `section`, as a range of the unit's flat buffer.
  detail::ElementRange shard_range(int section, int unit, int rank) const;
  /// The section that holds `kind` of trainable or frozen tensors; -1 when there is none.
  int find_section(std::string_view kind, bool frozen) const;
  friend bool operator==(const Layout&, const Layout&) = default;
};

/// A tensor, a unit and a state kind as the caller knows them, before anything is laid out.
struct TensorDescription {
  std::string name;
  Shape shape;
  bool frozen = false;
  std::vector<std::string> aliases;
};
struct UnitDescription {
  std::string name;
  int uses_per_micro_batch = 1;
  std::vector<TensorDescription> tensors;
};
struct StateDescription {
  std::string name;
  DataType dtype = DataType::float32;
};

/// Lays units out over `world` ranks as FlatLayout does (trainable and frozen tensors of a unit apart, each
/// in declared order). `weight_dtype` is that of the trainable tensors' stored weights (the master weights),
/// `frozen_dtype` that of frozen ones. Throws InvalidArgument on names used twice (aliases included), empty
/// or such as HDF5 cannot show ("a//b", "." ...), a state named "weight", dtypes that are not fp32, bf16 or
/// fp16.
Layout make_layout(const std::vector<UnitDescription>& units, const std::vector<StateDescription>& states,
                   DataType weight_dtype, DataType frozen_dtype, int world);

/// Adds the program's own arrays. Throws InvalidArgument on names as make_layout() does, and on cuts or
/// shapes that do not fit the layout's ranks.
void add_arrays(Layout& layout, std::vector<ArrayRecord> arrays);

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
  std::string random = "{}";
  std::string loss_scaler = "{}";
  std::string schedule = "{}";
  std::string optimizer = "{}";
  std::string config = "{}";  ///< the effective configuration
  std::string user = "{}";    ///< the caller's own; at most user_limit bytes
  friend bool operator==(const RunState&, const RunState&) = default;
};
inline constexpr std::size_t user_limit = 1 << 20;

struct Manifest {
  std::int64_t version = format_version;
  std::string library;        ///< version of Tranche
  std::string hdf5;           ///< version of the HDF5 library
  std::int64_t sequence = 0;  ///< of saves into a folder, not of tokens: the largest is the newest
  std::int64_t created = 0;   ///< seconds since 1970, UTC; for people
  /// The run that saved it, last, and before it those that it went on from, the first one first; a run is
  /// its RunFolder's number. Empty: of a version that knew none.
  std::vector<std::uint64_t> lineage;
  int stage = 0;            ///< of the run that saved
  std::string numerics;     ///< its numerics_fingerprint
  int reduction_group = 1;  ///< of its sums over ranks
  Layout layout;
  std::vector<ShardRecord> shards;  ///< by rank
  FileRecord master;                ///< model.h5
  RunState run;
  friend bool operator==(const Manifest&, const Manifest&) = default;

  std::int64_t bytes() const;  ///< of all files that it lists
};

/// The manifest's text, its own digest included. Throws InvalidArgument when a text of `run` is not a JSON
/// object or is too large.
std::string to_text(const Manifest& manifest);
/// The reverse; strict: a wrong digest, an unknown version, a missing key, a wrong type or a layout that
/// contradicts itself is a CheckpointError naming `origin` (the file) and the key. Keys that it does not know
/// are left alone, so that later versions can add some.
Manifest manifest_from_text(std::string_view text, std::string_view origin);

/// Version of the HDF5 library this was linked with, "1.10.8".
std::string hdf5_version();

}  // namespace tranche::checkpoint
