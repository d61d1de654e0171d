#include <cuda_runtime_api.h>

#include <algorithm>
#include <utility>

#include "device/cpu/cpu_streams.h"
#include "device/cuda/cuda_memory.h"
#include "device/cuda/cuda_modules.h"
#include "device/cuda/cuda_replay.h"
#include "device/cuda/cuda_state.h"
#include "device/cuda/cuda_stream.h"
#include "device/cuda/nvtx_ranges.h"
#include "device/cuda_probe.h"
#include "tranche/core/error.h"
#include "tranche/device/cuda_interop.h"

namespace tranche {
namespace {

using cuda::check;
using cuda::CudaState;
using cuda::CudaStream;

std::string describe(const detail::CudaDeviceInfo& info, int rank, int gpus) {
  std::string text = info.name + " (compute capability " + std::to_string(info.compute_major) + "." +
                     std::to_string(info.compute_minor) + ", " + std::to_string(info.multiprocessors) +
                     " multiprocessors)";
  // Only ranks beyond the last GPU warn, because lower ranks cannot know that they exist.
  if (rank >= gpus) {
    text += ", shared: rank " + std::to_string(rank) + " of this node has GPU " +
            std::to_string(rank % gpus) + " of " + std::to_string(gpus);
  }
  return text;
}

class CudaDevice : public Device {
 public:
  CudaDevice(const DeviceOptions& options, const detail::CudaProbe& probe)
      : index_(options.index), threads_(std::max(1, options.threads)) {
    const int gpus = static_cast<int>(probe.devices.size());
    const int gpu = options.index % gpus;
    description_ = describe(probe.devices[static_cast<std::size_t>(gpu)], options.index, gpus);
    state_ = std::make_shared<CudaState>(gpu);
    const auto driver = cuda::DriverFunctions::fetch();
    cuda::load_kernels(driver);
    const bool exact = cuda::wants_plain_memory();
    if (!exact) device_memory_ = cuda::make_mapped_memory(state_, driver);
    if (!device_memory_) device_memory_ = cuda::make_plain_memory(state_, exact);
    host_memory_ = std::make_unique<cuda::PinnedMemory>(state_);
    staging_ = std::make_unique<cuda::StagingMemory>(state_, *host_memory_);
    parts_ = {state_, host_memory_.get(), staging_.get(), driver};
    compute_ = std::make_unique<CudaStream>(parts_, "compute", CudaStream::Priority::normal);
    state_->renew_clock(static_cast<cudaStream_t>(compute_->native_handle()));
  }

  DeviceKind kind() const override { return DeviceKind::cuda; }
  int index() const override { return index_; }
  int threads() const override { return threads_; }
  void set_threads(int threads) override { threads_ = std::max(1, threads); }
  std::string description() const override { return description_; }
  Stream& compute_stream() override { return *compute_; }
  // Further streams carry communication, for which others wait; its kernels are short.
  std::unique_ptr<Stream> create_stream(std::string name) override {
    return std::make_unique<CudaStream>(parts_, std::move(name), CudaStream::Priority::high);
  }
  std::unique_ptr<Stream> create_inline_stream(std::string name, int threads) override {
    if (threads < 1) throw InvalidArgument("stream '" + name + "' needs at least one thread");
    return create_stream(std::move(name));
  }
  std::unique_ptr<Stream> create_host_stream(std::string name, int threads) override {
    return detail::make_host_stream(std::move(name), threads);
  }
  MemoryResource& memory(Tier tier) override {
    if (tier == Tier::device) return *device_memory_;
    if (tier == Tier::host) return *host_memory_;
    throw InvalidArgument("a device has no memory of tier nvme; the block store of offload/ holds it");
  }
  bool host_accessible() const override { return false; }
  void copy_to_host(Stream& stream, void* host, const void* device, std::int64_t bytes) override {
    CudaStream& own = ours(stream, "copy to host", bytes);
    if (bytes > 0) own.copy_to_host(host, device, bytes);
  }
  void copy_from_host(Stream& stream, void* device, const void* host, std::int64_t bytes) override {
    CudaStream& own = ours(stream, "copy from host", bytes);
    if (bytes > 0) own.copy_from_host(device, host, bytes);
  }
  void fill_bytes(Stream& stream, void* device, unsigned char value, std::int64_t bytes) override {
    CudaStream& own = ours(stream, "fill_bytes", bytes);
    if (bytes > 0) own.fill(device, value, bytes);
  }
  std::unique_ptr<Replay> create_replay(std::string name) override {
    return std::make_unique<cuda::GraphReplay>(state_, std::move(name));
  }
  DeviceCounters counters() const override { return state_->counters(); }
  MemoryInfo memory_info() const override {
    state_->make_current();
    std::size_t free = 0;
    std::size_t total = 0;
    check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    const auto held = device_memory_->held();
    return {static_cast<std::int64_t>(total), static_cast<std::int64_t>(free), held.mapped, held.placed,
            host_memory_->pinned_bytes(),     state_->staging_bytes()};
  }
  void mark_phase(std::string_view phase, std::string_view unit) override { phase_.mark(phase, unit); }
  void release_unused() override { device_memory_->release_unused(); }

