#pragma once
/// The device that an executable's tests run on. The same sources are compiled twice: for the CPU, and, with
/// TRANCHE_KERNEL_TESTS_ON_GPU, for a GPU or its emulation, where tensors lie in pinned memory that kernels
/// reach under its host address and every look at them waits for the device first. (Memory of the device
/// proper is what kernels_cuda_test.cpp uses.)

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

/// The GPU that all tests of a process share. Never destroyed: tensors of static objects may be.
inline Device& test_gpu() {
  static Device* const device = make_device({.kind = DeviceKind::cuda}).release();
  return *device;
}

/// True from a launch, which asks for the GPU's stream, to the next settle(). Tests look at single elements,
/// and a wait at each look took most of their time.
inline bool& gpu_has_work() {
  static bool has_work = false;
  return has_work;
}
inline void* native_compute_stream() {
  gpu_has_work() = true;
  return test_gpu().compute_stream().native_handle();
}

/// Everything issued to the GPU has been done; its failure is thrown here, and again at every later look.
inline void settle() {
  if (!on_gpu || !gpu_has_work()) return;
  test_gpu().compute_stream().synchronize();
  gpu_has_work() = false;
}

/// The tested GPU's compute stream with a count of work of its own.
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

/// Memory that kernels of the tested device may touch.
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
    } catch (const Error&) {  // whoever looks at a result is told
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
/// Skips every test, with the reason, where there is no GPU.
class NeedsGpu : public ::testing::Environment {
 public:
  void SetUp() override {
    const detail::CudaProbe probe = detail::probe_cuda();
    if (!probe.devices.empty()) return;
    std::cout << "[  SKIPPED ] all: " << probe.problem << std::endl;  // what CTest looks for
    GTEST_SKIP() << probe.problem;
  }
};
inline ::testing::Environment* const needs_gpu = ::testing::AddGlobalTestEnvironment(new NeedsGpu);
#endif

}  // namespace tranche::kernels::testing
