// Tokenizer files, and texts encoded with them.

#include <nlohmann/json.hpp>

#include "tests/fuzz/fuzz_target.h"
#include "tests/training/sentencepiece_bytes.h"
#include "tranche/training/tokenizer.h"

namespace tranche::fuzz {

namespace {

using Json = nlohmann::ordered_json;

/// A character of one or two bytes in UTF-8.
std::string utf8(unsigned character) {
  if (character < 128) return {static_cast<char>(character)};
  return {static_cast<char>(0xc0 | character >> 6), static_cast<char>(0x80 | (character & 0x3f))};
}

/// A vocabulary of the bytes and a few merges.
Json small_vocabulary() {
  Json vocabulary = Json::object();
  unsigned next = 256;
  for (unsigned byte = 0; byte < 256; ++byte) {
    const bool visible = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
    vocabulary[utf8(visible ? byte : next++)] = byte;
  }
  int token = 256;
  for (const char* name : {"he", "ll", "hell", "hello", "oo", "<|endoftext|>"}) vocabulary[name] = token++;
  return vocabulary;
}

constexpr const char* small_merges = "#version: 0.2\nh e\nl l\nhe ll\nhell o\no o\n";

/// `exact`: decoding must return the original text.
void use(const training::Tokenizer& tokenizer, std::string_view text, bool exact) {
  const std::vector<std::int32_t> tokens = tokenizer.encode(text);
  const std::string decoded = tokenizer.decode(tokens);
  require(!exact || decoded == text, "a text changes when it is encoded");
  for (const std::int32_t token : tokens) {
    require(token >= 0 && token < tokenizer.vocabulary(), "a token is not in the vocabulary");
  }
}

/// The input is vocab.json, merges.txt and a text.
void read_bpe(std::string_view input) {
  const auto parts = split(input, 3);
  use(*training::read_vocabulary_and_merges(parts[0], parts[1], "folder"), parts[2], true);
}

std::vector<std::string> bpe_seeds() {
  return {join({small_vocabulary().dump(), small_merges, "hello, world's cool"})};
}

/// The input is merges.txt and a text.
void read_merges(std::string_view input) {
  static const std::string vocabulary = small_vocabulary().dump();
  const auto parts = split(input, 2);
  use(*training::read_vocabulary_and_merges(vocabulary, parts[0], "folder"), parts[1], true);
}

std::vector<std::string> merges_seeds() {
  return {join({small_merges, "hello hello"}),
          join({"h e\r\nl l\r\n\r\no o\r\n", "we'll  see:\t\xc3\xa9\xe4\xb8\xad 123<|endoftext|>he"})};
}

/// The input is the rest of a tokenizer.json, without vocabulary and merges, and a text. The vocabulary is
/// inserted here; it would be most of the bytes, and is read like that of `bpe`.
void read_tokenizer(std::string_view input) {
  static const Json bytes = small_vocabulary();
  static const Json characters = [] {
    Json vocabulary = Json::object();
    for (int byte = 0; byte < 256; ++byte) {
      constexpr std::string_view digits = "0123456789ABCDEF";
      const auto high = static_cast<std::size_t>(byte / 16), low = static_cast<std::size_t>(byte % 16);
      vocabulary[std::string("<0x") + digits[high] + digits[low] + ">"] = byte;
    }
    int token = 256;
    for (const char* name : {"h", "e", "l", "o", "\u2581", "he", "ll", "hell", "hello", "oo"})
      vocabulary[name] = token++;
    return vocabulary;
  }();
  const auto parts = split(input, 2);
  Json document = Json::parse(parts[0], nullptr, false);
  if (document.is_object() && document.contains("model") && document["model"].is_object() &&
      document["model"].contains("vocab") && document["model"]["vocab"].is_string()) {
    document["model"]["vocab"] = document["model"]["vocab"] == "bytes" ? bytes : characters;
  }
  // An input that is not JSON, or not UTF-8, is used unchanged.
  const bool plain = document.is_discarded() || !document.is_object() || !document.contains("model");
  const std::string text =
      plain ? std::string(parts[0]) : document.dump(-1, ' ', false, Json::error_handler_t::replace);
  const bool exact =
      !plain && document.value("normalizer", Json()).is_null() &&
      document.value("pre_tokenizer", Json()).dump().find("Metaspace") == std::string::npos &&
      document.value("pre_tokenizer", Json()).dump().find("\"add_prefix_space\":true") == std::string::npos;
  use(*training::read_tokenizer_json(text, "tokenizer.json"), parts[1], exact);
}

std::vector<std::string> tokenizer_seeds() {
  constexpr const char* merges = R"([["h","e"],["l","l"],["he","ll"],["hell","o"],"o o"])";
  const std::string gpt2 =
      std::string(
          R"({"version":"1.0","truncation":null,"padding":null,"added_tokens":[{"id":262,"content":"<|x|>",)") +
      R"("single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}],"normalizer":null,)" +
      R"("pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true},)" +
      R"("post_processor":{"type":"ByteLevel"},"decoder":{"type":"ByteLevel"},"model":{"type":"BPE","dropout":null,)" +
      R"("unk_token":null,"fuse_unk":false,"ignore_merges":true,"vocab":"bytes","merges":)" + merges + "}}";
  const std::string llama3 =
      std::string(
          R"({"added_tokens":[{"id":262,"content":"<|x|>","normalized":true}],"normalizer":{"type":"NFC"},)") +
      R"("pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":)" +
      R"("(?i:'s|'t)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s+(?!\\S)|\\s+"},)" +
      R"("behavior":"Isolated","invert":false},{"type":"ByteLevel","add_prefix_space":false,"use_regex":false}]},)" +
      R"("post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<|x|>","type_id":0}},)" +
      R"({"Sequence":{"id":"A","type_id":0}}],"pair":[],"special_tokens":{"<|x|>":{"id":"<|x|>","ids":[262]}}},)" +
      R"("decoder":{"type":"ByteLevel"},"model":{"type":"BPE","vocab":"bytes","merges":)" + merges + "}}";
  const std::string llama2 =
      std::string(
          R"({"added_tokens":[{"id":266,"content":"<s>"}],"normalizer":{"type":"Sequence","normalizers":[)") +
      R"({"type":"Prepend","prepend":"\u2581"},{"type":"Replace","pattern":{"String":" "},"content":"\u2581"}]},)" +
      R"("pre_tokenizer":null,"decoder":{"type":"Sequence","decoders":[{"type":"Replace","pattern":{"String":)" +
      R"("\u2581"},"content":" "},{"type":"ByteFallback"},{"type":"Fuse"},{"type":"Strip","content":" ","start":1,)" +
      R"("stop":0}]},"model":{"type":"BPE","byte_fallback":true,"fuse_unk":true,"vocab":"characters","merges":)" +
      merges + "}}";
  const std::string mistral =
      std::string(
          R"({"pre_tokenizer":{"type":"Metaspace","replacement":"\u2581","prepend_scheme":"first",)") +
      R"("split":false},"decoder":null,"model":{"type":"BPE","byte_fallback":true,"vocab":"characters","merges":)" +
      merges + "}}";
  return {join({gpt2, "hello<|x|> world's"}), join({llama3, "hello<|x|>\n 1234 e\u0301"}),
          join({llama2, "hello <s> world\u4e2d"}), join({mistral, " hello world"})};
}

