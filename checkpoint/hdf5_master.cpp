// The master file: whole tensors as views of the shards beside it.

#include <cstring>

#include "checkpoint/hdf5_handles-inl.h"
#include "tranche/version.h"

namespace tranche::checkpoint {

namespace {

/// A box in HDF5's terms.
struct Hyperslab {
  explicit Hyperslab(const Box& box) {
    for (const Slice& slice : box) {
      start.push_back(static_cast<hsize_t>(slice.start));
      stride.push_back(static_cast<hsize_t>(slice.stride));
      count.push_back(static_cast<hsize_t>(slice.count));
      block.push_back(static_cast<hsize_t>(slice.block));
    }
  }
  void select(hid_t space, const std::string& what) const {
    hdf5_check(
        H5Sselect_hyperslab(space, H5S_SELECT_SET, start.data(), stride.data(), count.data(), block.data()),
        what);
  }
  std::vector<hsize_t> start, stride, count, block;
};

void set_not_a_number(hid_t creation, hid_t type, DataType dtype, const std::string& what) {
  const std::uint32_t single = 0x7fc00000u;
  const std::uint16_t half = dtype == DataType::bfloat16 ? 0x7fc0 : 0x7e00;
  const void* value = dtype == DataType::float32 ? static_cast<const void*>(&single) : &half;
  hdf5_check(H5Pset_fill_value(creation, type, value), what);
}

class MasterFile {
 public:
  MasterFile(hid_t file, const Layout& layout)
      : file_(file), layout_(layout), links_(H5Pcreate(H5P_LINK_CREATE), H5Pclose, "make a list") {
    hdf5_check(H5Pset_create_intermediate_group(links_, 1), "choose intermediate groups");
    for (std::size_t s = 0; s < layout.sections.size(); ++s) {
      const SectionRecord& section = layout.sections[s];
      types_.push_back(file_type(section.dtype));
      for (int rank = 0; rank < layout.world; ++rank) {
        const std::int64_t bytes = section.bytes(layout.section_elements(static_cast<int>(s), rank));
        const auto elements = static_cast<hsize_t>(dataset_extent(bytes, section.dtype));
        sources_.push_back(
            bytes == 0 ? Hdf5Handle()
                       : Hdf5Handle(H5Screate_simple(1, &elements, nullptr), H5Sclose, "describe a shard"));
      }
    }
  }

  void add_unit(const UnitRecord& unit) {
    for (std::size_t s = 0; s < layout_.sections.size(); ++s) {
      const SectionRecord& section = layout_.sections[s];
      if (!section.block.name.empty()) continue;
      for (std::size_t t = 0; t < unit.tensors.size(); ++t) {
        const TensorRecord& tensor = unit.tensors[t];
        if (kind_of_buffer(tensor.frozen, tensor.state_class) == section.kind_of()) add(unit, t, s);
      }
    }
  }

 private:
  void add(const UnitRecord& unit, std::size_t index, std::size_t section_index) {
    const TensorRecord& tensor = unit.tensors[index];
    const SectionRecord& section = layout_.sections[section_index];
    const std::string folder = section.kind == "weight"   ? "weights/"
                               : section.state_class == 0 ? section.dataset + "/"
                                                          : "state/" + section.kind + "/";
    const std::string name = folder + tensor.name;
    const std::string what = "describe " + name + " in " + std::string(master_name);
    std::vector<hsize_t> extents;
    for (const std::int64_t extent : tensor.shape.extents()) extents.push_back(static_cast<hsize_t>(extent));
    if (extents.empty()) extents.push_back(1);
    const Hdf5Handle space(H5Screate_simple(static_cast<int>(extents.size()), extents.data(), nullptr),
                           H5Sclose, what);
    const Hdf5Handle creation(H5Pcreate(H5P_DATASET_CREATE), H5Pclose, what);
    const hid_t type = types_[section_index];
    hdf5_check(H5Pset_obj_track_times(creation, false), what);
    set_not_a_number(creation, type, section.dtype, what);
    for (const BufferRecord& buffer : unit.buffers) {
      for (const InstanceRecord& instance : buffer.instances) {
        for (const PlacedTensor& placed : instance.tensors) {
          if (placed.tensor == static_cast<int>(index)) {
            map(placed, instance, section_index, space, creation, what);
          }
        }
      }
    }
    hdf5_check(H5Sselect_all(space), what);
    const Hdf5Handle dataset(H5Dcreate2(file_, name.c_str(), type, space, links_, creation, H5P_DEFAULT),
                             H5Dclose, what);
    for (const std::string& alias : tensor.aliases) {
      hdf5_check(H5Lcreate_soft(("/" + name).c_str(), file_, (folder + alias).c_str(), links_, H5P_DEFAULT),
                 what);
    }
  }

  /// Maps the box of a tensor that an instance of a buffer holds into the tensor's view.
  void map(const PlacedTensor& placed, const InstanceRecord& instance, std::size_t section, hid_t space,
           hid_t creation, const std::string& what) {
    const detail::ElementRange whole{placed.offset, placed.offset + elements_of(placed.box)};
    for (const StoredRange& range : instance.ranges) {
      const detail::ElementRange part = detail::intersect(whole, range.range());
      if (part.empty()) continue;
      const hid_t source =
          sources_[section * static_cast<std::size_t>(layout_.world) + static_cast<std::size_t>(range.rank)];
      auto at = static_cast<hsize_t>(range.first + part.begin - range.begin);
      for (Box& box : boxes_of(placed.box, {part.begin - whole.begin, part.end - whole.begin})) {
        const auto count = static_cast<hsize_t>(elements_of(box));
        if (box.empty()) box.emplace_back();  // a tensor without extents has the shape [1]
        hdf5_check(H5Sselect_hyperslab(source, H5S_SELECT_SET, &at, nullptr, &count, nullptr), what);
        Hyperslab(box).select(space, what);
        hdf5_check(H5Pset_virtual(creation, space, shard_name(range.rank, layout_.world).c_str(),
                                  ("/" + layout_.sections[section].dataset).c_str(), source),
                   what);
        at += count;
      }
    }
  }

  hid_t file_;
  const Layout& layout_;
  Hdf5Handle links_;
  std::vector<Hdf5Handle> types_;    ///< by section
  std::vector<Hdf5Handle> sources_;  ///< by section and rank
};

}  // namespace

MasterImage make_master_image(const Layout& layout) {
  const Hdf5Session session;
  SparseImage image;
  Hdf5MemoryFile memory = create_memory_file(image, std::string(master_name), 4096);
  Hdf5Handle& file = memory.file;
  set_attribute(file, "format", std::string("tranche-master"));
  set_attribute(file, "version", format_version);
  set_attribute(file, "library", std::string(version));
  {
    MasterFile master(file, layout);
    for (const UnitRecord& unit : layout.units) master.add_unit(unit);
  }
  file.close("finish the master file");
  MasterImage made{std::vector<std::byte>(static_cast<std::size_t>(image.bytes)), library_version()};
  image.overlay(0, made.bytes.data(), image.bytes);
  return made;
}

}  // namespace tranche::checkpoint
