#pragma once
/// Threads that help the one thread of a host stream with its loops.

#include <functional>
#include <memory>

namespace tranche::detail {

/// `threads` - 1 threads of its own, which share loops with the thread that calls run().
///
/// Streams beside the compute stream use it instead of OpenMP. GNU's OpenMP gives every thread that starts a
/// loop a team of its own, and as soon as all teams together have more threads than the machine has cores
/// none of them waits actively any more, the compute stream's neither: its kernels, some ten microseconds
/// apart, then pay a wake-up each (measured: a step of 71 ms takes 136; docs/internals/offload.md).
class WorkerTeam {
 public:
  /// Throws InvalidArgument below one thread, std::system_error when the system gives none.
  explicit WorkerTeam(int threads);
  ~WorkerTeam();
  WorkerTeam(const WorkerTeam&) = delete;
  WorkerTeam& operator=(const WorkerTeam&) = delete;

  int threads() const noexcept;

  /// Calls part(i) once for each i in [0, parts), on the calling thread and the team's; returns when all have
  /// returned. Waits for no thread that has taken no part, so one that the system does not let run delays
  /// nobody. Of exceptions that parts throw the first is rethrown when all parts that had begun are done; the
  /// others are then not begun. From one thread at a time, and not from inside a part.
  void run(int parts, const std::function<void(int)>& part);

  /// The team that the calling thread may use; null: none.
  static WorkerTeam* of_this_thread() noexcept;

  /// Lets the calling thread use a team as long as it lives.
  class Loan {
   public:
    explicit Loan(WorkerTeam& team) noexcept;
    ~Loan();
    Loan(const Loan&) = delete;
    Loan& operator=(const Loan&) = delete;

   private:
    WorkerTeam* before_;
  };

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tranche::detail
