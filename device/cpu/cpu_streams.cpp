#include "device/cpu/cpu_streams.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "core/clock.h"
#include "device/work_recorder.h"
#include "device/worker_team.h"
#include "tranche/core/error.h"
#include "tranche/core/trace.h"

namespace tranche::detail {
namespace {

void run_traced(TraceRecorder* trace, const std::string& track, std::string_view name,
                const std::function<void()>& work, double (*now)() = &seconds_now) {
  if (trace == nullptr) {
    work();
    return;
  }
  const double begin = now();
  work();
  trace->span(track, name, begin, now());
}

}  // namespace

CpuInlineStream::CpuInlineStream(std::string name, int threads) : name_(std::move(name)), threads_(threads) {}

void CpuInlineStream::enqueue(std::string_view name, std::function<void()> work) {
  if (!work) throw InvalidArgument("stream '" + name_ + "' was given empty work '" + std::string(name) + "'");
  if (recorder() != nullptr) {
    const auto now = attachment<SpanClock>().now;
    const double begin = now();
    work();
    recorder()->took(now() - begin);
    return;
  }
  if (trace() == nullptr) return work();
  run_traced(trace(), name_, name, work, attachment<SpanClock>().now);
}

struct CpuWorkerStream::Impl {
  // Exactly one of the three is set.
  struct Task {
    std::function<void()> work;
    Event waited;
    std::shared_ptr<HostEvent> recorded;
    std::string name;
    TraceRecorder* trace = nullptr;
  };

  std::string name;
  WorkerTeam team;
  std::mutex mutex;
  std::condition_variable arrived;
  std::deque<Task> queue;
  bool stopping = false;
  double stopping_since = 0;
  std::exception_ptr failure;  // accessed only by the worker
  std::thread worker;

  Impl(std::string stream_name, int threads)
      : name(std::move(stream_name)), team(threads), worker([this] { run(); }) {}

  ~Impl() {
    {
      std::lock_guard lock(mutex);
      stopping = true;
      stopping_since = seconds_now();
    }
    arrived.notify_one();
    worker.join();
  }

  void push(Task task) {
    {
      std::lock_guard lock(mutex);
      queue.push_back(std::move(task));
    }
    arrived.notify_one();
  }

  void run() {
    const WorkerTeam::Loan loan(team);
    for (;;) {
      Task task;
      {
        std::unique_lock lock(mutex);
        arrived.wait(lock, [&] { return stopping || !queue.empty(); });
        if (queue.empty()) return;
        task = std::move(queue.front());
        queue.pop_front();
      }
      perform(task);
    }
  }

  void perform(Task& task) {
    if (task.recorded) {
      if (failure) {
        task.recorded->fail(failure);
      } else {
        task.recorded->complete();
      }
      return;
    }
    if (failure) return;
    try {
      if (task.work) {
        run_traced(task.trace, name, task.name, task.work);
      } else {
        wait_for(task.waited);
      }
    } catch (...) {
      failure = std::current_exception();
    }
  }

  void wait_for(const Event& event) {
    constexpr double slice = 0.05;
    constexpr double patience = 1.0;
    while (!event.wait_for(slice)) {
      std::lock_guard lock(mutex);
      if (stopping && seconds_now() - stopping_since > patience) {
        throw LogicError(
            "stream '" + name +
            "' was destroyed while it waited for an event that never passed; synchronize streams "
            "before what they depend on goes away");
      }
    }
  }
};

CpuWorkerStream::CpuWorkerStream(std::string name, int threads)
    : name_(std::move(name)), threads_(threads), impl_(std::make_unique<Impl>(name_, threads_)) {}

CpuWorkerStream::~CpuWorkerStream() = default;

void CpuWorkerStream::enqueue(std::string_view name, std::function<void()> work) {
  if (!work) throw InvalidArgument("stream '" + name_ + "' was given empty work '" + std::string(name) + "'");
  Impl::Task task;
  task.work = std::move(work);
  if (trace() != nullptr) {
    task.name = name;
    task.trace = trace();
  }
  impl_->push(std::move(task));
}

void CpuWorkerStream::wait(const Event& event) {
  if (!event.state()) return;
  Impl::Task task;
  task.waited = event;
  impl_->push(std::move(task));
}

Event CpuWorkerStream::record() {
  Impl::Task task;
  task.recorded = std::make_shared<HostEvent>();
  Event event(task.recorded);
  impl_->push(std::move(task));
  return event;
}

std::unique_ptr<Stream> make_host_stream(std::string name, int threads) {
  if (threads < 1) throw InvalidArgument("stream '" + name + "' needs at least one thread");
  return std::make_unique<CpuWorkerStream>(std::move(name), threads);
}

}  // namespace tranche::detail
