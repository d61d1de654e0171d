#include "tools/train/ngrams.h"

#include <gmock/gmock.h>

#include <cmath>
#include <string>
#include <string_view>

#include "tranche/core/error.h"

namespace tranche::tools {
namespace {

/// The text in parts of one to three bytes, so that contexts cross their ends.
TextPieces pieces(std::string_view text) {
  return [text](const auto& visit) {
    for (std::size_t i = 0, size = 1; i < text.size(); i += size, size = size % 3 + 1) {
      const std::string_view piece = text.substr(i, size);
      visit({reinterpret_cast<const std::uint8_t*>(piece.data()), piece.size()});
    }
  };
}

TEST(Ngrams, AreWhatAHandComputes) {
  // "abab": a twice, b twice; after a: b twice; after b: a once; after ab: a once; after ba: b once.
  const NgramModel model(pieces("abab"));
  const double none = 1.0 / 256;
  const double a = (2 + 2 * none) / (4 + 2), c = (0 + 2 * none) / (4 + 2);
  EXPECT_DOUBLE_EQ(model.unigram('a'), a);
  EXPECT_DOUBLE_EQ(model.unigram('c'), c);
  const double a_then_b = (2 + 1 * a) / (2 + 1);  // unigram(b) = unigram(a)
  EXPECT_DOUBLE_EQ(model.bigram('a', 'b'), a_then_b);
  EXPECT_DOUBLE_EQ(model.bigram('a', 'c'), (0 + 1 * c) / (2 + 1));
  EXPECT_DOUBLE_EQ(model.bigram('c', 'a'), a) << "an unseen context says nothing";
  const double b_then_a = (1 + 1 * a) / (1 + 1);
  EXPECT_DOUBLE_EQ(model.bigram('b', 'a'), b_then_a);
  EXPECT_DOUBLE_EQ(model.trigram('a', 'b', 'a'), (1 + 1 * b_then_a) / (1 + 1));
  EXPECT_DOUBLE_EQ(model.trigram('b', 'a', 'c'), (0 + 1 * model.bigram('a', 'c')) / (1 + 1));
  EXPECT_DOUBLE_EQ(model.trigram('b', 'b', 'a'), b_then_a);

  const NgramEntropies entropies = model.entropies(pieces("bac"));
  EXPECT_DOUBLE_EQ(entropies.unigram, -(std::log(a) + std::log(a) + std::log(c)) / 3);
  EXPECT_DOUBLE_EQ(entropies.bigram, -(std::log(b_then_a) + std::log(model.bigram('a', 'c'))) / 2);
  EXPECT_DOUBLE_EQ(entropies.trigram, -std::log(model.trigram('b', 'a', 'c')));
}

TEST(Ngrams, AreThoseOfTheWholeTextHoweverItIsCut) {
  const std::string_view text = "to be or not to be, that is the question";
  const TextPieces whole = [&](const auto& visit) {
    visit({reinterpret_cast<const std::uint8_t*>(text.data()), text.size()});
  };
  const NgramEntropies cut = NgramModel(pieces(text)).entropies(pieces(text));
  const NgramEntropies uncut = NgramModel(whole).entropies(whole);
  EXPECT_EQ(cut.unigram, uncut.unigram);
  EXPECT_EQ(cut.bigram, uncut.bigram);
  EXPECT_EQ(cut.trigram, uncut.trigram);
}

TEST(Ngrams, AreDistributions) {
  const NgramModel model(pieces(std::string_view("to be or not to be\0\xff that is", 28)));
  for (int x = 0; x < 256; ++x) {
    double one = 0, two = 0, three = 0;
    for (int w = 0; w < 256; ++w) {
      const auto byte = static_cast<std::uint8_t>(w), before = static_cast<std::uint8_t>(x);
      one += model.unigram(byte);
      two += model.bigram(before, byte);
      three += model.trigram('o', before, byte);
    }
    // 256 terms of at most 1 with rounding errors of 1e-16 each.
    EXPECT_NEAR(one, 1, 1e-12);
    EXPECT_NEAR(two, 1, 1e-12);
    EXPECT_NEAR(three, 1, 1e-12);
  }
}

TEST(Ngrams, AreFiniteForBytesNeverSeen) {
  const NgramModel model(pieces("aaaa"));
  const NgramEntropies entropies = model.entropies(pieces("zyxw"));
  EXPECT_TRUE(std::isfinite(entropies.bigram));
  EXPECT_TRUE(std::isfinite(entropies.trigram));
  const NgramEntropies nothing = NgramModel(pieces("")).entropies(pieces("abc"));
  EXPECT_NEAR(nothing.trigram, std::log(256.0), 1e-12);
}

TEST(Ngrams, LongerContextsTellMoreOfRegularText) {
  std::string text;
  for (int i = 0; i < 2000; ++i) text += i % 2 == 0 ? "abcabd" : "abdabc";
  const NgramEntropies entropies = NgramModel(pieces(text)).entropies(pieces(text));
  EXPECT_LT(entropies.bigram, entropies.unigram);
  EXPECT_LT(entropies.trigram, entropies.bigram);
  // After "ab" every third byte carries one bit; everything else is certain except for smoothing.
  EXPECT_NEAR(entropies.trigram, std::log(2.0) / 3, 0.01);
}

TEST(Ngrams, NeedThreeBytes) {
  EXPECT_THROW((void)NgramModel(pieces("abc")).entropies(pieces("ab")), ConfigurationError);
}

}  // namespace
}  // namespace tranche::tools
