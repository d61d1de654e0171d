#include "checkpoint/layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "core/json.h"
#include "partition/placement.h"
#include "tranche/core/error.h"

namespace tranche::checkpoint {

using detail::ElementRange;

namespace {

/// The most elements over all units of a rank: multiplied by the widest element, they fit an int64 number of
/// bytes.
constexpr std::int64_t most_elements = INT64_MAX / 8;
/// The most pairs of boxes of one tensor that are compared, over all tensors.
constexpr std::int64_t most_pairs = std::int64_t{1} << 23;

/// The longest name, in bytes.
constexpr std::size_t longest_name = 1024;

/// Names that share one group of an HDF5 file. They must outlive this.
class Names {
 public:
  /// Throws InvalidArgument if `name` cannot be added.
  void claim(std::string_view what, std::string_view name) {
    if (const std::string fault = fault_of_name(name); !fault.empty()) {
      throw InvalidArgument(fmt::format("{} '{}' {}", what, shown_name(name), fault));
    }
    if (!names_.insert(name).second) throw InvalidArgument(fmt::format("{} '{}' is there twice", what, name));
    if (const auto inner = groups_.find(name); inner != groups_.end()) refuse(what, name, inner->second);
    for (std::size_t end = name.find('/'); end != std::string_view::npos; end = name.find('/', end + 1)) {
      const std::string_view group = name.substr(0, end);
      if (names_.contains(group)) refuse(what, group, name);
      groups_.emplace(group, name);
    }
  }

 private:
  [[noreturn]] static void refuse(std::string_view what, std::string_view outer, std::string_view inner) {
    throw InvalidArgument(
        fmt::format("the {} names '{}' and '{}' do not fit into one HDF5 file, where '{}' would be both a "
                    "dataset and a group; rename one of them",
                    what, outer, inner, outer));
  }
  std::unordered_set<std::string_view> names_;
  std::unordered_map<std::string_view, std::string_view> groups_;  ///< a name in each group
};

void require_storable(std::string_view what, DataType dtype) {
  if (dtype != DataType::float32 && dtype != DataType::bfloat16 && dtype != DataType::float16) {
    throw InvalidArgument(
        fmt::format("{} of {}: checkpoints store fp32, bf16 and fp16", what, name_of(dtype)));
  }
}

/// Describes the first range that does not continue the previous one, starting from 0; empty when there is
/// none.
std::string fault_of(const std::vector<StoredRange>& ranges, int world) {
  std::int64_t end = 0;
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    const StoredRange& range = ranges[i];
    if (range.rank < 0 || range.rank >= world) {
      return fmt::format("range {} is stored by rank {} of {}", i, range.rank, world);
    }
    if (range.begin != end || range.end <= range.begin) {
      return fmt::format("range {} holds elements {} to {}, but has to begin at element {} and not be empty",
                         i, range.begin, range.end, end);
    }
    end = range.end;
  }
  return {};
}

std::string array_fault(const ArrayRecord& array, int world) {
  if (array.shapes.size() != (array.per_rank ? static_cast<std::size_t>(world) : 1)) {
    return fmt::format("it has {} shapes", array.shapes.size());
  }
  if (array.per_rank) return array.ranges.empty() ? "" : "it is stored per rank, so it cannot have ranges";
  if (std::string fault = fault_of(array.ranges, world); !fault.empty()) return fault;
  const std::int64_t end = array.ranges.empty() ? 0 : array.ranges.back().end;
  if (end != array.shapes[0].elements()) {
    return fmt::format("its ranges end at element {} of {}", end, array.shapes[0].elements());
  }
  std::unordered_set<int> ranks;
  for (const StoredRange& range : array.ranges) {
    if (!ranks.insert(range.rank).second) return fmt::format("rank {} stores two ranges of it", range.rank);
  }
  return {};
}

/// Finds the faults of one unit.
class UnitCheck {
 public:
  UnitCheck(const Layout& layout, const UnitRecord& unit, std::int64_t& pairs)
      : layout_(layout), unit_(unit), pairs_(pairs), boxes_(unit.tensors.size()) {}

