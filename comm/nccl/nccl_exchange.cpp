/// Exchanges by NCCL. All calls go to one communicator on one stream in one order. A gather, a broadcast or
/// NCCL's own reduction launches one kernel; an all_to_all launches one group; a deterministic reduction
/// launches, for each bucket, one group of sends and receives and one sum. In both kinds of reduction, the
/// bytes sent match the traffic formula: each part is sent once, to its owner, in the communication dtype.
/// NCCL reports neither which rank is missing when a call does not end, nor that ranks' calls differ. The
/// first is reported as a device or link that hangs; the sequence hash finds the second, except for different
/// counts of an all_to_all_v.
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>

#include <fmt/format.h>

#include "comm/deterministic_sum.h"
#include "comm/device/host_messages.h"
#include "comm/nccl/nccl_exchange.h"
#include "comm/nccl/nccl_group.h"
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
  return ncclFloat32;  // reduce_scatter accepts no other dtype
}

class NcclExchange : public DeviceExchange {
 public:
  NcclExchange(const DeviceGroup& group, bool own_reductions)
      : group_(group),
        own_reductions_(own_reductions),
        stream_(static_cast<cudaStream_t>(group.stream->native_handle())),
        messages_(group_) {
    ncclUniqueId id{};
    if (group.rank() == 0) id = make_nccl_id();
    group.host->broadcast(&id, sizeof(id), DataType::uint8, 0, {}, id_label).wait();
    nccl_ = std::make_unique<NcclGroup>(group, id, group.size(), group.rank());
    nccl_->join();
    const bool reduces = group.size() > 1 || own_reductions;
    staging_ = Buffer(*group.device_memory, reduces ? group.staging_bytes : 0, Category::communication,
                      "staging buffer");
    if (reduces) nccl_->register_memory(staging_.data(), staging_.bytes());
    require_staging();
  }

  Issued issue(const std::shared_ptr<const DeviceCall>& call, const Event&) override {
    if (call->count > 0 || !call->sends.empty()) {
      nccl_->make_current();
      const StreamSpan span(*group_.stream, call->what());
      if (call->name == "reduce_scatter") {
        // A single rank does not call NCCL, which would not round its values.
        const bool by_nccl = own_reductions_ && group_.size() > 1;
        by_nccl ? reduce_by_nccl(*call) : reduce_in_order(*call);
      } else {
        move(*call);
      }
    }
    return {group_.stream->record(), {}, false, true};
  }

  Issued message(const std::shared_ptr<const DeviceCall>& call, const Event&, Stream& channel) override {
    return messages_.issue(call, channel);
  }

  void check() override { nccl_->check(); }
  void abort() noexcept override { nccl_->abort(); }
  void close() noexcept override {
    nccl_->begin_close();
    nccl_->end_close();
  }

 private:
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
      nccl_->launch("ncclAllGather", [&](ncclComm_t communicator, auto&& say) {
        say(ncclAllGather(call.from, call.to, bytes, ncclUint8, communicator, stream_));
      });
    } else if (call.name == "broadcast") {
      nccl_->launch("ncclBroadcast", [&](ncclComm_t communicator, auto&& say) {
        say(ncclBroadcast(call.from, call.to, bytes, ncclUint8, call.other, communicator, stream_));
      });
    } else {
      copy_own_part(*group_.stream, call, group_.rank());
      if (call.count == 0) return;
      nccl_->launch("ncclSend and ncclRecv", [&](ncclComm_t communicator, auto&& say) {
        for (const int peer : group_.peers()) {
          // A pair of ranks without data to exchange posts no message.
          if (const auto sent = static_cast<std::size_t>(call.bytes_to(peer)); sent > 0) {
            say(ncclSend(call.place_sent_to(peer), sent, ncclUint8, peer, communicator, stream_));
          }
          if (const auto received = static_cast<std::size_t>(call.bytes_from(peer)); received > 0) {
            say(ncclRecv(call.place_received_from(peer), received, ncclUint8, peer, communicator, stream_));
          }
        }
      });
    }
  }

  unsigned char* staging() const { return static_cast<unsigned char*>(staging_.data()); }

  /// The number of elements exchanged at once when `pieces` parts lie in the staging buffer, aligned.
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
        nccl_->launch("ncclSend and ncclRecv", [&](ncclComm_t communicator, auto&& say) {
          unsigned char* place = staging();
          for (const int peer : group_.peers()) {
            if (gives) say(ncclSend(piece(peer), bytes, ncclUint8, peer, communicator, stream_));
            if (peer >= givers) continue;
            say(ncclRecv(place, bytes, ncclUint8, peer, communicator, stream_));
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
      nccl_->launch("ncclReduceScatter", [&](ncclComm_t communicator, auto&& say) {
        say(ncclReduceScatter(call.from, place, all, type, ncclSum, communicator, stream_));
      });
      if (!direct) sum(call, {place}, 0, call.count);
      return;
    }
    // NCCL's reduction a chunk at a time: a group of reductions, one to each owner.
    const std::int64_t width = size_of(call.dtype), chunk = chunk_of(call, 1);
    for (std::int64_t first = 0; first < call.count; first += chunk) {
      const std::int64_t count = std::min(chunk, call.count - first);
      nccl_->launch("ncclReduce", [&](ncclComm_t communicator, auto&& say) {
        for (int owner = 0; owner < group_.size(); ++owner) {
          say(ncclReduce(call.from_bytes() + owner * call.bytes() + first * width, staging_.data(),
                         static_cast<std::size_t>(count), type, ncclSum, owner, communicator, stream_));
        }
      });
      sum(call, {staging_.data()}, first, count);
    }
  }

  DeviceGroup group_;
  bool own_reductions_;
  cudaStream_t stream_;
  HostMessages messages_;
  Buffer staging_;
  std::unique_ptr<NcclGroup> nccl_;  // last: destroyed before the memory that it registered
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
  if (group.line) return make_nccl_line(group);
  return std::make_unique<NcclExchange>(group, own_reductions);
}

}  // namespace comm

std::string nccl_version() {
  int version = 0;
  ncclGetVersion(&version);
  return fmt::format("NCCL {}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

}  // namespace tranche
