// A language model of your own in the program `tranche`: own_model train --model token-mlp --data my.txt, and
// all other commands. A block is x + GELU(x U) D, so that the prediction depends on the current token alone.
#include <tranche/engine/engine.h>
#include <tranche/kernels/embedding.h>
#include <tranche/kernels/rms_norm.h>
#include <tranche/models/linear.h>
#include <tranche/models/weight_gradients.h>
#include <tranche/tools/program_main.h>

#include <nlohmann/json.hpp>

using namespace tranche;
using namespace tranche::models;

class TokenMlp final : public LanguageModel {
 public:
  TokenMlp(std::int64_t layers, std::int64_t width) : layers_(layers), width_(width) {}
  /// Reads the text that to_json() wrote.
  static std::shared_ptr<const TokenMlp> from_json(std::string_view text, std::string_view /*file*/) {
    const auto json = nlohmann::json::parse(text);
    return std::make_shared<TokenMlp>(json.at("layers"), json.at("width"));
  }

  std::string architecture() const override { return "TokenMlp"; }
  ModelShape shape() const override {
    return {.layers = layers_, .width = width_, .vocabulary = 256, .positions = 128, .tied_head = true};
  }
  std::string to_json() const override {
    return nlohmann::json{{"architectures", {"TokenMlp"}}, {"layers", layers_}, {"width", width_}}.dump();
  }
  std::string describe() const override { return "TokenMlp of " + std::to_string(layers_) + " layers"; }
  double block_operations(std::int64_t /*sequence*/) const override { return 2.0 * 8 * width_ * width_; }
  double skipped_operations() const override { return 2.0 * 4 * width_ * width_; }

  UnitSpec embedding_unit() const override {
    return {.name = "embedding",
            .tensors = {{"embedding.weight", {256, width_}, Initializer::normal(0.02f)},
                        {"norm.weight", {width_}, Initializer::ones()}},
            .uses_per_micro_batch = 2};
  }
  UnitSpec block_unit(std::int64_t block) const override {
    const std::string name = "blocks." + std::to_string(block);
    return {
        .name = name,
        .tensors = {
            {name + ".up", {width_, 4 * width_}, Initializer::normal(0.02f), {}, LinearLayout::in_out},
            {name + ".down", {4 * width_, width_}, Initializer::normal(0.02f), {}, LinearLayout::in_out}}};
  }

  void embedding_forward(const Pass& pass, const GatheredUnit& unit, const ConstTensorView& tokens,
                         const TensorView& out) const override {
    kernels::embedding_forward(pass.engine.compute_stream(), tokens, unit.tensor(0), {},
                               out.reshaped({pass.batch, pass.time, width_}));
  }
  void embedding_backward(const Pass& pass, const UnitGradients& gradients, const ConstTensorView& tokens,
                          const TensorView& gradient) const override {
    kernels::embedding_backward(pass.engine.compute_stream(), tokens,
                                gradient.reshaped({pass.batch, pass.time, width_}), gradients.tensor(0), {});
  }

  StepTensors acquire_block_activations(const Pass& pass) const override {
    return {pass.engine, Category::activations, "block", {{pass.dtype(), {pass.rows(), 4 * width_}}}};
  }
  void block_forward(const Pass& pass, std::int64_t /*block*/, const GatheredUnit& unit,
                     const ConstTensorView& input, const StepTensors& saved,
                     const TensorView* output) const override {
    linear_forward(pass.engine, unit, up, input, saved[0]);
    if (output == nullptr) return;
    const StepTensors active(pass.engine, Category::activations, "MLP", {{pass.dtype(), saved[0].shape}});
    kernels::gelu_forward(pass.engine.compute_stream(), saved[0], active[0]);
    linear_forward(pass.engine, unit, down, active[0], *output);
    kernels::add(pass.engine.compute_stream(), input, *output, *output);
  }
  void block_backward(const Pass& pass, std::int64_t /*block*/, const GatheredUnit& unit,
                      WeightGradients& weights, const ConstTensorView& input, const StepTensors& saved,
                      const TensorView& gradient) const override {
    StepTensors scratch(pass.engine, Category::activations, "MLP backward",
                        {{pass.dtype(), saved[0].shape}, {pass.dtype(), saved[0].shape}});
    const TensorView d_sum = scratch[0], active = scratch[1];
    const ConstTensorView d_out = weights.lasting(pass.engine, gradient);  // which is added to below
    linear_input_gradient(pass.engine, unit, down, d_out, d_sum);
    kernels::gelu_forward_backward(pass.engine.compute_stream(), saved[0], d_sum, active, d_sum);
    linear_parameter_gradients(pass.engine, unit, weights, down, active, d_out);
    linear_backward(pass.engine, unit, weights, up, input, d_sum, &gradient, /*accumulate=*/true);
    weights.keep(std::move(scratch));
  }

  void final_norm_forward(const Pass& pass, const GatheredUnit& unit, const ConstTensorView& x,
                          const FinalNorm& norm) const override {
    kernels::rms_norm_forward(pass.engine.compute_stream(), x, unit.tensor(1), 1e-5f, norm.normed, norm.rstd);
  }
  void final_norm_backward(const Pass& pass, const GatheredUnit& unit, const UnitGradients& gradients,
                           const TensorView& d_normed, const ConstTensorView& x, const FinalNorm& norm,
                           const TensorView& d_x) const override {
    kernels::rms_norm_backward(pass.engine.compute_stream(), d_normed, x, unit.tensor(1), norm.rstd, false,
                               d_x, gradients.tensor(1), pass.engine.workspace());
  }

 private:
  static constexpr Linear up{.weight = 0}, down{.weight = 1};
  std::int64_t layers_, width_;
};

int main(int argc, char** argv) {
  ModelRegistry models = ModelRegistry::with_builtin();
  models.add(
      {"TokenMlp", "token_mlp", TokenMlp::from_json, {{"token-mlp", std::make_shared<TokenMlp>(4, 64)}}});
  return tools::program_main(argc, argv, models);
}
