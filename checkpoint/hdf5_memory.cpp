// A file driver that keeps the pages that the library writes, and nothing else.

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "checkpoint/hdf5_handles-inl.h"

namespace tranche::checkpoint {

void SparseImage::overlay(std::int64_t begin, std::byte* target, std::int64_t size) const {
  for (auto page = pages.lower_bound(begin / page_bytes * page_bytes); page != pages.end(); ++page) {
    if (page->first >= begin + size) break;
    const std::int64_t from = std::max(page->first, begin);
    const std::int64_t to = std::min(page->first + page_bytes, begin + size);
    if (to <= from) continue;
    std::memcpy(target + (from - begin), page->second.data() + (from - page->first),
                static_cast<std::size_t>(to - from));
  }
}

namespace {

struct DriverInfo {
  SparseImage* image = nullptr;
};

struct MemoryFile {
  H5FD_t base{};  // the library requires its part first
  SparseImage* image = nullptr;
  haddr_t end_of_addresses = 0;
  haddr_t end_of_file = 0;
};

MemoryFile& self(H5FD_t* file) {
  return *reinterpret_cast<MemoryFile*>(file);
}
const MemoryFile& self(const H5FD_t* file) {
  return *reinterpret_cast<const MemoryFile*>(file);
}

H5FD_t* open_file(const char*, unsigned, hid_t fapl, haddr_t) {
  const auto* info = static_cast<const DriverInfo*>(H5Pget_driver_info(fapl));
  if (info == nullptr || info->image == nullptr) return nullptr;
  auto* file = new (std::nothrow) MemoryFile;
  if (file == nullptr) return nullptr;
  file->image = info->image;
  return &file->base;
}

herr_t close_file(H5FD_t* base) {
  MemoryFile& file = self(base);
  file.image->bytes = round_up(static_cast<std::int64_t>(std::max(file.end_of_addresses, file.end_of_file)),
                               SparseImage::page_bytes);
  delete &file;
  return 0;
}

int compare_files(const H5FD_t* a, const H5FD_t* b) {
  return a == b ? 0 : (a < b ? -1 : 1);
}

herr_t query(const H5FD_t*, unsigned long* flags) {
  *flags = H5FD_FEAT_AGGREGATE_METADATA | H5FD_FEAT_ACCUMULATE_METADATA;
  return 0;
}

haddr_t get_end_of_addresses(const H5FD_t* file, H5FD_mem_t) {
  return self(file).end_of_addresses;
}

herr_t set_end_of_addresses(H5FD_t* file, H5FD_mem_t, haddr_t address) {
  self(file).end_of_addresses = address;
  return 0;
}

haddr_t get_end_of_file(const H5FD_t* file, H5FD_mem_t) {
  return self(file).end_of_file;
}

herr_t read_bytes(H5FD_t* file, H5FD_mem_t, hid_t, haddr_t address, std::size_t size, void* buffer) {
  std::memset(buffer, 0, size);
  self(file).image->overlay(static_cast<std::int64_t>(address), static_cast<std::byte*>(buffer),
                            static_cast<std::int64_t>(size));
  return 0;
}

herr_t write_bytes(H5FD_t* base, H5FD_mem_t, hid_t, haddr_t address, std::size_t size, const void* buffer) {
  MemoryFile& file = self(base);
  const auto* source = static_cast<const std::byte*>(buffer);
  try {
    for (std::size_t done = 0; done < size;) {
      const auto at = static_cast<std::int64_t>(address + done);
      const std::int64_t first = at / SparseImage::page_bytes * SparseImage::page_bytes;
      auto& page = file.image->pages[first];
      page.resize(SparseImage::page_bytes);
      const std::size_t part =
          std::min(size - done, static_cast<std::size_t>(first + SparseImage::page_bytes - at));
      std::memcpy(page.data() + (at - first), source + done, part);
      done += part;
    }
  } catch (const std::bad_alloc&) {
    return -1;
  }
  file.end_of_file = std::max(file.end_of_file, static_cast<haddr_t>(address + size));
  return 0;
}

herr_t truncate(H5FD_t* file, hid_t, hbool_t) {
  self(file).end_of_file = self(file).end_of_addresses;
  return 0;
}

const H5FD_class_t& driver() {
  static const H5FD_class_t made = [] {
    H5FD_class_t driver;
    std::memset(&driver, 0, sizeof driver);
#if H5_VERSION_GE(1, 13, 2)
    driver.version = H5FD_CLASS_VERSION;
    driver.value = static_cast<H5FD_class_value_t>(731);  // from the range reserved for tests and private use
#endif
    driver.name = "tranche memory";
    driver.maxaddr = (haddr_t{1} << 62) - 1;
    driver.fc_degree = H5F_CLOSE_STRONG;
    driver.fapl_size = sizeof(DriverInfo);
    driver.open = open_file;
    driver.close = close_file;
    driver.cmp = compare_files;
    driver.query = query;
    driver.get_eoa = get_end_of_addresses;
    driver.set_eoa = set_end_of_addresses;
    driver.get_eof = get_end_of_file;
    driver.read = read_bytes;
    driver.write = write_bytes;
    driver.truncate = truncate;
    const H5FD_mem_t lists[] = H5FD_FLMAP_DICHOTOMY;
    std::copy(std::begin(lists), std::end(lists), std::begin(driver.fl_map));
    return driver;
  }();
  return made;
}

herr_t keep_first(unsigned number, const H5E_error2_t* error, void* text) {
  if (number == 0 && error->desc != nullptr) *static_cast<std::string*>(text) = error->desc;
  return 0;
}

}  // namespace

std::string hdf5_problem() {
  std::string text = "no reason given";
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, keep_first, &text);
  return text;
}

