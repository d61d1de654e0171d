#pragma once
/// One communicator of NCCL's. Private to comm/nccl.

#include <nccl.h>

#include <mutex>
#include <utility>

#include "comm/device/device_exchange.h"

namespace tranche::comm {

/// A nonblocking communicator, whose calls may be aborted from the watch's thread at any time.
class NcclGroup {
 public:
  /// `rank` of `size` begins to meet the others, who have the same id; join() waits for them. `blocks`: most
  /// thread blocks of the GPU that a call may occupy; 0 leaves it to NCCL. `group` says whose it is, and who
  /// is told of failures.
  NcclGroup(const DeviceGroup& group, const ncclUniqueId& id, int size, int rank, int blocks = 0);
  ~NcclGroup() { abort(); }
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;
  void join();

  /// Makes the GPU that NCCL works on the current one.
  void make_current() const;
  /// Runs NCCL calls as one launch: `calls(communicator, say)` hands the result of each to `say`.
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
  /// Zero-copy use of memory where it and the driver allow that; where they do not, NCCL copies.
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
  /// A call of a nonblocking communicator has to be over before the next.
  void settle(ncclResult_t result, const char* what);
  void end_launch(ncclResult_t result, const char* what);

  DeviceGroup group_;
  int gpu_;  ///< as the runtime numbers it; a device's index may be larger
  void* registration_ = nullptr;
  std::mutex mutex_;  ///< calls of the communicator
  ncclComm_t communicator_ = nullptr;
  ncclResult_t begun_ = ncclSuccess;  ///< the result of what join() or end_close() waits for
};

/// An id that ranks can meet by. Throws CommunicationError.
ncclUniqueId make_nccl_id();

/// Messages of a line of ranks: each neighbour and direction has a communicator of two ranks. Collective.
std::unique_ptr<DeviceExchange> make_nccl_line(const DeviceGroup& group);

}  // namespace tranche::comm