/// The input is tokenizer_config.json, special_tokens_map.json, added_tokens.json, config.json, the choice of
/// vocabulary, and a text. Empty files do not exist.
void read_tokenizer_folder(std::string_view input) {
  static const std::string model = training::test::SmallModel().bytes();
  static const std::string vocabulary = small_vocabulary().dump();
  static const std::string document =
      Json{{"added_tokens", Json::array()},
           {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}},
           {"model", {{"type", "BPE"}, {"vocab", small_vocabulary()}, {"merges", Json::array()}}}}
          .dump();
  const auto parts = split(input, 6);
  const auto file = [&](std::size_t part) {
    return parts[part].empty() ? std::nullopt : std::optional<std::string>(parts[part]);
  };
  training::TokenizerFiles files;
  files.tokenizer_config = file(0);
  files.special_tokens_map = file(1);
  files.added_tokens = file(2);
  files.model_config = file(3);
  if (parts[4] == "json") files.tokenizer_json = document;
  if (parts[4] == "model") files.tokenizer_model = model;
  if (!files.tokenizer_json && !files.tokenizer_model) {
    files.vocabulary = vocabulary;
    files.merges = small_merges;
  }
  const auto tokenizer = training::read_tokenizer(files, "folder");
  use(*tokenizer, parts[5], false);
  std::vector<std::size_t> begins;
  const std::vector<std::int32_t> tokens = tokenizer->encode(parts[5], begins);
  require(tokens == tokenizer->encode(parts[5]), "the tokens are others where their places are asked for");
  require(begins.size() == tokens.size(), "a token has no place");
  std::size_t before = 0;
  for (const std::size_t begin : begins) {
    require(begin >= before && begin <= parts[5].size(),
            "a token begins before the one before it, or behind the text");
    before = begin;
  }
  const training::SpecialTokens& special = tokenizer->special();
  for (const auto* list : {&special.before, &special.after}) {
    for (const std::int32_t token : *list)
      require(token >= 0 && token < tokenizer->vocabulary(), "a token around a text is none");
  }
  require(!special.end || (*special.end >= 0 && *special.end < tokenizer->vocabulary()),
          "the end is no token");
}

