/// Exchange by NCCL. All calls go to one communicator on one stream in one order. What a call launches: a
/// gather, a broadcast or NCCL's own reduction one kernel; an all_to_all one group; a deterministic reduction
/// one group of sends and receives and one sum a bucket. Bytes on the wire are those of the formula,
/// whichever reduces: pieces travel in the communication dtype, to their owner, once. NCCL does not say who
/// is missing when a call does not end, nor that ranks' calls differ: the first is told as a device or link
/// that hangs, the second is found by the sequence hash, which has no counts of an all_to_all_v.
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>

#include <fmt/format.h>

#include "comm/deterministic_sum.h"
#include "comm/device/host_messages.h"
#include "comm/nccl/nccl_exchange.h"
#include "core/clock.h"
#include "tranche/comm/backends.h"
#include "tranche/core/error.h"
#include "tranche/core/shape.h"
#include "tranche/device/cuda_interop.h"

namespace tranche {

namespace comm {

namespace {

constexpr OperationLabel id_label{"", "start", Traffic::control, Tier::host};

ncclDataType_t nccl_type(DataType dtype) {
  if (dtype == DataType::bfloat16) return ncclBfloat16;
  if (dtype == DataType::float16) return ncclFloat16;
  return ncclFloat32;  // reduce_scatter takes no other
}

bool went_well(ncclResult_t result) {
  return result == ncclSuccess || result == ncclInProgress;
}

class NcclExchange : public DeviceExchange {
 public:
  NcclExchange(const DeviceGroup& group, bool own_reductions)
      : group_(group),
        gpu_(cuda_ordinal(*group.device)),
        own_reductions_(own_reductions),
        stream_(static_cast<cudaStream_t>(group.stream->native_handle())),
        host_(group.host->split(0, group.rank())),
        messages_(group_, *host_),
        exchange_(group.device->create_stream("exchange")) {
    ncclUniqueId id{};
    if (group.rank() == 0) require(ncclGetUniqueId(&id), "ncclGetUniqueId");
    group.host->broadcast(&id, sizeof(id), DataType::uint8, 0, {}, id_label).wait();
    make_current();
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    try {
      settle(ncclCommInitRankConfig(&communicator_, group.size(), id, group.rank(), &config),
             "ncclCommInitRankConfig");
      const bool reduces = group.size() > 1 || own_reductions;
      staging_ = Buffer(*group.device_memory, reduces ? group.staging_bytes : 0, Category::communication,
                        "staging buffer");
      // Zero-copy where memory and driver allow it; where they do not, NCCL copies as it always can.
      if (reduces &&
          ncclCommRegister(communicator_, staging_.data(), static_cast<std::size_t>(staging_.bytes()),
                           &registration_) != ncclSuccess) {
        registration_ = nullptr;
      }
      require_staging();
    } catch (...) {
      abort();
      throw;
    }
  }

  ~NcclExchange() override { abort(); }

  Issued issue(const std::shared_ptr<const DeviceCall>& call, const Event& started) override {
    if (call->name == "send") return messages_.send(call, started, *exchange_);
    if (call->name == "recv") return messages_.receive(call, *exchange_);
    if (call->count > 0 || !call->sends.empty()) {
      make_current();
      const StreamSpan span(*group_.stream, call->what());
      if (call->name == "reduce_scatter") {
        // A rank alone has nothing for NCCL, which would not round it.
        const bool by_nccl = own_reductions_ && group_.size() > 1;
        by_nccl ? reduce_by_nccl(*call) : reduce_in_order(*call);
      } else {
        move(*call);
      }
    }
    return {group_.stream->record(), {}, false, true};
  }

  void check() override {
    const std::lock_guard lock(mutex_);
    if (communicator_ == nullptr) return;
    ncclResult_t state = ncclSuccess;
    require(ncclCommGetAsyncError(communicator_, &state), "ncclCommGetAsyncError");
    require(state, "an operation under way");
  }

  void abort() noexcept override {
    const std::lock_guard lock(mutex_);
    if (communicator_ == nullptr) return;
    cudaSetDevice(gpu_);
    ncclCommAbort(communicator_);
    communicator_ = nullptr;
  }

