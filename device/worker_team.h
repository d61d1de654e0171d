#pragma once
/// Threads that share the loops of a host stream's one thread.

#include <functional>
#include <memory>

namespace tranche::detail {

/// `threads` - 1 threads that share loops with the thread that calls run().
///
/// Streams beside the compute stream use it instead of OpenMP. GNU's OpenMP gives every thread that starts a
/// loop its own team, and as soon as all teams together have more threads than the machine has cores, none of
/// them waits actively any more, the compute stream's included: its kernels, some ten microseconds apart,
/// then pay a wake-up each (one measured step took 136 ms in place of 71).
class WorkerTeam {
 public:
  /// Throws InvalidArgument below one thread, std::system_error when the system cannot create one.
  explicit WorkerTeam(int threads);
  ~WorkerTeam();
  WorkerTeam(const WorkerTeam&) = delete;
  WorkerTeam& operator=(const WorkerTeam&) = delete;

  int threads() const noexcept;

  /// Calls part(i) once for each i in [0, parts), on the calling thread and the team's; returns when all have
  /// returned. It does not wait for threads that took no part, so a thread that the system does not schedule
  /// delays nobody. If parts throw, the remaining ones are not begun, and the first exception is rethrown
  /// when all that had begun are done. Call it from one thread at a time, and not from inside a part.
  void run(int parts, const std::function<void(int)>& part);

  /// The team that the calling thread may use; null if it has none.
  static WorkerTeam* of_this_thread() noexcept;

  /// Lets the calling thread use a team during the object's lifetime.
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
