// The empty file of one rank.

#include <fmt/format.h>

#include "checkpoint/digest.h"
#include "checkpoint/hdf5_handles-inl.h"
#include "tranche/version.h"

namespace tranche::checkpoint {

namespace {

/// Makes the groups in a dataset's path without time stamps, so that equal state has equal bytes.
void make_groups(hid_t file, const std::string& dataset) {
  const std::string what = "make groups for " + dataset;
  const Hdf5Handle creation(H5Pcreate(H5P_GROUP_CREATE), H5Pclose, what);
  hdf5_check(H5Pset_obj_track_times(creation, false), what);
  for (std::size_t slash = dataset.find('/'); slash != std::string::npos;
       slash = dataset.find('/', slash + 1)) {
    const std::string group = dataset.substr(0, slash);
    if (hdf5_check(H5Lexists(file, group.c_str(), H5P_DEFAULT), what) > 0) continue;
    const Hdf5Handle made(H5Gcreate2(file, group.c_str(), H5P_DEFAULT, creation, H5P_DEFAULT), H5Gclose,
                          what);
  }
}

/// Creates a contiguous dataset with allocated, unwritten space; returns its byte offset in the file.
std::int64_t lay_out(hid_t file, const std::string& name, hid_t type, std::int64_t elements) {
  const std::string what = "lay out dataset " + name;
  make_groups(file, name);
  const auto extent = static_cast<hsize_t>(elements);
  const Hdf5Handle space(H5Screate_simple(1, &extent, nullptr), H5Sclose, what);
  const Hdf5Handle creation(H5Pcreate(H5P_DATASET_CREATE), H5Pclose, what);
  hdf5_check(H5Pset_layout(creation, H5D_CONTIGUOUS), what);
  hdf5_check(H5Pset_alloc_time(creation, H5D_ALLOC_TIME_EARLY), what);
  hdf5_check(H5Pset_fill_time(creation, H5D_FILL_TIME_NEVER), what);
  hdf5_check(H5Pset_obj_track_times(creation, false), what);
  const Hdf5Handle dataset(H5Dcreate2(file, name.c_str(), type, space, H5P_DEFAULT, creation, H5P_DEFAULT),
                           H5Dclose, what);
  const haddr_t offset = H5Dget_offset(dataset);
  if (offset == HADDR_UNDEF || offset % SparseImage::page_bytes != 0) {
    throw CheckpointError(fmt::format("{} puts dataset {} at byte {}, which is not a multiple of {}",
                                      H5_VERS_INFO, name, offset, SparseImage::page_bytes));
  }
  return static_cast<std::int64_t>(offset);
}

}  // namespace

ShardImage make_shard_image(const Layout& layout, int rank, std::int64_t step) {
  const Hdf5Session session;
  ShardImage image;
  // Measured: less than 2 KiB, plus 400 bytes for each dataset; names are stored beside them.
  std::int64_t room = 8192 + 1024 * static_cast<std::int64_t>(layout.sections.size());
  for (const ArrayRecord& array : layout.arrays)
    room += 2048 + 4 * static_cast<std::int64_t>(array.name.size());
  const std::int64_t metadata = round_up(room, SparseImage::page_bytes);
  Hdf5MemoryFile memory = create_memory_file(image.file, shard_name(rank, layout.world), metadata);
  Hdf5Handle& file = memory.file;
  set_attribute(file, "format", std::string("tranche-shard"));
  set_attribute(file, "version", format_version);
  set_attribute(file, "library", std::string(version));
  set_attribute(file, "step", step);
  set_attribute(file, "rank", std::int64_t{rank});
  set_attribute(file, "world", std::int64_t{layout.world});
  std::int64_t end = 0;
  for (std::size_t s = 0; s < layout.sections.size(); ++s) {
    const SectionRecord& section = layout.sections[s];
    const std::int64_t bytes = section.bytes(layout.section_elements(static_cast<int>(s), rank));
    if (bytes == 0) {
      image.offsets.push_back(-1);
      continue;
    }
    const std::int64_t held = dataset_extent(bytes, section.dtype);
    image.offsets.push_back(lay_out(file, section.dataset, file_type(section.dtype), held));
    end = std::max(end, image.offsets.back() + held * size_of(section.dtype));
  }
  for (const ArrayRecord& array : layout.arrays) {
    const std::int64_t bytes = array.range(rank).size() * size_of(array.dtype);
    if (bytes == 0) {
      image.array_offsets.push_back(-1);
      continue;
    }
    const std::int64_t held = dataset_extent(bytes, array.dtype);
    image.array_offsets.push_back(lay_out(file, array.dataset(), file_type(array.dtype), held));
    end = std::max(end, image.array_offsets.back() + held * size_of(array.dtype));
  }
  // The table comes last and covers everything before it. Its size depends on its offset, the first aligned
  // byte after metadata that the library has yet to place: so it gets slightly more entries than the payload
  // needs, and `leaves` of them are used.
  constexpr std::int64_t metadata_room = 64 * 1024;
  constexpr std::int64_t least_entries = least_aligned_bytes / 8;
  const std::int64_t entries = std::max(least_entries, divide_round_up(end + metadata_room, leaf_bytes));
  image.table_offset = lay_out(file, "digests", H5T_STD_U64LE, entries);
  image.leaves = divide_round_up(image.table_offset, leaf_bytes);
  if (image.table_offset < end || image.leaves > entries) {
    throw CheckpointError(
        fmt::format("{} does not lay datasets out in the order they are made; a checkpoint "
                    "cannot be written with it",
                    H5_VERS_INFO));
  }
  file.close("finish a shard's layout");
  const auto last = image.file.pages.rbegin();
  const std::int64_t table_end = image.table_offset + round_up(entries * 8, SparseImage::page_bytes);
  if (last->first >= image.table_offset || image.file.bytes > table_end) {
    throw CheckpointError(
        fmt::format("{} writes metadata after a file's last dataset; a checkpoint cannot be "
                    "written with it",
                    H5_VERS_INFO));
  }
  return image;
}

}  // namespace tranche::checkpoint
