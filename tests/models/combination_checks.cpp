#include "combination_checks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "tests/core/program_output.h"

namespace tranche::models {
namespace {

using Pair = std::pair<std::string, std::string>;
Pair pair_of(const std::string& a, const std::string& b) {
  return {std::min(a, b), std::max(a, b)};
}

/// The capabilities on one side of an entry: keys, and groups as "@name".
std::vector<std::string> expanded(const nlohmann::json& table, const nlohmann::json& side) {
  std::vector<std::string> keys;
  for (const std::string name : side) {
    if (!name.starts_with('@')) {
      keys.push_back(name);
      continue;
    }
    for (const std::string key : table["groups"][name.substr(1)]) keys.push_back(key);
  }
  return keys;
}

}  // namespace

std::vector<test::CoveringRow> rows_of(const std::vector<CombinationAxis>& axes) {
  std::vector<int> counts;
  for (const CombinationAxis& axis : axes) counts.push_back(static_cast<int>(axis.values.size()));
  return test::CoveringRows(counts, [&](std::size_t a, int value, std::size_t b,
                                        int other) { return can_meet(axes[a], value, axes[b], other); })
      .rows();
}

std::vector<test::CoveringRow> rows_of_few_ranks(const std::vector<CombinationAxis>& axes, int most_ranks) {
  std::vector<test::CoveringRow> open = rows_of(axes), rows;
  std::set<test::CoveringRow> met;
  for (std::size_t next = 0; next < open.size(); ++next) {
    const test::CoveringRow row = open[next];
    if (!met.insert(row).second) continue;
    if (combination_of(axes, row).ranks <= most_ranks) {
      rows.push_back(row);
      continue;
    }
    for (std::size_t axis = 0; axis < axes.size(); ++axis) {
      const std::string& name = axes[axis].name;
      if (row[axis] == 0 || (name != "pipeline" && name != "context" && name != "tensor")) continue;
      open.push_back(row);
      open.back()[axis] = 0;
    }
  }
  return rows;
}

std::vector<test::CoveringRow> rows_of_every_value(std::vector<test::CoveringRow> rows) {
  std::vector<test::CoveringRow> few;
  std::set<std::pair<std::size_t, int>> met;
  const auto values_new_in = [&](const test::CoveringRow& row) {
    int count = 0;
    for (std::size_t axis = 0; axis < row.size(); ++axis) count += met.contains({axis, row[axis]}) ? 0 : 1;
    return count;
  };
  for (;;) {
    const auto best = std::max_element(rows.begin(), rows.end(), [&](const auto& a, const auto& b) {
      return values_new_in(a) < values_new_in(b);
    });
    if (best == rows.end() || values_new_in(*best) == 0) return few;
    for (std::size_t axis = 0; axis < best->size(); ++axis) met.insert({axis, (*best)[axis]});
    few.push_back(*best);
  }
}

void expect_pairs_of_the_table(const std::string& test, const std::vector<CombinationAxis>& axes,
                               const std::vector<test::CoveringRow>& rows,
                               const std::vector<std::string>& everywhere) {
  std::set<Pair> met;
  for (const test::CoveringRow& row : rows) {
    std::vector<std::string> capabilities = everywhere;
    for (std::size_t i = 0; i < axes.size(); ++i) {
      capabilities.push_back(axes[i].values[static_cast<std::size_t>(row[i])].capability);
    }
    for (const std::string& a : capabilities) {
      for (const std::string& b : capabilities) met.insert(pair_of(a, b));
    }
  }
  // A bundle for GPU hosts has the table beside the program, because the build's source tree does not exist
  // there.
  const std::string path = test::beside_program("combinations.json", TRANCHE_COMBINATIONS);
  std::ifstream file(path);
  ASSERT_TRUE(file) << "cannot read " << path;
  const auto table = nlohmann::json::parse(file);
  std::map<std::string, std::string> axis_of;
  for (const auto& capability : table["capabilities"]) axis_of[capability["key"]] = capability["axis"];
  std::set<Pair> settled;  // settled by this or an earlier entry
  int held = 0;
  for (const auto& entry : table["cells"]) {
    for (const std::string& a : expanded(table, entry["between"])) {
      for (const std::string& b : expanded(table, entry["and"])) {
        const Pair pair = pair_of(a, b);
        if (axis_of[a] == axis_of[b] || !settled.insert(pair).second || entry.value("test", "") != test)
          continue;
        ++held;
        EXPECT_TRUE(met.contains(pair)) << pair.first << " and " << pair.second << " do not meet in " << test;
      }
    }
  }
  EXPECT_GT(held, 0) << "the table does not know " << test;
}

void expect_same(const CombinationOutcome& expected, const CombinationOutcome& actual, const Combination& c) {
  ASSERT_EQ(actual.steps.size(), expected.steps.size());
  for (std::size_t s = 0; s < expected.steps.size(); ++s) {
    SCOPED_TRACE("step " + std::to_string(s + 1));
    EXPECT_EQ(actual.steps[s].loss, expected.steps[s].loss);
    EXPECT_EQ(actual.steps[s].gradient_norm, expected.steps[s].gradient_norm);
    EXPECT_EQ(actual.steps[s].clip_coefficient, expected.steps[s].clip_coefficient);
    EXPECT_EQ(actual.steps[s].loss_scale, expected.steps[s].loss_scale);
    EXPECT_EQ(actual.steps[s].learning_rate, expected.steps[s].learning_rate);
    EXPECT_EQ(actual.steps[s].skipped_because, expected.steps[s].skipped_because);
    EXPECT_EQ(actual.steps[s].applied, expected.steps[s].applied);
    EXPECT_EQ(actual.steps[s].applied, c.gradients != Gradients::not_finite || s != 2);
    EXPECT_EQ(actual.steps[s].stop_requested, c.stop && s >= 2 && s < 4) << "by an engine, not the next";
  }
  EXPECT_EQ(actual.last, expected.last);
  if (c.evaluate) {
    ASSERT_EQ(actual.evaluations.size(), expected.evaluations.size());
    for (std::size_t e = 0; e < expected.evaluations.size(); ++e) {
      EXPECT_EQ(actual.evaluations[e].loss, expected.evaluations[e].loss) << "evaluation " << e;
      EXPECT_EQ(actual.evaluations[e].tokens, expected.evaluations[e].tokens) << "evaluation " << e;
    }
  }
  if (c.generate) {
    EXPECT_EQ(actual.logits, expected.logits);
    EXPECT_EQ(actual.texts, expected.texts);
  }
  if (!c.save_meanwhile) return;
  EXPECT_EQ(actual.saved, expected.second) << "the checkpoint is of what was when it was asked for";
  ASSERT_FALSE(actual.array.empty());
  EXPECT_EQ(actual.array.front(), 7);
  EXPECT_EQ(actual.array.back(), 6 + static_cast<std::int64_t>(actual.array.size()));
}

}  // namespace tranche::models
