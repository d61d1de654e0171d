#include "device/cuda/host_work.h"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "core/clock.h"
#include "device/cuda/nvtx_ranges.h"
#include "tranche/core/error.h"
#include "tranche/core/trace.h"

namespace tranche::cuda {

using detail::seconds_now;

struct HostWork::Impl {
  std::shared_ptr<CudaState> state;
  PinnedMemory& pinned;
  DriverFunctions driver;
  std::shared_ptr<const std::string> stream;
  std::shared_ptr<HostOutcome> outcome;

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::pair<std::int64_t, Task>> tasks;  // issued and not yet begun, in order
  std::int64_t reached = 0;                         // the number of them that the stream has reached
  bool running = false;
  bool closing = false;  // the thread ends once no reached task is left
  bool stopping = false;
  double stopping_since = 0;

  // Created with the first task, and only when streams can wait for memory.
  std::thread thread;
  Buffer word_memory;
  std::atomic<std::uint32_t>* word = nullptr;
  CUdeviceptr word_address = 0;

  Impl(std::shared_ptr<CudaState> s, PinnedMemory& p, const DriverFunctions& d,
       std::shared_ptr<const std::string> name, std::shared_ptr<HostOutcome> o)
      : state(std::move(s)), pinned(p), driver(d), stream(std::move(name)), outcome(std::move(o)) {}

  // Called by the runtime in stream order, on its own thread; must not throw.
  static void CUDART_CB reach(void* data) {
    auto* self = static_cast<Impl*>(data);
    if (self->word == nullptr) {
      self->run_next();
      return;
    }
    std::lock_guard lock(self->mutex);
    ++self->reached;
    self->changed.notify_all();
  }

  void run_next() noexcept {
    std::pair<std::int64_t, Task> task;
    {
      std::lock_guard lock(mutex);
      task = std::move(tasks.front());
      tasks.pop_front();
      running = true;
    }
    perform(task.first, task.second);
    task.second = {};  // the task's objects are destroyed before its end is reported
    std::lock_guard lock(mutex);
    outcome->ended(task.first);
    // The release store makes the task's writes visible to the device and to the host code after it.
    if (word != nullptr) word->store(static_cast<std::uint32_t>(task.first), std::memory_order_release);
    running = false;
    changed.notify_all();
  }

  void perform(std::int64_t number, Task& task) noexcept {
    if (outcome->failure_by(number)) return;
    if (const std::exception_ptr error = task.needs.failure()) {
      outcome->fail(number, error);
      return;
    }
    try {
      const double begin = task.trace != nullptr ? seconds_now() : 0;
      {
        const nvtx::Range range(task.name);
        task.work();
      }
      if (task.trace != nullptr) task.trace->span(*stream, task.name, begin, seconds_now());
    } catch (...) {
      outcome->fail(number, std::current_exception());
    }
  }

  void run() {
    for (;;) {
      {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return reached > 0 || closing; });
        if (reached == 0) return;
        --reached;
      }
      run_next();
    }
  }

  void make_word() {
    state->make_current();
    word_memory = Buffer(pinned, sizeof(std::uint32_t), Category::other, "stream progress");
    void* address = nullptr;
    check(cudaHostGetDevicePointer(&address, word_memory.data(), 0), "cudaHostGetDevicePointer",
          "the progress word of stream '" + *stream + "'");
    word_address = static_cast<CUdeviceptr>(reinterpret_cast<std::uintptr_t>(address));
    word = new (word_memory.data()) std::atomic<std::uint32_t>(0);
    thread = std::thread([this] { run(); });
  }

  void wait_for(const Event& event) {
    constexpr double slice = 0.05;
    constexpr double patience = 1.0;
    while (!event.wait_for(slice)) {
      std::lock_guard lock(mutex);
      if (stopping && seconds_now() - stopping_since > patience) {
        throw LogicError(
            "stream '" + *stream +
            "' was destroyed while it waited for an event that never passed; synchronize streams "
            "before what they depend on goes away");
      }
    }
  }
};

HostWork::HostWork(std::shared_ptr<CudaState> state, PinnedMemory& pinned, const DriverFunctions& driver,
                   std::shared_ptr<const std::string> stream)
    : outcome_(std::make_shared<HostOutcome>()),
      impl_(std::make_unique<Impl>(std::move(state), pinned, driver, std::move(stream), outcome_)) {}

HostWork::~HostWork() {
  {
    std::unique_lock lock(impl_->mutex);
    impl_->closing = true;
    impl_->changed.notify_all();
    // After a failed synchronize a host function may still be running.
    impl_->changed.wait(lock, [&] { return !impl_->running; });
  }
  if (impl_->thread.joinable()) impl_->thread.join();
}

void HostWork::issue(cudaStream_t stream, Task task) {
  Impl& impl = *impl_;
  impl.state->make_current();
  if (impl.driver.stream_wait_value != nullptr && impl.word == nullptr) impl.make_word();
  std::int64_t number = 0;
  {
    std::lock_guard lock(impl.mutex);
    impl.tasks.emplace_back(0, std::move(task));
    number = impl.tasks.back().first = outcome_->issue();
  }
  if (const cudaError_t error = cudaLaunchHostFunc(stream, &Impl::reach, &impl); error != cudaSuccess) {
    std::string purpose;
    {
      std::lock_guard lock(impl.mutex);
      purpose = "'" + impl.tasks.back().second.name + "' on stream '" + *impl.stream + "'";
      impl.tasks.pop_back();
    }
    outcome_->fail(number,
                   std::make_exception_ptr(DeviceError(error_text(error, "cudaLaunchHostFunc", purpose))));
    check(error, "cudaLaunchHostFunc", purpose);
  }
  if (impl.word == nullptr) return;
  const CUresult result =
      impl.driver.stream_wait_value(reinterpret_cast<CUstream>(stream), impl.word_address,
                                    static_cast<cuuint32_t>(number), CU_STREAM_WAIT_VALUE_GEQ);
  if (result != CUDA_SUCCESS) {
    throw DeviceError("cuStreamWaitValue32 failed on stream '" + *impl.stream + "' with the driver's error " +
                      std::to_string(static_cast<int>(result)));
  }
}

void HostWork::issue_wait(cudaStream_t stream, const Event& event) {
  Task task;
  task.name = "wait for the host";
  task.work = [impl = impl_.get(), event] { impl->wait_for(event); };
  issue(stream, std::move(task));
}

void HostWork::fail(std::exception_ptr error) noexcept {
  outcome_->fail(outcome_->issue(), std::move(error));
}

void HostWork::stop_waiting() noexcept {
  std::lock_guard lock(impl_->mutex);
  impl_->stopping = true;
  impl_->stopping_since = seconds_now();
}

}  // namespace tranche::cuda
