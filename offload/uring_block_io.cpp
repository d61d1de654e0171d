// Transfers by io_uring. One thread owns the ring: it takes blocks, submits them and handles every
// completion.
#include <liburing.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <mutex>

#include "core/thread.h"
#include "offload/block_transfers.h"
#include "offload/io_failure.h"
#include "tranche/core/error.h"

namespace tranche::detail {
namespace {

constexpr unsigned registered_entries = 64;
// The largest buffer that the kernel registers.
constexpr std::int64_t largest_entry = std::int64_t{1} << 30;

/// The ring, its wake-up event, and the memory registered with it.
class Ring {
 public:
  Ring(int depth, const IoHook& hook);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  io_uring* get() { return &ring_; }
  void wake();
  /// Submits a read of the event, which completes at the next wake().
  void arm_wake(std::uint64_t data);

  /// Registers the memory and returns its entries; on refusal they are empty and `refusal` has the reason.
  std::vector<unsigned> add_memory(char* memory, std::int64_t bytes, const IoHook& hook,
                                   std::string& refusal);
  void remove_memory(const std::vector<unsigned>& entries);
  /// The entry that contains the whole range, or -1.
  int entry_of(const char* memory, std::int64_t bytes) const;

 private:
  struct Entry {
    char* memory = nullptr;
    std::int64_t bytes = 0;
  };
  io_uring ring_{};
  int event_ = -1;
  std::uint64_t event_value_ = 0;
  std::string table_refusal_;
  mutable std::mutex mutex_;
  std::vector<Entry> entries_;
};

std::string refused(std::string_view what, int code) {
  return std::string(what) + " is refused by the kernel (" + std::strerror(code) + ")";
}

Ring::Ring(int depth, const IoHook& hook) : entries_(registered_entries) {
  std::int64_t result = hook ? hook(IoCall::uring_setup, 0) : 0;
  // The ring needs one more entry for the wake-up event.
  if (result >= 0) result = io_uring_queue_init(static_cast<unsigned>(depth) + 1, &ring_, 0);
  if (result < 0) {
    const auto code = static_cast<int>(-result);
    std::string remedy = "; the engine 'threads' works without it";
    if (code == EPERM || code == ENOSYS || code == EACCES) {
      remedy = ": kernel.io_uring_disabled, a container's seccomp profile or a kernel before 5.6" + remedy;
    } else if (code == ENOMEM) {
      remedy = ": raise 'ulimit -l' or lower the depth" + remedy;
    }
    throw IoError(refused("io_uring", code) + remedy, code);
  }
  event_ = ::eventfd(0, EFD_CLOEXEC);
  if (event_ < 0) {
    const int code = errno;
    io_uring_queue_exit(&ring_);
    throw IoError(refused("an eventfd for io_uring", code), code);
  }
  const int table = io_uring_register_buffers_sparse(&ring_, registered_entries);
  if (table < 0) table_refusal_ = refused("a table of registered memory", -table);
}

Ring::~Ring() {
  io_uring_queue_exit(&ring_);
  ::close(event_);
}

void Ring::wake() {
  const std::uint64_t one = 1;
  while (::write(event_, &one, sizeof(one)) < 0 && errno == EINTR) {
  }
}

void Ring::arm_wake(std::uint64_t data) {
  io_uring_sqe* entry = io_uring_get_sqe(&ring_);
  io_uring_prep_read(entry, event_, &event_value_, sizeof(event_value_), 0);
  io_uring_sqe_set_data64(entry, data);
}

std::vector<unsigned> Ring::add_memory(char* memory, std::int64_t bytes, const IoHook& hook,
                                       std::string& refusal) {
  std::vector<unsigned> taken;
  if (!table_refusal_.empty()) {
    refusal = table_refusal_;
    return taken;
  }
  const std::lock_guard lock(mutex_);
  for (unsigned index = 0; index < registered_entries && bytes > 0; ++index) {
    if (entries_[index].memory != nullptr) continue;
    const std::int64_t part = std::min(bytes, largest_entry);
    const std::int64_t allowed = hook ? hook(IoCall::uring_register, part) : part;
    iovec range{memory, static_cast<std::size_t>(part)};
    __u64 tag = 0;
    const int result = allowed < 0 ? static_cast<int>(allowed)
                                   : io_uring_register_buffers_update_tag(&ring_, index, &range, &tag, 1);
    if (result < 0) {
      refusal = refused("registering memory with io_uring", -result);
      if (result == -ENOMEM || result == -EPERM) refusal += ": raise 'ulimit -l'";
      break;
    }
    entries_[index] = {memory, part};
    taken.push_back(index);
    memory += part;
    bytes -= part;
  }
  if (bytes > 0 && refusal.empty()) refusal = "all entries for registered memory are in use";
  return taken;
}

void Ring::remove_memory(const std::vector<unsigned>& entries) {
  const std::lock_guard lock(mutex_);
  for (const unsigned index : entries) {
    iovec nothing{nullptr, 0};
    __u64 tag = 0;
    io_uring_register_buffers_update_tag(&ring_, index, &nothing, &tag, 1);
    entries_[index] = {};
  }
}

int Ring::entry_of(const char* memory, std::int64_t bytes) const {
  const std::lock_guard lock(mutex_);
  for (std::size_t index = 0; index < entries_.size(); ++index) {
    const Entry& entry = entries_[index];
    if (entry.memory != nullptr && memory >= entry.memory && memory + bytes <= entry.memory + entry.bytes) {
      return static_cast<int>(index);
    }
  }
  return -1;
}

class RingMemory : public RegisteredMemory {
 public:
  RingMemory(Ring& ring, char* memory, std::int64_t bytes, const IoHook& hook) : ring_(ring) {
    entries_ = ring.add_memory(memory, bytes, hook, refusal_);
  }
  ~RingMemory() override { ring_.remove_memory(entries_); }
  bool registered() const override { return refusal_.empty(); }
  std::string refusal() const override { return refusal_; }

