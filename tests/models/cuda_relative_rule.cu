#include "kernels/cuda/launch.h"
#include "relative_rule.h"

namespace tranche::models {
namespace {

__global__ void prepare(RelativeSegment segment) {
  prepare_relative(segment);
}

__global__ void apply(RelativeSegment segment) {
  const double weights = segment.sums[0], directions = segment.sums[1];
  apply_relative(segment, weights > 0 && directions > 0 ? sqrt(weights / directions) : 1);
}

}  // namespace

void launch_prepare_relative(Stream& stream, const RelativeSegment& segment) {
  kernels::cuda::launch(stream, "prepare_relative", prepare, {}, segment);
}

void launch_apply_relative(Stream& stream, const RelativeSegment& segment) {
  kernels::cuda::launch(stream, "apply_relative", apply, {}, segment);
}

}  // namespace tranche::models
