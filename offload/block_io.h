#pragma once
/// Asynchronous transfers between memory and files: a bounded number of blocks in flight over any number of
/// files, by io_uring or by threads that call pread and pwrite.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "offload/file_system.h"

namespace tranche::detail {

enum class BlockIoEngine : std::uint8_t {
  automatic,  ///< io_uring, or threads where it is not built or the kernel refuses it
  uring,
  threads,
};
std::string_view name_of(BlockIoEngine engine);

struct BlockIoOptions {
  BlockIoEngine engine = BlockIoEngine::automatic;
  /// Transfers are cut into blocks of this size, at its multiples in the file (rounded up to 4096).
  std::int64_t block_bytes = std::int64_t{1} << 20;
  /// Blocks in flight at once, 1 to 1024; with threads, their number.
  int depth = 16;
  /// For tests: stands below io_uring. Shortened and failed operations look as if the kernel had done it.
  IoHook hook;
};

/// One transfer under way. Waited for once.
struct IoTicket {
  std::uint64_t id = 0;
};

/// Since the engine was made; of what has completed.
struct BlockIoStatistics {
  std::int64_t read_bytes = 0;
  std::int64_t written_bytes = 0;
  std::int64_t direct_bytes = 0;  ///< of both, what went past the page cache (0 for files without native())
  std::int64_t registered_bytes = 0;  ///< of both, what went through registered memory
  std::int64_t blocks = 0;            ///< operations given to the kernel
  std::int64_t resumed = 0;           ///< of these, such as went on after a short or interrupted one
};

/// Keeps memory registered with an engine while it lives; the engine must outlive it. No transfer may be
/// under way on the memory when it ends.
class RegisteredMemory {
 public:
  virtual ~RegisteredMemory() = default;
  /// True when the kernel took it. If not, transfers work all the same, and refusal() says why.
  virtual bool registered() const = 0;
  virtual std::string refusal() const = 0;
};

/// Thread-safe: any thread may submit, and any one thread wait for a ticket. Blocks start in the order of
/// submission; transfers complete in any order, so a range that is still being written must not be read or
/// written again before wait(). File and memory belong to the transfer until wait() or drain() has returned
/// or thrown for it: by then nothing touches them any more, whatever happened. Any range of bytes and any
/// memory will do; only ranges and memory on multiples of 4096 go past the page cache as a whole (see File).
class BlockIo {
 public:
  /// Ends what is under way as cancel() does, and waits for it. Nothing touches a caller's memory afterwards.
  virtual ~BlockIo() = default;

  /// Throws InvalidArgument for negative ranges; failures of the transfer itself surface in wait().
  virtual IoTicket read(File& file, std::int64_t offset, void* memory, std::int64_t bytes) = 0;
  virtual IoTicket write(File& file, std::int64_t offset, const void* memory, std::int64_t bytes) = 0;

  /// Returns when all bytes of the transfer are where they belong; throws IoError with file and range of the
  /// first block that failed, after all its blocks are at rest. LogicError for a ticket that was waited for
  /// before. Written bytes are durable only after File::sync.
  virtual void wait(IoTicket ticket) = 0;
  /// True when wait() would return at once. Of tickets waited for: true.
  virtual bool done(IoTicket ticket) = 0;
  /// Waits for all transfers submitted so far and not waited for; then throws the first error among them, in
  /// the order of submission. Their tickets are spent.
  virtual void drain() = 0;
  /// Blocks not yet in flight are dropped; wait() of their transfers throws IoError with code ECANCELED.
  /// Returns when no block is in flight.
  virtual void cancel() = 0;

  /// Lets io_uring map this memory once instead of for each block. Never needed, never an error.
  virtual std::unique_ptr<RegisteredMemory> register_memory(void* memory, std::int64_t bytes) = 0;

  /// uring or threads.
  virtual BlockIoEngine engine() const = 0;
  /// Why `automatic` has taken threads; else empty.
  virtual const std::string& fallback_reason() const = 0;
  virtual BlockIoStatistics statistics() const = 0;
};

/// Throws NotCompiled when io_uring is asked for and not built, IoError with the kernel's reason when it is
/// refused (containers often do), InvalidArgument for block sizes and depths out of range.
std::unique_ptr<BlockIo> make_block_io(const BlockIoOptions& options = {});

}  // namespace tranche::detail
