#pragma once
/// Owning HDF5 ids, and a driver that keeps a file's written pages in memory. For this folder's sources only.

#include <hdf5.h>

#include <mutex>
#include <string>
#include <utility>

#include "checkpoint/hdf5_image.h"
#include "tranche/core/error.h"

namespace tranche::checkpoint {

/// The text of the newest entry in the library's error stack.
std::string hdf5_problem();

/// Throws CheckpointError with the library's reason when `result` is negative.
template <typename T>
T hdf5_check(T result, const std::string& what) {
  if (result < 0) throw CheckpointError("HDF5 cannot " + what + ": " + hdf5_problem());
  return result;
}

class Hdf5Handle {
 public:
  using Closer = herr_t (*)(hid_t);
  Hdf5Handle() = default;
  Hdf5Handle(hid_t id, Closer close, const std::string& what) : id_(hdf5_check(id, what)), close_(close) {}
  Hdf5Handle(Hdf5Handle&& other) noexcept : id_(std::exchange(other.id_, -1)), close_(other.close_) {}
  Hdf5Handle& operator=(Hdf5Handle&& other) noexcept {
    if (this != &other) {
      reset();
      id_ = std::exchange(other.id_, -1);
      close_ = other.close_;
    }
    return *this;
  }
  ~Hdf5Handle() { reset(); }
  operator hid_t() const noexcept { return id_; }  // NOLINT(google-explicit-constructor): for HDF5's calls
  /// Closes now, and throws on failure.
  void close(const std::string& what) { hdf5_check(close_(std::exchange(id_, -1)), what); }

 private:
  void reset() noexcept {
    if (id_ >= 0) close_(std::exchange(id_, -1));
  }
  hid_t id_ = -1;
  Closer close_ = nullptr;
};

/// Guards every use of the library: one thread at a time, because not every build is thread-safe, and without
/// the library's own error output.
class Hdf5Session {
 public:
  Hdf5Session();
  ~Hdf5Session();
  Hdf5Session(const Hdf5Session&) = delete;
  Hdf5Session& operator=(const Hdf5Session&) = delete;

 private:
  std::unique_lock<std::mutex> lock_;
  H5E_auto2_t function_ = nullptr;
  void* data_ = nullptr;
};

/// hdf5_version() within a session.
std::string library_version();

/// A file that the library builds in memory. H5Fclose() calls the driver after it has released the file's own
/// reference to it, so `driver` must outlive `file`: members are destroyed in reverse order.
struct Hdf5MemoryFile {
  Hdf5Handle driver;
  Hdf5Handle file;
};

/// Creates an HDF5 file whose pages go to `image`, which must outlive it; `image.bytes` is set when the file
/// is closed. Datasets of 512 bytes and more start on multiples of 4096. Metadata is allocated in blocks of
/// `metadata_bytes`: what fits into the first lies before all datasets.
Hdf5MemoryFile create_memory_file(SparseImage& image, const std::string& name, std::int64_t metadata_bytes);

/// The type of a dtype in a file: F64LE, F32LE and F16LE as in IEEE 754, bf16 as a float of 1 + 8 + 7 bits,
/// integers little-endian.
Hdf5Handle file_type(DataType dtype);

/// Adds an attribute to the root group.
void set_attribute(hid_t file, const char* name, const std::string& text);
void set_attribute(hid_t file, const char* name, std::int64_t value);

}  // namespace tranche::checkpoint
