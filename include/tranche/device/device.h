#pragma once
/// A device: its memory, its compute stream, and the creation of further streams.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "tranche/device/memory.h"
#include "tranche/device/replay.h"
#include "tranche/device/stream.h"

namespace tranche {

struct DeviceOptions {
  DeviceKind kind = DeviceKind::cpu;
  /// Node-local rank; selects the GPU on cuda.
  int index = 0;
  /// Host threads for kernels on the compute stream (cpu); 0 takes the cores of the affinity mask.
  int threads = 1;
  /// meta: records the work of the device's streams as a graph; other kinds ignore it.
  std::shared_ptr<detail::WorkRecorder> recorder = nullptr;
};

/// Counters of a device since its creation, for tests.
struct DeviceCounters {
  /// The number of times that the host thread blocked until the device had reached a point (synchronize,
  /// Event::wait on a pending point, a copy that could not be asynchronous). cpu and meta: 0.
  std::int64_t host_waits = 0;
  std::int64_t replays = 0;  ///< runs of a Replay that launched a captured graph
};

/// Memory of Tier::device as the device's driver reports it; all 0 on cpu and meta. Over all ranks that share
/// the GPU, total - free - sum(mapped) is held by libraries, contexts and other programs.
struct MemoryInfo {
  std::int64_t total = 0;    ///< of the whole GPU
  std::int64_t free = 0;     ///< of the whole GPU, shared with all its users
  std::int64_t mapped = 0;   ///< physical bytes that this Device's resource holds
  std::int64_t placed = 0;   ///< the allocated part of `mapped` (in multiples of memory_alignment)
  std::int64_t pinned = 0;   ///< host bytes registered by this Device, its own staging included
  std::int64_t staging = 0;  ///< the part of `pinned` that the Device keeps for its own copies and flags
};

/// A device of one rank. It outlives its streams and everything allocated from it.
class Device {
 public:
  virtual ~Device() = default;
  virtual DeviceKind kind() const = 0;
  virtual int index() const = 0;
  virtual int threads() const = 0;
  /// Changes the number of host threads for the compute stream's kernels. Call it before work is issued. It
  /// exists because the ranks of a node share its cores, and their number is known only after the device was
  /// made.
  virtual void set_threads(int threads) = 0;
  /// "cpu (16 threads)", "NVIDIA H200 (compute capability 9.0, 132 multiprocessors)", "meta".
  virtual std::string description() const = 0;
  /// cpu: enqueue() runs work on the calling thread and returns when it is done; cuda: an asynchronous CUDA
  /// stream; meta: drops work.
  virtual Stream& compute_stream() = 0;
  /// Creates a further stream; cpu: with its own worker thread; cuda: another CUDA stream; meta: drops work,
  /// and events have already passed.
  virtual std::unique_ptr<Stream> create_stream(std::string name) = 0;
  /// Creates a stream for kernels that a communication thread calls; cpu: runs work on the calling thread,
  /// with `threads`; cuda: as create_stream, with high priority.
  virtual std::unique_ptr<Stream> create_inline_stream(std::string name, int threads) = 0;
  /// Creates a stream for work on host memory, on any device: its kernels run on the host, on its own worker
  /// thread with up to `threads` threads; meta: drops work.
  virtual std::unique_ptr<Stream> create_host_stream(std::string name, int threads) = 0;
  /// The undecorated resource of a tier. Throws InvalidArgument for nvme, which belongs to offload/.
  virtual MemoryResource& memory(Tier tier) = 0;
  /// True when host code may touch memory of Tier::device (cpu).
  virtual bool host_accessible() const = 0;
  /// Copies between device memory and host memory, ordered on `stream`. `host` holds the bytes once `stream`
  /// has been synchronized (or, for memory of Tier::host, once an event recorded behind the copy has passed).
  /// Pageable `host` memory may be reused as soon as copy_from_host returns. Memory of Tier::host (pinned on
  /// cuda) is read in stream order: keep it until the stream has passed the copy.
  virtual void copy_to_host(Stream& stream, void* host, const void* device, std::int64_t bytes) = 0;
  virtual void copy_from_host(Stream& stream, void* device, const void* host, std::int64_t bytes) = 0;
  /// Sets `bytes` bytes of device memory to `value`, ordered on `stream`.
  virtual void fill_bytes(Stream& stream, void* device, unsigned char value, std::int64_t bytes) = 0;
  /// Creates a replay for work that is issued the same way again and again (see replay.h).
  virtual std::unique_ptr<Replay> create_replay(std::string name) = 0;
  virtual DeviceCounters counters() const { return {}; }
  virtual MemoryInfo memory_info() const { return {}; }
  /// Announces the phase that begins ("forward" of a unit, "step") to the device's profiler. cuda: NVTX
  /// ranges; cpu and meta: nothing. Called by the thread that issues work.
  virtual void mark_phase(std::string_view /*phase*/, std::string_view /*unit*/) {}
  /// Returns unoccupied physical memory to the driver. It is called at changes of phase, because a resource
  /// otherwise keeps freed memory until it grows. No-op on cpu and meta.
  virtual void release_unused() {}
};

/// Makes a device. Throws NotCompiled for cuda when the build has none, ConfigurationError when no such
/// device is present.
std::unique_ptr<Device> make_device(const DeviceOptions& options);
/// Cores that this process may run on (its affinity mask).
int usable_cores();
/// The number of devices of a kind that DeviceOptions::index selects from (GPUs); 0 for kinds of which every
/// process has its own, whatever the index. Throws as make_device does when there is none.
int numbered_devices(DeviceKind kind);

}  // namespace tranche