  void close() noexcept override {
    try {
      make_current();
      ncclResult_t result = ncclSuccess;
      {
        const std::lock_guard lock(mutex_);
        if (communicator_ == nullptr) return;
        if (registration_ != nullptr) ncclCommDeregister(communicator_, registration_);
        result = ncclCommFinalize(communicator_);
      }
      settle(result, "ncclCommFinalize");
      const std::lock_guard lock(mutex_);
      ncclCommDestroy(communicator_);
      communicator_ = nullptr;
    } catch (...) {
      // A peer is gone; the destructor aborts, which waits for nobody.
    }
  }

 private:
  void make_current() const {
    if (const cudaError_t error = cudaSetDevice(gpu_); error != cudaSuccess) {
      throw CommunicationError(
          fmt::format("NCCL cannot work on GPU {}: {}", gpu_, cudaGetErrorString(error)));
    }
  }

  void require(ncclResult_t result, const char* what) const {
    if (went_well(result)) return;
    const char* detail = ncclGetLastError(communicator_);
    throw CommunicationError(
        fmt::format("NCCL failed in {}: {}{}{} (NCCL_DEBUG=WARN says more)", what, ncclGetErrorString(result),
                    detail != nullptr && *detail != '\0' ? ": " : "", detail != nullptr ? detail : ""));
  }

  /// A call of a nonblocking communicator has to be over before the next.
  void settle(ncclResult_t result, const char* what) {
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
      if (communicator_ == nullptr) continue;  // aborted: the failure is known
      require(ncclCommGetAsyncError(communicator_, &result), "ncclCommGetAsyncError");
    }
    require(result, what);
  }

  /// Runs NCCL calls (each returning its result through `say`) as one launch.
  template <typename Calls>
  void launch(const char* what, Calls&& calls) {
    ncclResult_t result = ncclSuccess;
    {
      const std::lock_guard lock(mutex_);
      if (communicator_ != nullptr) {
        ncclResult_t inside = ncclSuccess;
        require(ncclGroupStart(), "ncclGroupStart");
        calls([&](ncclResult_t each) {
          if (!went_well(each)) inside = each;
        });
        result = ncclGroupEnd();
        if (inside != ncclSuccess) result = inside;
      }
    }
    group_.failure->check(what);  // aborted meanwhile
    settle(result, what);
  }

  void require_staging() const {
    const std::int64_t least = 256 * std::int64_t{4} * std::max(1, group_.size() - 1);
    if (staging_.bytes() >= least || (group_.size() == 1 && !own_reductions_)) return;
    throw ConfigurationError(
        fmt::format("a staging buffer of {} bytes cannot hold 256 fp32 elements from each of {} peers; give "
                    "tranche.communication_slab (staging_bytes in C++) at least {}",
                    group_.staging_bytes, group_.size() - 1, least));
  }

  void move(const DeviceCall& call) {
    const auto bytes = static_cast<std::size_t>(call.bytes());
    if (call.name == "all_gather") {
      launch("ncclAllGather", [&](auto&& say) {
        say(ncclAllGather(call.from, call.to, bytes, ncclUint8, communicator_, stream_));
      });
    } else if (call.name == "broadcast") {
      launch("ncclBroadcast", [&](auto&& say) {
        say(ncclBroadcast(call.from, call.to, bytes, ncclUint8, call.other, communicator_, stream_));
      });
    } else {
      copy_own_part(*group_.stream, call, group_.rank());
      if (call.count == 0) return;
      launch("ncclSend and ncclRecv", [&](auto&& say) {
        for (const int peer : group_.peers()) {
          // A pair of ranks that has nothing to exchange posts no message.
          if (const auto sent = static_cast<std::size_t>(call.bytes_to(peer)); sent > 0) {
            say(ncclSend(call.place_sent_to(peer), sent, ncclUint8, peer, communicator_, stream_));
          }
          if (const auto received = static_cast<std::size_t>(call.bytes_from(peer)); received > 0) {
            say(ncclRecv(call.place_received_from(peer), received, ncclUint8, peer, communicator_, stream_));
          }
        }
      });
    }
  }

  unsigned char* staging() const { return static_cast<unsigned char*>(staging_.data()); }

  /// Elements of a piece that are exchanged at once when `pieces` of them lie in the staging buffer, aligned.
  std::int64_t chunk_of(const DeviceCall& call, int pieces) const {
    if (pieces == 0) return call.count;  // one rank: nothing arrives
    const std::int64_t room = staging_.bytes() / pieces / memory_alignment * memory_alignment;
    std::int64_t chunk = room / size_of(call.dtype);
    if (call.sum.bucket_elements > 0) {
      chunk = std::min(chunk, std::max<std::int64_t>(call.sum.bucket_elements / group_.size(), 1));
    }
    return std::min(chunk, call.count);
  }

