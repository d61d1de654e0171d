#pragma once
/// The contents of a checkpoint and the ranks that store them: tensors, flat buffers, sections, arrays.

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "partition/box.h"
#include "partition/flat_layout.h"
#include "partition/slices.h"
#include "tranche/core/dtype.h"
#include "tranche/core/shape.h"
#include "tranche/partition/mesh.h"

namespace tranche::checkpoint {

using detail::Box;
using detail::CommonRun;
using detail::Slice;
using detail::whole_box;

/// One tensor of a unit.
struct TensorRecord {
  std::string name;
  Shape shape;                       ///< of the whole tensor, whichever parts ranks hold
  bool frozen = false;               ///< stored once, in its own dtype, without optimizer state
  std::vector<std::string> aliases;  ///< other names of the same elements (tied tensors), stored once
  int state_class = 0;               ///< the state class of its buffer
  friend bool operator==(const TensorRecord&, const TensorRecord&) = default;
};

/// The index of a kind of buffers and sections. Trainable tensors of one state class have the same optimizer
/// states, and their own buffers and sections; frozen tensors have no class and form kind 1.
constexpr std::size_t kind_of_buffer(bool frozen, int state_class) {
  return frozen ? 1 : static_cast<std::size_t>(state_class == 0 ? 0 : state_class + 1);
}
inline constexpr int most_state_classes = 16;

/// Rank `rank` stores elements [begin, end) of a flat buffer.
struct StoredRange {
  int rank = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t first = 0;  ///< position of `begin` in the rank's datasets; Layout::place() sets it
  detail::ElementRange range() const { return {begin, end}; }
  friend bool operator==(const StoredRange&, const StoredRange&) = default;
};

/// The part of a tensor that a flat buffer holds.
struct PlacedTensor {
  int tensor = 0;  ///< index in its unit
  Box box;
  std::int64_t offset = 0;  ///< of the box's first element in the flat buffer; row-major
  friend bool operator==(const PlacedTensor&, const PlacedTensor&) = default;
};

/// The contents of one flat buffer and the ranks that store them: ranges in ascending order, without gaps.
struct InstanceRecord {
  std::vector<PlacedTensor> tensors;  ///< in ascending order, with padding between and after them
  std::vector<StoredRange> ranges;
  std::int64_t elements() const { return ranges.empty() ? 0 : ranges.back().end; }
  friend bool operator==(const InstanceRecord&, const InstanceRecord&) = default;
};

/// A flat buffer of a unit. Ranks that hold different boxes of its tensors have different instances; together
/// the instances of a unit's buffers hold each element once. A buffer without elements has no instance.
struct BufferRecord {
  std::string name;  ///< "trainable", "frozen"
  bool frozen = false;
  std::vector<std::string> group;  ///< the axes of the mesh over which an instance is sharded
  std::vector<InstanceRecord> instances;
  int state_class = 0;
  std::size_t kind_of() const { return kind_of_buffer(frozen, state_class); }
  friend bool operator==(const BufferRecord&, const BufferRecord&) = default;
};

struct UnitRecord {
  std::string name;
  int uses_per_micro_batch = 1;
  std::vector<TensorRecord> tensors;  ///< in declared order
  std::vector<BufferRecord> buffers;
  friend bool operator==(const UnitRecord&, const UnitRecord&) = default;
};

/// The format of elements that are stored in blocks, such as quantised ones with their scale. A block holds
/// consecutive elements of the whole tensor, starting at a multiple of its size.
struct BlockFormat {
  std::string name;           ///< empty: plain elements
  std::int64_t elements = 1;  ///< per block
  std::int64_t bytes = 0;     ///< per block
  friend bool operator==(const BlockFormat&, const BlockFormat&) = default;
};

/// The block format of a dtype, under its name; plain for other dtypes.
BlockFormat block_format_of(DataType dtype);
/// The dtype of such elements in a section: uint8 for blocks.
constexpr DataType stored_as(DataType dtype) {
  return is_block(dtype) ? DataType::uint8 : dtype;
}
/// The dtype of a section's elements: the block dtype for the formats above, otherwise `stored`.
DataType element_type(DataType stored, const BlockFormat& block);

/// One quantity (weights, exp_avg ...) of every element of the frozen buffers, or of a state class's
/// trainable ones: one HDF5 dataset in each rank's file, in which the rank's ranges are contiguous.
struct SectionRecord {
  std::string dataset;                 ///< path in the file: "weights", "frozen", "state/exp_avg"
  std::string kind;                    ///< "weight", or the name of an optimizer state
  DataType dtype = DataType::float32;  ///< uint8 where elements are stored in blocks
  bool frozen = false;
  BlockFormat block = {};
  int state_class = 0;
  std::size_t kind_of() const { return kind_of_buffer(frozen, state_class); }
  /// The bytes of so many elements, in whole blocks.
  std::int64_t bytes(std::int64_t elements) const {
    return block.name.empty() ? elements * size_of(dtype) : elements / block.elements * block.bytes;
  }
  friend bool operator==(const SectionRecord&, const SectionRecord&) = default;
};

/// An array of the user's program: either global, with ranges stored by ranks, or `per_rank`, with one array
/// of its own shape on each rank. Each rank with elements has a dataset for it in its file.
struct ArrayRecord {
  std::string name;
  DataType dtype = DataType::float32;  ///< any
  bool per_rank = false;
  std::vector<Shape> shapes;        ///< global: one; per_rank: one for each rank
  std::vector<StoredRange> ranges;  ///< global: ascending, without gaps, at most one per rank; per_rank: none
  std::string dataset() const { return "arrays/" + name; }
  const Shape& shape(int rank) const { return shapes.at(per_rank ? static_cast<std::size_t>(rank) : 0); }
  /// The elements of shape(rank) that `rank` stores.
  detail::ElementRange range(int rank) const;
  friend bool operator==(const ArrayRecord&, const ArrayRecord&) = default;
};
/// Rank r stores elements [cuts[r], cuts[r + 1]).
std::vector<StoredRange> ranges_between(const std::vector<std::int64_t>& cuts);

/// A mesh axis of the run that saved, by name, so that a reader need not know it.
struct AxisRecord {
  std::string name;
  int size = 1;
  friend bool operator==(const AxisRecord&, const AxisRecord&) = default;
};

/// The contents of a checkpoint and their places. It is equal on all ranks, and each rank can compute it,
/// except for arrays.
struct Layout {
  int world = 1;                 ///< number of ranks, each with a file
  std::vector<AxisRecord> mesh;  ///< axes above 1, slowest first
  std::vector<UnitRecord> units;
  std::vector<SectionRecord> sections;
  std::vector<ArrayRecord> arrays;
  /// The number of elements in each rank's datasets, by kind_of_buffer().
  std::vector<std::vector<std::int64_t>> file_elements;

