#include "tranche/optim/rules.h"

#include <fmt/core.h>

#include <algorithm>
#include <cctype>
#include <utility>

#include "optim/muon.h"
#include "optim/state_format.h"
#include "tranche/core/error.h"
#include "tranche/kernels/optimizer_update.h"

namespace tranche {
namespace {

bool same_name(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](unsigned char x, unsigned char y) { return std::tolower(x) == std::tolower(y); });
}

bool before(std::string_view a, std::string_view b) {
  if ((a == "AdamW") != (b == "AdamW")) return a == "AdamW";
  return a < b;
}

struct Missing {
  std::string_view name, nearest;
};
constexpr Missing missing[] = {
    {"OneBitAdam",
     "AdamW (1-bit Adam compresses what ranks exchange; communication_data_type says its dtype)"},
    {"ZeroOneAdam", "AdamW (communication_data_type says the dtype of what ranks exchange)"},
    {"OneBitLamb", "Lamb (communication_data_type says the dtype of what ranks exchange)"},
    {"MuAdam", "Adam with a learning_rate_factor for each tensor in tranche.parameter_groups"},
    {"MuAdamW", "AdamW with a learning_rate_factor for each tensor in tranche.parameter_groups"},
    {"MuSGD", "SGD with a learning_rate_factor for each tensor in tranche.parameter_groups"},
    {"Adafactor", "AdamW with tranche.moments block8, or Lion, which keeps one state"},
    {"ScheduleFree", "AdamW with the scheduler WSD, which need not know the run's end either"},
    {"ScheduleFreeAdamW", "AdamW with the scheduler WSD"},
    {"SOAP", "Muon, which takes whole matrices too"},
    {"Shampoo", "Muon, which takes whole matrices too, or Adagrad"},
    {"Sophia", "Lion (a second backward pass is not part of a step)"},
    {"GaLore", "AdamW with tranche.moments block8, or zero_optimization.offload_optimizer"},
    {"GaLoreAdamW", "AdamW with tranche.moments block8, or zero_optimization.offload_optimizer"},
    {"APOLLO", "AdamW with tranche.moments block8, or zero_optimization.offload_optimizer"},
    {"AdamW8bit", "AdamW with tranche.moments block8"},
    {"Adam8bit", "Adam with tranche.moments block8"},
    {"Lion8bit", "Lion with tranche.moments block8"},
    {"LAMB8bit", "Lamb with tranche.moments block8"},
    {"LARS8bit", "LARS with tranche.moments block8"},
    {"RMSprop8bit", "RMSprop with tranche.moments block8"},
    {"SGD8bit", "SGD with a momentum and tranche.moments block8"},
    {"Adagrad8bit", "Adagrad, whose sum stays in fp32"},
    {"PagedAdamW8bit", "AdamW with tranche.moments block8 and zero_optimization.offload_optimizer"},
    {"PagedAdamW", "AdamW with zero_optimization.offload_optimizer"},
    {"Adamax", "Adam"},
    {"NAdam", "Adam"},
    {"RAdam", "AdamW with a warm-up"},
    {"Adadelta", "RMSprop"},
    {"ASGD", "SGD"},
    {"Rprop", "Lion, which follows signs too"},
    {"LBFGS", "SGD (a step computes the gradient once)"}};

/// A rule over elements, which its rule file describes completely.
class RuleOptimizer final : public Optimizer {
 public:
  RuleOptimizer(RuleValues values, DataType moments) : values_(std::move(values)), moments_(moments) {
    rule().check(values_);
    kept_ = rule().kept(values_);
    if (moments == DataType::float32) return;
    detail::require_state_format(name(), moments);
    if (kept_ == 0) {
      throw InvalidArgument(fmt::format("{}: it keeps no moments with these parameters, in {} or any dtype",
                                        name(), name_of(moments)));
    }
    for (std::size_t slot = 0; slot < rule().states.size(); ++slot) {
      if ((kept_ >> slot & 1) == 0 || rule().states[slot].reducible) continue;
      throw InvalidArgument(fmt::format("{}: its {} is kept in fp32 alone, not in {}", name(),
                                        rule().states[slot].name, name_of(moments)));
    }
  }

