#pragma once
/// The difference between two checkpoints, by value, whatever numbers of ranks wrote them.

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/reader.h"

namespace tranche::checkpoint {

/// The difference of one kind ("weight", "exp_avg") of one tensor.
struct TensorDifference {
  enum class What : std::uint8_t { values, shape, only_in_first, only_in_second };
  std::string tensor;
  std::string kind;
  What what = What::values;
  std::int64_t differing = 0;  ///< elements whose bits, as fp32, differ
  double largest = 0;          ///< the largest absolute difference; infinity if one value is NaN
  std::int64_t first = -1;     ///< the first differing element,
  float first_in_first = 0;    ///< with its values in both checkpoints
  float first_in_second = 0;
};

struct Comparison {
  std::int64_t compared = 0;                  ///< pairs of (tensor, kind) in both with equal shapes
  std::vector<TensorDifference> differences;  ///< in the first's order, then those that only the second has
  bool equal() const { return differences.empty(); }
};

/// Streams both, with a few MiB of memory. Tensors are matched by name (aliases count). Throws as
/// Reader::read does.
Comparison compare(Reader& first, Reader& second);

/// "exp_avg of h.0.w: 3 of 100 elements differ, by at most 0.5; the first is element 7: 1 and 1.5"
std::string describe(const TensorDifference& difference);

}  // namespace tranche::checkpoint
