#pragma once
/// Ranks with device memory, for tests: on the cpu device, whose streams have threads of their own, or,
/// compiled with TRANCHE_TEST_GPU, on GPUs. Ranks of a GPU are threads; NCCL needs a GPU for each rank.

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <latch>
#include <memory>
#include <string>
#include <vector>

#include "comm/device_communicator.h"
#include "device/cuda_probe.h"
#include "tests/comm/collective_suite.h"
#include "tests/comm/common_start.h"
#include "tranche/comm/backends.h"
#include "tranche/core/error.h"
#include "tranche/device/memory_resources.h"

namespace tranche::test {

inline constexpr std::int64_t small_staging = 64 << 10;
inline const OperationLabel label{"h.3", "backward"};

inline CommunicatorOptions host_options(double timeout) {
  CommunicatorOptions result;
  result.timeout_seconds = timeout;
  result.staging_bytes = small_staging;
  return result;
}

inline comm::DeviceCommunicatorOptions device_options(comm::DeviceTransport transport, double timeout,
                                                      std::int64_t staging_bytes = small_staging) {
  comm::DeviceCommunicatorOptions result;
  result.transport = transport;
  result.timeout_seconds = timeout;
  result.staging_bytes = staging_bytes;
  return result;
}

#ifdef TRANCHE_TEST_GPU
inline constexpr bool on_gpu = true;
#else
inline constexpr bool on_gpu = false;
#endif

/// The reason why a case cannot run here; empty if it can.
inline std::string obstacle(comm::DeviceTransport transport, int ranks) {
  if (!on_gpu) return {};
  setenv("TRANCHE_EMULATED_GPUS", "5", 0);  // the emulation reads this at its first use
  const detail::CudaProbe probe = detail::probe_cuda();
  if (probe.devices.empty()) return probe.problem;
  if (transport != comm::DeviceTransport::nccl) return {};
  if (nccl_version() == "not compiled") return "NCCL is not part of this build";
  const auto gpus = static_cast<int>(probe.devices.size());
  if (ranks <= gpus) return {};
  return "NCCL wants a GPU for each of " + std::to_string(ranks) + " ranks, and there are " +
         std::to_string(gpus);
}

inline std::unique_ptr<Device> device_of(int rank, comm::DeviceTransport transport) {
  DeviceOptions options;
  if (on_gpu) {
    options.kind = DeviceKind::cuda;
    options.index = transport == comm::DeviceTransport::nccl ? rank : 0;
  }
  return make_device(options);
}

/// A rank with a device of its own and a communicator on it.
struct Rank {
  std::unique_ptr<Device> device;
  std::unique_ptr<Communicator> comm;
  Rank(comm::DeviceTransport transport, std::unique_ptr<Communicator> host, double timeout = 60,
       std::int64_t staging_bytes = small_staging)
      : device(device_of(host->rank(), transport)),
        comm(comm::make_device_communicator(*device, std::move(host),
                                            device_options(transport, timeout, staging_bytes))) {}
  SuitePlace place() const { return {device.get(), true}; }
};

using Body = std::function<void(int, Rank&)>;
/// Runs `body` when all ranks have their communicators. All threads exist before any of them makes its
/// communicator, because that has the same time-out.
inline void run_device_ranks(int size, comm::DeviceTransport transport, const Body& body, double timeout = 60,
                             const FaultInjection& faults = {}, std::int64_t staging_bytes = small_staging) {
  std::latch threads(size);
  CommonStart start(size);
  run_thread_ranks(
      size,
      [&](int rank, const CommunicatorFactory& factory) {
        CommonStart::Rank started(start);
        threads.arrive_and_wait();
        Rank mine(transport, factory(host_options(timeout)), timeout, staging_bytes);
        started.await_others();
        if (!on_gpu) return body(rank, mine);
        try {
          body(rank, mine);
        } catch (...) {
          // The failure is reported before unwinding, as in programs. Freeing pinned memory waits for all
          // streams of a GPU, including those of peers that wait for this rank.
          const std::exception_ptr error = std::current_exception();
          mine.comm->post_failure(tranche::message_of(error), exit_status_of(error), 2);
          throw;
        }
      },
      faults);
}

inline std::vector<comm::DeviceTransport> transports() {
  if (!on_gpu) return {comm::DeviceTransport::staged, comm::DeviceTransport::shared};
  return {comm::DeviceTransport::staged, comm::DeviceTransport::shared, comm::DeviceTransport::nccl};
}

/// Values of one rank on its device.
template <typename T>
class OnDevice {
 public:
  OnDevice(Device& device, const std::vector<T>& values)
      : device_(device),
        elements_(values.size()),
        buffer_(device.memory(Tier::device), static_cast<std::int64_t>(elements_ * sizeof(T)),
                Category::other, "test") {
    device.copy_from_host(device.compute_stream(), buffer_.data(), values.data(), buffer_.bytes());
    device.compute_stream().synchronize();
  }
  T* data() { return static_cast<T*>(buffer_.data()); }
  std::vector<T> read() {
    std::vector<T> values(elements_);
    device_.copy_to_host(device_.compute_stream(), values.data(), buffer_.data(), buffer_.bytes());
    device_.compute_stream().synchronize();
    return values;
  }

 private:
  Device& device_;
  std::size_t elements_;
  Buffer buffer_;
};

}  // namespace tranche::test
