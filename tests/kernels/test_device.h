#pragma once
/// The device on which a program's tests run. The same sources are compiled twice: for the CPU, and, with
/// TRANCHE_KERNEL_TESTS_ON_GPU, for a GPU or its emulation. Then tensors are in pinned memory, which kernels
/// access by its host address, and every access by the host first waits for the device.
/// (kernels_cuda_test.cpp uses memory of the device itself.)

#include <gtest/gtest.h>

#include <cstddef>
#include <functional>
#include <iostream>
#include <new>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "device/cuda_probe.h"
#include "tranche/core/error.h"
#include "tranche/device/device.h"
#include "tranche/kernels/workspace.h"

namespace tranche::kernels::testing {

#if defined(TRANCHE_KERNEL_TESTS_ON_GPU)
inline constexpr bool on_gpu = true;
#else
inline constexpr bool on_gpu = false;
#endif
inline constexpr DeviceKind test_device_kind = on_gpu ? DeviceKind::cuda : DeviceKind::cpu;

/// The GPU that all tests of a process share. It is never destroyed, because tensors of static objects may
/// still exist.
inline Device& test_gpu() {
  static Device* const device = make_device({.kind = DeviceKind::cuda}).release();
  return *device;
}

/// True from a launch, which needs the GPU's stream, until the next settle(). Tests read single elements, and
/// waiting at each read would take most of their time.
inline bool& gpu_has_work() {
  static bool has_work = false;
  return has_work;
}
inline void* native_compute_stream() {
  gpu_has_work() = true;
  return test_gpu().compute_stream().native_handle();
}

/// Waits for all work of the GPU; throws its failure, and again at every later call.
inline void settle() {
  if (!on_gpu || !gpu_has_work()) return;
  test_gpu().compute_stream().synchronize();
  gpu_has_work() = false;
}

/// The tested GPU's compute stream with its own count of work.
class SharedGpuStream : public Stream {
 public:
  DeviceKind kind() const override { return DeviceKind::cuda; }
  const std::string& name() const override { return compute().name(); }
  int threads() const override { return 1; }
  void enqueue(std::string_view name, std::function<void()> work) override {
    gpu_has_work() = true;
    compute().enqueue(name, std::move(work));
  }
  void wait(const Event& event) override { compute().wait(event); }
  Event record() override { return compute().record(); }
  void synchronize() override { compute().synchronize(); }
  void* native_handle() const override { return native_compute_stream(); }

 private:
  static Stream& compute() { return test_gpu().compute_stream(); }
};

/// Memory that kernels of the tested device can access.
template <class T>
struct TestAllocator {
  using value_type = T;  // NOLINT(readability-identifier-naming): the name that allocators have
  TestAllocator() = default;
  template <class U>
  TestAllocator(const TestAllocator<U>&) {}

  static AllocationRequest request(std::size_t count) {
    return {static_cast<std::int64_t>(count * sizeof(T)), Category::other, "test tensor"};
  }
  T* allocate(std::size_t count) {
    if constexpr (on_gpu) return static_cast<T*>(test_gpu().memory(Tier::host).allocate(request(count)));
    return static_cast<T*>(::operator new(count * sizeof(T)));
  }
  void deallocate(T* pointer, std::size_t count) noexcept {
    try {
      settle();
    } catch (const Error&) {  // a later read of the result reports it
    }
    if constexpr (on_gpu) return test_gpu().memory(Tier::host).deallocate(pointer, request(count));
    ::operator delete(pointer);
  }
  friend bool operator==(const TestAllocator&, const TestAllocator&) { return true; }
};
using TestBytes = std::vector<unsigned char, TestAllocator<unsigned char>>;

/// A number that kernels write.
template <class T>
class TestValue {
 public:
  explicit TestValue(const T& value) : storage_(1, value) {}
  T* data() { return storage_.data(); }
  T get() {
    settle();
    return storage_[0];
  }

 private:
  std::vector<T, TestAllocator<T>> storage_;
};

/// Scratch memory, poisoned once.
inline Workspace test_workspace() {
  static TestBytes* const bytes = new TestBytes(std::size_t{1} << 20, 0xff);
  return {bytes->data(), static_cast<std::int64_t>(bytes->size())};
}

#if defined(TRANCHE_KERNEL_TESTS_ON_GPU)
/// Skips every test with the reason if there is no GPU.
class NeedsGpu : public ::testing::Environment {
 public:
  void SetUp() override {
    const detail::CudaProbe probe = detail::probe_cuda();
    if (!probe.devices.empty()) return;
    std::cout << "[  SKIPPED ] all: " << probe.problem << std::endl;  // CTest looks for this text
    GTEST_SKIP() << probe.problem;
  }
};
inline ::testing::Environment* const needs_gpu = ::testing::AddGlobalTestEnvironment(new NeedsGpu);
#endif

}  // namespace tranche::kernels::testing