  std::string fault() {
    for (const BufferRecord& buffer : unit_.buffers) {
      for (const std::string& name : buffer.group) {
        if (std::none_of(layout_.mesh.begin(), layout_.mesh.end(),
                         [&](const AxisRecord& axis) { return axis.name == name; })) {
          return fmt::format("buffer '{}' is spread over '{}', which is no axis of the mesh", buffer.name,
                             name);
        }
      }
      block_ = 1;
      for (const SectionRecord& section : layout_.sections) {
        if (section.kind_of() == buffer.kind_of()) block_ = std::max(block_, section.block.elements);
      }
      for (std::size_t i = 0; i < buffer.instances.size(); ++i) {
        const std::string fault = fault_of_instance(buffer, buffer.instances[i]);
        if (!fault.empty()) return fmt::format("buffer '{}', instance {}: {}", buffer.name, i, fault);
      }
    }
    for (std::size_t t = 0; t < unit_.tensors.size(); ++t) {
      if (std::string fault = fault_of_tensor(unit_.tensors[t], boxes_[t]); !fault.empty()) return fault;
    }
    return {};
  }

 private:
  std::string fault_of_instance(const BufferRecord& buffer, const InstanceRecord& instance) {
    if (std::string fault = fault_of(instance.ranges, layout_.world); !fault.empty()) return fault;
    if (block_ > 1) {
      for (const StoredRange& range : instance.ranges) {
        if (range.begin % block_ == 0 && range.end % block_ == 0) continue;
        return fmt::format("elements {} to {} are not whole blocks of {}; {}", range.begin, range.end, block_,
                           conversion(buffer.frozen));
      }
    }
    std::int64_t end = 0;
    for (const PlacedTensor& placed : instance.tensors) {
      if (placed.tensor < 0 || static_cast<std::size_t>(placed.tensor) >= unit_.tensors.size()) {
        return fmt::format("there is no tensor {}", placed.tensor);
      }
      const TensorRecord& tensor = unit_.tensors[static_cast<std::size_t>(placed.tensor)];
      if (tensor.frozen != buffer.frozen) {
        return fmt::format("tensor {} is {}", tensor.name, tensor.frozen ? "frozen" : "trainable");
      }
      if (tensor.state_class != buffer.state_class) {
        return fmt::format("tensor {} is of state class {}", tensor.name, tensor.state_class);
      }
      if (!lies_within(placed.box, tensor.shape)) {
        return fmt::format("a box of tensor {} does not lie in its shape {}", tensor.name,
                           tensor.shape.to_string());
      }
      if (block_ > 1 &&
          (placed.offset % block_ != 0 || !holds_whole_blocks(placed.box, tensor.shape, block_))) {
        return fmt::format("box {} of tensor {}, at element {}, is not whole blocks of {}; {}",
                           to_string(placed.box), tensor.name, placed.offset, block_,
                           conversion(buffer.frozen));
      }
      const std::int64_t elements = elements_of(placed.box);
      if (placed.offset < end || elements > instance.elements() - placed.offset) {
        return fmt::format("tensor {} begins at element {}, where it overlaps another or leaves the buffer",
                           tensor.name, placed.offset);
      }
      // The next tensor begins with a block. If this exceeds the buffer, the next check finds it.
      end = round_up(placed.offset + elements, block_);
      boxes_[static_cast<std::size_t>(placed.tensor)].push_back(&placed.box);
    }
    return {};
  }

  std::string fault_of_tensor(const TensorRecord& tensor, const std::vector<const Box*>& boxes) {
    std::int64_t elements = 0;
    for (const Box* box : boxes) {
      if (elements_of(*box) > tensor.shape.elements() - elements) {
        return fmt::format("tensor {} is stored more than once", tensor.name);
      }
      elements += elements_of(*box);
    }
    if (elements != tensor.shape.elements()) {
      return fmt::format("tensor {}: only {} of {} elements are stored", tensor.name, elements,
                         tensor.shape.elements());
    }
    for (std::size_t a = 0; a < boxes.size(); ++a) {
      for (std::size_t b = 0; b < a; ++b) {
        if (++pairs_ > most_pairs) return "its tensors are cut into more boxes than are read";
        if (!meet(*boxes[a], *boxes[b])) continue;
        return fmt::format("tensor {}: boxes {} and {} have elements in common", tensor.name,
                           to_string(*boxes[b]), to_string(*boxes[a]));
      }
    }
    return {};
  }

  std::string conversion(bool frozen) const {
    for (const SectionRecord& section : layout_.sections) {
      if (section.frozen != frozen || section.block.name.empty()) continue;
      return fmt::format("to cut {} elsewhere, convert it from {} to {} first", section.kind,
                         section.block.name, name_of(DataType::float32));
    }
    return {};
  }

