// Compares tokens with those of Hugging Face's tokenizers, for tokenizers and strings from
// scripts/compare_tokenizers.py --golden.

#include <gmock/gmock.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tranche/training/tokenizer.h"

namespace tranche::training {
namespace {

TEST(TokenizerGolden, TokensAreThoseOfHuggingFace) {
  std::ifstream file(TRANCHE_GOLDEN_TOKENIZERS);
  const auto golden = nlohmann::ordered_json::parse(file);
  ASSERT_EQ(golden.size(), 5u);
  for (const auto& [name, each] : golden.items()) {
    const auto tokenizer = read_tokenizer_json(each["tokenizer"].dump(), name);
    EXPECT_EQ(each["strings"].size(), 60u) << name;
    for (const auto& [index, entry] : each["strings"].items()) {
      const auto text = entry[0].get<std::string>();
      const auto tokens = entry[1].get<std::vector<std::int32_t>>();
      EXPECT_EQ(tokenizer->encode(text), tokens) << name << ": " << text;
      EXPECT_EQ(tokenizer->decode(tokens), entry[2].get<std::string>()) << name;
    }
  }
}

}  // namespace
}  // namespace tranche::training
