// Tokenizers of whole folders: classes, added tokens, tokens around a text. The expected numbers are those of
// transformers 5.24 (scripts/compare_tokenizer_folders.py compares many more).

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "tests/tools/temporary.h"
#include "tests/training/sentencepiece_bytes.h"
#include "training/added_tokens.h"
#include "training/sentencepiece_model.h"
#include "training/word_pattern.h"
#include "tranche/core/error.h"
#include "tranche/training/documents.h"
#include "tranche/training/tokenizer.h"

namespace tranche::training {
namespace {

using nlohmann::json;
using test::SmallModel;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using tools::test::message_of;

using Tokens = std::vector<std::int32_t>;

/// The number of a piece by its name, in the order of SmallModel.
std::int32_t piece(const SmallModel& model, std::string_view name) {
  const auto read = read_sentencepiece_model(model.bytes(), "model");
  for (std::size_t i = 0; i < read.pieces.size(); ++i) {
    if (read.pieces[i].text == name) return static_cast<std::int32_t>(i);
  }
  return -1;
}

struct ModelFolder {
  SmallModel model;
  json config = json::object(), map, added, model_config;
  std::unique_ptr<Tokenizer> read() const {
    TokenizerFiles files;
    files.tokenizer_model = model.bytes();
    files.tokenizer_config = config.dump();
    if (!map.is_null()) files.special_tokens_map = map.dump();
    if (!added.is_null()) files.added_tokens = added.dump();
    if (!model_config.is_null()) files.model_config = model_config.dump();
    return read_tokenizer(files, "tok");
  }
  std::string refusal() const {
    return message_of<ConfigurationError>([&] { (void)read(); });
  }
  Tokens tokens(const std::vector<std::string>& names) const {
    Tokens all;
    for (const std::string& name : names) all.push_back(piece(model, name));
    return all;
  }
};

TEST(TokenizerFolder, OfAnotherTypeOfModelIsReadByTheFileAlone) {
  ModelFolder folder;
  folder.config = {{"tokenizer_class", "LlamaTokenizer"}};
  folder.model_config = {{"model_type", "olmo2"}};
  EXPECT_THAT(folder.refusal(),
              AllOf(HasSubstr("model_type is \"olmo2\""),
                    HasSubstr("another tokenizer than the class that is named, LlamaTokenizer"),
                    HasSubstr("name PreTrainedTokenizerFast as tokenizer_class")));
  folder.model_config = {{"model_type", "llama"}};
  EXPECT_NE(folder.read(), nullptr);
}

TEST(TokenizerFolder, ControlPiecesInATextAreTheirTokens) {
  const ModelFolder folder;
  const auto tokenizer = folder.read();
  EXPECT_EQ(tokenizer->encode("<s>hello</s>hello"),
            folder.tokens({"<s>", "\u2581hello", "</s>", "\u2581hello"}));
  EXPECT_EQ(tokenizer->encode(" [INST] <unk>"),
            folder.tokens({"\u2581", "\u2581", "[INST]", "\u2581", "\u2581", "<unk>"}));
  EXPECT_EQ(tokenizer->find("[INST]"), 3);
  EXPECT_EQ(tokenizer->find("hello"), std::nullopt);
  EXPECT_EQ(tokenizer->decode(1), "<s>");
  EXPECT_EQ(tokenizer->special().end, 2);
  EXPECT_THAT(tokenizer->special().before, ElementsAre());
  EXPECT_EQ(tokenizer->decode(tokenizer->encode("hello h\u00e9 <s>")), "hello h\u00e9 <s>");
}

TEST(TokenizerFolder, TheClassSaysWhereASpaceComesFirst) {
  ModelFolder folder;
  folder.config = {{"tokenizer_class", "LlamaTokenizer"}};
  const auto plain = folder.read();
  EXPECT_EQ(plain->encode("hello</s>hello"), folder.tokens({"\u2581hello", "</s>", "hello"}));
  EXPECT_EQ(plain->encode(" hello"), folder.tokens({"\u2581hello"})) << "one space is enough";
  EXPECT_THAT(plain->special().before, ElementsAre());
  folder.config["legacy"] = true;
  folder.config["add_bos_token"] = true;
  folder.config["add_eos_token"] = true;
  const auto legacy = folder.read();
  EXPECT_EQ(legacy->encode("hello</s>hello"), folder.tokens({"\u2581hello", "</s>", "\u2581hello"}));
  EXPECT_THAT(legacy->special().before, ElementsAre(1));
  EXPECT_THAT(legacy->special().after, ElementsAre(2));
  folder.config = {{"tokenizer_class", "LlamaTokenizerFast"}, {"add_prefix_space", false}};
  EXPECT_EQ(folder.read()->encode("hello"), folder.tokens({"hello"}));
  folder.model_config = {{"model_type", "mistral"}};
  EXPECT_EQ(folder.read()->encode("hello</s> hello"),
            folder.tokens({"\u2581hello", "</s>", "\u2581", "\u2581hello"}))
      << "Mistral's models have the general class";
  folder.config["legacy"] = nullptr;
  EXPECT_EQ(folder.read()->encode("hello</s>hello"), folder.tokens({"\u2581hello", "</s>", "hello"}));
}

TEST(TokenizerFolder, AddedTokensOfEachFile) {
  ModelFolder folder;
  const std::int32_t next =
      static_cast<std::int32_t>(read_sentencepiece_model(folder.model.bytes(), "m").pieces.size());
  folder.added = {{"<|a|>", next}, {"<|b|>", next + 1}};
  for (const char* name : {"", "LlamaTokenizer"}) {
    if (*name != '\0') folder.config["tokenizer_class"] = name;
    EXPECT_THAT(folder.read()->encode("<|b|><|a|>"), ElementsAre(next + 1, next)) << name;
    EXPECT_EQ(folder.read()->vocabulary(), next + 2);
    EXPECT_EQ(folder.read()->decode(next), "<|a|>");
  }
  folder.map = {{"pad_token", {{"content", "<|p|>"}, {"lstrip", false}}}};
  EXPECT_THAT(folder.read()->encode("<|p|>"), ElementsAre(next + 2));
  folder.config["added_tokens_decoder"] = {{std::to_string(next), {{"content", "<|c|>"}, {"special", true}}}};
  EXPECT_THAT(folder.read()->encode("<|c|>"), ElementsAre(next));
  EXPECT_EQ(folder.read()->find("<|a|>"), std::nullopt) << "the list of tokenizer_config.json counts alone";
  folder.config["eos_token"] = {{"content", "<|c|>"}};
  EXPECT_EQ(folder.read()->special().end, next);
}

TEST(TokenizerFolder, WhatCannotBeHonouredIsRefusedWithFileAndKey) {
  const auto refused = [](const json& config, const json& added = {}) {
    ModelFolder folder;
    folder.config = config;
    folder.added = added;
    return folder.refusal();
  };
  EXPECT_EQ(refused({{"tokenizer_class", "BartTokenizer"}}),
            "tok/tokenizer_config.json: tokenizer_class is \"BartTokenizer\", which is not supported: "
            "LlamaTokenizer, "
            "GPT2Tokenizer, Qwen2Tokenizer and PreTrainedTokenizerFast are, and tokenizer.json with the last "
            "of them says by "
            "itself how text is split");
  EXPECT_EQ(refused({{"tokenizer_class", "Qwen2Tokenizer"}}),
            "tok/tokenizer.model is not a vocabulary of Qwen2Tokenizer, which tokenizer_config.json or "
            "config.json names");
  EXPECT_EQ(refused({{"eos_token", "<|none|>"}}),
            "tok/tokenizer_config.json: eos_token is '<|none|>', which the tokenizer does not have");
  EXPECT_THAT(refused(json::object(), {{"<|a|>", 900}}),
              AllOf(HasSubstr("tok/added_tokens.json: <|a|> gives '<|a|>' the number 900, but the next free "
                              "number is 3"),
                    HasSubstr("correct the number, or remove the token")));
  EXPECT_EQ(refused(json::object(), {{"<|a|>", 900}, {"<|b|>", 900}}),
            "tok/added_tokens.json: <|b|> is 900, which is the number of another token");
  EXPECT_EQ(refused({{"added_tokens_decoder", {{"2", {{"content", "</s>"}, {"rstrip", true}}}}}}),
            "tok/tokenizer_config.json: added_tokens_decoder.2.rstrip is true, which is not supported: only "
            "false is");
  EXPECT_EQ(refused({{"added_tokens_decoder", {{"x", {{"content", "</s>"}}}}}}),
            "tok/tokenizer_config.json: added_tokens_decoder.x does not stand under the number of a token");
  EXPECT_EQ(refused({{"split_special_tokens", true}}),
            "tok/tokenizer_config.json: split_special_tokens is not supported: remove the key");
  EXPECT_EQ(refused({{"auto_map", {{"AutoTokenizer", {"a.B", nullptr}}}}}),
            "tok/tokenizer_config.json: auto_map.AutoTokenizer names a tokenizer in Python of the folder's "
            "own, which is not run "
            "here");
  EXPECT_EQ(refused({{"additional_special_tokens", {std::string(257, 'a')}}}),
            "tok/tokenizer_config.json: additional_special_tokens[0] has 257 bytes, which is too long: added "
            "tokens have at most "
            "256");
  ModelFolder folder;
  folder.config = {{"tokenizer_class", "LlamaTokenizer"}};
  const std::string why =
      ", which SentencePiece and transformers do in different ways, so it is not supported; supported are "
      "models of type bpe with the normalizer rule identity and remove_extra_whitespaces false, such as "
      "those of Llama and Mistral";
  folder.model.normalizer = "";
  EXPECT_EQ(folder.refusal(), "") << "the class does not look at spaces";
  folder.config = json::object();
  EXPECT_EQ(folder.refusal(), "tok/tokenizer.model removes spaces (normalizer_spec)" + why);
  folder.model.normalizer = test::field(4, 0) + test::field(5, 0);
  EXPECT_EQ(folder.refusal(), "tok/tokenizer.model keeps spaces as they are (normalizer_spec)" + why);
  folder.model.normalizer = test::field(2, "table");
  EXPECT_EQ(folder.refusal(), "tok/tokenizer.model changes characters by a table (normalizer_spec)" + why);
  folder.model.trainer = test::field(3, 1);
  EXPECT_EQ(folder.refusal(),
            "tok/tokenizer.model is not of byte pair encoding (trainer_spec.model_type)" + why);
}

TEST(TokenizerFolder, FilesThatAreNoSentencePieceModel) {
  const auto refused = [](const std::string& bytes) {
    return message_of<ConfigurationError>([&] { (void)read_sentencepiece(bytes, "t.model"); });
  };
  EXPECT_EQ(refused("IQ== 0\nIg== 1\n"),
            "t.model is not a SentencePiece model but tiktoken's list of words, as Llama 3's original files "
            "have it, which does "
            "not say how text is split and which tokens are added: put the tokenizer.json of the model's "
            "Hugging Face folder "
            "beside it");
  EXPECT_EQ(refused("version https://git-lfs.github.com/spec/v1\n"),
            "t.model is a pointer of Git LFS, not the file itself: fetch it with 'git lfs pull'");
  EXPECT_EQ(refused(""), "t.model is not a SentencePiece model: it has no pieces");
  EXPECT_EQ(refused(test::piece("a", 0) + test::piece("a", 0)),
            "t.model is not a SentencePiece model: piece 1 is there twice: 'a'");
  EXPECT_EQ(refused(test::piece("", 0)),
            "t.model is not a SentencePiece model: piece 0 is empty or not UTF-8");
  EXPECT_EQ(refused(test::piece("a", 0, 9)), "t.model is not a SentencePiece model: a piece has type 9");
  EXPECT_EQ(refused("\x0a\x05"
                    "ab"),
            "t.model is not a SentencePiece model: it ends within a field");
  EXPECT_EQ(refused("\x0f"), "t.model is not a SentencePiece model: a field has wire type 7");
  EXPECT_EQ(refused("\x09" + std::string(7, '\0')),
            "t.model is not a SentencePiece model: it ends within a field");
  EXPECT_EQ(refused(std::string(10, '\xff')),
            "t.model is not a SentencePiece model: a number has more than 64 bits");
}

TEST(TokenizerFolder, ASentencePieceModelNamesItsTokensAndSpaces) {
  SmallModel model;
  const SentencePieceModel usual = read_sentencepiece_model(model.bytes(), "t.model");
  EXPECT_EQ(usual.unknown + usual.begin + usual.end, "<unk><s></s>");
  EXPECT_TRUE(usual.adds_prefix && usual.escapes_spaces && !usual.removes_spaces && !usual.normalizes);
  const std::string trainer = model.trainer;
  model.trainer = trainer + test::field(45, "[INST]") + test::field(46, "a") + test::field(47, "b");
  model.normalizer = test::field(3, 0) + test::field(5, 0) + "\x99\x06" + std::string(8, 'x');
  const SentencePieceModel named = read_sentencepiece_model(model.bytes(), "t.model");
  EXPECT_EQ(named.unknown + named.begin + named.end, "[INST]ab");
  EXPECT_TRUE(!named.adds_prefix && !named.escapes_spaces && named.removes_spaces)
      << "and the unknown field of 8 bytes is skipped";
  for (const unsigned number : {40u, 41u, 42u}) {
    model.trainer = trainer + test::field(number, ~std::uint64_t{0});
    const SentencePieceModel lacking = read_sentencepiece_model(model.bytes(), "t.model");
    EXPECT_EQ(lacking.unknown, number == 40 ? "" : "<unk>");
    EXPECT_EQ(lacking.begin, number == 41 ? "" : "<s>");
    EXPECT_EQ(lacking.end, number == 42 ? "" : "</s>");
    model.trainer = trainer + test::field(number, std::uint64_t{0});
    const SentencePieceModel first = read_sentencepiece_model(model.bytes(), "t.model");
    EXPECT_EQ(first.unknown + first.begin + first.end, "<unk><s></s>");
  }
}

TEST(TokenizerFolder, PiecesThatTransformersReadsInAnotherWayAreRefused) {
  for (const bool llama : {false, true}) {
    ModelFolder folder;
    const std::string who = llama ? "as LlamaTokenizer reads it" : "with \"legacy\": false";
    folder.config = llama ? json{{"tokenizer_class", "LlamaTokenizer"}} : json{{"legacy", false}};
    EXPECT_EQ(folder.refusal(), "");
    folder.model.user_defined = {"<|x|>"};
    EXPECT_EQ(folder.refusal(), llama
                                    ? ""
                                    : "tok/tokenizer.model has the user-defined piece '<|x|>', which is not "
                                      "supported with \"legacy\": false");
    folder.model.user_defined = {std::string(257, 'a')};
    EXPECT_EQ(folder.refusal(), "tok/tokenizer.model has a piece of 257 bytes");
    folder.model.user_defined.clear();
    folder.model.byte_pieces = 255;
    EXPECT_EQ(folder.refusal(),
              "tok/tokenizer.model has no piece for byte 255 (byte_fallback), which is not supported " + who);
  }
  ModelFolder renames;
  renames.added = {{"<|a|>", 4}};
  EXPECT_EQ(renames.refusal(),
            "tok/added_tokens.json: <|a|> gives '<|a|>' the number 4, which is the piece '<0x00>' of "
            "tok/tokenizer.model");
}

/// A vocab.json with only the bytes, as their visible letters: printable ones represent themselves, which is
/// enough here.
json visible_bytes() {
  json vocabulary = json::object();
  unsigned next = 256;
  for (unsigned byte = 0; byte < 256; ++byte) {
    const unsigned letter = (byte > 32 && byte < 127) || (byte > 160 && byte != 173) ? byte : next++;
    std::string text(1, static_cast<char>(letter));
    if (letter > 127)
      text = {static_cast<char>(0xc0 | letter >> 6), static_cast<char>(0x80 | (letter & 0x3f))};
    vocabulary[text] = byte;
  }
  return vocabulary;
}

TEST(TokenizerFolder, TwoFilesNeedAClass) {
  TokenizerFiles files;
  files.vocabulary = visible_bytes().dump();
  files.merges = "";
  EXPECT_THAT(
      message_of<ConfigurationError>([&] { (void)read_tokenizer(files, "tok"); }),
      AllOf(HasSubstr(
                "tok: vocab.json and merges.txt do not say how text is split in words: put a tokenizer.json"),
            HasSubstr("name GPT2Tokenizer or Qwen2Tokenizer as tokenizer_class of tokenizer_config.json")));
  files.tokenizer_config =
      R"({"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": {"256": {"content": "<|im_end|>"}}})";
  const auto qwen = read_tokenizer(files, "tok");
  EXPECT_THAT(qwen->encode("e\u0301<|im_end|>"), ElementsAre(0xc3, 0xa9, 256)) << "NFC";
  EXPECT_EQ(qwen->special().end, 257) << "the class adds <|endoftext|>";
  files.tokenizer_config =
      R"({"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": true, "add_bos_token": true})";
  const auto gpt2 = read_tokenizer(files, "tok");
  EXPECT_THAT(gpt2->encode("e\u0301 a<|endoftext|>b"),
              ElementsAre(' ', 'e', 0xcc, 0x81, ' ', 'a', 256, ' ', 'b'));
  EXPECT_THAT(gpt2->special().before, ElementsAre(256));
  files.tokenizer_config = R"({"tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": true})";
  EXPECT_EQ(message_of<ConfigurationError>([&] { (void)read_tokenizer(files, "tok"); }),
            "tok/tokenizer_config.json: add_prefix_space is true, which is not supported for Qwen2Tokenizer");
}

TEST(TokenizerFolder, AClassOfItsOwnTakesTheVocabularyOfTokenizerJsonAlone) {
  TokenizerFiles files;
  const json document = {{"added_tokens", json::array()},
                         {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}},
                         {"model", {{"type", "BPE"}, {"vocab", visible_bytes()}, {"merges", json::array()}}}};
  files.tokenizer_json = document.dump();
  const auto encode = [&] { return read_tokenizer(files, "tok")->encode("e\u0301"); };
  const Tokens apart{'e', 0xcc, 0x81}, composed{0xc3, 0xa9};
  EXPECT_EQ(encode(), apart);
  files.model_config = R"({"model_type": "qwen2"})";
  EXPECT_EQ(encode(), composed);
  files.model_config = R"({"model_type": "llama"})";
  files.tokenizer_config = R"({"tokenizer_class": "LlamaTokenizer", "add_bos_token": true})";
  EXPECT_EQ(encode(), apart) << "Llama 3 under the name of Llama 2's class";
  EXPECT_THAT(read_tokenizer(files, "tok")->special().before, ElementsAre())
      << "tokenizer.json says what is around a text";
}

TEST(TokenizerFolder, IsReadFromDisk) {
  const tools::test::TemporaryFolder folder;
  const std::string path = folder.path("");
  folder.write("tekken.json", "{}");
  EXPECT_THAT(
      message_of<ConfigurationError>([&] { (void)load_tokenizer(path); }),
      HasSubstr(
          "tekken.json is Mistral's own format; put the tokenizer.json of the model's Hugging Face folder"));
  folder.write("tokenizer.model", SmallModel().bytes());
  folder.write("config.json", R"({"model_type": "llama"})");
  folder.write("special_tokens_map.json", R"({"eos_token": "[INST]"})");
  EXPECT_EQ(load_tokenizer(path)->special().end, 3);
  folder.write("added_tokens.json", R"({"<|a|>": 5})");
  EXPECT_THAT(message_of<ConfigurationError>([&] { (void)load_tokenizer(path); }),
              HasSubstr("added_tokens.json: <|a|>"));
}

TEST(TokenBegins, SayWhereTokensBeginInTheText) {
  const auto begins_of = [](const Tokenizer& tokenizer, std::string_view text) {
    std::vector<std::size_t> begins;
    EXPECT_EQ(tokenizer.encode(text, begins), tokenizer.encode(text));
    return begins;
  };
  ModelFolder folder;
  EXPECT_THAT(begins_of(*folder.read(), "hello<s> hello"), ElementsAre(0, 5, 8, 8));
  folder.config = {{"tokenizer_class", "LlamaTokenizer"}, {"legacy", true}};
  EXPECT_THAT(begins_of(*folder.read(), "hello<s>hello\u2581q"), ElementsAre(0, 5, 8, 13, 16));
  TokenizerFiles files;
  files.vocabulary = visible_bytes().dump();
  files.merges = "";
  files.tokenizer_config = R"({"tokenizer_class": "Qwen2Tokenizer"})";
  const auto qwen = read_tokenizer(files, "tok");
  EXPECT_THAT(begins_of(*qwen, "ae\u0301b<|endoftext|>c"), ElementsAre(0, 1, 2, 4, 5, 18));
}

TEST(TokenBegins, LearnedTokensOfAConversationWhoseTextChanges) {
  TokenizerFiles files;
  files.vocabulary = visible_bytes().dump();
  files.merges = "";
  files.tokenizer_config = R"({"tokenizer_class": "Qwen2Tokenizer"})";
  const auto qwen = read_tokenizer(files, "tok");
  Document document;
  document.rendered = true;
  document.segments = {{"e\u0301:", false}, {"a", true}, {"e\u0301", false}, {"bc", true}};
  TokenDocuments documents;
  append_document(*qwen, document, true, documents);
  EXPECT_THAT(documents.tokens, ElementsAre(0xc3, 0xa9, ':', 'a', 0xc3, 0xa9, 'b', 'c'));
  EXPECT_THAT(documents.targets, ElementsAre(0, 0, 0, 1, 0, 0, 1, 1));
}

// The following inputs take hours if the work is not bounded, and milliseconds with the bounds.

TEST(TokenizerWork, AConversationOfManyMessagesIsEncodedOnce) {
  ModelFolder folder;
  folder.config = {{"tokenizer_class", "LlamaTokenizer"}};
  const auto tokenizer = folder.read();
  Document document;
  document.rendered = true;
  for (int i = 0; i < 20'000; ++i) document.segments.push_back({"hello ", i % 2 == 1});
  TokenDocuments documents;
  append_document(*tokenizer, document, true, documents);
  EXPECT_GE(documents.tokens.size(), 20'000U);
}

TEST(TokenizerWork, StepsOfAPatternAreInProportionToTheText) {
  const WordPattern pattern("(?:a+)+[xy]");
  std::string text;
  for (int i = 0; i < 20'000; ++i) text += "aaaaaaaaaaaaaaaaaaaaaaa ";
  WordPattern::Budget budget = WordPattern::budget_for(text.size());
  EXPECT_EQ(message_of<InvalidArgument>([&] { pattern.split(text, budget, [](std::string_view) {}); }),
            "it takes too many steps for a text of this length");
}

TEST(TokenizerWork, LongRunsAreNoReasonToGiveUp) {
  const std::string text(2'000'000, 'a');
  WordPattern::Budget budget = WordPattern::budget_for(text.size());
  int words = 0;
  WordPattern("(?:a|b)+").split(text, budget, [&](std::string_view) { ++words; });
  EXPECT_EQ(words, 1);
}

TEST(TokenizerWork, AddedTokensOfOneLetterAreNotLookedThrough) {
  std::vector<AddedToken> tokens;
  for (int i = 0; i < 100'000; ++i) tokens.push_back({"a" + std::to_string(1'000'000 + i) + "b", i, false});
  tokens.push_back({"aa", 100'000, false});
  tokens.push_back({"a", 100'001, false});
  const AddedTokenFinder finder(std::move(tokens));
  std::string text(1'000'000, 'a');
  text += "a1000007bb";
  Tokens found;
  std::string between;
  finder.split(
      text, [&](std::string_view piece, std::size_t) { between += piece; },
      [&](std::int32_t token, std::size_t) { found.push_back(token); });
  EXPECT_EQ(between, "b");
  ASSERT_EQ(found.size(), 500'001U);
  EXPECT_EQ(found.front(), 100'000) << "the longest";
  EXPECT_EQ(found.back(), 7);
}

TEST(TokenizerWork, TokensAroundATextAreBounded) {
  json document = {{"added_tokens", {{{"id", 256}, {"content", "<x>"}}}},
                   {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}},
                   {"model", {{"type", "BPE"}, {"vocab", visible_bytes()}, {"merges", json::array()}}}};
  json& single = document["post_processor"];
  single = {{"type", "TemplateProcessing"},
            {"single", json::array()},
            {"special_tokens", {{"<x>", {{"id", "<x>"}, {"ids", json::array()}}}}}};
  for (int i = 0; i < 15'000; ++i) {
    single["single"].push_back({{"SpecialToken", {{"id", "<x>"}}}});
    for (int k = 0; i == 0 && k < 1'000; ++k) single["special_tokens"]["<x>"]["ids"].push_back(256);
  }
  EXPECT_EQ(message_of<ConfigurationError>([&] { (void)read_tokenizer_json(document.dump(), "t.json"); }),
            "t.json: post_processor.special_tokens.<x>.ids[24] is one token too many: at most 1024 may be "
            "around a text");
  single["single"] = json::array({{{"SpecialToken", {{"id", "<x>"}}}}});
  single["special_tokens"]["<x>"]["ids"] = {300};
  EXPECT_EQ(message_of<ConfigurationError>([&] { (void)read_tokenizer_json(document.dump(), "t.json"); }),
            "t.json: post_processor puts 300 around texts, which is no token");
}

}  // namespace
}  // namespace tranche::training
