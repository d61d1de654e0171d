#pragma once
/// Streams of the cpu device: inline on the calling thread, or a worker thread with an ordered queue.

#include <memory>
#include <string>

#include "device/span_clock.h"
#include "tranche/device/stream.h"

namespace tranche::detail {

/// Runs work at once on the calling thread, so every recorded point has been passed. Failures of the work are
/// thrown by enqueue().
class CpuInlineStream : public Stream {
 public:
  CpuInlineStream(std::string name, int threads);
  DeviceKind kind() const override { return DeviceKind::cpu; }
  const std::string& name() const override { return name_; }
  int threads() const override { return threads_; }
  /// Call it before work is issued.
  void set_threads(int threads) noexcept { threads_ = threads; }
  void enqueue(std::string_view name, std::function<void()> work) override;
  void wait(const Event& event) override { event.wait(); }
  Event record() override { return {}; }
  void synchronize() override {}

 private:
  std::string name_;
  int threads_;
};

/// Runs work in order on its own thread, whose kernels share their loops with threads() - 1 further threads
/// of the stream (worker_team.h). After a failure (of work, or of an awaited event) later work is skipped and
/// every later event carries that failure; it is never cleared. The destructor runs the queued work. An event
/// that does not pass within a second then counts as failed, so that shutdown after an error elsewhere cannot
/// hang.
class CpuWorkerStream : public Stream {
 public:
  CpuWorkerStream(std::string name, int threads);
  ~CpuWorkerStream() override;
  DeviceKind kind() const override { return DeviceKind::cpu; }
  const std::string& name() const override { return name_; }
  int threads() const override { return threads_; }
  void enqueue(std::string_view name, std::function<void()> work) override;
  void wait(const Event& event) override;
  Event record() override;
  void synchronize() override { record().wait(); }

 private:
  struct Impl;
  std::string name_;
  int threads_;
  std::unique_ptr<Impl> impl_;
};

/// Implements Device::create_host_stream for every device with real memory. Throws InvalidArgument below one
/// thread.
std::unique_ptr<Stream> make_host_stream(std::string name, int threads);

}  // namespace tranche::detail
