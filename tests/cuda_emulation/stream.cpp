// Streams. Each has a queue and a thread, or, with TRANCHE_EMULATION_QUEUES, all of them share so many
// queues, like the hardware queues of a real GPU. Then unordered streams may wait for each other.
#include <fmt/format.h>

#include <chrono>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "tests/cuda_emulation/control.h"
#include "tests/cuda_emulation/grid.h"
#include "tests/cuda_emulation/state.h"

using cuda_emulation::Capture;
using cuda_emulation::Operation;

namespace cuda_emulation {
namespace {

struct Queue {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::pair<std::shared_ptr<CUstream_st>, Operation>> operations;
  bool started = false;
  bool shared = false;     // never ends
  bool abandoned = false;  // its only stream was destroyed
};

}  // namespace
}  // namespace cuda_emulation

// The runtime's own handle type; other files see only its address.
struct CUstream_st {
  int device = 0;
  unsigned flags = 0;
  int priority = 0;
  std::uint64_t number = 0;
  std::shared_ptr<cuda_emulation::Queue> queue;
  std::uint64_t submitted = 0, finished = 0;  // guarded by the queue's mutex
  std::uint64_t launches = 0;                 // used only by the thread that runs them
  std::shared_ptr<Capture> capture;           // guarded by capture_mutex()
};

namespace cuda_emulation {
namespace {

constexpr int lowest_priority = 0, highest_priority = -5;
constexpr std::size_t longest_shared_queue = 1000;

struct Streams {
  std::mutex mutex;
  std::unordered_map<cudaStream_t, std::shared_ptr<CUstream_st>> live;
  std::uint64_t made = 0;
  std::map<std::pair<int, std::int64_t>, std::shared_ptr<Queue>> shared;  // by device and number
  std::atomic<std::int64_t> most_pending{0};
};

Streams& streams() {
  static Streams& instance = *new Streams;
  return instance;
}

constinit thread_local bool in_host_function = false;
constinit thread_local CUstream_st* running_stream = nullptr;

std::shared_ptr<CUstream_st> find(cudaStream_t stream) {
  std::lock_guard lock(streams().mutex);
  const auto found = streams().live.find(stream);
  return found == streams().live.end() ? nullptr : found->second;
}

std::vector<std::shared_ptr<CUstream_st>> streams_of(int device) {
  std::lock_guard lock(streams().mutex);
  std::vector<std::shared_ptr<CUstream_st>> found;
  for (const auto& [handle, stream] : streams().live) {
    if (stream->device == device) found.push_back(stream);
  }
  return found;
}

// The loop of a queue's thread. Device memory stays accessible from one operation to the next if both need
// it.
void work(const std::shared_ptr<Queue>& queue, std::uint64_t number) {
  Shuffler rest(seed() + number);
  std::optional<DeviceAccess> access;
  std::unique_lock lock(queue->mutex);
  for (;;) {
    if (queue->operations.empty() && access) {
      lock.unlock();
      access.reset();
      lock.lock();
      continue;
    }
    queue->changed.wait(lock, [&] { return !queue->operations.empty() || queue->abandoned; });
    if (queue->operations.empty()) return;
    auto [stream, operation] = std::move(queue->operations.front());
    queue->operations.pop_front();
    const bool last = queue->operations.empty();
    lock.unlock();
    running_stream = stream.get();
    if (operation.on_device) {
      if (!access) access.emplace();
    } else if (last || !operation.marker) {
      access.reset();
    }
    if (const int delay = delay_microseconds(); delay > 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(rest.below(static_cast<std::uint32_t>(delay))));
    }
    if (!operation.on_device || sticky_error(stream->device) == cudaSuccess) operation.run();
    operation.run = nullptr;
    // A thread that waits for the last operation must find the memory protected again.
    lock.lock();
    if (queue->operations.empty() && access) {
      lock.unlock();
      access.reset();
      lock.lock();
    }
    ++stream->finished;
    queue->changed.notify_all();
  }
}

void append(const std::shared_ptr<CUstream_st>& stream, Operation operation) {
  Queue& queue = *stream->queue;
  bool start = false;
  {
    std::unique_lock lock(queue.mutex);
    // The driver waits here too, but this holds no lock that threads of other streams need.
    if (queue.shared) {
      queue.changed.wait(lock, [&] { return queue.operations.size() < longest_shared_queue; });
    }
    queue.operations.emplace_back(stream, std::move(operation));
    const auto pending = static_cast<std::int64_t>(++stream->submitted - stream->finished);
    std::int64_t most = streams().most_pending;
    while (pending > most && !streams().most_pending.compare_exchange_weak(most, pending)) {
    }
    start = !queue.started;
    queue.started = true;
  }
  if (start) {
    std::thread([shared = stream->queue, number = stream->number] { work(shared, number); }).detach();
  }
  queue.changed.notify_all();
}

void drain(CUstream_st& stream) {
  std::unique_lock lock(stream.queue->mutex);
  const std::uint64_t target = stream.submitted;
  stream.queue->changed.wait(lock, [&] { return stream.finished >= target; });
}

// Called under the mutex of streams().
std::shared_ptr<Queue> queue_for(const CUstream_st& stream) {
  static const std::int64_t queues = environment("TRANCHE_EMULATION_QUEUES", 0);
  if (queues <= 0) return std::make_shared<Queue>();
  auto& queue = streams().shared[{stream.device, static_cast<std::int64_t>(stream.number) % queues}];
  if (!queue) {
    queue = std::make_shared<Queue>();
    queue->shared = true;
  }
  return queue;
}

cudaError_t not_a_stream(const char* name, cudaStream_t stream) {
  const auto number = reinterpret_cast<std::uintptr_t>(stream);
  if (number <= 2) {
    return misuse(cudaErrorInvalidResourceHandle,
                  fmt::format("{}: the default stream is not emulated; make a stream", name));
  }
  return misuse(cudaErrorInvalidResourceHandle,
                fmt::format("{}: {} is no live stream", name, fmt::ptr(stream)));
}

}  // namespace

