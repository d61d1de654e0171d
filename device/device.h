#pragma once
/// A device: its memory, its compute stream, and the making of further streams.

#include <cstdint>
#include <memory>
#include <string>

#include "tranche/device/memory.h"
#include "tranche/device/stream.h"

namespace tranche {

struct DeviceOptions {
  DeviceKind kind = DeviceKind::cpu;
  /// Node-local rank; selects the GPU on cuda.
  int index = 0;
  /// Host threads for kernels on the compute stream (cpu); 0 takes the cores of the affinity mask.
  int threads = 1;
};

/// Outlives its streams and everything allocated from it. One per rank.
class Device {
 public:
  virtual ~Device() = default;
  virtual DeviceKind kind() const = 0;
  virtual int index() const = 0;
  virtual int threads() const = 0;
  /// Changes the host threads of the compute stream's kernels; before work is issued (the ranks of a host
  /// share its cores, and their number is known only after the device was made).
  virtual void set_threads(int threads) = 0;
  /// "cpu (16 threads)", "NVIDIA H200", "meta".
  virtual std::string description() const = 0;
  /// cpu: runs work inline on the calling thread; meta: drops it.
  virtual Stream& compute_stream() = 0;
  /// A further stream; cpu: with a worker thread of its own; meta: drops work, events already passed.
  virtual std::unique_ptr<Stream> create_stream(std::string name) = 0;
  /// A stream that runs on whichever thread calls it (communication threads calling kernels).
  virtual std::unique_ptr<Stream> create_inline_stream(std::string name, int threads) = 0;
  /// The undecorated resource of a tier; nvme belongs to offload/ and throws InvalidArgument here.
  virtual MemoryResource& memory(Tier tier) = 0;
  /// Copies between device memory and host memory, ordered on `stream`.
  virtual void copy_to_host(Stream& stream, void* host, const void* device, std::int64_t bytes) = 0;
  virtual void copy_from_host(Stream& stream, void* device, const void* host, std::int64_t bytes) = 0;
};

/// Makes a device. Throws NotCompiled for cuda when the build has none, ConfigurationError when no such
/// device is present.
std::unique_ptr<Device> make_device(const DeviceOptions& options);

}  // namespace tranche
