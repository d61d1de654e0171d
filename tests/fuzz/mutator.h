#pragma once
/// Damages inputs at random, the same way for the same seed. Takes the place of libFuzzer where there is
/// none.

#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace tranche::fuzz {

class Mutator {
 public:
  /// `seeds` must not be empty.
  Mutator(std::vector<std::string> seeds, std::vector<std::string> words, std::uint64_t seed)
      : seeds_(std::move(seeds)), words_(std::move(words)), random_(seed) {}

  /// A seed with one change or more; at most 64 KiB.
  std::string next();

 private:
  std::size_t below(std::size_t bound) { return bound == 0 ? 0 : random_() % bound; }
  void change(std::string& text);
  /// Puts a JSON value, or a number of interest in the place of one that is there.
  void replace_value(std::string& text);

  std::vector<std::string> seeds_, words_;
  std::mt19937_64 random_;
};

}  // namespace tranche::fuzz
