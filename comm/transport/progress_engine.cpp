#include "comm/transport/progress_engine.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include <fmt/format.h>

#include "comm/device/device_failure.h"
#include "core/clock.h"
#include "tranche/core/random.h"
#include "tranche/core/trace.h"

namespace tranche::comm {

using detail::seconds_now;

namespace {
/// The longest wait for the cause of a failure. An unwinding exception reaches its handler within
/// milliseconds; if a handler never reports the cause, the peers wait no longer than this.
constexpr double longest_unwinding_seconds = 2;
/// An operation that has not moved for so long, or for a quarter of the time-out, asks its peers whether they
/// are in the same one.
constexpr double patience_seconds = 0.1;
}  // namespace

ProgressEngine::ProgressEngine(std::unique_ptr<Transport> transport,
                               std::shared_ptr<CommunicationThread> thread,
                               const CommunicatorOptions& options, const FaultInjection& faults,
                               std::shared_ptr<MemoryResource> memory)
    : transport_(std::move(transport)),
      thread_(std::move(thread)),
      options_(options),
      faults_(faults),
      memory_(std::move(memory)),
      device_(make_device({})),
      stream_(device_->create_inline_stream("communication", 1)),
      staging_(options.memory, options.staging_bytes, transport_->size()),
      wake_event_(transport_->wake_event()) {
  transport_->set_rank_names({options_.mesh, transport_->size()});
  if (transport_->size() > 1 || transport_->needs_polling()) attach();
}

std::unique_ptr<Stream> ProgressEngine::make_wide_stream() const {
  if (options_.device == nullptr) return device_->create_inline_stream("communication", 1);
  if (options_.device->kind() == DeviceKind::meta) return nullptr;
  return device_->create_inline_stream("communication", options_.device->threads());
}

void ProgressEngine::attach() {
  if (thread_ == nullptr || attached_) return;
  thread_->add(*this);
  attached_ = true;
}

ProgressEngine::~ProgressEngine() {
  if (attached_) thread_->remove(*this);
  const bool clean = !failed_ && !abandoned_ && std::uncaught_exceptions() == 0;
  const auto close = [&] {
    active_.clear();
    const bool in_step = clean && (transport_->size() == 1 || bid_farewell());
    transport_->close(in_step, options_.timeout_seconds);
    transport_.reset();
  };
  execute(close, -1);
}

bool ProgressEngine::bid_farewell() noexcept {
  try {
    transport_->set_farewell([rank = transport_->rank(), operations = next_order_ + noted_,
                              record = record_](const CallSignature& theirs) -> std::optional<FailureReport> {
      if (theirs.waits_for != CallSignature::no_call || !record.comes(theirs)) return std::nullopt;
      FailureReport report;
      report.rank = rank;
      report.cause = fmt::format(
          "has ended its engine after {} operations: all ranks have to take the same number of steps",
          operations);
      report.ended = true;
      return report;
    });
    for (const CallSignature& theirs : early_signatures_) {
      const auto report = transport_->farewell()(theirs);
      if (!report) continue;
      const double limit = seconds_now() + longest_unwinding_seconds;
      while (!transport_->post_failure(*report) && seconds_now() < limit) std::this_thread::yield();
      return false;
    }
  } catch (...) {
    // Memory is exhausted; the peers' time-outs end their calls.
  }
  return true;
}

Event ProgressEngine::submit(std::unique_ptr<Operation> operation) {
  auto done = operation->info().done;
  const int context = operation->info().tag.context;
  const bool eager = operation->info().eager;
  if (!thread_) {
    done->set_progress(
        [engine = weak_from_this(), wanted = done.get()] {
          const auto self = engine.lock();
          return self && self->poll(wanted);
        },
        {}, wake_event_);
  } else if (attached_) {
    // A waiting caller makes progress in place of the thread.
    const std::weak_ptr<CommunicationThread> thread = thread_;
    done->set_progress(
        [thread, wanted = done.get()] {
          const auto self = thread.lock();
          return self && self->poll_inline(wanted);
        },
        [thread] {
          auto self = thread.lock();
          return self ? CommunicationThread::begin_inline_progress(std::move(self)) : nullptr;
        },
        wake_event_);
  }
  bool alone = false;
  {
    const std::lock_guard lock(inbox_mutex_);
    if (failed_) std::rethrow_exception(error_for(operation->describe()));
    operation->order = next_order_++;
    const OperationInfo& info = operation->info();
    if (!info.tag.point_to_point && transport_->size() > 1) {
      record_.add(make_call_signature(transport_->rank(), info.tag, info.bytes, info.name, info.unit));
    }
    if (faults_.maximum_delay_seconds > 0) {
      const RandomKey key{faults_.seed, RandomPurpose::test, static_cast<std::uint64_t>(transport_->rank())};
      operation->not_before =
          seconds_now() + faults_.maximum_delay_seconds * random_uniform(key, operation->order);
    }
    inbox_.push_back(std::move(operation));
    ++pending_[context];
    alone = !busy_;
    busy_ = true;
  }
  if (!thread_) {
    poll(nullptr);
  } else if (attached_) {
    if (!eager || !alone || !try_inline(*done)) thread_->wake();
  } else {
    // A single rank needs its thread only when an operation has to wait for something.
    poll(nullptr);
    if (busy_) {
      attach();
      thread_->wake();
    }
  }
  return Event(done);
}

bool ProgressEngine::try_inline(HostEvent& done) {
  constexpr double longest = 5e-6;
  if (!thread_->idle()) return false;
  const auto inline_progress = CommunicationThread::begin_inline_progress(thread_);
  const double limit = seconds_now() + longest;
  do {
    thread_->poll_inline(&done);
    if (done.query()) return true;
  } while (seconds_now() < limit);
  return false;
}

std::exception_ptr ProgressEngine::error_for(const std::string& what) const {
  const auto make = [&](auto error) {
    error.attach_rank(transport_->rank());
    return std::make_exception_ptr(std::move(error));
  };
  const std::string text = what.empty() ? failure_ : what + ": " + failure_;
  return peer_status_ ? make(PeerFailure(text, *peer_status_)) : make(CommunicationError(text));
}

void ProgressEngine::note_call(const CallSignature& mine) {
  if (transport_->size() == 1) return;
  const std::lock_guard lock(inbox_mutex_);
  record_.add(mine);
  ++noted_;
}

void ProgressEngine::tell_peers(const CallSignature& mine, std::vector<int> ranks) noexcept {
  try {
    if (!attached_) return;
    // The destructor waits for this thread's commands, so a command must not hold the last reference.
    const auto tell = [this, mine, ranks = std::move(ranks)] {
      const std::lock_guard progress(progress_mutex_);
      for (const int rank : ranks) transport_->send_signature(mine, rank);
    };
    thread_->run(tell, 0);
  } catch (...) {
    // The peers are not asked; the time-out still applies.
  }
}

void ProgressEngine::require_healthy(const std::string& what) {
  if (!thread_) poll(nullptr);
  const std::lock_guard lock(inbox_mutex_);
  if (failed_) std::rethrow_exception(error_for(what));
}

void ProgressEngine::finish(Operation& operation, const std::exception_ptr& error) noexcept {
  operation.abandon(staging_);
  if (operation.uses_staging()) staging_.retire(operation.order);
  if (operation.signature_sent && !error) end_waiting();
  if (options_.trace != nullptr && !error) {
    options_.trace->span("communication", operation.describe(), operation.begin, seconds_now());
  }
  if (error) {
    operation.info().done->fail(error);
  } else {
    operation.info().done->complete();
  }
  if (wake_event_) transport_->notify();
  const std::lock_guard lock(inbox_mutex_);
  --pending_[operation.info().tag.context];
  drained_.notify_all();
}

void ProgressEngine::fail_all(const std::string& cause, std::optional<ExitStatus> peer, Operation* culprit,
                              std::exception_ptr own) noexcept {
  {
    const std::lock_guard lock(inbox_mutex_);
    if (!failed_) {
      failure_ = cause;
      peer_status_ = peer;
      failed_ = true;
    }
  }
  take_inbox();
  for (auto& operation : active_) {
    std::exception_ptr error = own;
    if (operation.get() != culprit || !own) {
      const std::lock_guard lock(inbox_mutex_);
      error = error_for(operation->describe());
    }
    finish(*operation, error);
  }
  active_.clear();
}

void ProgressEngine::take_inbox() {
  const std::lock_guard lock(inbox_mutex_);
  for (auto& operation : inbox_) {
    if (operation->uses_staging()) staging_.enlist(operation->order);
    active_.push_back(std::move(operation));
  }
  inbox_.clear();
}

bool ProgressEngine::poll_peer_failure(double now) {
  auto report = transport_->poll_failure();
  if (!report) return false;
  if (report->cause_follows) {
    const double longest = std::min(longest_unwinding_seconds, options_.timeout_seconds);
    if (cause_awaited_ == 0) cause_awaited_ = now + longest;
    if (now < cause_awaited_) return false;
    report->cause_follows = false;
  }
  cause_awaited_ = 0;
  heard_ = *report;
  const std::string who = transport_->rank_names().of(report->rank);
  fail_all(report->ended ? fmt::format("{} {}", who, report->cause)
                         : fmt::format("{} failed: {}", who, report->cause),
           report->status);
  return true;
}

void ProgressEngine::send_signature(Operation& operation) {
  operation.signature_sent = true;
  const OperationInfo& info = operation.info();
  const CallSignature signature =
      make_call_signature(transport_->rank(), info.tag, info.bytes, info.name, info.unit);
  const std::vector<int> ranks = operation.pending_peers().ranks;
  if (!info.tag.point_to_point) {
    for (const int rank : ranks) transport_->send_signature(signature, rank);
    told_.insert(ranks.begin(), ranks.end());
  } else if (!ranks.empty()) {
    tell_waiting(ranks, ranks.front());
  }
  if (!ranks.empty()) tell_waiting({asking_.begin(), asking_.end()}, ranks.front());
}

void ProgressEngine::tell_waiting(const std::vector<int>& ranks, int waits_for) {
  CallSignature word;
  word.rank = transport_->rank();
  word.waits_for = waits_for;
  for (const int rank : ranks) {
    transport_->send_signature(word, rank);
    told_.insert(rank);
  }
}

void ProgressEngine::end_waiting() noexcept {
  try {
    const std::vector<int> told{told_.begin(), told_.end()};
    const int other = waits_for();
    tell_waiting(told, other);
    if (other < 0) told_.clear();
  } catch (...) {
    // The peers assume that this rank still waits, so their time-out comes later.
  }
}

int ProgressEngine::waits_for() const {
  for (const auto& operation : active_) {
    if (!operation->signature_sent) continue;
    const std::vector<int> ranks = operation->pending_peers().ranks;
    if (!ranks.empty()) return ranks.front();
  }
  return -1;
}

void ProgressEngine::hear_asking(int rank) {
  if (!asking_.insert(rank).second) return;
  if (const int other = waits_for(); other >= 0) tell_waiting({rank}, other);
}

bool ProgressEngine::compare_signatures() {
  for (CallSignature signature; transport_->poll_signature(signature);) {
    if (signature.waits_for == CallSignature::no_call) {
      early_signatures_.push_back(signature);
      hear_asking(signature.rank);
    } else if (signature.waits_for < 0) {
      waiting_.erase(signature.rank);
      asking_.erase(signature.rank);
    } else {
      waiting_[signature.rank] = signature.waits_for;
      if (signature.waits_for == transport_->rank()) hear_asking(signature.rank);
    }
  }
  if (early_signatures_.empty()) return false;
  std::optional<CallSignature> mine;
  std::string text;
  {
    const std::lock_guard lock(inbox_mutex_);
    std::erase_if(early_signatures_, [&](const CallSignature& theirs) {
      if (!text.empty()) return true;
      if (record_.comes(theirs)) return false;
      mine = record_.same_number(theirs);
      if (mine) text = difference(*mine, theirs, transport_->rank_names());
      if (!text.empty())
        transport_->send_signature(*mine, theirs.rank);  // otherwise the peer learns it only when it asks
      return true;
    });
  }
  if (text.empty()) return false;
  fail_all(text, std::nullopt);
  return true;
}

void ProgressEngine::expire(Operation& operation, double now) {
  if (cause_awaited_ > 0) return;  // the missing ranks are known
  if (operation.waits_for_staging()) operation.last_move = now;
  const double waited = now - operation.last_move, timeout = options_.timeout_seconds;
  if (!operation.signature_sent && waited > std::min(patience_seconds, timeout / 4)) {
    send_signature(operation);
  }
  if (waited < timeout) return;
  PendingPeers pending = operation.pending_peers();
  // A rank whose peers all wait for others leaves it to them to name the cause. A rank that waits in a
  // message of its own may have begun up to a time-out later than this one.
  const auto waits_itself = [&](int rank) {
    const auto found = waiting_.find(rank);
    return found != waiting_.end() && found->second != transport_->rank();
  };
  double grace = std::min(1.0, timeout / 4);
  if (!pending.ranks.empty() && std::all_of(pending.ranks.begin(), pending.ranks.end(), waits_itself)) {
    pending.indirect = true;
    grace = timeout;
  } else if (!pending.indirect) {
    std::erase_if(pending.ranks, waits_itself);
  }
  if (pending.indirect && waited < timeout + grace) return;
  throw CommunicationError(timeout_message(operation.describe(), pending, timeout, transport_->rank_names()));
}

ProgressEngine::Step ProgressEngine::step(Operation& operation, double now) {
  bool moved = false;
  if (operation.state == Operation::State::waiting) {
    if (now < operation.not_before) return Step::idle;
    const auto& ready = operation.info().ready;
    while (operation.ready_seen < ready.size()) {
      if (!ready[operation.ready_seen].query()) return Step::idle;
      ready[operation.ready_seen].wait_for(0);  // rethrows the failure of the work before it
      ++operation.ready_seen;
    }
    operation.begin = operation.last_move = now;
    operation.state = Operation::State::exchanging;
    operation.start();
    moved = true;
  }
  moved |= operation.advance(*transport_, staging_);
  if (operation.finished()) return Step::finished;
  if (moved) {
    operation.last_move = seconds_now();
  } else {
    expire(operation, now);
  }
  return moved ? Step::moved : Step::idle;
}

bool ProgressEngine::poll(HostEvent* wanted) {
  std::unique_lock progress(progress_mutex_, std::try_to_lock);
  if (!progress) return false;  // with inline progress, another waiter is polling
  take_inbox();
  const double now = seconds_now();
  bool moved = !failed_ && (poll_peer_failure(now) || compare_signatures());
  for (auto it = active_.begin(); it != active_.end();) {
    Operation& operation = **it;
    std::exception_ptr error;
    Step outcome = Step::finished;
    try {
      outcome = step(operation, now);
    } catch (Error& known) {
      known.attach_rank(transport_->rank());
      error = std::current_exception();
    } catch (...) {
      error = std::current_exception();
    }
    moved |= outcome != Step::idle;
    if (error && operation.state == Operation::State::exchanging) {
      // A partial exchange cannot be undone: later operations of this rank would not match its peers'.
      std::string cause = message_of(error);
      if (cause.rfind(operation.describe(), 0) != 0) cause = operation.describe() + ": " + cause;
      fail_all("ended by the failure of " + cause, std::nullopt, &operation, error);
      break;
    }
    if (outcome != Step::finished) {
      ++it;
      continue;
    }
    const std::unique_ptr<Operation> ended = std::move(*it);
    it = active_.erase(it);
    finish(*ended, error);
    if (wanted != nullptr && wanted->query()) break;
  }
  const std::lock_guard lock(inbox_mutex_);
  busy_ = !active_.empty() || !inbox_.empty() || (cause_awaited_ > 0 && !failed_);
  return moved;
}

bool ProgressEngine::execute(const std::function<void()>& work, double seconds) noexcept {
  try {
    if (attached_) return thread_->run(work, seconds);
    work();
    return true;
  } catch (...) {
    return false;
  }
}

void ProgressEngine::leave(int context, bool drain) noexcept {
  const double limit = seconds_now() + (drain ? options_.timeout_seconds : 0);
  std::unique_lock lock(inbox_mutex_);
  const auto drained = [&] {
    const auto found = pending_.find(context);
    return found == pending_.end() || found->second == 0;
  };
  while (!drained() && !failed_ && seconds_now() < limit) {
    if (attached_) {
      drained_.wait_for(lock, std::chrono::duration<double>(limit - seconds_now()));
    } else {
      lock.unlock();
      if (!poll(nullptr)) std::this_thread::sleep_for(std::chrono::microseconds(20));
      lock.lock();
    }
  }
  if (drained()) {
    pending_.erase(context);
    return;
  }
  lock.unlock();
  execute(
      [this, context] {
        const std::lock_guard progress(progress_mutex_);
        take_inbox();
        for (auto it = active_.begin(); it != active_.end();) {
          if ((*it)->info().tag.context != context) {
            ++it;
            continue;
          }
          const std::unique_ptr<Operation> ended = std::move(*it);
          it = active_.erase(it);
          abandoned_ = true;
          CommunicationError error(ended->describe() + ": its communicator was destroyed before it was done");
          error.attach_rank(transport_->rank());
          finish(*ended, std::make_exception_ptr(error));
        }
      },
      -1);
}

void ProgressEngine::post_failure(std::string_view cause, ExitStatus status, double seconds,
                                  bool cause_follows) noexcept {
  try {
    const double limit = seconds_now() + std::max(seconds, 0.0);
    // The text is captured by value, because the thread may run this after the call has returned.
    const auto post = [this, text = std::string(cause), status, cause_follows, limit] {
      const std::lock_guard progress(progress_mutex_);
      // A rank that was ended by a peer's failure forwards that report: the first of several reports to
      // arrive may not be the origin's, and "rank 3 failed: rank 1 failed: ..." would name the wrong rank.
      const FailureReport report =
          heard_.value_or(FailureReport{transport_->rank(), text, status, cause_follows});
      while (!transport_->post_failure(report) && seconds_now() < limit) std::this_thread::yield();
      cause_awaited_ = 0;
      if (!failed_) {
        fail_all(fmt::format("{} failed: {}", transport_->rank_names().of(transport_->rank()), text), status);
      }
    };
    execute(post, std::max(seconds, 0.0));
  } catch (...) {
    // Nothing more can be done; the peers' time-outs end their calls.
  }
}

void ProgressEngine::abort_job(int status) noexcept {
  // The communication thread makes the call if it can; if it does not answer, this thread does.
  if (attached_ && execute([this, status] { transport_->abort_job(status); }, 1.0)) return;
  transport_->abort_job(status);
}

}  // namespace tranche::comm
