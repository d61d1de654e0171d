#pragma once
/// Measures the I/O backend, block size and queue depth that are fastest on a disk.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "offload/block_io.h"
#include "tranche/device/memory.h"

namespace tranche::detail {

struct BlockIoCandidate {
  BlockIoEngine engine = BlockIoEngine::threads;
  std::int64_t block_bytes = 0;
  int depth = 0;
  double write_bytes_per_second =
      0;  ///< over blocks that are on the disk already, as swap files and tiles are
  double read_bytes_per_second = 0;
};

struct BlockIoCalibration {
  /// The best engine, block size and depth.
  BlockIoOptions options;
  /// All that were tried, the best (shortest time to write and read the same bytes) first.
  std::vector<BlockIoCandidate> candidates;
  bool direct = false;      ///< the disk takes direct I/O; if not, this measured the page cache
  bool remembered = false;  ///< from the memory file, nothing was measured
};

struct CalibrationRequest {
  /// Folder on the disk in question; a file is made there for the while, and removed.
  std::string directory;
  /// JSON file that remembers the results of all folders' file systems, and is read first; empty: neither.
  /// A file that cannot be read as such is replaced.
  std::string memory_path;
  /// automatic: both engines are tried, where the kernel lets them.
  BlockIoEngine engine = BlockIoEngine::automatic;
  std::int64_t file_bytes = std::int64_t{64} << 20;
  double seconds_per_candidate = 0.25;
};

/// Tries some pairs of block size and depth with each engine, `seconds_per_candidate` each at most but at
/// least one pass over the file. Memory for one pass comes from `resource` (Tier::host). Throws IoError,
/// OutOfMemory, and what make_block_io does. Results depend on the moment; data never does on them.
BlockIoCalibration calibrate_block_io(const CalibrationRequest& request, MemoryResource& resource,
                                      FileSystem& files = posix_file_system());

/// The calibration as the text of the memory file: {"schema": 1, "results": {"<key>": {...}}}, with the entry
/// for `key` added to or replaced in `earlier` (which may be empty or anything). Exposed for tests.
std::string remember_calibration(std::string_view earlier, const std::string& key,
                                 const BlockIoCalibration& calibration);
/// False when the text holds no usable entry for `key`.
bool recall_calibration(std::string_view text, const std::string& key, BlockIoCalibration& calibration);

}  // namespace tranche::detail
