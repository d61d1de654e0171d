#pragma once
/// Step memory that goes to host memory and comes back: activations that a model saves for backward.

#include <cstdint>
#include <string>

#include "tranche/device/step_arena.h"

namespace tranche {

class HostCopies;

/// A buffer of step memory whose bytes are, or will be, in host memory. Move-only; made by
/// Engine::send_to_host and turned into a buffer again by Engine::fetch_from_host. Destroyed before that, it
/// lets go of both places behind what still uses them. Released, as all memory of the step, before step().
class HostCopy {
 public:
  HostCopy() = default;
  ~HostCopy() { release(); }
  HostCopy(HostCopy&& other) noexcept;
  HostCopy& operator=(HostCopy&& other) noexcept;
  HostCopy(const HostCopy&) = delete;
  HostCopy& operator=(const HostCopy&) = delete;

  explicit operator bool() const noexcept { return static_cast<bool>(device_) || static_cast<bool>(host_); }
  std::int64_t bytes() const noexcept { return bytes_; }
  /// Gives the device memory back, for reuse once the copy has left it and the compute stream has passed this
  /// point; until then kernels may read it. No-op where nothing was sent (see Engine::send_to_host).
  void leave_device() noexcept;
  void release() noexcept;

 private:
  friend class HostCopies;
  HostCopies* owner_ = nullptr;  ///< null: nothing was sent, the bytes stay on the device
  std::int64_t bytes_ = 0;
  std::string tag_;
  StepBuffer device_, host_;
  Event out_, in_;       ///< the copies' ends
  bool coming_ = false;  ///< the way back was issued: device_ is where it leads
};

}  // namespace tranche