bool inside_host_function() {
  return in_host_function;
}

std::mutex& capture_mutex() {
  static std::mutex& instance = *new std::mutex;
  return instance;
}

std::shared_ptr<Capture> capture_of(cudaStream_t handle) {
  const auto stream = find(handle);
  if (!stream) return nullptr;
  std::lock_guard lock(capture_mutex());
  return stream->capture;
}

void set_capture(cudaStream_t handle, std::shared_ptr<Capture> capture) {
  if (const auto stream = find(handle)) {
    std::lock_guard lock(capture_mutex());
    stream->capture = std::move(capture);
  }
}

int device_of(cudaStream_t handle) {
  const auto stream = find(handle);
  return stream ? stream->device : -1;
}

cudaError_t submit(cudaStream_t handle, Operation operation) {
  const auto stream = find(handle);
  if (!stream) return not_a_stream("an operation", handle);
  {
    std::lock_guard lock(capture_mutex());
    if (Capture* capture = stream->capture.get()) {
      if (capture->invalid) return cudaErrorStreamCaptureInvalidated;
      capture->operations.push_back(std::move(operation));
      if (handle != capture->origin) capture->unjoined.insert(handle);
      return cudaSuccess;
    }
  }
  append(stream, std::move(operation));
  return cudaSuccess;
}

std::int64_t most_pending() {
  return streams().most_pending;
}

void reset_most_pending() {
  streams().most_pending = 0;
}

void drain_device(int device) {
  for (const auto& stream : streams_of(device)) drain(*stream);
}

bool drain(cudaStream_t handle) {
  const auto stream = find(handle);
  if (stream) drain(*stream);
  return stream != nullptr;
}

namespace {

/// The kernels that have been loaded, with lazy loading.
struct LoadedKernels {
  std::mutex mutex;
  std::set<const void*> functions;
  bool all = environment("TRANCHE_EMULATION_LAZY", 0) == 0 || is_eager();

  static bool is_eager() {
    const char* const text = std::getenv("CUDA_MODULE_LOADING");
    return text != nullptr && std::string_view(text) == "EAGER";
  }
};
LoadedKernels& loaded_kernels() {
  static LoadedKernels& instance = *new LoadedKernels;
  return instance;
}

bool load_now(const void* function) {
  LoadedKernels& loaded = loaded_kernels();
  std::lock_guard lock(loaded.mutex);
  return function != nullptr && !loaded.all && loaded.functions.insert(function).second;
}

}  // namespace

bool load_all_kernels() {
  LoadedKernels& loaded = loaded_kernels();
  std::lock_guard lock(loaded.mutex);
  return !std::exchange(loaded.all, true);
}

void set_lazy_loading(bool lazy) {
  LoadedKernels& loaded = loaded_kernels();
  std::lock_guard lock(loaded.mutex);
  loaded.all = !lazy;
  loaded.functions.clear();
}