  std::string name() const override { return std::string(rule().name(values_)); }

  std::vector<OptimizerStateTensor> state(const TrainableTensor& tensor) const override {
    std::vector<OptimizerStateTensor> result;
    for (std::size_t slot = 0; slot < rule().states.size(); ++slot) {
      if ((kept_ >> slot & 1) == 0) continue;
      result.push_back({std::string(rule().states[slot].name),
                        detail::state_format(moments_, rule().states[slot], tensor.shape),
                        rule().initial_value(values_, static_cast<int>(slot))});
    }
    return result;
  }

  void check_group(const GroupOptions& group) const override {
    const char* lacking = group.weight_decay && !values_.has("weight_decay") ? "weight_decay"
                          : group.betas && !values_.has("betas")             ? "betas"
                          : group.epsilon && !values_.has("eps")             ? "eps"
                                                                             : nullptr;
    if (lacking != nullptr) {
      throw InvalidArgument(
          fmt::format("{}: a parameter group sets {}, which {} has not", name(), lacking, name()));
    }
    rule().check(of(group));
  }

  std::vector<std::byte> numbers(const OptimizerStep& step, const GroupOptions& group) const override {
    if (step.step < 1) {
      throw InvalidArgument(fmt::format("{}: update number {} is below 1", name(), step.step));
    }
    UpdateFacts facts;
    facts.step = step.step;
    facts.learning_rate = group.rate(step);
    facts.momentum = group.betas ? -1 : step.momentum;
    facts.gradient_scale = step.gradient_scale;
    facts.apply = step.apply;
    return rule().arguments(of(group), facts);
  }

  int sums(const TrainableTensor&) const override { return rule().trust ? 2 : 0; }

  void prepare(Stream& stream, const OptimizerStep&, const UpdateRange& range) const override {
    if (rule().trust) update(stream, kernels::RulePhase::advance, range);
  }

  void apply(Stream& stream, const OptimizerStep&, const UpdateRange& range) const override {
    update(stream, rule().trust ? kernels::RulePhase::finish : kernels::RulePhase::update, range);
  }

  bool takes_master_formats() const override { return true; }

  std::string describe() const override {
    std::string text = fmt::format(R"({{"type": "{}")", name());
    for (const RuleOption& option : rule().options) {
      if (option.name == "adam_w_mode") continue;  // the type determines it
      text += fmt::format(R"(, "{}": {})", option.name, values_.text(option.name));
    }
    if (kept_ != 0) text += fmt::format(R"(, "moments": "{}")", name_of(moments_));
    return text + "}";
  }

 private:
  const UpdateRule& rule() const { return values_.rule(); }

  RuleValues of(const GroupOptions& group) const {
    RuleValues values = values_;
    if (group.betas) values.set("betas", (*group.betas)[0], (*group.betas)[1]);
    if (group.epsilon) values.set("eps", *group.epsilon);
    if (!values.has("weight_decay")) return values;
    if (group.weight_decay) values.set("weight_decay", *group.weight_decay);
    if (!group.decay) values.set("weight_decay", 0);
    return values;
  }

  void update(Stream& stream, kernels::RulePhase phase, const UpdateRange& range) const {
    if (range.state.size() != state({}).size()) {
      throw InvalidArgument(fmt::format("{}: a range comes with {} state tensors instead of {}", name(),
                                        range.state.size(), state({}).size()));
    }
    std::vector<kernels::UpdateSegment> segments;
    segments.reserve(range.segments.size());
    for (const TensorSegment& segment : range.segments) {
      segments.push_back({segment.first, segment.count, segment.group, segment.partial, segment.sums,
                          segment.index, segment.first_element});
    }
    kernels::RuleOperands of;
    of.arguments = range.numbers;
    of.groups = range.groups;
    of.stride = range.numbers_stride;
    of.slots = kept_;
    of.segments = segments;
    of.gradient = range.gradient;
    of.master = range.master;
    of.state = range.state;
    of.weight = range.weight;
    of.rounding = range.rounding;
    of.rounding_key = range.rounding_key;
    kernels::rule_update(stream, rule(), phase, of);
  }

