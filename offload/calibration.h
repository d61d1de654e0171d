#pragma once
/// Measures which I/O backend, block size and queue depth are fastest on a disk.

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
      0;  ///< over blocks that are already allocated on the disk, as swap files and tiles are
  double read_bytes_per_second = 0;
};

struct BlockIoCalibration {
  /// The best engine, block size and depth.
  BlockIoOptions options;
  /// All candidates, the best (shortest time to write and read the same bytes) first.
  std::vector<BlockIoCandidate> candidates;
  bool direct = false;      ///< the disk supports direct I/O; if not, the page cache was measured
  bool remembered = false;  ///< taken from the memory file; nothing was measured
};

struct CalibrationRequest {
  /// A folder on the disk; a temporary file is made there and removed.
  std::string directory;
  /// A JSON file that stores the results for all file systems and is read first; empty: none is used. A file
  /// with other contents is replaced.
  std::string memory_path;
  /// automatic: both engines are tried, if the kernel allows them.
  BlockIoEngine engine = BlockIoEngine::automatic;
  std::int64_t file_bytes = std::int64_t{64} << 20;
  double seconds_per_candidate = 0.25;
};

/// Tries several pairs of block size and depth with each engine, for at most `seconds_per_candidate` but at
/// least one pass over the file. Memory for one pass comes from `resource` (Tier::host). Throws IoError,
/// OutOfMemory, and the errors of make_block_io. Timing affects only the result, never data.
BlockIoCalibration calibrate_block_io(const CalibrationRequest& request, MemoryResource& resource,
                                      FileSystem& files = posix_file_system());

struct DiskRates {
  double read_bytes_per_second = 0;
  double write_bytes_per_second = 0;
  /// How many times as long reads and writes take while `busy_threads` threads move memory. Both need the
  /// memory's bandwidth, and on virtual machines the host's as well.
  double slowed = 1;
};

/// The rates of a disk in a step whose state is on it, where one file is read while another is written,
/// measured for `seconds` with `options`. The two rates have the ratio that each direction has alone;
/// together they need the time that was measured for both. Makes two files of `request.file_bytes` in
/// `request.directory` and removes them. Throws IoError, OutOfMemory, and the errors of make_block_io.
DiskRates measure_both_ways(const CalibrationRequest& request, const BlockIoOptions& options,
                            int busy_threads, double seconds, MemoryResource& resource,
                            FileSystem& files = posix_file_system());

/// The rates for the seconds in which `bytes` were read, were written, and both at once without and beside
/// busy threads. Exposed for tests.
DiskRates rates_of(std::int64_t bytes, double reading, double writing, double both, double beside_threads);

/// The calibration as the text of the memory file: {"schema": 1, "results": {"<key>": {...}}}, with the entry
/// for `key` added to or replaced in `earlier` (which may be empty or any text). Exposed for tests.
std::string remember_calibration(std::string_view earlier, const std::string& key,
                                 const BlockIoCalibration& calibration);
/// Returns false when the text has no usable entry for `key`.
bool recall_calibration(std::string_view text, const std::string& key, BlockIoCalibration& calibration);

}  // namespace tranche::detail
