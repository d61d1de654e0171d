#pragma once
/// A program's own update rule on every device: momentum whose step has the length of the tensor times the
/// rate. Like LARS and LAMB it needs sums over whole tensors before the update.

#include <cstdint>
#include <memory>

#include "tranche/core/dtype.h"
#include "tranche/optim/optimizer.h"

namespace tranche::models {

std::unique_ptr<Optimizer> make_relative_rule();

/// The memory and numbers of one segment of a range.
struct RelativeSegment {
  const void* gradient = nullptr;
  DataType gradient_dtype = DataType::float32;
  float* master = nullptr;
  float* direction = nullptr;
  void* weight = nullptr;  ///< null: the master is the weight
  DataType weight_dtype = DataType::float32;
  std::int64_t count = 0;
  SquareSum* partial = nullptr;
  const double* sums = nullptr;
  float scale = 1, decay = 0;
  double rate = 0;
  bool apply = true;
};

/// Updates the direction and adds to the sums. It is constexpr so that device code can call it.
constexpr void prepare_relative(const RelativeSegment& s) {
  for (std::int64_t i = 0; i < s.count; ++i) {
    const float gradient = s.gradient_dtype == DataType::float32
                               ? static_cast<const float*>(s.gradient)[i]
                               : to_float(static_cast<const bfloat16*>(s.gradient)[i]);
    const float w = s.master[i];
    if (s.apply) s.direction[i] = 0.5f * s.direction[i] + (gradient * s.scale + s.decay * w);
    s.partial[0].add_square(w);
    s.partial[1].add_square(s.direction[i]);
  }
}

/// `ratio` is the square root of the quotient of the sums.
constexpr void apply_relative(const RelativeSegment& s, double ratio) {
  for (std::int64_t i = 0; i < s.count; ++i) {
    s.master[i] -= static_cast<float>(s.rate * ratio) * s.direction[i];
    if (s.weight == nullptr) continue;
    if (s.weight_dtype == DataType::float32) static_cast<float*>(s.weight)[i] = s.master[i];
    if (s.weight_dtype == DataType::bfloat16) static_cast<bfloat16*>(s.weight)[i] = to_bfloat16(s.master[i]);
    if (s.weight_dtype == DataType::float16) static_cast<float16*>(s.weight)[i] = to_float16(s.master[i]);
  }
}

/// The same on the device, with one thread, because the tests' tensors are small.
void launch_prepare_relative(Stream& stream, const RelativeSegment& segment);
void launch_apply_relative(Stream& stream, const RelativeSegment& segment);

}  // namespace tranche::models
