#include "device/cpu/cpu_device.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "device/cpu/cpu_streams.h"
#include "device/large_copy.h"
#include "tranche/core/error.h"
#include "tranche/device/memory_resources.h"

namespace tranche {
namespace {

int resolve_threads(int threads) {
  if (threads < 0) {
    throw ConfigurationError("threads is " + std::to_string(threads) +
                             "; give a positive number, or 0 for the cores of the affinity mask");
  }
  return threads == 0 ? usable_cores() : threads;
}

void copy_bytes(Stream& stream, std::string_view name, void* to, const void* from, std::int64_t bytes,
                void (*copy)(void*, const void*, std::int64_t)) {
  if (bytes < 0) throw InvalidArgument(std::string(name) + " of " + std::to_string(bytes) + " bytes");
  if (bytes == 0) return;
  stream.enqueue(name, [=] { copy(to, from, bytes); });
}

class CpuDevice : public Device {
 public:
  explicit CpuDevice(const DeviceOptions& options)
      : index_(options.index),
        threads_(resolve_threads(options.threads)),
        compute_("compute", threads_),
        device_memory_(make_host_resource(Tier::device)),
        host_memory_(make_host_resource(Tier::host)) {}

  DeviceKind kind() const override { return DeviceKind::cpu; }
  int index() const override { return index_; }
  int threads() const override { return threads_; }
  void set_threads(int threads) override {
    threads_ = resolve_threads(threads);
    compute_.set_threads(threads_);
  }
  std::string description() const override {
    return "cpu (" + std::to_string(threads_) + (threads_ == 1 ? " thread)" : " threads)");
  }
  Stream& compute_stream() override { return compute_; }
  std::unique_ptr<Stream> create_stream(std::string name) override {
    return std::make_unique<detail::CpuWorkerStream>(std::move(name), 1);
  }
  std::unique_ptr<Stream> create_inline_stream(std::string name, int threads) override {
    if (threads < 1) throw InvalidArgument("stream '" + name + "' needs at least one thread");
    return std::make_unique<detail::CpuInlineStream>(std::move(name), threads);
  }
  std::unique_ptr<Stream> create_host_stream(std::string name, int threads) override {
    return detail::make_host_stream(std::move(name), threads);
  }
  MemoryResource& memory(Tier tier) override {
    if (tier == Tier::device) return *device_memory_;
    if (tier == Tier::host) return *host_memory_;
    throw InvalidArgument("a device has no memory of tier nvme; the block store of offload/ holds it");
  }
  bool host_accessible() const override { return true; }
  void fill_bytes(Stream& stream, void* device, unsigned char value, std::int64_t bytes) override {
    if (bytes < 0) throw InvalidArgument("fill_bytes of " + std::to_string(bytes) + " bytes");
    if (bytes == 0) return;
    stream.enqueue("fill bytes", [=] { std::memset(device, value, static_cast<std::size_t>(bytes)); });
  }
  std::unique_ptr<Replay> create_replay(std::string) override { return std::make_unique<DirectReplay>(); }
  void copy_to_host(Stream& stream, void* host, const void* device, std::int64_t bytes) override {
    copy_bytes(stream, "copy to host", host, device, bytes, detail::copy_large);
  }
  void copy_from_host(Stream& stream, void* device, const void* host, std::int64_t bytes) override {
    copy_bytes(stream, "copy from host", device, host, bytes,
               [](void* to, const void* from, std::int64_t size) {
                 // The bytes are read soon, so they stay in the caches.
                 std::memcpy(to, from, static_cast<std::size_t>(size));
               });
  }

 private:
  int index_;
  int threads_;
  detail::CpuInlineStream compute_;
  std::unique_ptr<MemoryResource> device_memory_;
  std::unique_ptr<MemoryResource> host_memory_;
};

}  // namespace

int usable_cores() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  if (sched_getaffinity(0, sizeof(mask), &mask) == 0) return std::max(1, CPU_COUNT(&mask));
  // The machine has more cores than the fixed-size mask holds.
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

std::unique_ptr<Device> detail::make_cpu_device(const DeviceOptions& options) {
  return std::make_unique<CpuDevice>(options);
}

}  // namespace tranche
