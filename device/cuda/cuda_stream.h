#pragma once
/// Streams of the cuda device.

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "device/cuda/cuda_staging.h"
#include "device/cuda/cuda_state.h"
#include "device/cuda/host_work.h"
#include "device/cuda/launch_bound.h"
#include "tranche/core/error.h"
#include "tranche/device/stream.h"

namespace tranche::cuda {

/// Thrown by a stream inside a Replay's capture when it is asked for something that a graph cannot hold.
class CaptureRefused : public LogicError {
 public:
  using LogicError::LogicError;
};

/// The device's parts that streams use.
struct StreamParts {
  std::shared_ptr<CudaState> state;
  PinnedMemory* pinned = nullptr;
  StagingMemory* staging = nullptr;
  DriverFunctions driver;
};

/// Host work, and waits for events that the host completes, run on the stream's own thread (HostWork); all
/// else runs on the device. After a failure of host work, later host work is skipped and later events carry
/// the failure, also across streams; work already issued to the device cannot be skipped.
class CudaStream : public Stream {
 public:
  enum class Priority { normal, high };
  CudaStream(StreamParts parts, std::string name, Priority priority);
  /// Wraps a CUDA stream that its creator destroys after this object.
  CudaStream(StreamParts parts, std::string name, cudaStream_t foreign);
  ~CudaStream() override;

  DeviceKind kind() const override { return DeviceKind::cuda; }
  const std::string& name() const override { return *name_; }
  int threads() const override { return 1; }
  void enqueue(std::string_view name, std::function<void()> work) override;
  void wait(const Event& event) override;
  Event record() override;
  void synchronize() override;
  /// Also makes the GPU current for the calling thread, because the caller is about to launch something.
  void* native_handle() const override;
  void begin_span(std::string_view name) override;
  void end_span() noexcept override;

  /// See Device; bytes > 0. Pinned memory is copied directly, the rest through staging.
  void copy_to_host(void* host, const void* device, std::int64_t bytes);
  void copy_from_host(void* device, const void* host, std::int64_t bytes);
  void fill(void* device, unsigned char value, std::int64_t bytes);

  /// Between these calls, operations that a graph cannot hold are refused.
  void begin_capture();
  cudaGraph_t end_capture();
  const StreamParts& parts() const noexcept { return parts_; }

 private:
  struct Span {
    std::string name;
    cudaEvent_t begin = nullptr;
    cudaEvent_t end = nullptr;
  };
  void refuse_in_capture(const char* what) const;
  cudaStream_t native() const;
  void copy_by_registration(void* to, const void* from, const void* pinned, std::int64_t bytes,
                            cudaMemcpyKind kind);
  void begin_traced_span(std::string_view name);
  void end_traced_span() noexcept;
  void drain_spans(bool all) noexcept;

  StreamParts parts_;
  std::shared_ptr<const std::string> name_;
  cudaStream_t stream_ = nullptr;
  bool owned_ = true;
  bool capturing_ = false;
  HostWork host_;
  mutable LaunchBound bound_;
  HostDependencies needs_;
  Staging staging_;
  std::deque<Span> spans_;        // finished
  std::vector<Span> open_spans_;  // innermost last
};

}  // namespace tranche::cuda
