#include "core/closest_match.h"

#include <algorithm>
#include <cctype>
#include <cstddef>

namespace tranche::detail {
namespace {

std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return result;
}

}  // namespace

std::size_t edit_distance(std::string_view one, std::string_view other) {
  const std::string a = lower(one), b = lower(other);  // optimal string alignment
  std::vector<std::size_t> before(b.size() + 1), previous(b.size() + 1), row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) previous[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({previous[j] + 1, row[j - 1] + 1, previous[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], before[j - 2] + 1);
      }
    }
    before = previous;
    previous = row;
  }
  return previous[b.size()];
}

std::string closest_match(std::string_view text, const std::vector<std::string>& candidates) {
  const std::string wanted = lower(text);
  std::string best, holder;
  std::size_t best_distance = std::max<std::size_t>(2, wanted.size() / 3) + 1;
  bool best_keeps = false;  // the shorter name's letters all occur in the longer, in order
  for (const std::string& candidate : candidates) {
    const std::size_t distance = edit_distance(wanted, candidate);
    const auto [shorter, longer] = std::minmax({wanted.size(), candidate.size()});
    const bool keeps = distance == longer - shorter;
    // Two candidates at the same distance: one that only adds letters is preferred. "llama-3-8b" means
    // "llama-3.1-8b", not "llama-2-7b".
    const bool closer =
        distance < best_distance || (distance == best_distance && keeps && !best_keeps && !best.empty());
    // Two short words without a common letter are also at a small distance, so at least one letter must
    // agree.
    if (closer && distance < longer) {
      best = candidate;
      best_distance = distance;
      best_keeps = keeps;
    }
    const bool holds = wanted.size() >= 4 && lower(candidate).find(wanted) != std::string::npos;
    if (holds && (holder.empty() || candidate.size() < holder.size())) holder = candidate;
  }
  // A longer name that contains the text, such as one with "micro_batch_size", is preferred to names at a
  // distance above 2.
  return best_distance > 2 && !holder.empty() ? holder : best;
}

}  // namespace tranche::detail
