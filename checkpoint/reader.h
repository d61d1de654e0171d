#pragma once
/// Reads any range of a checkpoint, whatever number of ranks wrote it. It reads only the bytes that are
/// needed, and verifies each before returning it. Needs no engine, no MPI and no HDF5.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "checkpoint/folder.h"
#include "checkpoint/format.h"
#include "checkpoint/storage.h"

namespace tranche::checkpoint {

/// Elements of a tensor, or of a box of it, to be read to `memory` in `dtype`. Data in a block format that
/// the library does not know is read unconverted, in whole blocks of the tensor, as bytes (uint8).
struct ReadRequest {
  int section = 0;
  int tensor = 0;              ///< index in Reader::tensors()
  detail::ElementRange range;  ///< within the box's row-major elements
  DataType dtype = DataType::float32;
  void* memory = nullptr;
  Box box = {};  ///< empty: the whole tensor
};

/// A tensor in a checkpoint.
struct StoredTensor {
  std::string name;
  int unit = 0;
  int index = 0;  ///< in its unit
  Shape shape;
  bool frozen = false;
  int state_class = 0;  ///< in the checkpoint's own numbering
};

/// A damaged part of a checkpoint.
struct Damage {
  std::string file;        ///< its name in the folder, or "latest"
  std::int64_t begin = 0;  ///< byte range in the file
  std::int64_t end = 0;
  std::string what;  ///< "elements 5 to 9 of exp_avg of tensor h.0.w", with the reason
};

struct ReadStatistics {
  std::int64_t bytes_read = 0;    ///< from files, including digests but not the manifest
  std::int64_t bytes_wanted = 0;  ///< of the requested elements, in their stored dtype
};

/// Called with the number of bytes read since the last call.
using ReadProgress = std::function<void(std::int64_t bytes)>;

/// Not thread-safe; several readers may read one checkpoint.
///
/// All returned bytes have been verified. Reads are widened to whole leaves of 16 KiB, so a range costs at
/// most two leaves more, and two entries of the digest table (2 KiB each) if it covers only part of a 4 MiB
/// block. That is under 5 % for ranges of at least 720 KiB. It allocates staging_bytes once. Whole leaves
/// that need no conversion are read without a copy when memory address and file offset are congruent modulo
/// the disk's alignment for direct I/O (nearly always 512). Requests of one call that are adjacent in file
/// and memory are merged; small ones that follow each other in a file share the leaves between them. Ranges
/// that want less than 15/16 of their leaves, like the columns of a tensor and small tensors, are read
/// through the page cache, so that the readers of a host load these leaves from the disk once.
class Reader {
 public:
  /// Opens one checkpoint (a step-... folder, even if it was renamed). Throws CheckpointError when it is
  /// incomplete.
  Reader(Storage storage, const std::string& folder);
  ~Reader();
  Reader(Reader&&) noexcept;
  Reader(const Reader&) = delete;

  static constexpr std::int64_t staging_buffers = 8;
  /// The bytes that it allocates from the memory resource.
  static std::int64_t staging_bytes();

  const std::string& folder() const noexcept;
  const Manifest& manifest() const noexcept;
  const Layout& layout() const noexcept { return manifest().layout; }

  /// All tensors, in declared order over all units.
  const std::vector<StoredTensor>& tensors() const noexcept;
  /// Finds a tensor by name or alias; nullptr when there is none.
  const StoredTensor* find(std::string_view name) const;
  /// The tensor; CheckpointError naming the closest match when there is none.
  const StoredTensor& tensor(std::string_view name) const;
  /// The stored kinds: "weight" and, for trainable tensors, the optimizer's states.
  std::vector<std::string> kinds(const StoredTensor& tensor) const;
  /// The dtype in which `kind` of this tensor is stored; uint8 for a block format that the library does not
  /// know. Throws CheckpointError when the kind is not stored.
  DataType dtype(const StoredTensor& tensor, std::string_view kind) const;

  /// Reads all requests as one pipeline; requests that convert from or to a block format are read one after
  /// the other. Throws InvalidArgument on ranges outside a tensor; CheckpointError naming file, tensor and
  /// elements when data is damaged (memory is then undefined) or cannot be read.
  void read(std::span<const ReadRequest> requests);
  void read(const ReadRequest& request) { read(std::span(&request, 1)); }
  /// Reads elements of one tensor, or of a box of it. Throws as above, and CheckpointError when the kind is
  /// not stored.
  void read_tensor(std::string_view name, std::string_view kind, detail::ElementRange elements,
                   DataType dtype, void* memory, Box box = {});
  /// The program's array with that name; throws CheckpointError naming the closest match when there is none.
  const ArrayRecord& array(std::string_view name) const;
  /// Reads elements of a global array, or of `rank`'s array if it is per rank, in its own dtype. Throws as
  /// read() does.
  void read_array(const ArrayRecord& array, int rank, detail::ElementRange elements, void* memory);

  /// The request of read_tensor(), for reading several as one pipeline.
  ReadRequest request_for(std::string_view name, std::string_view kind, detail::ElementRange elements,
                          DataType dtype, void* memory, Box box = {}) const;

  /// Reads every byte of every file that the manifest lists, and returns the damaged parts. Reading errors of
  /// the system count as damage too. (The manifest itself was verified when the checkpoint was opened.)
  /// `progress` is called with the bytes as they are read; their sum is manifest().bytes() or, because of
  /// padding, less.
  std::vector<Damage> verify(const ReadProgress& progress = {});

  const ReadStatistics& statistics() const noexcept;

 private:
  struct Impl;
  /// Reads a request that converts from or to a block format.
  void read_converted(const ReadRequest& request);
  std::unique_ptr<Impl> impl_;
};

/// Verifies a whole folder: one checkpoint, or a run's folder with `latest` and every checkpoint in it, where
/// incomplete ones count as damage. full: every byte; otherwise manifests and sizes only. Never throws for
/// damage.
std::vector<Damage> verify(Storage storage, const std::string& folder, bool full,
                           const ReadProgress& progress = {});

/// "shard-00001-of-00003.h5, bytes 4096 to 8191: ..."
std::string describe(const Damage& damage);

}  // namespace tranche::checkpoint
