#include "partition/cuts.h"

#include <algorithm>
#include <limits>
#include <string>

#include "tranche/core/error.h"

namespace tranche::detail {

namespace {

void require(int uses, int stages) {
  if (stages >= 1 && stages <= uses) return;
  throw InvalidArgument("the model has " + std::to_string(uses) + " units to cut, so " +
                        std::to_string(uses) + " stages at most, not " + std::to_string(stages));
}

}  // namespace

std::vector<int> balanced_cuts(std::span<const double> work, int stages) {
  std::vector<double> before(work.size() + 1);  // prefix sums
  for (std::size_t i = 0; i < work.size(); ++i) before[i + 1] = before[i] + work[i];
  return balanced_cuts(static_cast<int>(work.size()), stages, [&](int begin, int end) {
    return before[static_cast<std::size_t>(end)] - before[static_cast<std::size_t>(begin)];
  });
}

std::vector<int> balanced_cuts(int uses, int stages, const std::function<double(int, int)>& share) {
  require(uses, stages);
  // least[n]: the smallest possible largest share when the first n uses are on the stages so far.
  std::vector<double> least(static_cast<std::size_t>(uses) + 1, std::numeric_limits<double>::infinity());
  for (int n = 1; n <= uses; ++n) least[static_cast<std::size_t>(n)] = share(0, n);
  for (int stage = 2; stage <= stages; ++stage) {
    std::vector<double> next(least.size(), std::numeric_limits<double>::infinity());
    for (int n = stage; n <= uses; ++n) {
      for (int cut = stage - 1; cut < n; ++cut) {
        double& best = next[static_cast<std::size_t>(n)];
        best = std::min(best, std::max(least[static_cast<std::size_t>(cut)], share(cut, n)));
      }
    }
    least = std::move(next);
  }
  const double bound = least.back();
  std::vector<int> cuts{0};
  for (int stage = 1; stage < stages; ++stage) {
    const int begin = cuts.back(), most = uses - (stages - stage);  // each later stage needs at least one
    int end = begin + 1;
    while (end < most && share(begin, end + 1) <= bound) ++end;
    cuts.push_back(end);
  }
  return cuts;
}

std::vector<int> equal_cuts(int uses, int stages) {
  require(uses, stages);
  std::vector<int> cuts;
  for (int stage = 0, begin = 0; stage < stages; ++stage) {
    cuts.push_back(begin);
    begin += uses / stages + (stage < uses % stages ? 1 : 0);
  }
  return cuts;
}

std::vector<int> listed_cuts(std::span<const int> begins, int uses, int stages, std::string_view part) {
  require(uses, stages);
  std::string list;
  for (const int begin : begins) list += (list.empty() ? "" : ", ") + std::to_string(begin);
  const auto refuse = [&](const std::string& reason) { throw InvalidArgument("[" + list + "]: " + reason); };
  if (static_cast<int>(begins.size()) != stages - 1) {
    refuse("it has " + std::to_string(begins.size()) + " numbers; " + std::to_string(stages) + " " +
           std::string(part) + "s have " + std::to_string(stages - 1) + " cuts");
  }
  std::vector<int> cuts{0};
  for (const int begin : begins) {
    if (begin < cuts.back()) {
      refuse(std::to_string(begin) + " comes after " + std::to_string(cuts.back()) + ": cuts have to ascend");
    }
    if (begin <= cuts.back() || begin >= uses) {
      refuse(std::to_string(begin) + " leaves a " + std::string(part) +
             " without a unit; it has to be above " + std::to_string(cuts.back()) + " and below " +
             std::to_string(uses) + ", the number of the model's units");
    }
    cuts.push_back(begin);
  }
  return cuts;
}

}  // namespace tranche::detail
