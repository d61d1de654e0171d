#include "optim/muon.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <utility>

#include "optim/state_format.h"
#include "tranche/core/error.h"
#include "tranche/kernels/newton_schulz.h"
#include "tranche/kernels/optimizer_update.h"
#include "tranche/optim/rules.h"

namespace tranche::detail {

namespace {

using kernels::NewtonSchulzStep;

const UpdateRule& step_rule() {
  for (const UpdateRule* rule : kernels::built_in_rules()) {
    if (rule->kernel == "muon_step") return *rule;
  }
  throw LogicError("there is no rule muon_step");
}

/// The offset of a rule's numbers after `bytes` of earlier ones.
std::size_t aligned(std::size_t bytes) {
  return (bytes + 15) / 16 * 16;
}

class Muon final : public Optimizer {
 public:
  Muon(const RuleValues& values, DataType moments, double learning_rate)
      : values_(values), step_values_(step_rule(), "Muon"), moments_(moments), learning_rate_(learning_rate) {
    values.rule().check(values);
    require_state_format("Muon", moments);
    for (const char* own : {"muon_lr", "adam_lr"}) {
      if (!std::isfinite(values.number(own)) || learning_rate > 0) continue;
      throw InvalidArgument(fmt::format(
          "Muon: {} is taken relative to lr, which schedules set, so lr has to be above 0, not {}", own,
          learning_rate));
    }
    step_values_.set("weight_decay", values.number("weight_decay"));
    adam_ = make_rule_optimizer("AdamW",
                                {{"betas", std::array{values.number("betas"), values.second("betas")}},
                                 {"eps", values.number("eps")},
                                 {"weight_decay", values.number("weight_decay")}},
                                moments);
    const auto steps = static_cast<std::size_t>(values.number("ns_steps"));
    polar_express_ = values.number("ns_coefficients") == 0;
    for (std::size_t i = 0; i < steps; ++i) {
      const std::size_t last = std::size(kernels::polar_express_steps) - 1;
      steps_.push_back(polar_express_ ? kernels::polar_express_steps[std::min(i, last)]
                                      : kernels::keller_step);
    }
  }

  std::string name() const override { return "Muon"; }

  std::vector<OptimizerStateTensor> state(const TrainableTensor& tensor) const override {
    if (tensor.matrices == 0) return adam_->state(tensor);
    return {{"momentum_buffer", state_format(moments_, values_.rule().states[0], tensor.shape), 0}};
  }
  void check_group(const GroupOptions& group) const override {
    try {
      adam_->check_group(group);  // AdamW accepts the same settings of a group
    } catch (const InvalidArgument& error) {
      std::string text = error.message();
      if (text.starts_with(adam_->name())) text.replace(0, adam_->name().size(), name());
      throw InvalidArgument(text);
    }
  }
  bool needs_whole_matrices(const TrainableTensor& tensor) const override { return tensor.matrices > 0; }

  std::string routing(std::span<const TrainableTensor> tensors) const override {
    std::int64_t count[2] = {}, elements[2] = {}, matrices = 0;
    for (const TrainableTensor& tensor : tensors) {
      const int by_adam = tensor.matrices == 0 ? 1 : 0;
      ++count[by_adam];
      elements[by_adam] += tensor.shape.elements();
      matrices += tensor.matrices;
    }
    if (matrices == 0) {
      throw InvalidArgument(
          "Muon: the model marks none of its trained tensors as a hidden matrix (TensorSpec::matrices), so "
          "AdamW would update all of them; choose AdamW, or mark the matrices");
    }
    return fmt::format("Muon {} tensors of {} matrices ({} elements), AdamW {} tensors ({} elements)",
                       count[0], matrices, elements[0], count[1], elements[1]);
  }

  /// The numbers of the momentum rule, of the step rule, and of AdamW, in this order.
  std::vector<std::byte> numbers(const OptimizerStep& step, const GroupOptions& group) const override {
    std::vector<std::byte> bytes;
    const auto add = [&](std::vector<std::byte> part) {
      bytes.resize(aligned(bytes.size()));
      bytes.insert(bytes.end(), part.begin(), part.end());
    };
    UpdateFacts facts;
    facts.step = step.step;
    facts.gradient_scale = step.gradient_scale;
    facts.apply = step.apply;
    facts.learning_rate = group.rate(at_rate(step, "muon_lr"));
    add(values_.rule().arguments(values_, facts));
    RuleValues of_step = step_values_;
    if (group.weight_decay) of_step.set("weight_decay", *group.weight_decay);
    if (!group.decay) of_step.set("weight_decay", 0);
    add(of_step.rule().arguments(of_step, facts));
    add(adam_->numbers(at_rate(step, "adam_lr"), group));
    return bytes;
  }