  /// Describes a fault of an inconsistent layout; empty if each element of each tensor is stored exactly
  /// once, blocks are whole, and no sum overflows. Its time depends on the number of records, not of
  /// elements.
  std::string fault() const;
  /// Computes the positions of ranges in the files. The layout must have no fault.
  void place();
  /// The number of elements of `section` in `rank`'s file.
  std::int64_t section_elements(int section, int rank) const;
  /// The section that holds `kind` of frozen tensors, or of a class's trainable ones; -1: there is none.
  int find_section(std::string_view kind, bool frozen, int state_class = 0) const;
  /// The number of classes of trainable tensors; at least 1.
  int state_classes() const;
  /// The size of an axis of the mesh; 1 if it is not in `mesh`.
  int axis(MeshAxis axis) const;
  /// "6 ranks (replicate=2, shard=3)"; the mesh is left out if all ranks shard.
  std::string saved_by() const;
  friend bool operator==(const Layout&, const Layout&) = default;
};

/// A tensor, a unit and a state kind as the caller describes them, before the layout is computed.
struct TensorDescription {
  std::string name;
  Shape shape;
  bool frozen = false;
  std::vector<std::string> aliases;
  int state_class = 0;
  std::vector<int> stages = {}, uses = {};  ///< as in detail::TensorFacts
  detail::TensorCut cut = {};
};
struct UnitDescription {
  std::string name;
  int uses_per_micro_batch = 1;
  std::vector<TensorDescription> tensors;
};
struct StateDescription {
  std::string name;
  DataType dtype = DataType::float32;
  int state_class = 0;
};

/// Why checkpoints cannot hold a tensor, alias, array or optimizer state of this name, as the end of a
/// sentence about it ("is not UTF-8 ..."); empty if they can.
std::string fault_of_name(std::string_view name);
/// A name as messages show it: bytes that a terminal cannot show are escaped, and a long name is cut.
std::string shown_name(std::string_view name);
/// Throws InvalidArgument on names that no checkpoint can hold: those with a fault_of_name(), names that are
/// used twice (aliases included), a name that begins with another one and '/' (HDF5 would need a dataset and
/// a group of one name), a state named "weight", and units whose names are not UTF-8.
void require_names(const std::vector<UnitDescription>& units, const std::vector<StateDescription>& states);

/// Lays units out over the ranks of `mesh` as FlatLayout does (a unit's state classes and its frozen tensors
/// separately, each in declared order), sharded over the ranks that hold equal values. Replicas of a shard
/// store one part each, so that each element is stored once. `weight_dtype` is that of the trainable tensors'
/// stored weights (the master weights), `frozen_dtype` that of frozen ones. Throws InvalidArgument like
/// require_names(), and on dtypes other than fp32, bf16 and fp16 (or, for states, block formats).
Layout make_layout(const std::vector<UnitDescription>& units, const std::vector<StateDescription>& states,
                   DataType weight_dtype, DataType frozen_dtype, const Mesh& mesh);
/// The same over a single axis.
inline Layout make_layout(const std::vector<UnitDescription>& units,
                          const std::vector<StateDescription>& states, DataType weight_dtype,
                          DataType frozen_dtype, int world) {
  return make_layout(units, states, weight_dtype, frozen_dtype, Mesh(world));
}

/// Adds the program's own arrays. Throws InvalidArgument on names as make_layout() does, and on ranges or
/// shapes that do not match the layout's ranks.
void add_arrays(Layout& layout, std::vector<ArrayRecord> arrays);

}  // namespace tranche::checkpoint