 private:
  Ring& ring_;
  std::vector<unsigned> entries_;
  std::string refusal_;
};

class UringBlockIo final : public BlockIoBase {
 public:
  explicit UringBlockIo(const BlockIoOptions& options)
      : BlockIoBase(options, true, {}), hook_(options.hook), ring_(options.depth, hook_) {
    slots_.resize(static_cast<std::size_t>(options.depth));
    for (int i = options.depth - 1; i >= 0; --i) free_.push_back(i);
    thread_ = start_quiet_thread([this] { run(); });
  }

  ~UringBlockIo() override {
    shut_down();
    stopping_ = true;
    ring_.wake();
    thread_.join();
  }

  BlockIoEngine engine() const override { return BlockIoEngine::uring; }

  std::unique_ptr<RegisteredMemory> register_memory(void* memory, std::int64_t bytes) override {
    return std::make_unique<RingMemory>(ring_, static_cast<char*>(memory), bytes, hook_);
  }

 private:
  static constexpr std::uint64_t wake_data = ~std::uint64_t{0};
  struct Slot {
    IoBlock block;
    std::int64_t done = 0;
    bool direct = false;             // false from where the page cache has to continue
    bool registered = false;         // of the operation in flight
    std::int64_t forced_result = 1;  // the hook's result, which replaces the kernel's; > 0: none
  };

  void work_arrived() override { ring_.wake(); }
  void run();
  void start_blocks();
  void prepare(int index);
  void complete(int index, std::int64_t result);