  std::unique_ptr<Stream> wrap(void* stream, std::string name) {
    return std::make_unique<CudaStream>(parts_, std::move(name), static_cast<cudaStream_t>(stream));
  }
  int gpu() const { return state_->gpu(); }

 private:
  static CudaStream& ours(Stream& stream, const char* what, std::int64_t bytes) {
    if (bytes < 0) throw InvalidArgument(std::string(what) + " of " + std::to_string(bytes) + " bytes");
    auto* const own = dynamic_cast<CudaStream*>(&stream);
    if (own == nullptr) {
      throw InvalidArgument(std::string(what) + " on stream '" + stream.name() + "' of kind " +
                            std::string(name_of(stream.kind())) + ", but the memory is of a cuda device");
    }
    return *own;
  }

  int index_;
  int threads_;
  std::string description_;
  std::shared_ptr<CudaState> state_;
  std::unique_ptr<cuda::GpuMemory> device_memory_;
  std::unique_ptr<cuda::PinnedMemory> host_memory_;
  std::unique_ptr<cuda::StagingMemory> staging_;
  cuda::StreamParts parts_;
  cuda::nvtx::PhaseRange phase_;
  std::unique_ptr<CudaStream> compute_;  // after the members that provide pinned memory, which it holds
};

}  // namespace

std::unique_ptr<Device> detail::make_cuda_device(const DeviceOptions& options) {
  const CudaProbe probe = probe_cuda();
  if (probe.devices.empty()) {
    throw ConfigurationError("device cuda was asked for, but " + probe.problem + "; choose device cpu");
  }
  if (options.index < 0) {
    throw ConfigurationError("device cuda " + std::to_string(options.index) +
                             " was asked for; the index is this rank's among those of its node, from 0");
  }
  return std::make_unique<CudaDevice>(options, probe);
}

std::unique_ptr<Stream> wrap_stream(Device& device, void* cuda_stream, std::string name) {
  auto* const cuda_device = dynamic_cast<CudaDevice*>(&device);
  if (cuda_device == nullptr) {
    throw InvalidArgument("stream '" + name + "' cannot be wrapped: device '" + device.description() +
                          "' is no cuda device");
  }
  return cuda_device->wrap(cuda_stream, std::move(name));
}

int cuda_ordinal(const Device& device) {
  const auto* const cuda_device = dynamic_cast<const CudaDevice*>(&device);
  if (cuda_device == nullptr)
    throw InvalidArgument("device '" + device.description() + "' is no cuda device");
  return cuda_device->gpu();
}

}  // namespace tranche