std::vector<std::string> tokenizer_folder_seeds() {
  return {
      join({R"({"tokenizer_class":"LlamaTokenizer","add_bos_token":true,"legacy":false,"eos_token":"</s>"})",
            "", "", "", "model", "hello<s> hello"}),
      join(
          {R"({"tokenizer_class":"Qwen2TokenizerFast","added_tokens_decoder":{"261":{"content":"<|endoftext|>","special":true},)"
           R"("262":{"content":"<|im_end|>","lstrip":false,"normalized":true}},"additional_special_tokens":["<|im_end|>"]})",
           "", "", "", "two", "e\u0301<|im_end|>q"}),
      join({R"({"add_prefix_space":true,"extra_special_tokens":{"image_token":"<|i|>"},"legacy":null})",
            R"({"pad_token":{"content":"<|p|>","rstrip":false},"additional_special_tokens":["<|x|>"]})",
            R"({"<|y|>":262})", R"({"model_type":"gpt2","tokenizer_class":"GPT2Tokenizer"})", "json",
            "a<|y|><|p|>"}),
      join({R"({"legacy":false,"bos_token":"[INST]","add_eos_token":true})", "", "",
            R"({"model_type":"mistral"})", "model", "hello \u2581<unk>[INST]"})};
}

/// The input is a text and a SentencePiece model, read by our own reader. Debian's library, which other
/// classes use, is not tested.
void read_sentencepiece_input(std::string_view input) {
  const auto parts = split(input, 2);
  training::TokenizerFiles files;
  files.tokenizer_model = std::string(parts[1]);
  files.tokenizer_config = R"({"tokenizer_class":"LlamaTokenizer"})";
  use(*training::read_tokenizer(files, "folder"), parts[0], false);
}

std::vector<std::string> sentencepiece_seeds() {
  const training::test::SmallModel model;
  training::test::SmallModel other = model;
  other.trainer += training::test::field(45, "<unk>") + training::test::field(41, ~std::uint64_t{0});
  other.control.clear();
  return {join({"hello<s>[INST] he", model.bytes()}), join({"hello </s>", other.bytes()}),
          join({"a", "IQ== 0\nIg== 1\n"})};
}

}  // namespace

Target bpe_target() {
  return {"bpe", read_bpe, bpe_seeds, {ExitStatus::configuration}};
}
Target merges_target() {
  return {"merges", read_merges, merges_seeds, {ExitStatus::configuration}};
}
Target tokenizer_folder_target() {
  return {"tokenizer_folder", read_tokenizer_folder, tokenizer_folder_seeds, {ExitStatus::configuration}};
}
Target sentencepiece_target() {
  return {"sentencepiece", read_sentencepiece_input, sentencepiece_seeds, {ExitStatus::configuration}};
}
Target tokenizer_target() {
  return {"tokenizer", read_tokenizer, tokenizer_seeds, {ExitStatus::configuration}};
}

}  // namespace tranche::fuzz
