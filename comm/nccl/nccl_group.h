#pragma once
/// One NCCL communicator. Private to comm/nccl.

#include <nccl.h>

#include <mutex>
#include <utility>

#include "comm/device/device_exchange.h"

namespace tranche::comm {

/// A nonblocking communicator, whose calls may be aborted from the watch's thread at any time.
class NcclGroup {
 public:
  /// Starts to connect `rank` of `size` with the ranks that have the same id; join() waits for them.
  /// `blocks`: the most thread blocks of the GPU that a call may occupy; 0 lets NCCL choose. `group` provides
  /// the device and records failures.
  NcclGroup(const DeviceGroup& group, const ncclUniqueId& id, int size, int rank, int blocks = 0);
  ~NcclGroup() { abort(); }
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;
  void join();

  /// Makes NCCL's GPU the current one.
  void make_current() const;
  /// Runs NCCL calls as one launch: `calls(communicator, say)` passes the result of each call to `say`.
  template <typename Calls>
  void launch(const char* what, Calls&& calls) {
    ncclResult_t result = ncclSuccess;
    {
      const std::lock_guard lock(mutex_);
      if (communicator_ != nullptr) {
        ncclResult_t inside = ncclSuccess;
        require(ncclGroupStart(), "ncclGroupStart");
        calls(communicator_, [&](ncclResult_t each) {
          if (!went_well(each)) inside = each;
        });
        result = ncclGroupEnd();
        if (inside != ncclSuccess) result = inside;
      }
    }
    end_launch(result, what);
  }
  /// Registers memory for zero-copy use if it and the driver allow that; otherwise NCCL copies.
  void register_memory(void* data, std::int64_t bytes);

  /// See DeviceExchange. Closing is collective and has two parts, so that a rank can begin it for all of its
  /// communicators before it waits for the peers of the first.
  void check();
  void abort() noexcept;
  void begin_close() noexcept;
  void end_close() noexcept;

 private:
  static bool went_well(ncclResult_t result) { return result == ncclSuccess || result == ncclInProgress; }
  void require(ncclResult_t result, const char* what) const;
  /// Waits for a call of a nonblocking communicator to end, as is required before the next.
  void settle(ncclResult_t result, const char* what);
  void end_launch(ncclResult_t result, const char* what);

  DeviceGroup group_;
  int gpu_;  ///< the runtime's number; a device's index may be larger
  void* registration_ = nullptr;
  std::mutex mutex_;  ///< guards the communicator
  ncclComm_t communicator_ = nullptr;
  ncclResult_t begun_ = ncclSuccess;  ///< the result of the call that join() or end_close() waits for
};

/// Makes an id for a new communicator. Throws CommunicationError.
ncclUniqueId make_nccl_id();

/// Makes the exchange of a line of ranks: each neighbour and direction has a communicator of two ranks.
/// Collective.
std::unique_ptr<DeviceExchange> make_nccl_line(const DeviceGroup& group);

}  // namespace tranche::comm
