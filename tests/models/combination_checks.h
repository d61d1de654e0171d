#pragma once
/// Checks of covering arrays of trainings: the pairs that they contain, and the equality of two trainings.

#include <string>
#include <vector>

#include "combinations.h"

namespace tranche::models {

/// Rows in which every two values that can meet do meet.
std::vector<test::CoveringRow> rows_of(const std::vector<CombinationAxis>& axes);

/// The rows with at most `most_ranks` ranks each. A row with more ranks is replaced by one row for each of
/// the axes pipeline, context and tensor that it has, in which that axis has one rank. So every pair still
/// meets that fits in so many ranks.
std::vector<test::CoveringRow> rows_of_few_ranks(const std::vector<CombinationAxis>& axes, int most_ranks);

/// A few of the rows in which each value of each axis still occurs.
std::vector<test::CoveringRow> rows_of_every_value(std::vector<test::CoveringRow> rows);

/// Fails if a pair that tests/combinations.json assigns to `test` occurs in none of the rows; all rows also
/// have the capabilities of `everywhere`.
void expect_pairs_of_the_table(const std::string& test, const std::vector<CombinationAxis>& axes,
                               const std::vector<test::CoveringRow>& rows,
                               const std::vector<std::string>& everywhere);

/// Compares `actual`, the training of `c`, with `expected`, the training with its arithmetic at stage 0.
void expect_same(const CombinationOutcome& expected, const CombinationOutcome& actual, const Combination& c);

}  // namespace tranche::models
