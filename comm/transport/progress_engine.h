#pragma once
/// Advances the operations of one rank over one transport, and handles deadlines and failures. Private to
/// comm/.

#include <atomic>
#include <condition_variable>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "comm/call_record.h"
#include "comm/node/staging_buffer.h"
#include "comm/transport/communication_thread.h"
#include "comm/transport/operation.h"
#include "tranche/comm/backends.h"
#include "tranche/device/device.h"

namespace tranche::comm {

/// Shared by a communicator and those split from it. Operations progress independently of each other, within
/// a communicator too; the first failure ends them all.
class ProgressEngine : public Pollable, public std::enable_shared_from_this<ProgressEngine> {
 public:
  /// `thread` null: inline progress, in which operations move when waited on or when any call is made.
  /// `memory` is kept until the staging buffer has been freed.
  ProgressEngine(std::unique_ptr<Transport> transport, std::shared_ptr<CommunicationThread> thread,
                 const CommunicatorOptions& options, const FaultInjection& faults = {},
                 std::shared_ptr<MemoryResource> memory = nullptr);
  ~ProgressEngine() override;

  Transport& transport() { return *transport_; }
  const CommunicatorOptions& options() const { return options_; }
  const FaultInjection& faults() const { return faults_; }
  std::int64_t slot_bytes() const { return staging_.slot_bytes(); }
  /// The stream of the kernels that an operation runs when it advances.
  Stream& stream() { return *stream_; }
  /// A stream like stream() with the threads of the options' device; null on meta, which has no memory.
  std::unique_ptr<Stream> make_wide_stream() const;
  bool inline_progress() const { return thread_ == nullptr; }

  /// Submits an operation whose info().done is not yet set; returns its done event. Throws CommunicationError
  /// when the rank has failed.
  Event submit(std::unique_ptr<Operation> operation);
  /// Records a call that sends no messages itself, so that peers can be informed of it.
  void note_call(const CallSignature& mine);
  /// Sends `ranks` of the job the call in which this rank waits. From any thread; never blocks.
  void tell_peers(const CallSignature& mine, std::vector<int> ranks) noexcept;
  /// Throws the failure that ended the rank's communication, if there was one.
  void require_healthy(const std::string& what);
  /// Waits for the pending operations of a communicator until the time-out (not at all when `drain` is false
  /// or the rank has failed), then abandons the rest.
  void leave(int context, bool drain) noexcept;
  void post_failure(std::string_view cause, ExitStatus status, double seconds,
                    bool cause_follows = false) noexcept;
  void abort_job(int status) noexcept;
  /// The first context for split that this rank has not seen in use.
  int next_context() const { return next_context_; }
  void set_next_context(int context) { next_context_ = context; }

  bool poll(HostEvent* wanted) override;
  bool busy() const override { return busy_.load(std::memory_order_relaxed); }
  bool needs_polling() const override { return transport_->needs_polling(); }

 private:
  /// The outcome of one step of an operation.
  enum class Step { idle, moved, finished };
  Step step(Operation& operation, double now);
  void finish(Operation& operation, const std::exception_ptr& error) noexcept;
  /// Ends every operation. `peer`: the exit status of a rank that reported its failure; nullopt when this
  /// rank's communication failed. `culprit` (if not null) gets `own` as its error.
  void fail_all(const std::string& cause, std::optional<ExitStatus> peer, Operation* culprit = nullptr,
                std::exception_ptr own = nullptr) noexcept;
  [[nodiscard]] std::exception_ptr error_for(const std::string& what) const;
  void expire(Operation& operation, double now);
  /// Sends `ranks` a notice that this rank waits for `waits_for`, or no longer waits (-1). A rank whose peer
  /// waits for another one leaves it to that peer to name the cause of a time-out.
  void tell_waiting(const std::vector<int>& ranks, int waits_for);
  /// Called when an operation that waited for long is done: ranks that received a notice are informed whether
  /// this rank still waits for another one.
  void end_waiting() noexcept;
  /// Records that a peer waits for this rank. If this rank waits as well, the peer is informed for whom.
  void hear_asking(int rank);
  /// The rank for which this one has been waiting longer than the patience; -1: none.
  int waits_for() const;
  /// Ends this rank if a peer has failed; returns whether it did.
  bool poll_peer_failure(double now);
  /// Sets the transport's answer to peers that ask from now on. False when a peer has already asked and got
  /// the answer that this rank has ended.
  bool bid_farewell() noexcept;
  /// Sends the awaited peers the signature of an operation.
  void send_signature(Operation& operation);
  /// Ends this rank if a peer has issued a different call in place of one of its own.
  bool compare_signatures();
  void take_inbox();
  /// Polls inline for a few microseconds, about the time of waking the thread; returns whether `done` has
  /// passed.
  bool try_inline(HostEvent& done);
  /// Adds this engine to those that the communication thread polls.
  void attach();
  /// Runs work that uses the transport, on the communication thread if that polls this engine.
  bool execute(const std::function<void()>& work, double seconds) noexcept;

  std::unique_ptr<Transport> transport_;
  std::shared_ptr<CommunicationThread> thread_;
  CommunicatorOptions options_;
  FaultInjection faults_;
  std::shared_ptr<MemoryResource> memory_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
  StagingBuffer staging_;
  std::shared_ptr<WakeEvent> wake_event_;  ///< null: a waiter polls now and then
  int next_context_ = 1;
  bool attached_ = false;  ///< used by the issuing thread

  std::mutex progress_mutex_;  ///< held while operations move
  std::list<std::unique_ptr<Operation>> active_;
  bool abandoned_ = false;
  std::vector<CallSignature> early_signatures_;  ///< of calls that this rank has not issued yet
  std::set<int> asking_;                         ///< ranks that wait for this one
  std::set<int> told_;                           ///< ranks that received a notice that this one waits
  std::map<int, int> waiting_;                   ///< waiting ranks, and for whom, from their notices

  mutable std::mutex inbox_mutex_;
  std::condition_variable drained_;
  std::vector<std::unique_ptr<Operation>> inbox_;
  std::map<int, int> pending_;  ///< by context, including the inbox
  CallRecord record_;
  std::uint64_t next_order_ = 0;
  std::uint64_t noted_ = 0;                ///< calls of note_call()
  std::string failure_;                    ///< "rank 2 failed: disk full"; empty while all is well
  std::optional<ExitStatus> peer_status_;  ///< from a peer's report; none for this rank's own failure
  std::optional<FailureReport>
      heard_;  ///< a peer's report, if that ended this rank; used by the thread that makes progress
  double cause_awaited_ = 0;  ///< end of the wait for an unwinding peer's cause; 0: none awaited
  std::atomic<bool> failed_{false};
  std::atomic<bool> busy_{false};
};

}  // namespace tranche::comm
