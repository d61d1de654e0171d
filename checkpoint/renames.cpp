#include "checkpoint/renames.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "core/closest_match.h"
#include "tranche/core/error.h"

namespace tranche::checkpoint {

namespace {

/// The text that matches the `*` of the pattern; nullopt if the name does not match.
std::optional<std::string_view> matched(std::string_view name, std::string_view pattern) {
  const std::size_t star = pattern.find('*');
  if (star == std::string_view::npos) {
    if (name != pattern) return std::nullopt;
    return std::string_view();
  }
  const std::string_view before = pattern.substr(0, star), after = pattern.substr(star + 1);
  if (name.size() < before.size() + after.size() || !name.starts_with(before) || !name.ends_with(after)) {
    return std::nullopt;
  }
  return name.substr(before.size(), name.size() - before.size() - after.size());
}

}  // namespace

Renames::Renames(std::vector<std::pair<std::string, std::string>> rules) {
  for (auto& [from, to] : rules) {
    const auto refuse = [&, &old_name = from, &new_name = to](const char* why) {
      throw InvalidArgument(fmt::format("rename {}={}: {}", old_name, new_name, why));
    };
    if (from.empty() || to.empty()) refuse("a name is missing");
    const auto stars = [](const std::string& name) { return std::count(name.begin(), name.end(), '*'); };
    if (stars(from) > 1 || stars(to) > 1) refuse("a name has at most one *");
    if (stars(to) > stars(from))
      refuse("the * of the new name stands for that of the old one, which has none");
    rules_.push_back({std::move(from), std::move(to)});
  }
}

std::string Renames::apply(std::string_view stored) {
  for (Rule& rule : rules_) {
    const auto text = matched(stored, rule.from);
    if (!text) continue;
    rule.used = true;
    std::string name = rule.to;
    if (const std::size_t star = name.find('*'); star != std::string::npos) name.replace(star, 1, *text);
    return name;
  }
  return std::string(stored);
}

void Renames::require_used(std::string_view origin, const std::vector<std::string>& names) const {
  for (const Rule& rule : rules_) {
    if (rule.used) continue;
    const std::string closest = detail::closest_match(rule.from, names);
    throw CheckpointError(
        fmt::format("rename {}={}: {} has no tensor of this name that no rule before it took{}", rule.from,
                    rule.to, origin, closest.empty() ? "" : "; the closest match is '" + closest + "'"));
  }
}

}  // namespace tranche::checkpoint
