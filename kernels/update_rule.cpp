#include "tranche/kernels/update_rule.h"

#include <fmt/core.h>

#include <cmath>

#include "tranche/core/error.h"
#include "tranche/kernels/optimizer_update.h"

namespace tranche {

// A program's own list, which CMake generates, replaces this weak definition when it is linked.
[[gnu::weak]] std::span<const UpdateRule* const> kernels::rules_of_program() {
  return {};
}

RuleValues::RuleValues(const UpdateRule& rule, std::string_view type) : rule_(&rule), type_(type) {
  for (const RuleOption& option : rule.options) values_.emplace_back(option.first, option.second);
}

bool RuleValues::has(std::string_view name) const {
  for (const RuleOption& option : rule_->options) {
    if (option.name == name) return true;
  }
  return false;
}

std::size_t RuleValues::index_of(std::string_view name) const {
  for (std::size_t i = 0; i < values_.size(); ++i) {
    if (rule_->options[i].name == name) return i;
  }
  throw LogicError(fmt::format("{} has no option {}", type_, name));
}

void RuleValues::set(std::string_view name, double first, double second) {
  if (!has(name)) throw InvalidArgument(fmt::format("{} has no {}", type_, name));
  const std::size_t i = index_of(name);
  values_[i] = {first, second};
  const RuleOption& option = rule_->options[i];
  // The comparisons are written so that NaN fails them too.
  const auto allowed = [&](double value) {
    return value >= option.range.least && value < option.range.below;
  };
  const std::string_view shown = rule_->name(*this);
  if (option.kind == RuleOption::Kind::pair && !(allowed(first) && allowed(second))) {
    throw InvalidArgument(
        fmt::format("{}: {} are [{}, {}]; each must be {}", shown, name, first, second, option.range.text));
  }
  if (option.kind == RuleOption::Kind::number && !allowed(first)) {
    throw InvalidArgument(fmt::format("{}: {} is {}; it must be {}", shown, name, first, option.range.text));
  }
  if (option.kind == RuleOption::Kind::choice &&
      !(first >= 0 && first < static_cast<double>(option.choices.size()) && first == std::floor(first))) {
    throw InvalidArgument(
        fmt::format("{}: {} is choice {} of {}", shown, name, first, option.choices.size()));
  }
}

std::string RuleValues::text(std::string_view name) const {
  const std::size_t i = index_of(name);
  const auto& [first, second] = values_[i];
  switch (rule_->options[i].kind) {
    case RuleOption::Kind::flag:
      return first != 0 ? "true" : "false";
    case RuleOption::Kind::pair:
      return fmt::format("[{}, {}]", first, second);
    case RuleOption::Kind::choice:
      return fmt::format("\"{}\"", rule_->options[i].choices[static_cast<std::size_t>(first)]);
    case RuleOption::Kind::number:
      break;
  }
  return std::isfinite(first) ? fmt::format("{}", first) : "null";
}

}  // namespace tranche