  const Layout& layout_;
  const UnitRecord& unit_;
  std::int64_t& pairs_;
  std::vector<std::vector<const Box*>> boxes_;  ///< by tensor
  std::int64_t block_ = 1;
};

/// The axes of size above 1, slowest first.
std::vector<MeshAxis> axes_of(const Mesh& mesh) {
  std::vector<std::pair<int, MeshAxis>> strides;
  for (int a = 0; a < mesh_axes; ++a) {
    const auto axis = static_cast<MeshAxis>(a);
    if (mesh.size(axis) > 1) strides.emplace_back(mesh.group({axis}, 0)[1], axis);
  }
  std::sort(strides.rbegin(), strides.rend());
  std::vector<MeshAxis> axes;
  for (const auto& [stride, axis] : strides) axes.push_back(axis);
  return axes;
}

/// Describes the contents of a buffer's part and the ranks that store it. Tensors are numbered from the
/// unit's first one on.
InstanceRecord instance_of(const detail::Placement& placement, int number, int part, int first_tensor) {
  InstanceRecord instance;
  const detail::Placement::Buffer& buffer = placement.buffer(number);
  for (std::size_t i = 0; i < buffer.tensors.size(); ++i) {
    const int tensor = buffer.tensors[i];
    instance.tensors.push_back({tensor - first_tensor, placement.box(tensor, part),
                                buffer.layout(part).tensor_offset(static_cast<int>(i))});
  }
  for (const int rank : placement.owners(number, part)) {
    const ElementRange owned = placement.owned(number, rank);
    if (!owned.empty()) instance.ranges.push_back({rank, owned.begin, owned.end, 0});
  }
  return instance;
}

}  // namespace

std::string fault_of_name(std::string_view name) {
  if (name.size() > longest_name) {
    return fmt::format("has {} bytes; names in a checkpoint have at most {}", name.size(), longest_name);
  }
  if (name.find('\0') != std::string_view::npos) return "has a NUL byte, at which HDF5 would end it";
  if (!tranche::detail::is_utf8(name)) return "is not UTF-8, as names in a checkpoint are";
  for (std::size_t begin = 0; begin <= name.size();) {
    const std::size_t end = std::min(name.find('/', begin), name.size());
    const std::string_view part = name.substr(begin, end - begin);
    // In HDF5 paths '/' separates names, and "." means "here".
    if (part.empty() || part == "." || part == "..") {
      return "cannot be shown as a path in an HDF5 file: parts between '/' must not be empty, '.' or '..'";
    }
    begin = end + 1;
  }
  return {};
}

std::string shown_name(std::string_view name) {
  constexpr std::size_t most = 64;
  const bool text = tranche::detail::is_utf8(name);
  std::string shown;
  for (const char c : name.substr(0, most)) {
    const auto byte = static_cast<unsigned char>(c);
    const bool plain = byte >= 0x20 && byte != 0x7f && (byte < 0x80 || (text && name.size() <= most));
    shown += plain ? std::string(1, c) : fmt::format("\\x{:02x}", byte);
  }
  return name.size() > most ? shown + "..." : shown;
}

void require_names(const std::vector<UnitDescription>& units, const std::vector<StateDescription>& states) {
  Names names;
  std::unordered_set<std::string_view> unit_names;
  for (const UnitDescription& unit : units) {
    if (!tranche::detail::is_utf8(unit.name)) {
      throw InvalidArgument(
          fmt::format("unit '{}' is not UTF-8, as names in a checkpoint are", shown_name(unit.name)));
    }
    if (!unit_names.insert(unit.name).second)
      throw InvalidArgument(fmt::format("unit '{}' is there twice", unit.name));
    for (const TensorDescription& tensor : unit.tensors) {
      names.claim("tensor", tensor.name);
      for (const std::string& alias : tensor.aliases) names.claim("alias", alias);
    }
  }
  std::map<int, Names> of_class;
  for (const StateDescription& state : states) {
    const auto [of, first] = of_class.try_emplace(state.state_class);
    if (first) of->second.claim("optimizer state", "weight");
    of->second.claim("optimizer state", state.name);
  }
}

BlockFormat block_format_of(DataType dtype) {
  if (!is_block(dtype)) return {};
  return {std::string(name_of(dtype)), block8_elements, block8_bytes};
}

DataType element_type(DataType stored, const BlockFormat& block) {
  for (const DataType dtype : {DataType::block8, DataType::block8_unsigned}) {
    if (block == block_format_of(dtype)) return dtype;
  }
  return stored;
}

detail::ElementRange ArrayRecord::range(int rank) const {
  if (per_rank) return {0, shape(rank).elements()};
  const auto found = std::find_if(ranges.begin(), ranges.end(),
                                  [rank](const StoredRange& range) { return range.rank == rank; });
  return found == ranges.end() ? ElementRange{} : found->range();
}

