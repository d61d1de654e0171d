// The master file: whole tensors as views of the shards beside it.

#include <cstring>

#include "checkpoint/hdf5_handles-inl.h"
#include "tranche/version.h"

namespace tranche::checkpoint {

namespace {

/// A box of a row-major tensor whose elements are one range of its flat order.
struct Box {
  std::vector<hsize_t> start;
  std::vector<hsize_t> count;
  std::int64_t elements = 1;
};

/// Cuts elements [begin, end) of a tensor into boxes, in flat order: at most 2 * rank - 1 of them.
std::vector<Box> boxes_of(const std::vector<hsize_t>& extents, std::int64_t begin, std::int64_t end) {
  std::vector<std::int64_t> strides(extents.size(), 1);
  for (std::size_t axis = extents.size() - 1; axis > 0; --axis) {
    strides[axis - 1] = strides[axis] * static_cast<std::int64_t>(extents[axis]);
  }
  std::vector<Box> boxes;
  while (begin < end) {
    // The outermost axis of which a whole step fits from here to the end and begin lies on one of its steps.
    std::size_t axis = 0;
    while (begin % strides[axis] != 0 || begin + strides[axis] > end) ++axis;
    Box box;
    std::int64_t rest = begin;
    for (std::size_t a = 0; a < extents.size(); ++a) {
      box.start.push_back(static_cast<hsize_t>(rest / strides[a]));
      rest %= strides[a];
      box.count.push_back(a < axis ? 1 : extents[a]);
    }
    const std::int64_t left = static_cast<std::int64_t>(extents[axis] - box.start[axis]);
    const std::int64_t steps = std::min((end - begin) / strides[axis], left);
    box.count[axis] = static_cast<hsize_t>(steps);
    box.elements = steps * strides[axis];
    begin += box.elements;
    boxes.push_back(std::move(box));
  }
  return boxes;
}

void set_not_a_number(hid_t creation, hid_t type, DataType dtype, const std::string& what) {
  const std::uint32_t single = 0x7fc00000u;
  const std::uint16_t half = dtype == DataType::bfloat16 ? 0x7fc0 : 0x7e00;
  const void* value = dtype == DataType::float32 ? static_cast<const void*>(&single) : &half;
  hdf5_check(H5Pset_fill_value(creation, type, value), what);
}

class MasterFile {
 public:
  MasterFile(hid_t file, const Layout& layout, const std::vector<ShardRecord>& shards)
      : file_(file),
        layout_(layout),
        shards_(shards),
        links_(H5Pcreate(H5P_LINK_CREATE), H5Pclose, "make a list") {
    hdf5_check(H5Pset_create_intermediate_group(links_, 1), "choose intermediate groups");
    for (std::size_t s = 0; s < layout.sections.size(); ++s) {
      types_.push_back(file_type(layout.sections[s].dtype));
      for (int rank = 0; rank < layout.world; ++rank) {
        const auto elements = static_cast<hsize_t>(layout.section_elements(static_cast<int>(s), rank));
        sources_.push_back(elements == 0 ? Hdf5Handle()
                                         : Hdf5Handle(H5Screate_simple(1, &elements, nullptr), H5Sclose,
                                                      "describe a shard"));
        begins_.push_back(0);
      }
    }
  }

  void add_unit(const UnitRecord& unit) {
    for (std::size_t s = 0; s < layout_.sections.size(); ++s) {
      for (const TensorRecord& tensor : unit.tensors) {
        if (tensor.frozen == layout_.sections[s].frozen) add(unit, tensor, s);
      }
      for (std::size_t rank = 0; rank < shards_.size(); ++rank) {
        const auto& cuts = unit.cuts(layout_.sections[s].frozen);
        begins_[s * shards_.size() + rank] += cuts[rank + 1] - cuts[rank];
      }
    }
  }

 private:
  void add(const UnitRecord& unit, const TensorRecord& tensor, std::size_t section_index) {
    const SectionRecord& section = layout_.sections[section_index];
    const std::string folder = section.kind == "weight" ? "weights/" : section.dataset + "/";
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
    const detail::ElementRange whole{tensor.offset, tensor.offset + tensor.shape.elements()};
    const auto& cuts = unit.cuts(section.frozen);
    for (std::size_t rank = 0; rank < shards_.size(); ++rank) {
      const detail::ElementRange part = detail::intersect(whole, {cuts[rank], cuts[rank + 1]});
      if (part.empty()) continue;
      const hid_t source = sources_[section_index * shards_.size() + rank];
      auto at =
          static_cast<hsize_t>(begins_[section_index * shards_.size() + rank] + part.begin - cuts[rank]);
      for (const Box& box : boxes_of(extents, part.begin - whole.begin, part.end - whole.begin)) {
        const auto count = static_cast<hsize_t>(box.elements);
        hdf5_check(H5Sselect_hyperslab(source, H5S_SELECT_SET, &at, nullptr, &count, nullptr), what);
        hdf5_check(
            H5Sselect_hyperslab(space, H5S_SELECT_SET, box.start.data(), nullptr, box.count.data(), nullptr),
            what);
        hdf5_check(H5Pset_virtual(creation, space, shards_[rank].file.name.c_str(),
                                  ("/" + section.dataset).c_str(), source),
                   what);
        at += count;
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

  hid_t file_;
  const Layout& layout_;
  const std::vector<ShardRecord>& shards_;
  Hdf5Handle links_;
  std::vector<Hdf5Handle> types_;     ///< by section
  std::vector<Hdf5Handle> sources_;   ///< by section and rank
  std::vector<std::int64_t> begins_;  ///< by section and rank: where the present unit's shard starts
};

}  // namespace

std::vector<std::byte> make_master_image(const Layout& layout, const std::vector<ShardRecord>& shards) {
  const Hdf5Session session;
  SparseImage image;
  Hdf5Handle file = create_memory_file(image, std::string(master_name), 4096);
  set_attribute(file, "format", std::string("tranche-master"));
  set_attribute(file, "version", format_version);
  set_attribute(file, "library", std::string(version));
  {
    MasterFile master(file, layout, shards);
    for (const UnitRecord& unit : layout.units) master.add_unit(unit);
  }
  file.close("finish the master file");
  std::vector<std::byte> bytes(static_cast<std::size_t>(image.bytes));
  image.overlay(0, bytes.data(), image.bytes);
  return bytes;
}

}  // namespace tranche::checkpoint
