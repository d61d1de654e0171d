#pragma once
/// Support for tests of the cuda device, on a GPU or on its emulation.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "device/cuda_probe.h"
#include "tests/core/error_text.h"
#include "tranche/device/device.h"

namespace tranche::testing_support {

using test::message_of;

/// Skips with a reason if there is neither a GPU nor an emulation.
class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const detail::CudaProbe probe = detail::probe_cuda();
    if (probe.devices.empty()) GTEST_SKIP() << probe.problem;
    device_ = make_device({DeviceKind::cuda, 0, 1});
  }
  Device& device() { return *device_; }
  Stream& compute() { return device_->compute_stream(); }
  Buffer memory(std::int64_t bytes, Tier tier = Tier::device) {
    return Buffer(device_->memory(tier), bytes, Category::other, "test");
  }
  /// Bytes that differ by position and by seed.
  static std::vector<unsigned char> bytes(std::int64_t count, unsigned seed = 0) {
    std::vector<unsigned char> result(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < result.size(); ++i) {
      result[i] = static_cast<unsigned char>((i * 131 + i / 251 + seed * 17) % 253);
    }
    return result;
  }
  /// The contents of device memory after all work issued to `stream`.
  std::vector<unsigned char> read(const void* device_memory, std::int64_t count, Stream& stream) {
    std::vector<unsigned char> result(static_cast<std::size_t>(count), 0xcd);
    device_->copy_to_host(stream, result.data(), device_memory, count);
    stream.synchronize();
    return result;
  }
  std::vector<unsigned char> read(const void* device_memory, std::int64_t count) {
    return read(device_memory, count, compute());
  }

  std::unique_ptr<Device> device_;
};

}  // namespace tranche::testing_support
