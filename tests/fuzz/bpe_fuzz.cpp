// GPT-2's vocab.json and merges.txt, and texts as their tokens.

#include <nlohmann/json.hpp>

#include "tests/fuzz/fuzz_target.h"
#include "tools/byte_pair_encoding.h"
#include "tools/unicode_classes.h"

namespace tranche::fuzz {

namespace {

/// A vocabulary of the bytes and a few merges.
nlohmann::ordered_json small_vocabulary() {
  nlohmann::ordered_json vocabulary = nlohmann::ordered_json::object();
  char32_t next = 256;
  for (char32_t byte = 0; byte < 256; ++byte) {
    const bool visible = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
    std::string name;
    tools::append_utf8(visible ? byte : next++, name);
    vocabulary[name] = byte;
  }
  int token = 256;
  for (const char* name : {"he", "ll", "hell", "hello", "oo", "<|endoftext|>"}) vocabulary[name] = token++;
  return vocabulary;
}

constexpr const char* small_merges = "#version: 0.2\nh e\nl l\nhe ll\nhell o\no o\n";

void use(const tools::BytePairEncoding& encoding, std::string_view text) {
  const std::vector<std::int32_t> tokens = encoding.encode(text);
  require(encoding.decode(tokens) == text, "a text changes when it is encoded");
  for (const std::int32_t token : tokens) require(token < encoding.vocabulary(), "a token is too large");
}

/// vocab.json, merges.txt, a text.
void read_bpe(std::string_view input) {
  const auto parts = split(input, 3);
  use(tools::BytePairEncoding(parts[0], parts[1], "folder"), parts[2]);
}

std::vector<std::string> bpe_seeds() {
  return {join({small_vocabulary().dump(), small_merges, "hello, world's cool"})};
}

/// merges.txt, a text.
void read_merges(std::string_view input) {
  static const std::string vocabulary = small_vocabulary().dump();
  const auto parts = split(input, 2);
  use(tools::BytePairEncoding(vocabulary, parts[0], "folder"), parts[1]);
}

std::vector<std::string> merges_seeds() {
  return {join({small_merges, "hello hello"}),
          join({"h e\r\nl l\r\n\r\no o\r\n", "we'll  see:\t\xc3\xa9\xe4\xb8\xad 123<|endoftext|>he"})};
}

}  // namespace

Target bpe_target() {
  return {"bpe", read_bpe, bpe_seeds, {ExitStatus::configuration}};
}
Target merges_target() {
  return {"merges", read_merges, merges_seeds, {ExitStatus::configuration}};
}

}  // namespace tranche::fuzz
