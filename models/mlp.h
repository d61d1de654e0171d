#pragma once
/// A multi-layer perceptron with a hand-written backward, for the engine.

#include <cstdint>
#include <vector>

#include "tranche/core/tensor_view.h"
#include "tranche/engine/model_spec.h"

namespace tranche {

class Engine;

namespace models {

/// squared_error: per sample the mean over outputs of (y - target)^2. cross_entropy: -log softmax(y)[target].
/// Both are summed over samples by the model and averaged over all samples of the step by the engine.
enum class MlpLoss : std::uint8_t { squared_error, cross_entropy };

struct MlpConfig {
  std::vector<std::int64_t> widths;  ///< input, hidden ..., output; at least two
  MlpLoss loss = MlpLoss::squared_error;
};

/// Linear layers with GELU (tanh form) between them. Each layer is a unit "layer.<i>" with "layer.<i>.weight"
/// [in, out], drawn with standard deviation 1 / sqrt(in), and "layer.<i>.bias" [out], initially zero.
class Mlp {
 public:
  /// Throws ConfigurationError for fewer than two widths or one that is not positive.
  explicit Mlp(MlpConfig config);
  /// The specification to make the Engine with; a sample counts as one token. Throws like the constructor.
  static ModelSpec spec(const MlpConfig& config);
  const MlpConfig& config() const noexcept { return config_; }

  /// Runs one whole micro-batch. inputs [batch, in], fp32 or the compute dtype; targets fp32 [batch, out] for
  /// squared error, int32 [batch] for cross-entropy (kernels::ignored_label is skipped); both in device
  /// memory. Throws InvalidArgument for wrong shapes and dtypes.
  void forward_backward(Engine& engine, const ConstTensorView& inputs, const ConstTensorView& targets) const;
  /// Computes the loss of one micro-batch, between Engine::begin_evaluation() and end_evaluation().
  void evaluate(Engine& engine, const ConstTensorView& inputs, const ConstTensorView& targets) const;

 private:
  void run(Engine& engine, const ConstTensorView& inputs, const ConstTensorView& targets,
           bool training) const;
  MlpConfig config_;
};

}  // namespace models
}  // namespace tranche
