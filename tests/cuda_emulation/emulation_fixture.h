#pragma once
/// A fixture with a stream and memory, which clears failures at the end of the test.

#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "tests/cuda_emulation/control.h"

namespace cuda_emulation {

/// There are four GPUs unless the environment says otherwise; CUDA's first call reads this.
inline const int four_gpus = setenv("TRANCHE_EMULATED_GPUS", "4", 0);

class Emulation : public ::testing::Test {
 protected:
  void SetUp() override {
    recover();
    forget_failures();
    reset_counters();
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
  }
  void TearDown() override {
    set_delay(0);
    set_seed(1);
    recover();
    forget_failures();
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    for (void* data : owned_) EXPECT_EQ(cudaFree(data), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
    EXPECT_EQ(live_device_memory().allocations, 0);
  }

  template <class T>
  T* device(std::size_t count) {
    void* data = nullptr;
    EXPECT_EQ(cudaMalloc(&data, count * sizeof(T)), cudaSuccess);
    owned_.push_back(data);
    return static_cast<T*>(data);
  }
  template <class T>
  T* device(const std::vector<T>& values) {
    T* data = device<T>(values.size());
    EXPECT_EQ(cudaMemcpy(data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
              cudaSuccess);
    return data;
  }
  /// The contents of device memory after all work on the stream.
  template <class T>
  std::vector<T> host(const T* data, std::size_t count) {
    std::vector<T> values(count);
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(values.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost), cudaSuccess);
    return values;
  }

  cudaStream_t stream_ = nullptr;
  std::vector<void*> owned_;
};

}  // namespace cuda_emulation
