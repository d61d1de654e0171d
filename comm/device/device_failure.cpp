#include "comm/device/device_failure.h"

#include <algorithm>

#include "comm/peer_failure.h"
#include "core/clock.h"
#include "tranche/core/error.h"

namespace tranche::comm {

void DeviceFailure::set(std::string cause, std::optional<ExitStatus> peer) noexcept {
  const std::lock_guard lock(mutex_);
  if (failed_.load(std::memory_order_relaxed)) return;
  cause_ = std::move(cause);
  peer_status_ = peer;
  when_ = detail::seconds_now();
  failed_.store(true, std::memory_order_release);
}

void DeviceFailure::fail(const std::string& what, const std::exception_ptr& error) noexcept {
  try {
    std::string cause = message_of(error);
    std::optional<ExitStatus> peer;
    try {
      std::rethrow_exception(error);
    } catch (const PeerFailure& echo) {
      peer = echo.exit_status();
      // The cause is stored without the operation, because other operations report it too.
      if (!what.empty() && cause.rfind(what + ": ", 0) == 0) cause.erase(0, what.size() + 2);
    } catch (...) {
      const std::string prefix = "ended by the failure of ";
      if (cause.rfind(prefix, 0) != 0) {
        if (!what.empty() && cause.rfind(what, 0) != 0) cause = what + ": " + cause;
        cause = prefix + cause;
      }
    }
    set(std::move(cause), peer);
  } catch (...) {
    set("ended by a failure; no memory was left to describe it", std::nullopt);
  }
}

void DeviceFailure::end(const std::string& cause) noexcept {
  set(cause, std::nullopt);
}

double DeviceFailure::failed_for() const {
  if (!failed()) return -1;
  const std::lock_guard lock(mutex_);
  return std::max(0.0, detail::seconds_now() - when_);
}

bool DeviceFailure::well_at(double when) const {
  if (!failed()) return true;
  const std::lock_guard lock(mutex_);
  return when < when_;  // false for an unknown time
}

void DeviceFailure::check(const std::string& what) const {
  if (!failed()) return;
  const std::lock_guard lock(mutex_);
  const std::string own = "ended by the failure of " + what + ": ";
  std::string text = what.empty() ? cause_ : what + ": " + cause_;
  if (!what.empty() && cause_.rfind(own, 0) == 0) text = what + ": " + cause_.substr(own.size());
  const auto raise = [&](auto error) {
    error.attach_rank(rank_);
    throw error;
  };
  if (peer_status_) raise(PeerFailure(text, *peer_status_));
  raise(CommunicationError(text));
}

}  // namespace tranche::comm
