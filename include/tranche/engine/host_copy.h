#pragma once
/// Step memory that is copied to host memory and back: activations that a model saves for backward.

#include <cstdint>
#include <string>

#include "tranche/device/step_arena.h"

namespace tranche {

class HostCopies;

/// A buffer of step memory whose bytes are, or will be, in host memory. Move-only; made by
/// Engine::send_to_host and turned into a buffer again by Engine::fetch_from_host. If it is destroyed before
/// that, it releases the memory on both tiers after the work that still uses it. Like all memory of the step,
/// it must be released before step().
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
  /// Releases the device memory, for reuse once the copy to host memory is done and the compute stream has
  /// passed this point; until then kernels may read it. No-op if nothing was sent (see Engine::send_to_host).
  void leave_device() noexcept;
  void release() noexcept;

 private:
  friend class HostCopies;
  HostCopies* owner_ = nullptr;  ///< null: nothing was sent, the bytes stay on the device
  std::int64_t bytes_ = 0;
  std::string tag_;
  StepBuffer device_, host_;
  Event out_, in_;       ///< the ends of the copies to host memory and back
  bool coming_ = false;  ///< the copy back was issued, and device_ is its destination
};

}  // namespace tranche
