// Checks that use only Tranche's device and kernels.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "device/cuda_probe.h"
#include "tranche/core/dtype.h"
#include "tranche/device/device.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/kernels/matmul.h"

namespace tranche::gpu_probe {
namespace {

std::unique_ptr<Device> gpu() {
  return make_device({.kind = DeviceKind::cuda});
}

Buffer memory(Device& device, std::int64_t bytes, Tier tier = Tier::device) {
  return Buffer(device.memory(tier), bytes, Category::other, "probe");
}

template <class T>
Buffer on_device(Device& device, const std::vector<T>& values) {
  Buffer made = memory(device, static_cast<std::int64_t>(values.size() * sizeof(T)));
  device.copy_from_host(device.compute_stream(), made.data(), values.data(), made.bytes());
  return made;
}
template <class T>
std::vector<T> read(Device& device, const Buffer& buffer, std::size_t count) {
  std::vector<T> values(count);
  device.copy_to_host(device.compute_stream(), values.data(), buffer.data(),
                      static_cast<std::int64_t>(count * sizeof(T)));
  device.compute_stream().synchronize();
  return values;
}

/// Small integers, for which multiplications and sums are exact in every dtype used here.
int small_number(std::size_t i) {
  return static_cast<int>(i * 7 % 9) - 4;
}

}  // namespace

std::shared_ptr<void> open_context() {
  return gpu();
}

void check_device() {
  const detail::CudaProbe probe = detail::probe_cuda();
  expect(!probe.devices.empty(), probe.problem);
  const auto device = gpu();
  const MemoryInfo info = device->memory_info();
  std::printf("%s, %lld MiB, %lld free; CUDA runtime %d, driver %d\n", device->description().c_str(),
              static_cast<long long>(info.total >> 20), static_cast<long long>(info.free >> 20),
              probe.runtime_version, probe.driver_version);
  expect(info.free > (std::int64_t{64} << 20), "less than 64 MiB of the GPU's memory are free");
  expect(probe.devices[0].compute_major >= 8, "kernels are compiled for compute capability 8.0 and newer");
}

void check_copy() {
  const auto device = gpu();
  constexpr std::size_t count = (std::size_t{3} << 20) + 5;
  std::vector<unsigned char> sent(count);
  for (std::size_t i = 0; i < count; ++i) sent[i] = static_cast<unsigned char>(i * 131 + i / 251);
  const Buffer there = on_device(*device, sent);
  expect(read<unsigned char>(*device, there, count) == sent,
         "bytes came back changed through pageable memory");
  const Buffer pinned = memory(*device, static_cast<std::int64_t>(count), Tier::host);
  for (std::size_t i = 0; i < count; ++i) {
    static_cast<unsigned char*>(pinned.data())[i] = static_cast<unsigned char>(~sent[i]);
  }
  device->copy_to_host(device->compute_stream(), pinned.data(), there.data(),
                       static_cast<std::int64_t>(count));
  device->compute_stream().synchronize();
  expect(std::memcmp(pinned.data(), sent.data(), count) == 0,
         "bytes came back changed through pinned memory");
}

void check_product() {
  const auto device = gpu();
  constexpr std::size_t m = 200, n = 136, k = 264;
  std::vector<bfloat16> a(m * k), b(n * k);
  for (std::size_t i = 0; i < a.size(); ++i) a[i] = to_bfloat16(static_cast<float>(small_number(i)));
  for (std::size_t i = 0; i < b.size(); ++i) b[i] = to_bfloat16(static_cast<float>(small_number(i + i / k)));
  const Buffer on_a = on_device(*device, a), on_b = on_device(*device, b),
               on_c = on_device(*device, std::vector<float>(m * n, -1e9f)),
               workspace = memory(*device, kernels::minimum_workspace_bytes);
  kernels::matmul(device->compute_stream(), {.transpose_b = true},
                  ConstTensorView{on_a.data(), DataType::bfloat16, {m, k}},
                  ConstTensorView{on_b.data(), DataType::bfloat16, {n, k}},
                  TensorView{on_c.data(), DataType::float32, {m, n}}, {workspace.data(), workspace.bytes()});
  const auto c = read<float>(*device, on_c, m * n);
  for (std::size_t row = 0; row < m; ++row) {
    for (std::size_t column = 0; column < n; ++column) {
      int wanted = 0;
      for (std::size_t i = 0; i < k; ++i) {
        wanted += small_number(row * k + i) * small_number(column * k + i + column);
      }
      expect(c[row * n + column] == static_cast<float>(wanted),
             "element (" + std::to_string(row) + ", " + std::to_string(column) + ") of a product is " +
                 std::to_string(c[row * n + column]) + ", not " + std::to_string(wanted));
    }
  }
}

void check_graph() {
  const auto device = gpu();
  constexpr std::int64_t count = 1000;
  const Buffer x = on_device(*device, std::vector<float>(count, 3)),
               y = on_device(*device, std::vector<float>(count, 0));
  const auto replay = device->create_replay("probe");
  for (int run = 0; run < 4; ++run) {
    replay->run(device->compute_stream(), [&] {
      kernels::accumulate(device->compute_stream(), ConstTensorView{x.data(), DataType::float32, {count}},
                          TensorView{y.data(), DataType::float32, {count}});
    });
  }
  const auto sums = read<float>(*device, y, count);
  expect(replay->problem().empty(), replay->problem());
  expect(device->counters().replays == 3,
         "of 4 runs " + std::to_string(device->counters().replays) + " were launches of a graph, not 3");
  expect(sums == std::vector<float>(count, 12),
         "after 4 runs that add 3 a number is " + std::to_string(sums.front()) + ", not 12");
}

void check_host_wait() {
  const auto device = gpu();
  Stream& stream = device->compute_stream();
  const Buffer flag = on_device(*device, std::vector<unsigned char>(64, 1));
  stream.synchronize();
  const auto gate = std::make_shared<HostEvent>();
  stream.wait(Event(gate));
  device->fill_bytes(stream, flag.data(), 2, 64);
  const Event after = stream.record();
  expect(!after.wait_for(0.05), "a stream went on before the host had written the word that it waits for");
  gate->complete();
  expect(after.wait_for(5), "a stream still waits 5 seconds after the host has written its word");
  expect(read<unsigned char>(*device, flag, 64) == std::vector<unsigned char>(64, 2),
         "what stood behind the wait was not done");
}

}  // namespace tranche::gpu_probe
