#pragma once
/// n-gram models of bytes, to which a trained model is compared.

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace tranche::tools {

/// Cross-entropies of a held-out text in nats per byte.
struct NgramEntropies {
  double unigram = 0;
  double bigram = 0;   ///< mean of -log p(b_t | b_t-1), over all bytes except the first
  double trigram = 0;  ///< mean of -log p(b_t | b_t-2, b_t-1), over all bytes except the first two
};

/// Calls `visit` with successive parts of a text, which need not fit in memory as a whole.
using TextPieces = std::function<void(const std::function<void(std::span<const std::uint8_t>)>& visit)>;

/// Counts the byte sequences of length 1 to 3 in a text, with Witten-Bell smoothing (Bell, Cleary & Witten,
/// "Text compression", 1990): with T(h) the number of different bytes seen after h,
///     p(w | h) = (c(h w) + T(h) p(w | shorter h)) / (c(h) + T(h)),
/// and the shortest falls back to 1/256. So unseen sequences are expensive but finite, nothing is tuned on
/// the held-out text, and with many counts it is close to the best possible table. Takes 64 MiB.
class NgramModel {
 public:
  explicit NgramModel(const TextPieces& text);
  double unigram(std::uint8_t byte) const;
  double bigram(std::uint8_t before, std::uint8_t byte) const;
  double trigram(std::uint8_t before_last, std::uint8_t before, std::uint8_t byte) const;

  /// Throws ConfigurationError when the text is shorter than three bytes.
  NgramEntropies entropies(const TextPieces& held_out) const;

 private:
  std::vector<std::uint32_t> one_, two_, three_;                   // counts
  std::vector<std::uint32_t> after_none_, after_one_, after_two_;  // different continuations
  std::vector<std::uint64_t> total_none_, total_one_,
      total_two_;  // counts of contexts that have a continuation
};

}  // namespace tranche::tools
