#pragma once
#include <chrono>

namespace tranche::detail {

/// Seconds from a steady clock with an arbitrary origin.
inline double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Measures elapsed seconds since construction or restart().
class Stopwatch {
 public:
  Stopwatch() : start_(seconds_now()) {}
  void restart() { start_ = seconds_now(); }
  double seconds() const { return seconds_now() - start_; }

 private:
  double start_;
};

}  // namespace tranche::detail
