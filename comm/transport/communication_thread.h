#pragma once
/// The thread of a rank that owns all calls of its transports.

#include <functional>
#include <memory>

namespace tranche {
class HostEvent;
}

namespace tranche::comm {

/// Work that the thread drives.
class Pollable {
 public:
  virtual ~Pollable() = default;
  /// Moves everything that can move; returns whether anything did. Stops early once `wanted` (may be null)
  /// has passed. Never blocks. Called by one thread at a time.
  virtual bool poll(HostEvent* wanted) = 0;
  /// True while something is under way that nobody will announce.
  virtual bool busy() const = 0;
  /// True when even an idle one has to be looked at now and then.
  virtual bool needs_polling() const = 0;
};

/// Sleeps while there is nothing to do. While something is under way it yields at first, then sleeps for tens
/// of microseconds at a time, and behind 5 ms for a fiftieth of the time waited so far (at most 5 ms): ranks
/// are often more numerous than cores, and one that waits for long must not disturb those that compute.
/// A thread that waits for what this one does can do it in its place: that saves waking another, and moves
/// the work to where a core is free already. Starts at the first use.
class CommunicationThread {
 public:
  CommunicationThread();
  /// Ends the thread after what was asked before. Every Pollable has been removed.
  ~CommunicationThread();
  CommunicationThread(const CommunicationThread&) = delete;
  CommunicationThread& operator=(const CommunicationThread&) = delete;

  /// Runs `work` on the thread, in the order asked; waits for it at most `seconds` (negative: no limit) and
  /// returns whether it is done. Rethrows what `work` throws when it was waited for.
  bool run(std::function<void()> work, double seconds = -1);
  /// Something has changed: look again.
  void wake();
  void add(Pollable& pollable);
  void remove(Pollable& pollable);

  /// While what it returns is kept, the calling thread looks in place of `thread`, which sleeps meanwhile
  /// unless it is woken or asked for something.
  static std::shared_ptr<void> stand_in(std::shared_ptr<CommunicationThread> thread);
  /// Looks once at everything until `wanted` has passed, on the calling thread; returns whether anything
  /// moved. False at once while another thread is at it.
  bool look(HostEvent* wanted);
  /// True when nothing was under way when somebody last looked.
  bool idle() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tranche::comm
