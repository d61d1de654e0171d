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
  int ranks_on_node = 1;         ///< ranks that share the disk: this file must fit so many times
  std::int64_t limit_bytes = 0;  ///< the budget of this rank; 0: none
  bool simulated = false;        ///< accounting only, no file: for planning
};

/// Life: reserve() what is needed, check_space() on all ranks, then create() once, then file() for transfers.
/// The file loses its name as soon as it is open: it goes with the process, however that ends, and no other
/// run can open it.
class SwapFile {
 public:
  /// `files` and `ledger` outlive it. Throws InvalidArgument for options that cannot be, ConfigurationError
  /// when the folder is not there and it is not simulated.
  SwapFile(SwapFileOptions options, FileSystem& files, Ledger& ledger);
  /// Ends its accounting and closes it.
  ~SwapFile();
  SwapFile(const SwapFile&) = delete;
  SwapFile& operator=(const SwapFile&) = delete;

  /// A range for `bytes` (rounded up to 4096), and its offset. Tracked under Tier::nvme. Throws OutOfMemory
  /// beyond the limit, with the ledger's words (phase, unit, tag, bytes asked, held, limit); LogicError after
  /// create().
  std::int64_t reserve(std::int64_t bytes, Category category, std::string_view tag);
  /// Throws OutOfMemory, with what is free, when the disk has no space for this file times the ranks of the
  /// node. Valid only before any of them has called create(): all ranks check, then a barrier, then all
  /// create. No-op when simulated.
  void check_space();
  /// Makes the file with all its blocks (no later write can run out of space) and removes its name. Throws
  /// OutOfMemory when the disk has no space for it, IoError otherwise; nothing is left behind then.
  /// A stale file of a run of this node that died between making and removing its name is removed first
  /// (swap_names.h).
  void create();

  std::int64_t bytes() const noexcept;  ///< reserved so far
  /// LogicError before create(), and of a simulated one.
  File& file();
  bool simulated() const noexcept;
  /// For people: "12.3 GiB in /scratch (direct I/O)", or why not direct.
  std::string description() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tranche::detail
