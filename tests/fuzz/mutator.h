#pragma once
/// Mutates inputs at random, deterministically by seed. Replaces libFuzzer in builds without it.

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

  /// A seed with one or more changes, at most 64 KiB long.
  std::string next();

 private:
  std::size_t below(std::size_t bound) { return bound == 0 ? 0 : random_() % bound; }
  void change(std::string& text);
  /// Replaces a value by a JSON value or by a special number.
  void replace_value(std::string& text);

  std::vector<std::string> seeds_, words_;
  std::mt19937_64 random_;
};

}  // namespace tranche::fuzz