std::vector<StoredRange> ranges_between(const std::vector<std::int64_t>& cuts) {
  std::vector<StoredRange> ranges;
  for (std::size_t r = 0; r + 1 < cuts.size(); ++r) {
    if (cuts[r] != cuts[r + 1]) ranges.push_back({static_cast<int>(r), cuts[r], cuts[r + 1], 0});
  }
  return ranges;
}

std::string Layout::fault() const {
  std::int64_t ranks = 1;
  for (const AxisRecord& axis : mesh) {
    if (axis.size < 1 || ranks > world / axis.size)
      return "the sizes of its mesh do not multiply to its number of ranks";
    ranks *= axis.size;
  }
  if (ranks != world) return "the sizes of its mesh do not multiply to its number of ranks";
  for (const SectionRecord& a : sections) {
    for (const SectionRecord& b : sections) {
      const std::int64_t large = std::max(a.block.elements, b.block.elements);
      if (a.kind_of() == b.kind_of() && (large % a.block.elements != 0 || large % b.block.elements != 0)) {
        return fmt::format("sections {} and {} have blocks of {} and {}, of which none divides the other",
                           a.dataset, b.dataset, a.block.elements, b.block.elements);
      }
    }
  }
  std::int64_t pairs = 0;
  std::vector<std::int64_t> sums(1 + most_state_classes);
  for (const UnitRecord& unit : units) {
    for (const BufferRecord& buffer : unit.buffers) {
      std::int64_t& sum = sums.at(buffer.kind_of());
      for (const InstanceRecord& instance : buffer.instances) {
        if (instance.elements() < 0 || instance.elements() > most_elements - sum) {
          return fmt::format("its units hold more than {} elements", most_elements);
        }
        sum += instance.elements();
      }
    }
    if (std::string fault = UnitCheck(*this, unit, pairs).fault(); !fault.empty()) {
      return fmt::format("unit '{}': {}", unit.name, fault);
    }
  }
  for (const ArrayRecord& array : arrays) {
    if (std::string fault = array_fault(array, world); !fault.empty()) {
      return fmt::format("array '{}': {}", array.name, fault);
    }
  }
  return {};
}

void Layout::place() {
  const auto kinds = static_cast<std::size_t>(1 + state_classes());
  file_elements.assign(kinds, std::vector<std::int64_t>(static_cast<std::size_t>(world)));
  for (UnitRecord& unit : units) {
    for (BufferRecord& buffer : unit.buffers) {
      for (InstanceRecord& instance : buffer.instances) {
        for (StoredRange& range : instance.ranges) {
          std::int64_t& next = file_elements[buffer.kind_of()][static_cast<std::size_t>(range.rank)];
          range.first = next;
          next += range.end - range.begin;
        }
      }
    }
  }
}

std::int64_t Layout::section_elements(int section, int rank) const {
  const std::size_t kind = sections.at(static_cast<std::size_t>(section)).kind_of();
  return file_elements.at(kind).at(static_cast<std::size_t>(rank));
}

int Layout::find_section(std::string_view kind, bool frozen, int state_class) const {
  const std::size_t of = kind_of_buffer(frozen, state_class);
  for (std::size_t s = 0; s < sections.size(); ++s) {
    if (sections[s].kind == kind && sections[s].kind_of() == of) return static_cast<int>(s);
  }
  return -1;
}

int Layout::state_classes() const {
  int last = 0;
  for (const SectionRecord& section : sections) last = std::max(last, section.state_class);
  for (const UnitRecord& unit : units) {
    for (const BufferRecord& buffer : unit.buffers) last = std::max(last, buffer.state_class);
  }
  return last + 1;
}

int Layout::axis(MeshAxis axis) const {
  for (const AxisRecord& record : mesh) {
    if (record.name == name_of(axis)) return record.size;
  }
  return 1;
}

std::string Layout::saved_by() const {
  std::string axes;
  for (const AxisRecord& record : mesh) {
    axes += fmt::format("{}{}={}", axes.empty() ? "" : ", ", record.name, record.size);
  }
  const bool all_shard = mesh.empty() || (mesh.size() == 1 && mesh[0].name == name_of(MeshAxis::shard));
  return fmt::format("{} rank{}{}", world, world == 1 ? "" : "s", all_shard ? "" : " (" + axes + ")");
}

