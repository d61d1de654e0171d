#pragma once
/// The progress line for reading or writing many bytes.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace tranche::tools {

/// "verified 1.20 GiB of 8.00 GiB, 1.95 GiB/s, 3 s left". In a terminal one line is redrawn a few times a
/// second; elsewhere a line is written every half minute. It writes and reads the time through functions, so
/// that tests can check it.
class TransferProgress {
 public:
  using Writer = std::function<void(std::string_view)>;
  using Clock = std::function<double()>;  ///< seconds
  TransferProgress(std::string verb, std::int64_t total, bool terminal, Writer write, Clock clock);
  TransferProgress(std::string verb, std::int64_t total, bool terminal, Writer write);
  /// Ends a redrawn line.
  ~TransferProgress() { finish(); }
  TransferProgress(const TransferProgress&) = delete;
  TransferProgress& operator=(const TransferProgress&) = delete;

  void add(std::int64_t bytes);
  void finish();
  std::int64_t done() const noexcept { return done_; }
  double seconds() const { return clock_() - start_; }
  /// "1.20 GiB in 0.6 s, 1.95 GiB/s"
  std::string summary() const;

 private:
  std::string line(double seconds) const;
  std::string verb_;
  std::int64_t total_;
  bool terminal_;
  Writer write_;
  Clock clock_;
  double start_, shown_;
  std::int64_t done_ = 0;
  std::size_t drawn_ = 0;
};

}  // namespace tranche::tools
