#pragma once
/// The parts that the engines of block_io.h share: the table of transfers, how they are cut into blocks, and
/// threads for files whose transfers must pass File::read and File::write. For offload/ only.

#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "offload/block_io.h"
#include "offload/posix_file.h"

namespace tranche::detail {

struct IoTransfer {
  std::uint64_t id = 0;
  File* file = nullptr;
  IoCall call = IoCall::read;
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
  char* memory = nullptr;
  std::optional<NativeFile> native;
  DirectPart direct;  // absolute offsets

  // The members below are guarded by the engine's mutex.
  std::int64_t cut = 0;  // bytes given out as blocks
  int in_flight = 0;
  bool claimed = false;  // someone waits for it
  std::exception_ptr failure;
  bool at_rest() const { return in_flight == 0 && (cut == bytes || failure != nullptr); }
};

/// One piece of a transfer. `direct`: aligned, to go past the page cache.
struct IoBlock {
  std::shared_ptr<IoTransfer> transfer;
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
  char* memory = nullptr;
  bool direct = false;
};

class BlockIoBase : public BlockIo {
 public:
  IoTicket read(File& file, std::int64_t offset, void* memory, std::int64_t bytes) override;
  IoTicket write(File& file, std::int64_t offset, const void* memory, std::int64_t bytes) override;
  void wait(IoTicket ticket) override;
  bool done(IoTicket ticket) override;
  void drain() override;
  void cancel() override;
  std::unique_ptr<RegisteredMemory> register_memory(void* memory, std::int64_t bytes) override;
  const std::string& fallback_reason() const override { return fallback_reason_; }
  BlockIoStatistics statistics() const override;

 protected:
  /// `natively`: files that have native() are left to the derived class, which take()s their blocks.
  BlockIoBase(const BlockIoOptions& options, bool natively, std::string fallback_reason);
  /// Derived destructors call it first: nothing is in flight afterwards, and the threads of this class have
  /// ended.
  void shut_down();

  /// Next block for the derived class; nullopt when there is none now. Each one taken must be finished.
  std::optional<IoBlock> take();
  void finish(const IoBlock& block, std::exception_ptr failure);
  /// Blocks have arrived for take(). Called without locks, by any thread.
  virtual void work_arrived() {}
  /// Adds to the statistics.
  void count(std::int64_t blocks, std::int64_t resumed, std::int64_t registered_bytes);

 private:
  using Queue = std::deque<std::shared_ptr<IoTransfer>>;
  IoTicket submit(File& file, IoCall call, std::int64_t offset, char* memory, std::int64_t bytes);
  std::optional<IoBlock> take_from(Queue& queue);
  IoBlock cut_block(const std::shared_ptr<IoTransfer>& transfer) const;
  void finish_locked(const IoBlock& block, std::exception_ptr failure);
  void work();

  const std::int64_t block_bytes_;
  const int depth_;
  const bool natively_;
  const std::string fallback_reason_;

  mutable std::mutex mutex_;
  std::condition_variable at_rest_;  // a transfer came to rest, or the last block did
  std::condition_variable arrived_;  // blocks for the threads, or the end
  std::uint64_t last_id_ = 0;
  std::map<std::uint64_t, std::shared_ptr<IoTransfer>> transfers_;  // not waited for yet
  Queue native_queue_, thread_queue_;
  int in_flight_ = 0;
  int idle_threads_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
  BlockIoStatistics statistics_;
};

std::unique_ptr<BlockIo> make_thread_block_io(const BlockIoOptions& options, std::string fallback_reason);
/// Throws NotCompiled, or IoError when the kernel refuses.
std::unique_ptr<BlockIo> make_uring_block_io(const BlockIoOptions& options);

}  // namespace tranche::detail
