#pragma once
/// Tensors of any dtype in memory that the host and the tested device can access, and random values for them.

#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "test_device.h"
#include "tranche/core/tensor_view.h"

namespace tranche::kernels::testing {

/// The seed, new in every run; a failure prints the line that repeats it.
inline std::uint64_t test_seed() {
  static const std::uint64_t seed = [] {
    if (const char* text = std::getenv("TRANCHE_TEST_SEED")) return std::strtoull(text, nullptr, 10);
    return static_cast<unsigned long long>(std::random_device{}());
  }();
  return seed;
}
inline std::string repeat_line() {
  return "repeat with TRANCHE_TEST_SEED=" + std::to_string(test_seed());
}

/// A tensor of any dtype; its bytes start as 0xff, which is NaN in every floating dtype.
class HostTensor {
 public:
  HostTensor(DataType dtype, Shape shape)
      : dtype_(dtype),
        shape_(shape),
        bytes_(static_cast<std::size_t>(shape.elements() * size_of(dtype)) + guard_bytes, 0xff) {}
  HostTensor(DataType dtype, Shape shape, std::span<const double> values) : HostTensor(dtype, shape) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      switch (dtype_) {
        case DataType::float32:
          put(i, static_cast<float>(values[i]));
          break;
        case DataType::bfloat16:
          put(i, to_bfloat16(static_cast<float>(values[i])));
          break;
        case DataType::float16:
          put(i, to_float16(static_cast<float>(values[i])));
          break;
        case DataType::float64:
          put(i, values[i]);
          break;
        case DataType::int32:
          put(i, static_cast<std::int32_t>(values[i]));
          break;
        default:
          put(i, static_cast<std::int64_t>(values[i]));
          break;
      }
    }
  }

  TensorView view() { return {bytes_.data(), dtype_, shape_}; }
  /// The tensor's values, after rounding to its dtype.
  std::vector<double> values() const {
    settle();
    std::vector<double> result(static_cast<std::size_t>(shape_.elements()));
    for (std::size_t i = 0; i < result.size(); ++i) {
      switch (dtype_) {
        case DataType::float32:
          result[i] = get<float>(i);
          break;
        case DataType::bfloat16:
          result[i] = to_float(get<bfloat16>(i));
          break;
        case DataType::float16:
          result[i] = to_float(get<float16>(i));
          break;
        case DataType::float64:
          result[i] = get<double>(i);
          break;
        case DataType::int32:
          result[i] = get<std::int32_t>(i);
          break;
        default:
          result[i] = static_cast<double>(get<std::int64_t>(i));
          break;
      }
    }
    return result;
  }
  /// True if the guard after the last element is unchanged, so that nothing was written past the end.
  bool guard_intact() const {
    settle();
    for (std::size_t i = bytes_.size() - guard_bytes; i < bytes_.size(); ++i) {
      if (bytes_[i] != 0xff) return false;
    }
    return true;
  }
  DataType dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  const TestBytes& bytes() const {
    settle();
    return bytes_;
  }

 private:
  static constexpr std::size_t guard_bytes = 64;
  template <class T>
  void put(std::size_t i, T value) {
    std::memcpy(bytes_.data() + i * sizeof(T), &value, sizeof(T));
  }
  template <class T>
  T get(std::size_t i) const {
    T value;
    std::memcpy(&value, bytes_.data() + i * sizeof(T), sizeof(T));
    return value;
  }
  DataType dtype_;
  Shape shape_;
  TestBytes bytes_;
};

/// Random numbers of one test.
class Random {
 public:
  explicit Random(std::uint64_t salt) : engine_(test_seed() * 1000003 + salt) {}
  std::vector<double> values(std::int64_t count, double low = -1, double high = 1) {
    std::uniform_real_distribution<double> draw(low, high);
    std::vector<double> result(static_cast<std::size_t>(count));
    for (double& value : result) value = draw(engine_);
    return result;
  }
  std::int64_t integer(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(engine_);
  }
  HostTensor tensor(DataType dtype, const Shape& shape, double low = -1, double high = 1) {
    return {dtype, shape, values(shape.elements(), low, high)};
  }

 private:
  std::mt19937_64 engine_;
};

/// A device with its stream and the smallest workspace that kernels accept. All objects share the tested GPU.
class Machine {
 public:
  explicit Machine(int threads = 1, std::int64_t workspace_bytes = minimum_workspace_bytes,
                   DeviceKind kind = test_device_kind)
      : owned_(kind == DeviceKind::cuda ? nullptr : make_device({.kind = kind, .threads = threads})),
        // If a kernel reads scratch memory before writing it, the results become NaN.
        scratch_(static_cast<std::size_t>(workspace_bytes) + alignment, 0xff) {
    void* data = scratch_.data();
    std::size_t space = scratch_.size();
    workspace_ = {std::align(alignment, static_cast<std::size_t>(workspace_bytes), data, space),
                  workspace_bytes};
  }
  ~Machine() { settle(); }
  Stream& stream() { return owned_ ? owned_->compute_stream() : shared_; }
  const Workspace& workspace() const { return workspace_; }

 private:
  static constexpr std::size_t alignment = 256;
  std::unique_ptr<Device> owned_;
  SharedGpuStream shared_;
  TestBytes scratch_;
  Workspace workspace_;
};

}  // namespace tranche::kernels::testing
