#pragma once
/// A rank's thread that makes all calls of its transports, and inline progress, which replaces it.

#include <functional>
#include <memory>

#include "comm/transport/pollable.h"

namespace tranche::comm {

/// Sleeps while there is nothing to do. While operations are pending it yields at first, then sleeps for tens
/// of microseconds at a time, and after 5 ms for a fiftieth of the time waited so far (at most 5 ms): there
/// are often more ranks than cores, and a rank that waits for long must not disturb those that compute.
///
/// Inline progress: a thread that waits for an operation polls in place of this one. That avoids waking
/// another thread, and moves the work to a core that is already free. The thread starts at the first use.
class CommunicationThread {
 public:
  CommunicationThread();
  /// Ends the thread after the work queued so far. Every Pollable has been removed.
  ~CommunicationThread();
  CommunicationThread(const CommunicationThread&) = delete;
  CommunicationThread& operator=(const CommunicationThread&) = delete;

  /// Runs `work` on the thread, in the order of the calls; waits for it at most `seconds` (negative: no
  /// limit) and returns whether it is done. Rethrows exceptions of `work` if it was waited for.
  bool run(std::function<void()> work, double seconds = -1);
  /// Makes the thread poll again, because something has changed.
  void wake();
  void add(Pollable& pollable);
  void remove(Pollable& pollable);

  /// Begins inline progress: while the returned handle lives, the calling thread polls in place of `thread`,
  /// which sleeps unless wake() or run() is called.
  static std::shared_ptr<void> begin_inline_progress(std::shared_ptr<CommunicationThread> thread);
  /// Polls everything once, until `wanted` has passed, on the calling thread; returns whether anything moved.
  /// Returns false at once while another thread holds the progress lock.
  bool poll_inline(HostEvent* wanted);
  /// True when no operation was pending at the last poll.
  bool idle() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tranche::comm
