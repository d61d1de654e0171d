#pragma once
/// The failure that ends a rank's exchanges of device memory. Private to comm/.

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/rank_names.h"
#include "tranche/core/error.h"
#include "tranche/device/event.h"

namespace tranche::comm {

/// The first failure of a device communicator. Thread-safe.
class DeviceFailure {
 public:
  explicit DeviceFailure(int rank, RankNames names = {}) : rank_(rank), names_(std::move(names)) {}

  /// Records that `error` ended `what`; the first failure wins. A peer's failure stays marked as such.
  void fail(const std::string& what, const std::exception_ptr& error) noexcept;
  /// Ends everything with `cause`, a complete sentence.
  void end(const std::string& cause) noexcept;
  bool failed() const noexcept { return failed_.load(std::memory_order_acquire); }
  /// Seconds since the failure; negative when there is none.
  double failed_for() const;
  /// True when nothing had failed yet at that time, in seconds_now().
  bool well_at(double when) const;
  /// Throws CommunicationError "<what>: <cause>" if anything failed; PeerFailure when a peer failed first.
  void check(const std::string& what) const;
  int rank() const noexcept { return rank_; }
  const RankNames& rank_names() const noexcept { return names_; }

 private:
  /// `peer`: the exit status of a failure that a peer reported; nullopt for this rank's own failure.
  void set(std::string cause, std::optional<ExitStatus> peer) noexcept;
  const int rank_;
  const RankNames names_;
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;
  std::string cause_;
  std::optional<ExitStatus> peer_status_;
  double when_ = 0;
};

}  // namespace tranche::comm
