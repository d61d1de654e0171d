#pragma once
/// Lets thread ranks start together.

#include <latch>

namespace tranche::test {

/// The ranks of run_thread_ranks() begin their work when each of them has made its engine, or has failed to.
/// Otherwise an error of a rank that is ahead may reach another in its engine's constructor, outside of the
/// test's try block, and a time-out may pass while a rank still starts.
class CommonStart {
 public:
  explicit CommonStart(int ranks) : waiting_(ranks) {}

  /// A rank's part. It is made before what the rank makes, and counts the rank as started when an exception
  /// destroys it, so that no other rank waits for ever.
  class Rank {
   public:
    explicit Rank(CommonStart& start) : waiting_(start.waiting_) {}
    ~Rank() {
      if (!counted_) waiting_.count_down();
    }
    Rank(const Rank&) = delete;
    Rank& operator=(const Rank&) = delete;
    /// Called once; returns when all ranks have called it or have failed.
    void await_others() {
      counted_ = true;
      waiting_.arrive_and_wait();
    }

   private:
    std::latch& waiting_;
    bool counted_ = false;
  };

 private:
  std::latch waiting_;
};

}  // namespace tranche::test