  RuleValues values_;
  DataType moments_;
  unsigned kept_ = 0;
};

}  // namespace

const std::vector<RuleType>& rule_types() {
  static const std::vector<RuleType> all = [] {
    std::vector<RuleType> types;
    for (const UpdateRule* rule : kernels::built_in_rules()) {
      for (const std::string_view name : rule->types) types.push_back({name, rule});
    }
    std::sort(types.begin(), types.end(),
              [](const RuleType& a, const RuleType& b) { return before(a.name, b.name); });
    for (const UpdateRule* rule : kernels::rules_of_program()) {
      for (const std::string_view name : rule->types) {
        const bool taken = std::any_of(types.begin(), types.end(),
                                       [&](const RuleType& type) { return same_name(type.name, name); });
        if (!taken) types.push_back({name, rule});
      }
    }
    return types;
  }();
  return all;
}

const RuleType* find_rule(std::string_view type) {
  for (const RuleType& known : rule_types()) {
    if (same_name(known.name, type)) return &known;
  }
  return nullptr;
}

std::string nearest_to_missing(std::string_view type) {
  std::string plain;  // "1-bit Adam" becomes OneBitAdam, "Schedule-Free" ScheduleFree
  for (const char c : type) {
    if (std::isalnum(static_cast<unsigned char>(c)) != 0) plain += c;
  }
  if (same_name(plain, "1bitAdam")) plain = "OneBitAdam";
  if (same_name(plain, "1bitLamb")) plain = "OneBitLamb";
  for (const Missing& known : missing) {
    if (same_name(known.name, plain)) return std::string(known.nearest);
  }
  return {};
}

std::unique_ptr<Optimizer> make_rule_optimizer(std::string_view type, const RuleParameters& parameters,
                                               DataType moments, std::optional<double> learning_rate) {
  const RuleType* const known = find_rule(type);
  if (known == nullptr) throw InvalidArgument(fmt::format("there is no optimizer {}", type));
  RuleValues values(*known->rule, known->name);
  // Flags come first, because the text of a refusal distinguishes Adam from AdamW.
  for (const bool flags : {true, false}) {
    for (const RuleOption& option : known->rule->options) {
      const auto given = parameters.find(option.name);
      if (given == parameters.end() || (option.kind == RuleOption::Kind::flag) != flags) continue;
      if (given->second.pair != (option.kind == RuleOption::Kind::pair)) {
        throw InvalidArgument(fmt::format("{}: {} is {}", known->name, option.name,
                                          given->second.pair ? "one number" : "a list of two numbers"));
      }
      values.set(option.name, given->second.first, given->second.second);
    }
  }
  for (const auto& [name, value] : parameters) {
    if (!values.has(name)) throw InvalidArgument(fmt::format("{} has no {}", known->name, name));
  }
  if (known->rule->whole_matrices) {
    return detail::make_muon(values, moments, learning_rate.value_or(known->rule->learning_rate));
  }
  return std::make_unique<RuleOptimizer>(std::move(values), moments);
}

std::unique_ptr<Optimizer> make_adam(const AdamOptions& options) {
  return make_rule_optimizer("Adam",
                             {{"betas", std::array{options.beta1, options.beta2}},
                              {"eps", options.epsilon},
                              {"weight_decay", options.weight_decay},
                              {"adam_w_mode", options.decoupled ? 1 : 0}},
                             options.moment_dtype);
}

std::unique_ptr<Optimizer> make_sgd(const SgdOptions& options) {
  return make_rule_optimizer("SGD", {{"momentum", options.momentum},
                                     {"dampening", options.dampening},
                                     {"weight_decay", options.weight_decay},
                                     {"nesterov", options.nesterov ? 1 : 0}});
}

}  // namespace tranche
