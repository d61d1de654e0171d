#include "tools/train/ngrams.h"

#include <cmath>

#include "tranche/core/error.h"

namespace tranche::tools {

namespace {

constexpr std::size_t symbols = 256;

/// Adds up, for every context, its counts and the number of different continuations.
void summarise(const std::vector<std::uint32_t>& counts, std::vector<std::uint64_t>& totals,
               std::vector<std::uint32_t>& different) {
  const std::size_t contexts = counts.size() / symbols;
  totals.assign(contexts, 0);
  different.assign(contexts, 0);
  for (std::size_t context = 0; context < contexts; ++context) {
    for (std::size_t byte = 0; byte < symbols; ++byte) {
      const std::uint32_t count = counts[context * symbols + byte];
      totals[context] += count;
      different[context] += count > 0;
    }
  }
}

double smoothed(std::uint32_t count, std::uint64_t total, std::uint32_t different, double shorter) {
  if (total == 0) return shorter;
  return (count + different * shorter) / (static_cast<double>(total) + different);
}

}  // namespace

NgramModel::NgramModel(const TextPieces& text)
    : one_(symbols), two_(symbols * symbols), three_(symbols * symbols * symbols) {
  std::size_t context = 0;  // the last two bytes
  std::int64_t count = 0;
  text([&](std::span<const std::uint8_t> piece) {
    for (const std::size_t byte : piece) {
      ++one_[byte];
      if (count >= 1) ++two_[(context % symbols) * symbols + byte];
      if (count >= 2) ++three_[context * symbols + byte];
      context = (context * symbols + byte) % (symbols * symbols);
      ++count;
    }
  });
  summarise(one_, total_none_, after_none_);
  summarise(two_, total_one_, after_one_);
  summarise(three_, total_two_, after_two_);
}

double NgramModel::unigram(std::uint8_t byte) const {
  return smoothed(one_[byte], total_none_[0], after_none_[0], 1.0 / symbols);
}

double NgramModel::bigram(std::uint8_t before, std::uint8_t byte) const {
  return smoothed(two_[before * symbols + byte], total_one_[before], after_one_[before], unigram(byte));
}

double NgramModel::trigram(std::uint8_t before_last, std::uint8_t before, std::uint8_t byte) const {
  const std::size_t context = before_last * symbols + before;
  return smoothed(three_[context * symbols + byte], total_two_[context], after_two_[context],
                  bigram(before, byte));
}

NgramEntropies NgramModel::entropies(const TextPieces& held_out) const {
  NgramEntropies sums;
  std::uint8_t before_last = 0, before = 0;
  std::int64_t count = 0;
  held_out([&](std::span<const std::uint8_t> piece) {
    for (const std::uint8_t byte : piece) {
      sums.unigram -= std::log(unigram(byte));
      if (count >= 1) sums.bigram -= std::log(bigram(before, byte));
      if (count >= 2) sums.trigram -= std::log(trigram(before_last, before, byte));
      before_last = before;
      before = byte;
      ++count;
    }
  });
  if (count < 3) {
    throw ConfigurationError("n-gram entropies need a held-out text of at least three bytes, not " +
                             std::to_string(count));
  }
  const auto bytes = static_cast<double>(count);
  return {sums.unigram / bytes, sums.bigram / (bytes - 1), sums.trigram / (bytes - 2)};
}

}  // namespace tranche::tools
