#pragma once
/// Asynchronous transfers between memory and files, with a bounded number of blocks in flight over any number
/// of files, by io_uring or by threads that call pread and pwrite.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "offload/file_system.h"

namespace tranche::detail {

enum class BlockIoEngine : std::uint8_t {
  automatic,  ///< io_uring; threads if it is not built or the kernel refuses it
  uring,
  threads,
};
std::string_view name_of(BlockIoEngine engine);

struct BlockIoOptions {
  BlockIoEngine engine = BlockIoEngine::automatic;
  /// Transfers are divided into blocks of this size, at its multiples in the file (rounded up to 4096).
  std::int64_t block_bytes = std::int64_t{1} << 20;
  /// The number of blocks in flight at once, 1 to 1024; with threads, the number of threads.
  int depth = 16;
  /// For tests: intercepts operations below io_uring. Shortened and failed operations look as if the kernel
  /// had done it.
  IoHook hook;
};

/// One transfer in flight. Each ticket is waited for once.
struct IoTicket {
  std::uint64_t id = 0;
};

/// Counts since the engine was made, over completed transfers.
struct BlockIoStatistics {
  std::int64_t read_bytes = 0;
  std::int64_t written_bytes = 0;
  std::int64_t direct_bytes = 0;      ///< bytes that bypassed the page cache (0 without native())
  std::int64_t registered_bytes = 0;  ///< bytes read or written in registered memory
  std::int64_t blocks = 0;            ///< operations issued to the kernel
  std::int64_t resumed = 0;           ///< blocks that continued after a short or interrupted operation
};

/// Keeps memory registered with an engine during its lifetime; the engine must outlive it. No transfer may be
/// in flight on the memory when it ends.
class RegisteredMemory {
 public:
  virtual ~RegisteredMemory() = default;
  /// True when the kernel accepted the registration. If not, transfers still work, and refusal() gives the
  /// reason.
  virtual bool registered() const = 0;
  virtual std::string refusal() const = 0;
};

/// Thread-safe: any thread may submit, and any one thread may wait for a ticket. Blocks start in the order of
/// submission; transfers complete in any order, so a range that is still being written must not be read or
/// written again before wait(). File and memory belong to the transfer until wait() or drain() has returned
/// or thrown for it; afterwards nothing accesses them any more, whatever happened. Any byte range and any
/// memory may be used; only ranges and memory on multiples of 4096 bypass the page cache as a whole (see
/// File).
class BlockIo {
 public:
  /// Ends pending transfers as cancel() does, and waits for them. Nothing accesses a caller's memory
  /// afterwards.
  virtual ~BlockIo() = default;

  /// Throws InvalidArgument for negative ranges; wait() reports failures of the transfer itself.
  virtual IoTicket read(File& file, std::int64_t offset, void* memory, std::int64_t bytes) = 0;
  virtual IoTicket write(File& file, std::int64_t offset, const void* memory, std::int64_t bytes) = 0;

  /// Returns when all bytes of the transfer have been transferred. Throws IoError with file and range of the
  /// first block that failed, after all its blocks are at rest; LogicError for a ticket that was already
  /// waited for. Written bytes are durable only after File::sync.
  virtual void wait(IoTicket ticket) = 0;
  /// True when wait() would return at once; also true for tickets that were waited for.
  virtual bool done(IoTicket ticket) = 0;
  /// Waits for all transfers submitted so far and not yet waited for; then throws the first error among them,
  /// in the order of submission. Their tickets become invalid.
  virtual void drain() = 0;
  /// Drops blocks that are not yet in flight; wait() of their transfers throws IoError with code ECANCELED.
  /// Returns when no block is in flight.
  virtual void cancel() = 0;

  /// Lets io_uring map this memory once instead of for each block. It is optional and never fails.
  virtual std::unique_ptr<RegisteredMemory> register_memory(void* memory, std::int64_t bytes) = 0;

  /// The engine in use: uring or threads.
  virtual BlockIoEngine engine() const = 0;
  /// The reason why `automatic` selected threads; empty otherwise.
  virtual const std::string& fallback_reason() const = 0;
  virtual BlockIoStatistics statistics() const = 0;
};

/// Throws NotCompiled when io_uring is requested and not built, IoError with the kernel's reason when it is
/// refused (containers often do), InvalidArgument for block sizes and depths out of range.
std::unique_ptr<BlockIo> make_block_io(const BlockIoOptions& options = {});

}  // namespace tranche::detail
