#include "offload/block_transfers.h"

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <utility>

#include "core/thread.h"
#include "offload/aligned_buffer.h"
#include "offload/io_failure.h"
#include "tranche/core/error.h"
#include "tranche/core/shape.h"

namespace tranche::detail {
namespace {

class UnregisteredMemory : public RegisteredMemory {
 public:
  bool registered() const override { return false; }
  std::string refusal() const override { return "threads have no use for registered memory"; }
};

std::string_view verb_of(IoCall call) {
  return call == IoCall::read ? "read" : "write";
}

}  // namespace

BlockIoBase::BlockIoBase(const BlockIoOptions& options, bool natively, std::string fallback_reason)
    : block_bytes_(round_up(options.block_bytes, io_alignment)),
      depth_(options.depth),
      natively_(natively),
      fallback_reason_(std::move(fallback_reason)) {}

void BlockIoBase::shut_down() {
  cancel();
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  arrived_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

IoTicket BlockIoBase::read(File& file, std::int64_t offset, void* memory, std::int64_t bytes) {
  return submit(file, IoCall::read, offset, static_cast<char*>(memory), bytes);
}

IoTicket BlockIoBase::write(File& file, std::int64_t offset, const void* memory, std::int64_t bytes) {
  // A write only reads from this memory; IoTransfer has one pointer for both directions.
  return submit(file, IoCall::write, offset, static_cast<char*>(const_cast<void*>(memory)), bytes);
}

IoTicket BlockIoBase::submit(File& file, IoCall call, std::int64_t offset, char* memory, std::int64_t bytes) {
  if (offset < 0 || bytes < 0 || (memory == nullptr && bytes > 0)) {
    throw InvalidArgument(std::string(verb_of(call)) + " of '" + file.path() + "': offset " +
                          std::to_string(offset) + " and " + std::to_string(bytes) +
                          " B must not be negative" + (memory == nullptr ? ", nor memory null" : ""));
  }
  auto transfer = std::make_shared<IoTransfer>();
  transfer->file = &file;
  transfer->call = call;
  transfer->offset = offset;
  transfer->bytes = bytes;
  transfer->memory = memory;
  transfer->native = file.native();
  transfer->direct =
      transfer->native ? direct_part(*transfer->native, offset, memory, bytes) : DirectPart{offset, offset};
  const bool native = natively_ && transfer->native.has_value();
  IoTicket ticket;
  {
    const std::lock_guard lock(mutex_);
    ticket.id = transfer->id = ++last_id_;
    transfers_.emplace(ticket.id, transfer);
    if (bytes == 0) return ticket;
    (native ? native_queue_ : thread_queue_).push_back(std::move(transfer));
    if (!native) {
      // Starts a thread for each block that no idle thread will take. Threads that were started or woken but
      // have not run yet count as idle, so the blocks meant for them are counted too.
      std::int64_t blocks = 0;
      for (const auto& queued : thread_queue_) {
        blocks += divide_round_up(queued->bytes - queued->cut, block_bytes_);
      }
      const auto more = std::min<std::int64_t>(blocks - idle_threads_, depth_ - std::ssize(threads_));
      for (std::int64_t i = 0; i < more; ++i) {
        threads_.push_back(start_quiet_thread([this] { work(); }));
        ++idle_threads_;
      }
    }
  }
  if (native) {
    work_arrived();
  } else {
    arrived_.notify_all();
  }
  return ticket;
}

IoBlock BlockIoBase::cut_block(const std::shared_ptr<IoTransfer>& transfer) const {
  const std::int64_t begin = transfer->offset + transfer->cut;
  const DirectPart& direct = transfer->direct;
  std::int64_t end = transfer->offset + transfer->bytes;
  bool past_cache = false;
  std::int64_t block = block_bytes_;
  if (begin < direct.begin) {
    end = direct.begin;
  } else if (begin < direct.end) {
    end = direct.end;
    past_cache = true;
    block = round_up(block, transfer->native->offset_alignment);
  }
  end = std::min(end, (begin / block + 1) * block);
  return {transfer, begin, end - begin, transfer->memory + transfer->cut, past_cache};
}

std::optional<IoBlock> BlockIoBase::take_from(Queue& queue) {
  while (!queue.empty()) {
    const std::shared_ptr<IoTransfer>& transfer = queue.front();
    if (transfer->failure) {  // a failed transfer is not continued
      queue.pop_front();
      continue;
    }
    IoBlock block = cut_block(transfer);
    transfer->cut += block.bytes;
    ++transfer->in_flight;
    ++in_flight_;
    if (transfer->cut == transfer->bytes) queue.pop_front();
    return block;
  }
  return std::nullopt;
}

std::optional<IoBlock> BlockIoBase::take() {
  const std::lock_guard lock(mutex_);
  return take_from(native_queue_);
}

void BlockIoBase::finish(const IoBlock& block, std::exception_ptr failure) {
  const std::lock_guard lock(mutex_);
  finish_locked(block, std::move(failure));
}

void BlockIoBase::finish_locked(const IoBlock& block, std::exception_ptr failure) {
  IoTransfer& transfer = *block.transfer;
  if (failure) {
    if (!transfer.failure) transfer.failure = std::move(failure);
  } else {
    (transfer.call == IoCall::read ? statistics_.read_bytes : statistics_.written_bytes) += block.bytes;
    if (block.direct) statistics_.direct_bytes += block.bytes;
  }
  --transfer.in_flight;
  --in_flight_;
  if (transfer.at_rest() || in_flight_ == 0) at_rest_.notify_all();
}

void BlockIoBase::work() {
  std::unique_lock lock(mutex_);
  --idle_threads_;
  while (true) {
    std::optional<IoBlock> block = take_from(thread_queue_);
    if (!block) {
      if (stopping_) return;
      ++idle_threads_;
      arrived_.wait(lock);
      --idle_threads_;
      continue;
    }
    ++statistics_.blocks;
    lock.unlock();
    std::exception_ptr failure;
    try {
      if (block->transfer->call == IoCall::read) {
        block->transfer->file->read(block->offset, block->memory, block->bytes);
      } else {
        block->transfer->file->write(block->offset, block->memory, block->bytes);
      }
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    finish_locked(*block, std::move(failure));
  }
}

void BlockIoBase::wait(IoTicket ticket) {
  std::unique_lock lock(mutex_);
  const auto found = transfers_.find(ticket.id);
  if (found == transfers_.end() || found->second->claimed) {
    throw LogicError("wait for the transfer with ticket " + std::to_string(ticket.id) +
                     (ticket.id == 0 || ticket.id > last_id_ ? ", which was never submitted"
                                                             : ", which was waited for before"));
  }
  const std::shared_ptr<IoTransfer> transfer = found->second;
  transfer->claimed = true;
  at_rest_.wait(lock, [&] { return transfer->at_rest(); });
  transfers_.erase(ticket.id);
  if (transfer->failure) std::rethrow_exception(transfer->failure);
}

bool BlockIoBase::done(IoTicket ticket) {
  const std::lock_guard lock(mutex_);
  const auto found = transfers_.find(ticket.id);
  return found == transfers_.end() || found->second->at_rest();
}

void BlockIoBase::drain() {
  std::unique_lock lock(mutex_);
  std::vector<std::shared_ptr<IoTransfer>> mine;
  for (const auto& [id, transfer] : transfers_) {
    if (transfer->claimed) continue;
    transfer->claimed = true;
    mine.push_back(transfer);
  }
  std::exception_ptr failure;
  for (const auto& transfer : mine) {
    at_rest_.wait(lock, [&] { return transfer->at_rest(); });
    transfers_.erase(transfer->id);
    if (transfer->failure && !failure) failure = transfer->failure;
  }
  if (failure) std::rethrow_exception(failure);
}

void BlockIoBase::cancel() {
  std::unique_lock lock(mutex_);
  for (Queue* queue : {&native_queue_, &thread_queue_}) {
    for (const auto& transfer : *queue) {
      if (transfer->failure) continue;
      const IoFailure failure{std::string(verb_of(transfer->call)), transfer->file->path(), ECANCELED,
                              transfer->offset + transfer->cut, transfer->bytes - transfer->cut};
      transfer->failure = std::make_exception_ptr(IoError(describe(failure), ECANCELED));
    }
    queue->clear();
  }
  at_rest_.notify_all();
  at_rest_.wait(lock, [&] { return in_flight_ == 0; });
}

std::unique_ptr<RegisteredMemory> BlockIoBase::register_memory(void*, std::int64_t) {
  return std::make_unique<UnregisteredMemory>();
}

void BlockIoBase::count(std::int64_t blocks, std::int64_t resumed, std::int64_t registered_bytes) {
  const std::lock_guard lock(mutex_);
  statistics_.blocks += blocks;
  statistics_.resumed += resumed;
  statistics_.registered_bytes += registered_bytes;
}

BlockIoStatistics BlockIoBase::statistics() const {
  const std::lock_guard lock(mutex_);
  return statistics_;
}

}  // namespace tranche::detail
