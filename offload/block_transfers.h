#pragma once
/// The shared parts of the engines in block_io.h: the table of transfers, their division into blocks, and
/// threads for files whose transfers must use File::read and File::write. For offload/ only.

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
  std::int64_t cut = 0;  // bytes already given out as blocks
  int in_flight = 0;
  bool claimed = false;  // a caller waits for it
  std::exception_ptr failure;
  bool at_rest() const { return in_flight == 0 && (cut == bytes || failure != nullptr); }
};

/// One block of a transfer. `direct`: it is aligned and bypasses the page cache.
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
  /// With `natively`, the derived class handles files that have native() and calls take() for their blocks.
  BlockIoBase(const BlockIoOptions& options, bool natively, std::string fallback_reason);
  /// Derived destructors call it first: afterwards nothing is in flight, and the threads of this class have
  /// ended.
  void shut_down();

  /// The next block for the derived class; nullopt when there is none now. Each block must be passed to
  /// finish().
  std::optional<IoBlock> take();
  void finish(const IoBlock& block, std::exception_ptr failure);
  /// Called when blocks for take() have arrived, without locks, by any thread.
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
  std::condition_variable at_rest_;  // a transfer or the last block came to rest
  std::condition_variable arrived_;  // blocks for the threads have arrived, or the engine ends
  std::uint64_t last_id_ = 0;
  std::map<std::uint64_t, std::shared_ptr<IoTransfer>> transfers_;  // not yet waited for
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