  MatrixWork whole_work(const TrainableTensor& tensor) const override {
    MatrixWork work;
    for (const kernels::MatrixBlock& block : blocks_of(tensor)) {
      work.operations +=
          kernels::newton_schulz_operations(block.rows, block.columns, static_cast<int>(steps_.size()));
      work.scratch_bytes =
          std::max(work.scratch_bytes, kernels::newton_schulz_scratch(block.rows, block.columns));
    }
    return work;
  }

  void prepare(Stream& stream, const OptimizerStep&, const UpdateRange& range) const override {
    kernels::RuleOperands of = operands(range, 0);
    of.slots = 0b1;
    of.state = range.state;
    if (range.message.dtype == DataType::float32) {
      of.master = range.message;
    } else {
      of.master = range.scratch;
      of.weight = range.message;
    }
    run(stream, values_.rule(), of, range);
  }

  void whole(Stream& stream, const OptimizerStep&, const TrainableTensor& tensor, const TensorView& message,
             const kernels::Workspace& scratch) const override {
    const Shape& shape = tensor.shape;
    kernels::NewtonSchulzOptions options;
    options.steps = steps_;
    if (polar_express_) options.norm_factor = 1.02;
    for (const kernels::MatrixBlock& block : blocks_of(tensor)) {
      const auto rows = static_cast<double>(block.rows), columns = static_cast<double>(block.columns);
      const double fan = tensor.outputs_first ? rows / columns : columns / rows;
      options.scale = values_.number("adjust_lr_fn") == 0 ? 0.2 * std::sqrt(std::max(rows, columns))
                                                          : std::sqrt(std::max(1.0, fan));
      kernels::newton_schulz(stream, options, {message.data, message.dtype, shape}, block, scratch);
    }
  }

  void apply(Stream& stream, const OptimizerStep& step, const UpdateRange& range) const override {
    if (range.segments.empty()) return;
    const std::size_t step_at = aligned(values_.rule().argument_bytes);
    if (range.segments.front().tensor->matrices == 0) {
      UpdateRange of_adam = range;
      of_adam.numbers += aligned(step_at + step_rule().argument_bytes);
      adam_->apply(stream, step, of_adam);
      return;
    }
    kernels::RuleOperands of = operands(range, step_at);
    of.slots = 0b0;
    of.gradient = range.message;
    of.master = range.master;
    of.weight = range.weight;
    of.rounding = range.rounding;
    of.rounding_key = range.rounding_key;
    run(stream, step_rule(), of, range);
  }

  bool takes_master_formats() const override { return true; }

  std::string describe() const override {
    std::string text = R"({"type": "Muon")";
    for (const RuleOption& option : values_.rule().options) {
      text += fmt::format(R"(, "{}": {})", option.name, values_.text(option.name));
    }
    return text + fmt::format(R"(, "moments": "{}"}})", name_of(moments_));
  }

 private:
  /// The step with the rate that the schedule would have if `key` were its lr.
  OptimizerStep at_rate(OptimizerStep step, std::string_view key) const {
    const double own = values_.number(key);
    if (std::isfinite(own)) step.learning_rate *= own / learning_rate_;
    return step;
  }

  /// The matrices of a tensor, which lie side by side along its outputs.
  static std::vector<kernels::MatrixBlock> blocks_of(const TrainableTensor& tensor) {
    std::vector<kernels::MatrixBlock> blocks;
    const std::int64_t rows = tensor.shape[0], columns = tensor.shape[1];
    for (std::int64_t i = 0; i < tensor.matrices; ++i) {
      const std::int64_t part = (tensor.outputs_first ? rows : columns) / tensor.matrices;
      blocks.push_back(tensor.outputs_first ? kernels::MatrixBlock{i * part, 0, part, columns}
                                            : kernels::MatrixBlock{0, i * part, rows, part});
    }
    return blocks;
  }

  static kernels::RuleOperands operands(const UpdateRange& range, std::size_t numbers_at) {
    kernels::RuleOperands of;
    of.arguments = range.numbers + numbers_at;
    of.groups = range.groups;
    of.stride = range.numbers_stride;
    of.gradient = range.gradient;
    return of;
  }
  static void run(Stream& stream, const UpdateRule& rule, kernels::RuleOperands of,
                  const UpdateRange& range) {
    std::vector<kernels::UpdateSegment> segments;
    for (const TensorSegment& segment : range.segments) {
      segments.push_back({segment.first, segment.count, segment.group, nullptr, nullptr, segment.index,
                          segment.first_element});
    }
    of.segments = segments;
    kernels::rule_update(stream, rule, kernels::RulePhase::update, of);
  }

  RuleValues values_, step_values_;
  DataType moments_;
  double learning_rate_;
  std::unique_ptr<Optimizer> adam_;
  bool polar_express_ = true;
  std::vector<NewtonSchulzStep> steps_;
};

}  // namespace

std::unique_ptr<Optimizer> make_muon(const RuleValues& values, DataType moments, double learning_rate) {
  return std::make_unique<Muon>(values, moments, learning_rate);
}

}  // namespace tranche::detail
