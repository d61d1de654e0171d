#pragma once
/// The thread of a rank that owns all calls of its transports.

#include <functional>
#include <memory>

namespace tranche::comm {

/// What the thread drives.
class Pollable {
 public:
  virtual ~Pollable() = default;
  /// Moves everything that can move; returns whether anything did. Never blocks.
  virtual bool poll() = 0;
  /// True while something is under way that nobody will announce.
  virtual bool busy() const = 0;
  /// True when even an idle one has to be looked at now and then.
  virtual bool needs_polling() const = 0;
};

/// Sleeps while there is nothing to do. While something is under way it yields at first, then sleeps for tens
/// of microseconds at a time, and behind 5 ms for a fiftieth of the time waited so far (at most 5 ms): ranks
/// are often more numerous than cores, and one that waits for long must not disturb those that compute.
/// Starts at the first use.
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

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tranche::comm
