#pragma once
/// Reads any range of a checkpoint, whatever number of ranks wrote it: only the bytes that are needed, each
/// verified before it is handed out. Needs no engine, no MPI and no HDF5.

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

/// Elements of a tensor, or of a box of it, to be read to `memory` in `dtype`. What is stored in blocks is
/// read as it is, whole blocks of the tensor, as bytes (uint8).
struct ReadRequest {
  int section = 0;
  int tensor = 0;              ///< index in Reader::tensors()
  detail::ElementRange range;  ///< of the box's row-major elements
  DataType dtype = DataType::float32;
  void* memory = nullptr;
  Box box = {};  ///< empty: all of the tensor
};

/// A tensor as a checkpoint has it.
struct StoredTensor {
  std::string name;
  int unit = 0;
  int index = 0;  ///< in its unit
  Shape shape;
  bool frozen = false;
  int state_class = 0;  ///< of the checkpoint's own numbers
};

/// A part of a checkpoint that is not what was written.
struct Damage {
  std::string file;        ///< its name in the folder, or "latest"
  std::int64_t begin = 0;  ///< bytes of the file
  std::int64_t end = 0;
  std::string what;  ///< "elements 5 to 9 of exp_avg of tensor h.0.w", with the reason
};

struct ReadStatistics {
  std::int64_t bytes_read = 0;    ///< from files, digests included, manifest not
  std::int64_t bytes_wanted = 0;  ///< of what was asked for, in its stored dtype
};

/// Told how many bytes more have been read.
using ReadProgress = std::function<void(std::int64_t bytes)>;

/// Not thread-safe; several readers may read one checkpoint.
///
/// Every byte handed out has been verified: reads are widened to whole leaves of 16 KiB, so a range costs
/// at most two of them more, and two entries of the digest table (2 KiB each) where it covers only part of a
/// 4 MiB block. That is under 5 % from ranges of 720 KiB on. Memory taken: staging_bytes, once. Whole
/// leaves that need no conversion are read without a copy when memory address and file offset are congruent
/// modulo the disk's alignment for direct I/O (nearly always 512). Requests of one call that are adjacent in
/// file and memory are merged; small ones that follow each other in a file share the leaves between them.
class Reader {
 public:
  /// Opens one checkpoint (a step-... folder, whatever its name is now). Throws CheckpointError when it is
  /// not complete.
  Reader(Storage storage, const std::string& folder);
  ~Reader();
  Reader(Reader&&) noexcept;
  Reader(const Reader&) = delete;

  static constexpr std::int64_t staging_buffers = 8;
  /// The bytes that are asked of the memory resource.
  static std::int64_t staging_bytes();

  const std::string& folder() const noexcept;
  const Manifest& manifest() const noexcept;
  const Layout& layout() const noexcept { return manifest().layout; }

  /// Tensors in declared order over all units.
  const std::vector<StoredTensor>& tensors() const noexcept;
  /// By name or alias; nullptr when there is none.
  const StoredTensor* find(std::string_view name) const;
  /// The tensor; CheckpointError naming the closest match when there is none.
  const StoredTensor& tensor(std::string_view name) const;
  /// "weight" and, for trainable tensors, the optimizer's states.
  std::vector<std::string> kinds(const StoredTensor& tensor) const;
  /// The dtype in which `kind` of this tensor is stored; of blocks in a format that is not the library's
  /// uint8. Throws CheckpointError when it is not stored.
  DataType dtype(const StoredTensor& tensor, std::string_view kind) const;

  /// Reads all ranges, as one pipeline; what is stored in blocks and asked for in another dtype, or the other
  /// way, is converted, a request after the other. Throws InvalidArgument on ranges outside a tensor;
  /// CheckpointError naming file, tensor and elements when something is damaged (memory is then undefined),
  /// and on what cannot be read.
  void read(std::span<const ReadRequest> requests);
  void read(const ReadRequest& request) { read(std::span(&request, 1)); }
  /// Reads elements of one tensor, or of a box of it. Throws as above, and CheckpointError when the kind is
  /// not stored.
  void read_tensor(std::string_view name, std::string_view kind, detail::ElementRange elements,
                   DataType dtype, void* memory, Box box = {});
  /// The program's own array of that name; CheckpointError naming the closest match when there is none.
  const ArrayRecord& array(std::string_view name) const;
  /// Reads elements of an array of all ranks, or of `rank`'s of one of each rank, in its own dtype. Throws as
  /// read() does.
  void read_array(const ArrayRecord& array, int rank, detail::ElementRange elements, void* memory);

  /// The request of read_tensor(), to be read with others as one pipeline.
  ReadRequest request_for(std::string_view name, std::string_view kind, detail::ElementRange elements,
                          DataType dtype, void* memory, Box box = {}) const;

  /// Reads every byte of every file that the manifest lists, and returns what is not as it was written.
  /// Reading errors of the system are damage too. (The manifest itself was verified by opening it.)
  /// `progress` is told of bytes as they have been looked at; they add up to manifest().bytes() or, by
  /// padding, less.
  std::vector<Damage> verify(const ReadProgress& progress = {});

  const ReadStatistics& statistics() const noexcept;

 private:
  struct Impl;
  /// From blocks or to blocks.
  void read_converted(const ReadRequest& request);
  std::unique_ptr<Impl> impl_;
};

/// Verifies all of a folder: of one checkpoint, or of a run's folder with `latest` and every checkpoint in
/// it, those that are not complete being damage. full: every byte; else manifests and sizes only. Never
/// throws for damage.
std::vector<Damage> verify(Storage storage, const std::string& folder, bool full,
                           const ReadProgress& progress = {});

/// "shard-00001-of-00003.h5, bytes 4096 to 8191: ..."
std::string describe(const Damage& damage);

}  // namespace tranche::checkpoint
