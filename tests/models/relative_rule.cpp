#include "relative_rule.h"

#include <cmath>

#include "tranche/kernels/launch.h"

namespace tranche::models {
namespace {

class Relative final : public Optimizer {
 public:
  std::string name() const override { return "Relative"; }
  std::string describe() const override { return "{}"; }
  std::vector<OptimizerStateTensor> state(const TrainableTensor&) const override {
    return {{"direction", DataType::float32, 0}};
  }
  void check_group(const GroupOptions&) const override {}
  int sums(const TrainableTensor&) const override { return 2; }
  void prepare(Stream& stream, const OptimizerStep& step, const UpdateRange& range) const override {
    for (const TensorSegment& segment : range.segments) {
      const RelativeSegment s = of(range, segment, step);
      kernels::KernelWork work;
      work.cpu = [s] { prepare_relative(s); };
#if defined(TRANCHE_COMBINATIONS_WITH_CUDA)
      work.cuda = [s, &stream](void*) { launch_prepare_relative(stream, s); };  // called at once
#endif
      kernels::launch(stream, "prepare_relative", {}, work);
    }
  }
  void apply(Stream& stream, const OptimizerStep& step, const UpdateRange& range) const override {
    if (!step.apply) return;
    for (const TensorSegment& segment : range.segments) {
      const RelativeSegment s = of(range, segment, step);
      kernels::KernelWork work;
      work.cpu = [s] {
        apply_relative(s, s.sums[0] > 0 && s.sums[1] > 0 ? std::sqrt(s.sums[0] / s.sums[1]) : 1);
      };
#if defined(TRANCHE_COMBINATIONS_WITH_CUDA)
      work.cuda = [s, &stream](void*) { launch_apply_relative(stream, s); };  // called at once
#endif
      kernels::launch(stream, "apply_relative", {}, work);
    }
  }

 private:
  static RelativeSegment of(const UpdateRange& range, const TensorSegment& segment,
                            const OptimizerStep& step) {
    const UpdateRange part = range.part(segment);
    const GroupOptions& group = segment.tensor->group;
    RelativeSegment s;
    s.gradient = part.gradient.data;
    s.gradient_dtype = part.gradient.dtype;
    s.master = part.master.as<float>();
    s.direction = part.state[0].as<float>();
    s.weight = part.weight.data;
    s.weight_dtype = part.weight.dtype;
    s.count = segment.count;
    s.partial = segment.partial;
    s.sums = segment.sums;
    s.scale = step.gradient_scale;
    s.decay = static_cast<float>(group.weight_decay.value_or(group.decay ? 0.1 : 0.0));
    s.rate = group.rate(step);
    s.apply = step.apply;
    return s;
  }
};

}  // namespace

std::unique_ptr<Optimizer> make_relative_rule() {
  return std::make_unique<Relative>();
}

}  // namespace tranche::models
