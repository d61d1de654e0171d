#pragma once
/// State that the files of the emulated runtime share.

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

/// A position in the order of a stream's work, as events record it.
struct Point {
  std::mutex mutex;
  std::condition_variable changed;
  std::atomic<bool> passed{false};
  double when = 0;  // milliseconds; written before `passed`

  void pass();
  void wait();
};

struct Operation {
  std::function<void()> run;
  /// Needs device memory; skipped after the device has failed.
  bool on_device = true;
  /// Ends at once and runs no user code. Device memory is not closed after it, unless it is the last
  /// operation.
  bool marker = false;
};

/// A capture in progress, and later its graph: the operations in the order of their issue. That order
/// respects all dependencies, so running them one after another is a correct execution.
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

/// The integer in an environment variable, or `otherwise`.
std::int64_t environment(const char* name, std::int64_t otherwise);

// --- errors (errors.cpp)
// -------------------------------------------------------------------------------------

/// Begins a call: counts it and returns its error, if any. That is an injected error, a sticky error of the
/// device, or the error of calling CUDA from a host function.
int begin_call(const char* name, int not_permitted, bool sticky_applies);
/// Stores the error for cudaGetLastError.
cudaError_t end_call(cudaError_t error);

enum class Sticky : std::uint8_t { applies, ignored };

/// Runs the body of every function of the runtime.
template <class Body>
cudaError_t call(const char* name, Body&& body, Sticky sticky = Sticky::applies) {
  const int refused = begin_call(name, cudaErrorNotPermitted, sticky == Sticky::applies);
  return end_call(refused != 0 ? static_cast<cudaError_t>(refused) : body());
}

/// Prints a misuse of the interface and stores it for last_diagnostic(); returns `error`.
cudaError_t misuse(cudaError_t error, const std::string& what);
/// Sets a sticky failure of the device; called on a stream's thread.
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

/// True on a thread that runs a host function, which may not call CUDA.
bool inside_host_function();

/// Appends to the stream, or to the graph into which it is being captured.
cudaError_t submit(cudaStream_t stream, Operation operation);
/// Loads all kernels, so that none is loaded at its first launch (TRANCHE_EMULATION_LAZY). Returns true if
/// some were not loaded yet.
bool load_all_kernels();
/// The device of a stream; -1 if there is no such stream.
int device_of(cudaStream_t stream);
bool is_capturing(cudaStream_t stream);
/// Waits until all work submitted so far is done; returns false if there is no such stream.
bool drain(cudaStream_t stream);
/// The most operations that one stream had pending since the last reset.
std::int64_t most_pending();
void reset_most_pending();
/// Waits for all streams of the device.
void drain_device(int device);
/// For calls that cannot be captured: returns an error and invalidates the captures that they would disturb.
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
  bool mapped = false;  // mapped by the driver's virtual memory functions
};

/// Returns nullptr if the device has too little memory left.
void* allocate_device(int device, std::size_t bytes);
void* allocate_host(std::size_t bytes);
/// Returns true if `data` was the beginning of such an allocation. Checks the bytes behind its end.
bool release(void* data, MemoryKind kind);
bool find(const void* address, Allocation& found);
void add_allocation(const Allocation& allocation);
bool remove_allocation(const void* data);
/// Reserves addresses of the emulated GPUs, without access. Addresses are not used again while unused ones
/// are left.
void* reserve_addresses(std::size_t bytes, std::size_t alignment);
/// Takes reserved addresses back; they are used again when unused ones run out.
void recycle_addresses(void* address, std::size_t bytes);
/// Frees the pages and leaves the addresses without access.
void close_addresses(void* address, std::size_t bytes);
/// Fills new memory (its first 32 MiB) with 0xff, which is NaN in every floating-point type.
void poison(void* data, std::size_t bytes);
std::int64_t bytes_in_use(int device);
bool take_bytes(int device, std::int64_t bytes);
void give_bytes(int device, std::int64_t bytes);
/// The reason why this side may not access [address, address + bytes); empty if it may.
std::string complaint_about(const void* address, std::size_t bytes, bool device_side);

/// Device memory can be read and written while such an object exists.
class DeviceAccess {
 public:
  DeviceAccess();
  ~DeviceAccess();
  DeviceAccess(const DeviceAccess&) = delete;
  DeviceAccess& operator=(const DeviceAccess&) = delete;
};

}  // namespace cuda_emulation