  const IoHook hook_;
  Ring ring_;
  std::vector<Slot> slots_;  // this and the following members are used by the ring's thread only
  std::vector<int> free_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

void UringBlockIo::run() {
  ring_.arm_wake(wake_data);
  while (!stopping_) {
    start_blocks();
    const int submitted = io_uring_submit_and_wait(ring_.get(), 1);
    if (submitted < 0 && submitted != -EINTR) {
      // For example, memory is exhausted for the moment: prepared entries stay in the ring and are submitted
      // by the next call.
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    io_uring_cqe* completion = nullptr;
    while (io_uring_peek_cqe(ring_.get(), &completion) == 0 && completion != nullptr) {
      const std::uint64_t data = io_uring_cqe_get_data64(completion);
      const std::int64_t result = completion->res;
      io_uring_cqe_seen(ring_.get(), completion);
      if (data == wake_data) {
        ring_.arm_wake(wake_data);
      } else {
        complete(static_cast<int>(data), result);
      }
    }
  }
}

void UringBlockIo::start_blocks() {
  while (!free_.empty()) {
    std::optional<IoBlock> block = take();
    if (!block) return;
    const int index = free_.back();
    free_.pop_back();
    Slot& slot = slots_[static_cast<std::size_t>(index)];
    slot = Slot{};
    slot.direct = block->direct;
    slot.block = *std::move(block);
    prepare(index);
  }
}

void UringBlockIo::prepare(int index) {
  Slot& slot = slots_[static_cast<std::size_t>(index)];
  const IoTransfer& transfer = *slot.block.transfer;
  char* memory = slot.block.memory + slot.done;
  const std::int64_t wanted = slot.block.bytes - slot.done;
  const std::int64_t bytes = hook_ ? std::min(hook_(transfer.call, wanted), wanted) : wanted;
  const auto offset = static_cast<std::uint64_t>(slot.block.offset + slot.done);
  const int descriptor = slot.direct ? transfer.native->direct : transfer.native->buffered;
  // It is never null: the ring has an entry for each slot, and one for the wake-up event.
  io_uring_sqe* entry = io_uring_get_sqe(ring_.get());
  slot.forced_result = bytes;
  const int registered = bytes > 0 ? ring_.entry_of(memory, bytes) : -1;
  slot.registered = registered >= 0;
  const auto length = static_cast<unsigned>(std::max<std::int64_t>(bytes, 0));
  if (bytes <= 0) {
    io_uring_prep_nop(entry);
  } else if (transfer.call == IoCall::read) {
    if (slot.registered) {
      io_uring_prep_read_fixed(entry, descriptor, memory, length, offset, registered);
    } else {
      io_uring_prep_read(entry, descriptor, memory, length, offset);
    }
  } else {
    if (slot.registered) {
      io_uring_prep_write_fixed(entry, descriptor, memory, length, offset, registered);
    } else {
      io_uring_prep_write(entry, descriptor, memory, length, offset);
    }
  }
  io_uring_sqe_set_data64(entry, static_cast<std::uint64_t>(index));
}

void UringBlockIo::complete(int index, std::int64_t result) {
  Slot& slot = slots_[static_cast<std::size_t>(index)];
  const IoTransfer& transfer = *slot.block.transfer;
  if (slot.forced_result <= 0) result = slot.forced_result;
  const std::int64_t progress = std::max<std::int64_t>(result, 0);
  slot.done += progress;
  const bool again = result == -EINTR || result == -EAGAIN;
  // For example, a file system that accepts O_DIRECT without supporting it: continue by the page cache.
  const bool refused_direct = slot.direct && result == -EINVAL;
  const bool unfinished = slot.done < slot.block.bytes && (result > 0 || again || refused_direct);
  count(1, unfinished ? 1 : 0, slot.registered ? progress : 0);
  if (unfinished) {
    if (refused_direct || slot.done % transfer.native->offset_alignment != 0) slot.direct = false;
    prepare(index);
    return;
  }
  std::exception_ptr failure;
  if (slot.done < slot.block.bytes) {
    int code = static_cast<int>(-result);
    if (result == 0 && transfer.call == IoCall::write)
      code = EIO;  // otherwise a write that writes nothing would repeat for ever
    const IoFailure text{transfer.call == IoCall::read ? "read" : "write", transfer.file->path(), code,
                         slot.block.offset + slot.done, slot.block.bytes - slot.done};
    failure = std::make_exception_ptr(IoError(describe(text), code));
  }
  IoBlock block = std::move(slot.block);
  block.direct = slot.direct;
  slot.block = {};
  free_.push_back(index);
  finish(block, std::move(failure));
}

}  // namespace

std::unique_ptr<BlockIo> make_uring_block_io(const BlockIoOptions& options) {
  return std::make_unique<UringBlockIo>(options);
}

}  // namespace tranche::detail
