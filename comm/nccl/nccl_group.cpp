#include "comm/nccl/nccl_group.h"

#include <cuda_runtime_api.h>

#include <chrono>
#include <thread>

#include <fmt/format.h>

#include "core/clock.h"
#include "tranche/core/error.h"
#include "tranche/device/cuda_interop.h"

namespace tranche::comm {

NcclGroup::NcclGroup(const DeviceGroup& group, const ncclUniqueId& id, int size, int rank, int blocks)
    : group_(group), gpu_(cuda_ordinal(*group.device)) {
  make_current();
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  if (blocks > 0) config.maxCTAs = blocks;
  begun_ = ncclCommInitRankConfig(&communicator_, size, id, rank, &config);
}

void NcclGroup::join() {
  settle(begun_, "ncclCommInitRankConfig");
}

void NcclGroup::make_current() const {
  if (const cudaError_t error = cudaSetDevice(gpu_); error != cudaSuccess) {
    throw CommunicationError(fmt::format("NCCL cannot work on GPU {}: {}", gpu_, cudaGetErrorString(error)));
  }
}

void NcclGroup::require(ncclResult_t result, const char* what) const {
  if (went_well(result)) return;
  const char* detail = ncclGetLastError(communicator_);
  throw CommunicationError(
      fmt::format("NCCL failed in {}: {}{}{} (NCCL_DEBUG=WARN says more)", what, ncclGetErrorString(result),
                  detail != nullptr && *detail != '\0' ? ": " : "", detail != nullptr ? detail : ""));
}

void NcclGroup::settle(ncclResult_t result, const char* what) {
  const double limit = detail::seconds_now() + group_.timeout_seconds;
  for (int tries = 0; result == ncclInProgress; ++tries) {
    if (tries > 100) std::this_thread::sleep_for(std::chrono::microseconds(50));
    group_.failure->check(what);
    if (tries % 1000 == 999) group_.host->check_health();
    if (detail::seconds_now() > limit) {
      throw CommunicationError(
          fmt::format("{} has not come to its end after {:.1f} s: a peer has not called it, "
                      "or a link hangs (NCCL_DEBUG=WARN says more)",
                      what, group_.timeout_seconds));
    }
    const std::lock_guard lock(mutex_);
    if (communicator_ == nullptr) continue;  // aborted: the failure is already recorded
    require(ncclCommGetAsyncError(communicator_, &result), "ncclCommGetAsyncError");
  }
  require(result, what);
}

void NcclGroup::end_launch(ncclResult_t result, const char* what) {
  group_.failure->check(what);  // aborted meanwhile
  settle(result, what);
}

void NcclGroup::register_memory(void* data, std::int64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (communicator_ == nullptr) return;
  if (ncclCommRegister(communicator_, data, static_cast<std::size_t>(bytes), &registration_) != ncclSuccess) {
    registration_ = nullptr;
  }
}

void NcclGroup::check() {
  const std::lock_guard lock(mutex_);
  if (communicator_ == nullptr) return;
  ncclResult_t state = ncclSuccess;
  require(ncclCommGetAsyncError(communicator_, &state), "ncclCommGetAsyncError");
  require(state, "an operation under way");
}

void NcclGroup::abort() noexcept {
  const std::lock_guard lock(mutex_);
  if (communicator_ == nullptr) return;
  cudaSetDevice(gpu_);
  ncclCommAbort(communicator_);
  communicator_ = nullptr;
}

void NcclGroup::begin_close() noexcept {
  const std::lock_guard lock(mutex_);
  if (communicator_ == nullptr) return;
  cudaSetDevice(gpu_);
  if (registration_ != nullptr) ncclCommDeregister(communicator_, registration_);
  begun_ = ncclCommFinalize(communicator_);
}

void NcclGroup::end_close() noexcept {
  try {
    {
      const std::lock_guard lock(mutex_);
      if (communicator_ == nullptr) return;
    }
    settle(begun_, "ncclCommFinalize");
    const std::lock_guard lock(mutex_);
    if (communicator_ != nullptr) ncclCommDestroy(communicator_);
    communicator_ = nullptr;
  } catch (...) {
    // A peer is gone; the destructor aborts, which does not wait.
  }
}

ncclUniqueId make_nccl_id() {
  ncclUniqueId id{};
  if (const ncclResult_t result = ncclGetUniqueId(&id); result != ncclSuccess) {
    throw CommunicationError(fmt::format("NCCL failed in ncclGetUniqueId: {} (NCCL_DEBUG=WARN says more)",
                                         ncclGetErrorString(result)));
  }
  return id;
}

}  // namespace tranche::comm