  void sum(const DeviceCall& call, const std::vector<const void*>& pieces, std::int64_t first,
           std::int64_t count) {
    deterministic_sum(
        *group_.stream, pieces, call.dtype, call.sum,
        TensorView{call.to_bytes() + first * size_of(call.output_dtype), call.output_dtype, Shape{count}});
  }

  void reduce_in_order(const DeviceCall& call) {
    const std::int64_t width = size_of(call.dtype);
    const std::int64_t chunk = chunk_of(call, group_.size() - 1);
    const std::int64_t stride = round_up(chunk * width, memory_alignment);
    for (std::int64_t first = 0; first < call.count; first += chunk) {
      const std::int64_t count = std::min(chunk, call.count - first);
      const auto bytes = static_cast<std::size_t>(count * width);
      const int givers = std::min(call.sum.givers, group_.size());
      std::vector<const void*> pieces(static_cast<std::size_t>(givers));
      const auto piece = [&](int member) {
        return call.from_bytes() + member * call.bytes() + first * width;
      };
      const bool gives = group_.rank() < givers;
      if (gives) pieces[static_cast<std::size_t>(group_.rank())] = piece(group_.rank());
      if (group_.size() > 1) {
        launch("ncclSend and ncclRecv", [&](auto&& say) {
          unsigned char* place = staging();
          for (const int peer : group_.peers()) {
            if (gives) say(ncclSend(piece(peer), bytes, ncclUint8, peer, communicator_, stream_));
            if (peer >= givers) continue;
            say(ncclRecv(place, bytes, ncclUint8, peer, communicator_, stream_));
            pieces[static_cast<std::size_t>(peer)] = place;
            place += stride;
          }
        });
      }
      sum(call, pieces, first, count);
    }
  }

  void reduce_by_nccl(const DeviceCall& call) {
    const ncclDataType_t type = nccl_type(call.dtype);
    const auto all = static_cast<std::size_t>(call.count);
    const bool direct = !call.sum.accumulate && call.dtype == call.output_dtype;
    if (direct || call.bytes() <= staging_.bytes()) {
      void* place = direct ? call.to : staging_.data();
      launch("ncclReduceScatter", [&](auto&& say) {
        say(ncclReduceScatter(call.from, place, all, type, ncclSum, communicator_, stream_));
      });
      if (!direct) sum(call, {place}, 0, call.count);
      return;
    }
    // The same a chunk at a time: a group of reductions, one to each owner.
    const std::int64_t width = size_of(call.dtype), chunk = chunk_of(call, 1);
    for (std::int64_t first = 0; first < call.count; first += chunk) {
      const std::int64_t count = std::min(chunk, call.count - first);
      launch("ncclReduce", [&](auto&& say) {
        for (int owner = 0; owner < group_.size(); ++owner) {
          say(ncclReduce(call.from_bytes() + owner * call.bytes() + first * width, staging_.data(),
                         static_cast<std::size_t>(count), type, ncclSum, owner, communicator_, stream_));
        }
      });
      sum(call, {staging_.data()}, first, count);
    }
  }

  DeviceGroup group_;
  int gpu_;  ///< as the runtime numbers it; a device's index may be larger
  bool own_reductions_;
  cudaStream_t stream_;
  std::unique_ptr<Communicator> host_;
  HostMessages messages_;
  Buffer staging_;
  void* registration_ = nullptr;
  std::mutex mutex_;  ///< calls of the communicator, which the watch may abort
  ncclComm_t communicator_ = nullptr;
  std::unique_ptr<Stream> exchange_;  // last: its work uses all of the above
};

}  // namespace

bool has_nccl() {
  return true;
}

std::string nccl_gpu_of(const Device& device) {
  if (device.kind() != DeviceKind::cuda) return {};
  char id[32] = "";
  if (cudaDeviceGetPCIBusId(id, sizeof(id), cuda_ordinal(device)) != cudaSuccess) {
    cudaGetLastError();
    return {};
  }
  return id;
}

std::unique_ptr<DeviceExchange> make_nccl_exchange(const DeviceGroup& group, bool own_reductions) {
  return std::make_unique<NcclExchange>(group, own_reductions);
}

}  // namespace comm

std::string nccl_version() {
  int version = 0;
  ncclGetVersion(&version);
  return fmt::format("NCCL {}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

}  // namespace tranche
