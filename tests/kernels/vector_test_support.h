#pragma once
/// Streams and buffers for tests of element-wise, reduction and update kernels.

#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/instruction_sets.h"
#include "test_device.h"
#include "tests/core/rounds.h"
#include "tranche/core/tensor_view.h"
#include "tranche/device/stream.h"

namespace tranche::kernels::testing {

/// A stream of any kind. Work runs at once, or in run() if `deferred`. On the tested GPU it is the compute
/// stream.
class TestStream : public Stream {
 public:
  explicit TestStream(int threads = 1, DeviceKind kind = test_device_kind, bool deferred = false)
      : kind_(kind), threads_(threads), deferred_(deferred) {}
  DeviceKind kind() const override { return kind_; }
  const std::string& name() const override { return name_; }
  int threads() const override { return threads_; }
  void enqueue(std::string_view name, std::function<void()> work) override {
    names.emplace_back(name);
    deferred_ ? queue_.push_back(std::move(work)) : work();
  }
  void wait(const Event&) override {}
  Event record() override { return {}; }
  void synchronize() override { settle(); }
  void* native_handle() const override {
    return on_gpu && kind_ == DeviceKind::cuda ? native_compute_stream() : nullptr;
  }
  void run() {
    gpu_has_work() = true;  // the work may have used the stream when it was enqueued
    for (auto& work : queue_) work();
    queue_.clear();
  }
  std::vector<std::string> names;

 private:
  DeviceKind kind_;
  int threads_;
  bool deferred_;
  std::string name_ = "test";
  std::vector<std::function<void()>> queue_;
};

/// Elements between poisoned borders, which reveal unwritten elements and writes outside.
class Guarded {
 public:
  Guarded(DataType dtype, std::int64_t elements, std::int64_t offset_elements = 0)
      : dtype_(dtype),
        elements_(elements),
        first_(border + static_cast<std::size_t>(offset_elements * size_of(dtype))),
        bytes_(first_ + static_cast<std::size_t>(elements * size_of(dtype)) + border, poison) {}
  ~Guarded() {
    settle();
    const auto end = first_ + static_cast<std::size_t>(elements_ * size_of(dtype_));
    bool intact = true;
    for (std::size_t i = 0; i < first_; ++i) intact = intact && bytes_[i] == poison;
    for (std::size_t i = end; i < bytes_.size(); ++i) intact = intact && bytes_[i] == poison;
    EXPECT_TRUE(intact) << "wrote outside a buffer of " << elements_ << " " << name_of(dtype_);
  }
  Guarded(const Guarded& other)
      : dtype_(other.dtype_),
        elements_(other.elements_),
        first_(other.first_),
        bytes_(other.settled_bytes()) {}
  Guarded& operator=(const Guarded&) = delete;

  TensorView view() { return {bytes_.data() + first_, dtype_, Shape{elements_}}; }
  TensorView view(Shape shape) { return {bytes_.data() + first_, dtype_, shape}; }
  template <class T>
  T* as() {
    settle();
    return reinterpret_cast<T*>(bytes_.data() + first_);
  }
  float get(std::int64_t i) {
    if (dtype_ == DataType::bfloat16) return to_float(as<bfloat16>()[i]);
    if (dtype_ == DataType::float16) return to_float(as<float16>()[i]);
    return as<float>()[i];
  }
  void set(std::int64_t i, float value) {
    if (dtype_ == DataType::bfloat16) {
      as<bfloat16>()[i] = to_bfloat16(value);
    } else if (dtype_ == DataType::float16) {
      as<float16>()[i] = to_float16(value);
    } else {
      as<float>()[i] = value;
    }
  }
  /// The bytes of the elements, for comparisons of bits.
  std::string bits() const {
    settle();
    return {reinterpret_cast<const char*>(bytes_.data()) + first_,
            static_cast<std::size_t>(elements_ * size_of(dtype_))};
  }
  std::int64_t elements() const { return elements_; }
  DataType dtype() const { return dtype_; }

 private:
  const TestBytes& settled_bytes() const {
    settle();
    return bytes_;
  }
  static constexpr std::size_t border = 64;
  static constexpr unsigned char poison = 0xcd;
  DataType dtype_;
  std::int64_t elements_;
  std::size_t first_;
  TestBytes bytes_;
};

/// Values of widely different magnitudes and both signs, some of them zero, none beyond the range of fp16.
inline void fill_random(Guarded& out, unsigned seed, bool positive = false) {
  std::mt19937 engine(seed);
  for (std::int64_t i = 0; i < out.elements(); ++i) {
    const int exponent = static_cast<int>(engine() % 20) - 12;
    const float fraction = 1.0f + static_cast<float>(engine() % (1u << 23)) * 0x1p-23f;
    float value = std::ldexp(fraction, exponent);
    if (engine() % 17 == 0) value = 0.0f;
    if (!positive && engine() % 2 == 0) value = -value;
    out.set(i, value);
  }
}

inline const std::vector<DataType>& floating_types() {
  static const std::vector<DataType> types{DataType::float32, DataType::bfloat16, DataType::float16};
  return types;
}

/// The instruction sets of the CPU's loops; on a GPU only the current one.
inline std::vector<std::string> tested_instruction_sets() {
  return on_gpu ? std::vector<std::string>{cpu::instruction_set()} : cpu::instruction_sets();
}

/// Every size near the widths of vectors; where sanitized, after the first 18 only the multiples of 16 and
/// their neighbours.
inline std::vector<std::int64_t> vector_sizes() {
  std::vector<std::int64_t> sizes;
  for (std::int64_t n = 0; n <= 130; ++n) {
    if (!test::sanitized || n < 19 || (n + 1) % 16 < 3) sizes.push_back(n);
  }
  return sizes;
}
/// A prime larger than two of the ranges into which threads divide work.
inline constexpr std::int64_t large_size = 81919;

/// ThreadSanitizer does not understand OpenMP's barriers, so its build uses one thread.
inline std::vector<int> thread_counts() {
#ifdef __SANITIZE_THREAD__
  return {1};
#else
  return on_gpu ? std::vector<int>{1} : std::vector<int>{1, 2, 3, 4};
#endif
}

inline std::string described(const std::string& set, std::int64_t size, int threads) {
  return "instruction set " + set + ", " + std::to_string(size) + " elements, " + std::to_string(threads) +
         " threads";
}

template <typename F>
std::string refusal(F&& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.message();
  }
  return "nothing was thrown";
}

}  // namespace tranche::kernels::testing
