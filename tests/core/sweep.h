#pragma once
/// Sweeps test one invariant on many drawn cases, each drawn from its number alone. The whole sweep is slow;
/// a part of it, which contains every value of every axis, runs with every change (tests/README.md).

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "tests/core/rounds.h"

namespace tranche::test {

/// The cases [first, end()).
struct Sweep {
  std::uint64_t first = 0, count = 0;
  std::uint64_t end() const { return first + count; }
};

/// Returns `usual` with the environment's changes: TRANCHE_TEST_SEED is the first case (for example one that
/// failed), TRANCHE_TEST_COUNT the number of cases.
inline Sweep sweep(Sweep usual) {
  const auto read = [](const char* name, std::uint64_t& number) {
    if (const char* text = std::getenv(name)) number = std::strtoull(text, nullptr, 10);
  };
  read("TRANCHE_TEST_SEED", usual.first);
  read("TRANCHE_TEST_COUNT", usual.count);
  return usual;
}

/// True if the environment selects the cases.
inline bool cases_are_chosen() {
  return std::getenv("TRANCHE_TEST_SEED") != nullptr || std::getenv("TRANCHE_TEST_COUNT") != nullptr;
}

/// The cases of a sweep that this run performs (rounds.h); all of them if the environment selects them. Cheap
/// work, such as counting the values that occur, should use all cases of the sweep instead.
inline std::vector<std::uint64_t> rounds(const Sweep& cases) {
  std::vector<std::uint64_t> taken;
  if (cases_are_chosen()) {
    for (std::uint64_t number = cases.first; number < cases.end(); ++number) taken.push_back(number);
  } else {
    for (const int round : rounds(static_cast<int>(cases.count))) {
      taken.push_back(cases.first + static_cast<std::uint64_t>(round));
    }
  }
  return taken;
}

/// Collects the values of a sweep's axes that occurred.
class AxesMet {
 public:
  template <typename T>
  void meet(const std::string& axis, const T& value) {
    met_[axis].insert(text_of(value));
  }
  /// Fails the test if no case had one of these values. Not for cases that the environment selects.
  template <typename T>
  void expect(const std::string& axis, std::initializer_list<T> values) const {
    if (cases_are_chosen()) return;
    const auto met = met_.find(axis);
    for (const T& value : values) {
      EXPECT_TRUE(met != met_.end() && met->second.contains(text_of(value)))
          << "no case had " << axis << " " << text_of(value) << ": take more cases, or another first one";
    }
  }

 private:
  template <typename T>
  static std::string text_of(const T& value) {
    if constexpr (requires { name_of(value); }) {
      return std::string(name_of(value));
    } else {
      return ::testing::PrintToString(value);
    }
  }

  std::map<std::string, std::set<std::string>> met_;
};

}  // namespace tranche::test
