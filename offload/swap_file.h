#pragma once
/// The nvme tier of one rank: one file whose ranges are reserved at the start, allocated on the disk, and
/// overwritten in place.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "offload/file_system.h"
#include "tranche/device/ledger.h"

namespace tranche::detail {

struct SwapFileOptions {
  std::string directory;         ///< must exist
  int rank = 0;                  ///< for the file's name and errors
  int ranks_on_node = 1;         ///< ranks that share the disk: it must hold so many such files
  std::int64_t limit_bytes = 0;  ///< this rank's budget; 0: none
  bool simulated = false;        ///< accounting only, no file: for planning
};

/// The calls come in this order: reserve() each range, check_space() on all ranks, create() once, then file()
/// for transfers. The file's name is removed as soon as it is open: the file is freed when the process ends,
/// however that happens, and no other run can open it.
class SwapFile {
 public:
  /// `files` and `ledger` outlive it. Throws InvalidArgument for invalid options, ConfigurationError when the
  /// folder does not exist and it is not simulated.
  SwapFile(SwapFileOptions options, FileSystem& files, Ledger& ledger);
  /// Removes its bytes from the ledger and closes it.
  ~SwapFile();
  SwapFile(const SwapFile&) = delete;
  SwapFile& operator=(const SwapFile&) = delete;

  /// Reserves a range for `bytes` (rounded up to 4096) and returns its offset. The ledger counts it under
  /// Tier::nvme. Throws OutOfMemory beyond the limit, with the ledger's facts (phase, unit, tag, bytes asked,
  /// held, limit); LogicError after create().
  std::int64_t reserve(std::int64_t bytes, Category category, std::string_view tag);
  /// Throws OutOfMemory, with the free space, when the disk cannot hold this file times the ranks of the
  /// node. Valid only before any of them has called create(): all ranks check, then a barrier, then all
  /// create. No-op when simulated.
  void check_space();
  /// Makes the file with all its blocks (no later write can run out of space) and removes its name. Throws
  /// OutOfMemory when the disk has no space for it, IoError otherwise; nothing is left behind then. A run may
  /// have died between making a file and removing its name: stale files of this node are removed first
  /// (swap_names.h).
  void create();

  std::int64_t bytes() const noexcept;  ///< reserved so far
  /// Throws LogicError before create(), and if simulated.
  File& file();
  bool simulated() const noexcept;
  /// For people: "12.3 GiB in /scratch (direct I/O)", or the reason why it is not direct.
  std::string description() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tranche::detail
