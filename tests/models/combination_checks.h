#pragma once
/// The checks of covering arrays of trainings: which pairs they hold, and that two trainings are the same.

#include <string>
#include <vector>

#include "combinations.h"

namespace tranche::models {

/// Rows in which every two values meet that can.
std::vector<test::CoveringRow> rows_of(const std::vector<CombinationAxis>& axes);

/// The rows with at most `most_ranks` ranks each. A row of more is replaced by one for each of the axes
/// pipeline, context and tensor that it has, in which that axis has one rank, so that every pair still meets
/// which fits in so many ranks.
std::vector<test::CoveringRow> rows_of_few_ranks(const std::vector<CombinationAxis>& axes, int most_ranks);

/// Few of them, in which each value of each axis still is.
std::vector<test::CoveringRow> rows_of_every_value(std::vector<test::CoveringRow> rows);

/// Fails where a pair that tests/combinations.json says is held by `test` meets in none of the rows, all of
/// which also have the capabilities of `everywhere`.
void expect_pairs_of_the_table(const std::string& test, const std::vector<CombinationAxis>& axes,
                               const std::vector<test::CoveringRow>& rows,
                               const std::vector<std::string>& everywhere);

/// `actual` is the training of `c`, `expected` that of its arithmetic at stage 0.
void expect_same(const CombinationOutcome& expected, const CombinationOutcome& actual, const Combination& c);

}  // namespace tranche::models