cudaError_t launch(const char* name, const void* function, dim3 grid, dim3 block,
                   std::size_t dynamic_shared_bytes, cudaStream_t handle, std::function<void()> body) {
  return call("cudaLaunchKernelExC", [&]() -> cudaError_t {
    auto kernel = std::make_shared<Kernel>(Kernel{name, grid, block, dynamic_shared_bytes, std::move(body)});
    if (const std::string why = refusal(*kernel); !why.empty()) {
      return misuse(cudaErrorInvalidConfiguration, fmt::format("launch of kernel '{}': {}", name, why));
    }
    const auto stream = find(handle);
    if (!stream) return not_a_stream(fmt::format("launch of kernel '{}'", name).c_str(), handle);
    count_launch();
    if (load_now(function) && !is_capturing(handle)) drain_device(stream->device);
    return submit(handle, {[kernel] {
                             static thread_local BlockRunner runner;
                             CUstream_st& on = *running_stream;
                             const std::uint64_t order = seed() * 1000003 + on.number * 7919 + on.launches++;
                             const std::string failure = runner.run(*kernel, order);
                             if (!failure.empty()) fail_device(on.device, cudaErrorLaunchFailure, failure);
                           },
                           true});
  });
}

}  // namespace cuda_emulation

using namespace cuda_emulation;

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  return call("cudaStreamCreateWithPriority", [&] {
    if (stream == nullptr || (flags != cudaStreamDefault && flags != cudaStreamNonBlocking)) {
      return cudaErrorInvalidValue;
    }
    auto made = std::make_shared<CUstream_st>();
    made->device = current_device();
    made->flags = flags;
    made->priority = std::min(lowest_priority, std::max(highest_priority, priority));
    std::lock_guard lock(streams().mutex);
    made->number = ++streams().made;
    made->queue = queue_for(*made);
    *stream = made.get();
    streams().live[made.get()] = std::move(made);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, lowest_priority);
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, cudaStreamDefault, lowest_priority);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return call("cudaDeviceGetStreamPriorityRange", [&] {
    if (least != nullptr) *least = lowest_priority;
    if (greatest != nullptr) *greatest = highest_priority;
    return cudaSuccess;
  });
}

// Submitted work still runs; then the stream's thread ends.
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  return call(
      "cudaStreamDestroy",
      [&] {
        const auto stream = find(handle);
        if (!stream) return not_a_stream("cudaStreamDestroy", handle);
        {
          std::lock_guard lock(streams().mutex);
          streams().live.erase(handle);
        }
        {
          std::lock_guard lock(stream->queue->mutex);
          stream->queue->abandoned = !stream->queue->shared;
        }
        stream->queue->changed.notify_all();
        return cudaSuccess;
      },
      Sticky::ignored);
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  return call("cudaStreamGetPriority", [&] {
    const auto stream = find(handle);
    if (!stream) return not_a_stream("cudaStreamGetPriority", handle);
    *priority = stream->priority;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned* flags) {
  return call("cudaStreamGetFlags", [&] {
    const auto stream = find(handle);
    if (!stream) return not_a_stream("cudaStreamGetFlags", handle);
    *flags = stream->flags;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamGetDevice(cudaStream_t handle, int* device) {
  return call("cudaStreamGetDevice", [&] {
    const auto stream = find(handle);
    if (!stream) return not_a_stream("cudaStreamGetDevice", handle);
    *device = stream->device;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  return call("cudaStreamSynchronize", [&] {
    count_host_wait();
    count_spinning_wait();
    if (handle == nullptr) {  // waits for all streams that the default stream orders, which here are all
                              // streams
      drain_device(current_device());
      return sticky_error(current_device());
    }
    const auto stream = find(handle);
    if (!stream) return not_a_stream("cudaStreamSynchronize", handle);
    if (const cudaError_t refused = refuse_on_captured("cudaStreamSynchronize", handle);
        refused != cudaSuccess) {
      return refused;
    }
    drain(*stream);
    return sticky_error(stream->device);
  });
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  return call("cudaStreamQuery", [&] {
    const auto stream = find(handle);
    if (!stream) return not_a_stream("cudaStreamQuery", handle);
    if (const cudaError_t refused = refuse_on_captured("cudaStreamQuery", handle); refused != cudaSuccess) {
      return refused;
    }
    std::lock_guard lock(stream->queue->mutex);
    if (stream->finished < stream->submitted) return cudaErrorNotReady;
    return sticky_error(stream->device);
  });
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  return call("cudaLaunchHostFunc", [&] {
    if (function == nullptr) return cudaErrorInvalidValue;
    return submit(handle, {[function, data] {
                             in_host_function = true;
                             function(data);
                             in_host_function = false;
                           },
                           false});
  });
}
