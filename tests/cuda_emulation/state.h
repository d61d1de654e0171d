#pragma once
/// The state that the files of the emulated runtime share.

#include <cuda_runtime_api.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace cuda_emulation {

/// A point in the order of a stream's work.
struct Point {
  std::mutex mutex;
  std::condition_variable changed;
  std::atomic<bool> passed{false};
  double when = 0;  // milliseconds; written before passed

  void pass();
  void wait();
};

struct Operation {
  std::function<void()> run;
  /// Needs device memory; skipped once the device has failed.
  bool on_device = true;
  /// Ends at once and runs no code of the user: not worth closing the memory for, unless it is the last.
  bool marker = false;
};

/// A capture under way, and then the graph: operations in the order in which they were issued, which respects
/// all dependencies, so that running them one after another is a correct execution.
struct Capture {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::thread::id thread;
  cudaStream_t origin = nullptr;
  bool invalid = false;
  std::vector<Operation> operations;
  std::set<cudaStream_t> streams;
  std::set<cudaStream_t> unjoined;
};

cudaStream_t current_capture_stream();

/// Environment: an integer, or `otherwise`.
std::int64_t environment(const char* name, std::int64_t otherwise);

// --- errors (errors.cpp)
// -------------------------------------------------------------------------------------

/// Begins a call: counts it and returns the error it must end with, if any: an injected one, one that stays
/// from an earlier failure of the device, or that of calling CUDA from a host function.
int begin_call(const char* name, int not_permitted, bool sticky_applies);
/// Keeps the error for cudaGetLastError.
cudaError_t end_call(cudaError_t error);

enum class Sticky : std::uint8_t { applies, ignored };

/// Every function of the runtime runs its body through here.
template <class Body>
cudaError_t call(const char* name, Body&& body, Sticky sticky = Sticky::applies) {
  const int refused = begin_call(name, cudaErrorNotPermitted, sticky == Sticky::applies);
  return end_call(refused != 0 ? static_cast<cudaError_t>(refused) : body());
}

/// Prints what was done wrong and keeps it for last_diagnostic(); returns `error`.
cudaError_t misuse(cudaError_t error, const std::string& what);
/// A failure that stays with the device, from a stream's thread.
void fail_device(int device, cudaError_t error, const std::string& what);
cudaError_t sticky_error(int device);

void count_host_wait();
void count_spinning_wait();
void count_launch();
void count_graph_launch();
void count_allocation();
void count_copy();
std::uint64_t seed();
int delay_microseconds();

// --- devices (device.cpp)
// ------------------------------------------------------------------------------------

int current_device();
int device_count();
std::int64_t total_memory();

// --- streams (stream.cpp)
// ------------------------------------------------------------------------------------

/// Marks this thread as running a host function, which may not call CUDA.
bool inside_host_function();

/// Appends to the stream, or to the graph it is being captured into.
cudaError_t submit(cudaStream_t stream, Operation operation);
/// Loads all kernels, so that none is loaded at its first launch (TRANCHE_EMULATION_LAZY). Returns whether
/// some were not loaded yet.
bool load_all_kernels();
/// The device of a stream; -1 when it is none.
int device_of(cudaStream_t stream);
bool is_capturing(cudaStream_t stream);
/// Blocks until what was submitted so far is done; false for no such stream.
bool drain(cudaStream_t stream);
/// Operations that a stream had pending at most, since the last reset.
std::int64_t most_pending();
void reset_most_pending();
/// All streams of the device.
void drain_device(int device);
/// Calls that cannot be captured: fails and spoils the captures they would disturb.
cudaError_t refuse_under_capture(const char* name);
/// The same for calls that name a stream.
cudaError_t refuse_on_captured(const char* name, cudaStream_t stream);
std::shared_ptr<Capture> capture_of(cudaStream_t stream);
std::mutex& capture_mutex();

// --- memory (memory.cpp)
// -------------------------------------------------------------------------------------

enum class MemoryKind : std::uint8_t { device, host, registered };

struct Allocation {
  unsigned char* data = nullptr;
  std::size_t bytes = 0;
  MemoryKind kind = MemoryKind::device;
  int device = 0;
  bool mapped = false;  // by the driver's virtual memory functions
};

/// nullptr when the device has not so much left.
void* allocate_device(int device, std::size_t bytes);
void* allocate_host(std::size_t bytes);
/// True when `data` was such an allocation's beginning. Checks the bytes behind its end.
bool release(void* data, MemoryKind kind);
bool find(const void* address, Allocation& found);
void add_allocation(const Allocation& allocation);
bool remove_allocation(const void* data);
/// Address space of the emulated GPUs, without access; never given out twice while there is fresh.
void* reserve_addresses(std::size_t bytes, std::size_t alignment);
/// Takes reserved addresses back, to be given out again when fresh ones run short.
void recycle_addresses(void* address, std::size_t bytes);
/// Gives the pages back and leaves the addresses without access.
void close_addresses(void* address, std::size_t bytes);
/// Fills new memory (the first 32 MiB of it) with 0xff: NaN in every floating-point type.
void poison(void* data, std::size_t bytes);
std::int64_t bytes_in_use(int device);
bool take_bytes(int device, std::int64_t bytes);
void give_bytes(int device, std::int64_t bytes);
/// Empty, or what is wrong with touching [address, address + bytes) as memory of this side.
std::string complaint_about(const void* address, std::size_t bytes, bool device_side);

/// While one exists, device memory can be read and written.
class DeviceAccess {
 public:
  DeviceAccess();
  ~DeviceAccess();
  DeviceAccess(const DeviceAccess&) = delete;
  DeviceAccess& operator=(const DeviceAccess&) = delete;
};

}  // namespace cuda_emulation
