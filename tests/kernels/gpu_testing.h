#pragma once
/// Tensors in GPU memory, for tests of GEMM and attention on the device or its emulation.

#include "device/cuda_probe.h"
#include "tests/kernels/kernel_testing.h"

namespace tranche::kernels::testing {

/// The device with its stream and a poisoned workspace. Tests skip with a reason if there is no device.
class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const detail::CudaProbe probe = detail::probe_cuda();
    if (probe.devices.empty()) GTEST_SKIP() << probe.problem;
    device_ = make_device({.kind = DeviceKind::cuda});
    lend_workspace(minimum_workspace_bytes);
  }
  void TearDown() override {
    if (device_) stream().synchronize();
  }
  Stream& stream() { return device_->compute_stream(); }
  const Workspace& workspace() const { return workspace_; }
  void lend_workspace(std::int64_t bytes) {
    if (memory_) stream().synchronize();
    memory_ = Buffer(device_->memory(Tier::device), bytes, Category::workspace, "test");
    // If a kernel reads scratch memory before writing it, the results become NaN.
    device_->fill_bytes(stream(), memory_.data(), 0xff, bytes);
    workspace_ = {memory_.data(), bytes};
  }

  /// A copy of a host tensor in device memory, with its guard.
  class Tensor {
   public:
    Tensor(GpuTest& test, const HostTensor& host, DataType dtype, const Shape& shape)
        : test_(test),
          dtype_(dtype),
          shape_(shape),
          bytes_(static_cast<std::int64_t>(host.bytes().size())),
          memory_(test.device_->memory(Tier::device), bytes_, Category::other, "test") {
      test.device_->copy_from_host(test.stream(), memory_.data(), host.bytes().data(), bytes_);
    }
    TensorView view() const { return {memory_.data(), dtype_, shape_}; }
    std::vector<unsigned char> bytes() const {
      std::vector<unsigned char> result(static_cast<std::size_t>(bytes_));
      test_.device_->copy_to_host(test_.stream(), result.data(), memory_.data(), bytes_);
      test_.stream().synchronize();
      return result;
    }
    /// The tensor's values; also checks the guard after the last element.
    std::vector<double> values() const {
      const std::vector<unsigned char> raw = bytes();
      std::vector<double> result(static_cast<std::size_t>(shape_.elements()));
      const auto size = static_cast<std::size_t>(size_of(dtype_));
      for (std::size_t i = 0; i < result.size(); ++i) {
        if (dtype_ == DataType::float32) {
          float value;
          std::memcpy(&value, raw.data() + i * size, size);
          result[i] = value;
        } else {
          std::uint16_t bits;
          std::memcpy(&bits, raw.data() + i * size, size);
          result[i] = dtype_ == DataType::bfloat16 ? to_float(bfloat16{bits}) : to_float(float16{bits});
        }
      }
      for (std::size_t i = result.size() * size; i < raw.size(); ++i)
        EXPECT_EQ(raw[i], 0xff) << "written past the end";
      return result;
    }

   private:
    GpuTest& test_;
    DataType dtype_;
    Shape shape_;
    std::int64_t bytes_;
    Buffer memory_;
  };
  Tensor on_gpu(const HostTensor& host, DataType dtype, const Shape& shape) {
    return {*this, host, dtype, shape};
  }
  Tensor poisoned(DataType dtype, const Shape& shape) {
    return {*this, HostTensor(dtype, shape), dtype, shape};
  }

 private:
  std::unique_ptr<Device> device_;
  Buffer memory_;
  Workspace workspace_;
};

}  // namespace tranche::kernels::testing
