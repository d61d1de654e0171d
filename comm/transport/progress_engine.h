#pragma once
/// Advances the operations of one rank over one transport, with their deadlines and failures. Private to
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

/// Shared by a communicator and those split from it. Operations of different communicators, and of one, move
/// independently; the first failure ends them all.
class ProgressEngine : public Pollable, public std::enable_shared_from_this<ProgressEngine> {
 public:
  /// `thread` null: inline progress, operations move when waited on or when any call is made. `memory`: kept
  /// until the staging buffer has been given back.
  ProgressEngine(std::unique_ptr<Transport> transport, std::shared_ptr<CommunicationThread> thread,
                 const CommunicatorOptions& options, const FaultInjection& faults = {},
                 std::shared_ptr<MemoryResource> memory = nullptr);
  ~ProgressEngine() override;

  Transport& transport() { return *transport_; }
  const CommunicatorOptions& options() const { return options_; }
  const FaultInjection& faults() const { return faults_; }
  std::int64_t slot_bytes() const { return staging_.slot_bytes(); }
  /// Kernels called while an operation advances run here.
  Stream& stream() { return *stream_; }
  /// A stream like stream() with the threads of the options' device; null on meta, which has no memory.
  std::unique_ptr<Stream> make_wide_stream() const;
  bool inline_progress() const { return thread_ == nullptr; }

  /// Hands over an operation whose info().done is still unset; returns its done event. Throws
  /// CommunicationError when the rank has failed.
  Event submit(std::unique_ptr<Operation> operation);
  /// Takes a call down that sends no messages of its own, so that peers can be told of it.
  void note_call(const CallSignature& mine);
  /// Tells `ranks` of the job which call this rank waits in. From any thread; never blocks.
  void tell_peers(const CallSignature& mine, std::vector<int> ranks) noexcept;
  /// Throws what ended the rank's communication, if anything did.
  void require_healthy(const std::string& what);
  /// Waits for the pending operations of a communicator, bounded by the time-out (not at all when
  /// `drain` is false or the rank has failed), then abandons what is left.
  void leave(int context, bool drain) noexcept;
  void post_failure(std::string_view cause, ExitStatus status, double seconds,
                    bool cause_follows = false) noexcept;
  void abort_job(int status) noexcept;
  /// Contexts for split: the first that this rank has not seen in use.
  int next_context() const { return next_context_; }
  void set_next_context(int context) { next_context_ = context; }

  bool poll(HostEvent* wanted) override;
  bool busy() const override { return busy_.load(std::memory_order_relaxed); }
  bool needs_polling() const override { return transport_->needs_polling(); }

 private:
  /// Outcome of one step of an operation.
  enum class Step { idle, moved, finished };
  Step step(Operation& operation, double now);
  void finish(Operation& operation, const std::exception_ptr& error) noexcept;
  /// Ends every operation. `peer`: the exit status of a rank that told of its failure; none when what failed
  /// is this rank's communication. `culprit` (if not null) gets `own` as its error.
  void fail_all(const std::string& cause, std::optional<ExitStatus> peer, Operation* culprit = nullptr,
                std::exception_ptr own = nullptr) noexcept;
  [[nodiscard]] std::exception_ptr error_for(const std::string& what) const;
  void expire(Operation& operation, double now);
  /// Tells ranks that this one waits, and for whom, or that it waits no more. A rank that waits for one that
  /// waits itself leaves it to that one to name the cause of a time-out.
  void tell_waiting(const std::vector<int>& ranks, int waits_for);
  /// Called when an operation that waited for long is done: ranks that were told so hear whether this rank
  /// still waits for another one.
  void end_waiting() noexcept;
  /// Notes that a peer waits for this rank. If this rank waits as well, the peer is told for whom.
  void hear_asking(int rank);
  /// The rank for which this one has been waiting for longer than the patience; -1: none.
  int waits_for() const;
  /// Ends this rank if a peer has failed; returns whether it did.
  bool poll_peer_failure(double now);
  /// Sets what the transport answers peers that ask from now on. False when one has asked already, and was
  /// told that this rank has ended.
  bool bid_farewell() noexcept;
  /// Tells the peers that an operation waits for which one it is.
  void send_signature(Operation& operation);
  /// Ends this rank if a peer has issued another call in the place of one of its own.
  bool compare_signatures();
  void take_inbox();
  /// Polls inline for a few microseconds, as long as waking the thread would take; returns whether `done` has
  /// passed then.
  bool try_inline(HostEvent& done);
  /// Adds this engine to those that the communication thread polls.
  void attach();
  /// Runs work that touches the transport; on the communication thread if it polls this engine.
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
  bool attached_ = false;  ///< of the issuing thread

  std::mutex progress_mutex_;  ///< held while operations move
  std::list<std::unique_ptr<Operation>> active_;
  bool abandoned_ = false;
  std::vector<CallSignature> early_signatures_;  ///< of calls that this rank has not issued yet
  std::set<int> asking_;                         ///< ranks that wait for this one
  std::set<int> told_;                           ///< ranks that were told that this one waits
  std::map<int, int> waiting_;                   ///< ranks that wait, and for whom, as they told

  mutable std::mutex inbox_mutex_;
  std::condition_variable drained_;
  std::vector<std::unique_ptr<Operation>> inbox_;
  std::map<int, int> pending_;  ///< by context, inbox included
  CallRecord record_;
  std::uint64_t next_order_ = 0;
  std::uint64_t noted_ = 0;                ///< calls of note_call()
  std::string failure_;                    ///< "rank 2 failed: disk full"; empty while all is well
  std::optional<ExitStatus> peer_status_;  ///< of a failure that a peer reported; none of this rank's own
  std::optional<FailureReport>
      heard_;  ///< a peer's report, if that ended this rank; used by the thread that makes progress
  double cause_awaited_ = 0;  ///< until when, from a peer that an exception unwinds; 0: from none
  std::atomic<bool> failed_{false};
  std::atomic<bool> busy_{false};
};

}  // namespace tranche::comm