Layout make_layout(const std::vector<UnitDescription>& units, const std::vector<StateDescription>& states,
                   DataType weight_dtype, DataType frozen_dtype, const Mesh& mesh) {
  require_names(units, states);
  Layout layout;
  layout.world = mesh.ranks();
  std::vector<std::string> axes;
  for (const MeshAxis axis : axes_of(mesh)) {
    axes.emplace_back(name_of(axis));
    layout.mesh.push_back({axes.back(), mesh.size(axis)});
  }
  int classes = 1;
  for (const UnitDescription& unit : units) {
    for (const TensorDescription& tensor : unit.tensors) classes = std::max(classes, tensor.state_class + 1);
  }
  std::vector<bool> in_blocks(static_cast<std::size_t>(classes));
  for (const StateDescription& state : states) {
    if (state.state_class < classes && is_block(state.dtype)) {
      in_blocks[static_cast<std::size_t>(state.state_class)] = true;
    }
  }
  std::vector<detail::TensorFacts> facts;
  for (std::size_t u = 0; u < units.size(); ++u) {
    for (const TensorDescription& tensor : units[u].tensors) {
      facts.push_back({tensor.shape, static_cast<int>(u), tensor.frozen,
                       tensor.frozen ? 0 : tensor.state_class, tensor.stages, tensor.uses, tensor.cut});
    }
  }
  const detail::Placement placement(mesh, static_cast<int>(units.size()), std::move(facts), in_blocks);
  std::vector<bool> any(kind_of_buffer(false, classes));  // index: kind_of_buffer()
  int first_tensor = 0;
  for (const UnitDescription& unit : units) {
    UnitRecord record{unit.name, unit.uses_per_micro_batch, {}, {}};
    for (const TensorDescription& tensor : unit.tensors) {
      const int state_class = tensor.frozen ? 0 : tensor.state_class;
      record.tensors.push_back({tensor.name, tensor.shape, tensor.frozen, tensor.aliases, state_class});
      any[kind_of_buffer(tensor.frozen, state_class)] = true;
    }
    const auto unit_number = static_cast<int>(layout.units.size());
    for (int kind = 0; kind <= classes; ++kind) {
      const bool frozen = kind == classes;
      const int state_class = frozen ? 0 : kind;
      record.buffers.push_back({frozen             ? "frozen"
                                : state_class == 0 ? "trainable"
                                                   : fmt::format("trainable {}", state_class),
                                frozen,
                                axes,
                                {},
                                state_class});
      for (int number = placement.first_buffer(unit_number) + kind;
           number < placement.first_buffer(unit_number + 1); number += classes + 1) {
        for (int part = 0; part < placement.buffer(number).parts(); ++part) {
          InstanceRecord instance = instance_of(placement, number, part, first_tensor);
          if (!instance.ranges.empty()) record.buffers.back().instances.push_back(std::move(instance));
        }
      }
    }
    first_tensor += static_cast<int>(unit.tensors.size());
    layout.units.push_back(std::move(record));
  }
  require_storable("weights", weight_dtype);
  require_storable("frozen tensors", frozen_dtype);
  const auto add_section = [&](std::string_view folder, const std::string& kind, DataType dtype, int of) {
    if (!any[kind_of_buffer(false, of)]) return;
    std::string dataset(folder);
    if (of > 0) dataset += fmt::format("_{}", of);
    if (kind != "weight") dataset += "/" + kind;
    layout.sections.push_back(
        {std::move(dataset), kind, stored_as(dtype), false, block_format_of(dtype), of});
  };
  for (int of = 0; of < classes; ++of) add_section("weights", "weight", weight_dtype, of);
  if (any[kind_of_buffer(true, 0)]) layout.sections.push_back({"frozen", "weight", frozen_dtype, true});
  for (int of = 0; of < classes; ++of) {
    for (const StateDescription& state : states) {
      if (state.state_class != of) continue;
      if (!is_block(state.dtype)) require_storable("optimizer state " + state.name, state.dtype);
      add_section("state", state.name, state.dtype, of);
    }
  }
  layout.place();
  return layout;
}

void add_arrays(Layout& layout, std::vector<ArrayRecord> arrays) {
  Names names;
  for (const ArrayRecord& array : arrays) {
    names.claim("array", array.name);
    if (is_block(array.dtype)) {
      throw InvalidArgument(fmt::format("array '{}' is in {}, which is a format of optimizer states alone",
                                        array.name, name_of(array.dtype)));
    }
    const bool good = array_fault(array, layout.world).empty();
    if (!good) {
      throw InvalidArgument(
          fmt::format("array '{}' does not have the shapes or ranges of {} ranks", array.name, layout.world));
    }
  }
  layout.arrays = std::move(arrays);
}

}  // namespace tranche::checkpoint