Hdf5Session::Hdf5Session() {
  static std::mutex library;  // one per process, because the library has process-wide state
  lock_ = std::unique_lock(library);
  H5Eget_auto2(H5E_DEFAULT, &function_, &data_);
  H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
}

Hdf5Session::~Hdf5Session() {
  H5Eset_auto2(H5E_DEFAULT, function_, data_);
}

Hdf5MemoryFile create_memory_file(SparseImage& image, const std::string& name, std::int64_t metadata_bytes) {
  Hdf5MemoryFile made{{H5FDregister(&driver()), H5FDunregister, "register a file driver"}, {}};
  const Hdf5Handle access(H5Pcreate(H5P_FILE_ACCESS), H5Pclose, "make a property list");
  const DriverInfo info{&image};
  hdf5_check(H5Pset_driver(access, made.driver, &info), "choose the file driver");
  hdf5_check(H5Pset_libver_bounds(access, H5F_LIBVER_V110, H5F_LIBVER_V110), "choose the file version");
  hdf5_check(H5Pset_alignment(access, 512, SparseImage::page_bytes), "choose the alignment");
  hdf5_check(H5Pset_meta_block_size(access, static_cast<hsize_t>(metadata_bytes)),
             "choose the metadata block");
  hdf5_check(H5Pset_fclose_degree(access, H5F_CLOSE_STRONG), "choose how files close");
  const Hdf5Handle creation(H5Pcreate(H5P_FILE_CREATE), H5Pclose, "make a property list");
  hdf5_check(H5Pset_obj_track_times(creation, false), "leave times away");
  made.file = {H5Fcreate(name.c_str(), H5F_ACC_TRUNC, creation, access), H5Fclose, "lay out " + name};
  return made;
}

Hdf5Handle file_type(DataType dtype) {
  const auto plain = [](hid_t type) { return Hdf5Handle(H5Tcopy(type), H5Tclose, "copy a type"); };
  switch (dtype) {
    case DataType::float64:
      return plain(H5T_IEEE_F64LE);
    case DataType::int32:
      return plain(H5T_STD_I32LE);
    case DataType::int64:
      return plain(H5T_STD_I64LE);
    case DataType::uint16:
      return plain(H5T_STD_U16LE);
    case DataType::uint8:
      return plain(H5T_STD_U8LE);
    default:
      break;
  }
  Hdf5Handle type(H5Tcopy(H5T_IEEE_F32LE), H5Tclose, "copy a type");
  if (dtype == DataType::float32) return type;
  const bool brain = dtype == DataType::bfloat16;
  const std::string what = "make the type " + std::string(name_of(dtype));
  const std::size_t mantissa = brain ? 7 : 10;
  // The fields are set before the size, because they must fit the size at every moment.
  hdf5_check(H5Tset_fields(type, 15, mantissa, 15 - mantissa, 0, mantissa), what);
  hdf5_check(H5Tset_offset(type, 0), what);
  hdf5_check(H5Tset_precision(type, 16), what);
  hdf5_check(H5Tset_ebias(type, brain ? 127 : 15), what);
  hdf5_check(H5Tset_size(type, 2), what);
  return type;
}

void set_attribute(hid_t file, const char* name, const std::string& text) {
  const std::string what = std::string("write attribute ") + name;
  const Hdf5Handle type(H5Tcopy(H5T_C_S1), H5Tclose, what);
  hdf5_check(H5Tset_size(type, text.size() + 1), what);
  const Hdf5Handle space(H5Screate(H5S_SCALAR), H5Sclose, what);
  const Hdf5Handle attribute(H5Acreate2(file, name, type, space, H5P_DEFAULT, H5P_DEFAULT), H5Aclose, what);
  hdf5_check(H5Awrite(attribute, type, text.c_str()), what);
}

void set_attribute(hid_t file, const char* name, std::int64_t value) {
  const std::string what = std::string("write attribute ") + name;
  const Hdf5Handle space(H5Screate(H5S_SCALAR), H5Sclose, what);
  const Hdf5Handle attribute(H5Acreate2(file, name, H5T_STD_I64LE, space, H5P_DEFAULT, H5P_DEFAULT), H5Aclose,
                             what);
  hdf5_check(H5Awrite(attribute, H5T_NATIVE_INT64, &value), what);
}

std::string library_version() {
  unsigned major = 0;
  unsigned minor = 0;
  unsigned release = 0;
  H5get_libversion(&major, &minor, &release);
  return fmt::format("{}.{}.{}", major, minor, release);
}

std::string hdf5_version() {
  const Hdf5Session session;
  return library_version();
}

}  // namespace tranche::checkpoint
