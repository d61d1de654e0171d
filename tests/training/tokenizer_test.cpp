#include "tranche/training/tokenizer.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <functional>
#include <nlohmann/json.hpp>

#include "tests/tools/temporary.h"
#include "training/pair_encoding.h"
#include "training/word_pattern.h"
#include "tranche/core/error.h"
#include "tranche/core/random.h"

namespace tranche::training {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using tools::test::message_of;

/// The text that represents bytes in the files.
std::string visible(const std::string& bytes) {
  std::string text;
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    const auto printable = [](unsigned b) { return (b > 32 && b < 127) || (b > 160 && b < 256 && b != 173); };
    unsigned character = byte;
    if (!printable(byte)) {
      character = 256;
      for (unsigned b = 0; b < byte; ++b) character += printable(b) ? 0 : 1;
    }
    if (character < 128) {
      text += static_cast<char>(character);
    } else {
      text += static_cast<char>(0xc0 | character >> 6);
      text += static_cast<char>(0x80 | (character & 0x3f));
    }
  }
  return text;
}

/// Tokens 0 to 255 are the bytes; then follow the merges in order, and "<|endoftext|>".
struct Files {
  std::vector<std::pair<std::string, std::string>> merges{{"h", "e"},    {"l", "l"},      {"he", "ll"},
                                                          {"hell", "o"}, {" ", "w"},      {" w", "o"},
                                                          {"o", "o"},    {"\xc3", "\xa9"}};
  json vocabulary = json::object();
  std::string merges_text = "#version: 0.2\n";

  Files() {
    for (int byte = 0; byte < 256; ++byte) vocabulary[visible({static_cast<char>(byte)})] = byte;
    int token = 256;
    for (const auto& [left, right] : merges) {
      vocabulary[visible(left + right)] = token++;
      merges_text += visible(left) + " " + visible(right) + "\n";
    }
    vocabulary["<|endoftext|>"] = token;
  }
  std::unique_ptr<Tokenizer> tokenizer() const {
    return read_vocabulary_and_merges(vocabulary.dump(), merges_text, "folder");
  }
  /// The same as tokenizer.json.
  json document() const {
    json added = {{"id", 264},       {"content", "<|endoftext|>"}, {"single_word", false}, {"lstrip", false},
                  {"rstrip", false}, {"normalized", false},        {"special", true}};
    json all = {
        {"version", "1.0"},
        {"truncation", nullptr},
        {"padding", nullptr},
        {"added_tokens", json::array({added})},
        {"normalizer", nullptr},
        {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}}},
        {"post_processor", nullptr},
        {"decoder", {{"type", "ByteLevel"}}},
        {"model", {{"type", "BPE"}, {"vocab", vocabulary}, {"merges", json::array()}}}};
    for (const auto& [left, right] : merges) {
      all["model"]["merges"].push_back({visible(left), visible(right)});
    }
    return all;
  }
};

TEST(Tokenizer, MergesInTheOrderOfTheFile) {
  Files files;
  json joined = files.document();
  for (json& merge : joined["model"]["merges"]) {
    merge = merge[0].get<std::string>() + " " + merge[1].get<std::string>();
  }
  for (const auto& tokenizer : {files.tokenizer(), read_tokenizer_json(files.document().dump(), "t.json"),
                                read_tokenizer_json(joined.dump(), "t.json")}) {
    EXPECT_EQ(tokenizer->vocabulary(), 265);
    EXPECT_THAT(tokenizer->encode("hello"), ElementsAre(259));
    EXPECT_THAT(tokenizer->encode("hell"), ElementsAre(258));
    EXPECT_THAT(tokenizer->encode("hello wool hello"), ElementsAre(259, 261, 'o', 'l', ' ', 259));
    EXPECT_THAT(tokenizer->encode("oooo"), ElementsAre(262, 262)) << "from the left";
    EXPECT_THAT(tokenizer->encode("ooo"), ElementsAre(262, 'o'));
    EXPECT_THAT(tokenizer->encode("h e"), ElementsAre('h', ' ', 'e')) << "not over words";
    EXPECT_THAT(tokenizer->encode("caf\u00e9"), ElementsAre('c', 'a', 'f', 263));
    EXPECT_THAT(tokenizer->encode(""), ElementsAre());
    EXPECT_THAT(tokenizer->encode("a<|endoftext|>b<|endoftext|>"), ElementsAre('a', 264, 'b', 264));
    EXPECT_EQ(tokenizer->find("<|endoftext|>"), 264);
    EXPECT_EQ(tokenizer->find("hello"), std::nullopt);
    EXPECT_EQ(tokenizer->decode(264), "<|endoftext|>");
    EXPECT_EQ(tokenizer->decode(-1), "");
    EXPECT_EQ(tokenizer->decode(265), "");
  }
  files.vocabulary.erase("<|endoftext|>");
  EXPECT_EQ(files.tokenizer()->encode("<|endoftext|>").size(), 13u);
}

TEST(Tokenizer, DecodesWhatItEncodedWhateverTheBytes) {
  const auto tokenizer = Files().tokenizer();
  for (std::uint64_t round = 0; round < 200; ++round) {
    std::string text;
    for (std::uint64_t i = 0; i < round; ++i) {
      const double draw = random_uniform({round, RandomPurpose::sampling, 0}, i);
      text.push_back(round % 2 == 0 ? static_cast<char>(draw * 256)
                                    : "hello wo' s\n9"[static_cast<int>(draw * 13)]);
    }
    EXPECT_EQ(tokenizer->decode(tokenizer->encode(text)), text) << "round " << round;
  }
}

TEST(Tokenizer, ALongWordIsNoSlowerThanItsLengthTimesItsLogarithm) {
  const std::string word(200'000, 'o');
  EXPECT_EQ(Files().tokenizer()->encode(word).size(), 100'000u);
}

std::string words(const WordPattern& pattern, std::string_view text) {
  std::string joined;
  WordPattern::Budget budget = WordPattern::budget_for(text.size());
  pattern.split(text, budget, [&](std::string_view word) { joined += "[" + std::string(word) + "]"; });
  return joined;
}

TEST(WordPattern, WordsAreThoseOfGpt2) {
  const auto gpt2 = [](std::string_view text) { return words(WordPattern(gpt2_pattern), text); };
  EXPECT_EQ(gpt2("It's 12 o'clock, isn't it?"), "[It]['s][ 12][ o]['][clock][,][ isn]['t][ it][?]");
  EXPECT_EQ(gpt2("we'll they've I'd I'm you're 'S"),
            "[we]['ll][ they]['ve][ I]['d][ I]['m][ you]['re][ '][S]");
  EXPECT_EQ(gpt2("a  b   c"), "[a][ ][ b][  ][ c]");
  EXPECT_EQ(gpt2("a\n\nb \n c  "), "[a][\n][\n][b][ \n][ c][  ]");
  EXPECT_EQ(gpt2("x1y22z"), "[x][1][y][22][z]");
  EXPECT_EQ(gpt2("!'s"), "[!'][s]");
  EXPECT_EQ(gpt2("na\u00efve \u4e2d\u6587\u0663\u00b2"), "[na\u00efve][ \u4e2d\u6587][\u0663\u00b2]");
  EXPECT_EQ(gpt2("a\u00a0b\u3000"), "[a][\u00a0][b][\u3000]");
  EXPECT_EQ(gpt2("a\u180e b"), "[a][\u180e][ b]") << "no white space since Unicode 6.3";
}

TEST(WordPattern, WhatIsBetweenMatchesIsAWordToo) {
  EXPECT_EQ(words(WordPattern("b+"), "abbcb"), "[a][bb][c][b]");
  EXPECT_EQ(words(WordPattern("x"), "\u00e9\u00e9"), "[\u00e9\u00e9]");
}

TEST(WordPattern, RefusesWhatTheLibrariesUnderstandDifferently) {
  const auto why = [](std::string_view pattern) {
    return message_of<InvalidArgument>([&] { WordPattern{pattern}; });
  };
  EXPECT_EQ(why("\\h+"), "it has '\\h', which is not supported");
  EXPECT_EQ(why("\\p{Han}+"), "it has '\\p{Han}', which is not supported");
  EXPECT_EQ(why("\\pL"), "it has '\\p', which is not supported");
  EXPECT_EQ(why("[a[bc]]"), "it has '[b', which is not supported");
  EXPECT_EQ(why("[a-z&&b]"), "it has '&&', which is not supported");
  EXPECT_EQ(why("a\\"), "it has '\\', which is not supported");
  EXPECT_EQ(why("a*"), "it matches the empty text");
  EXPECT_EQ(why("(a"), "missing closing parenthesis");
}

TEST(WordPattern, NormalizationFormCComposesAndOrdersMarks) {
  EXPECT_EQ(normalization_form_c("plain \u00e9"), "plain \u00e9");
  EXPECT_EQ(normalization_form_c("e\u0301q\u0301\u0327"), "\u00e9q\u0327\u0301");
  EXPECT_EQ(normalization_form_c("\u1112\u1161\u11ab"), "\ud55c");
  EXPECT_EQ(utf8_prefix("a\u00e9\xff"), 3u);
  EXPECT_EQ(utf8_prefix("\xed\xa0\x80"), 0u) << "a surrogate";
}

TEST(TokenizerJson, FeaturesThatAreNotSupportedAreNamedWithTheirValue) {
  const auto refused = [](const std::function<void(json&)>& change) {
    json document = Files().document();
    change(document);
    return message_of<ConfigurationError>([&] { (void)read_tokenizer_json(document.dump(), "t.json"); });
  };
  EXPECT_EQ(refused([](json& d) { d["model"]["type"] = "Unigram"; }),
            "t.json: model.type is \"Unigram\", which is not supported: only \"BPE\" is");
  EXPECT_EQ(refused([](json& d) {
              d["normalizer"] = {{"type", "NFKC"}};
            }),
            "t.json: normalizer.type is \"NFKC\", which is not supported: NFC, Prepend and Replace are");
  EXPECT_EQ(
      refused([](json& d) { d["pre_tokenizer"]["type"] = "Digits"; }),
      "t.json: pre_tokenizer.type is \"Digits\", which is not supported: ByteLevel, Split and Metaspace are");
  const auto split = [&](const char* key, const json& value) {
    return refused([&](json& d) {
      json step = {
          {"type", "Split"}, {"pattern", {{"Regex", "a+"}}}, {"behavior", "Isolated"}, {"invert", false}};
      step[key] = value;
      d["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {step, d["pre_tokenizer"]}}};
    });
  };
  EXPECT_EQ(split("invert", false), "");
  EXPECT_EQ(split("invert", true),
            "t.json: pre_tokenizer.pretokenizers[0].invert is true, which is not supported: only false is");
  EXPECT_EQ(split("behavior", "Removed"),
            "t.json: pre_tokenizer.pretokenizers[0].behavior is \"Removed\", which is not supported: only "
            "\"Isolated\" is");
  EXPECT_EQ(split("pattern", {{"Regex", "\\p{Han}"}}),
            "t.json: pre_tokenizer.pretokenizers[0].pattern.Regex is \"\\\\p{Han}\", which is not supported: "
            "it has "
            "'\\p{Han}', which is not supported");
  EXPECT_THAT(split("pattern", {{"String", "a"}}),
              HasSubstr("t.json: pre_tokenizer.pretokenizers[0].pattern"));
  EXPECT_EQ(refused([](json& d) { d["model"]["dropout"] = 0.1; }),
            "t.json: model.dropout is 0.1, which is not supported: only null is");
  EXPECT_EQ(refused([](json& d) { d["model"]["end_of_word_suffix"] = "</w>"; }),
            "t.json: model.end_of_word_suffix is \"</w>\", which is not supported: only \"\" is");
  EXPECT_EQ(refused([](json& d) { d["model"]["byte_fallback"] = true; }),
            "t.json: model.byte_fallback is true, which is not supported: not with ByteLevel");
  EXPECT_EQ(refused([](json& d) { d["added_tokens"][0]["lstrip"] = true; }),
            "t.json: added_tokens[0].lstrip is true, which is not supported: only false is");
  EXPECT_EQ(refused([](json& d) {
              d["post_processor"] = {{"type", "BertProcessing"}};
            }),
            "t.json: post_processor.type is \"BertProcessing\", which is not supported: ByteLevel and "
            "TemplateProcessing are");
  EXPECT_EQ(
      refused([](json& d) { d["decoder"]["type"] = "WordPiece"; }),
      "t.json: decoder.type is \"WordPiece\", which is not supported: the pre_tokenizer needs ByteLevel");
  EXPECT_THAT(refused([](json& d) { d["pre_tokenizer"] = nullptr; }),
              HasSubstr("t.json: pre_tokenizer is missing, which is not supported"));
  EXPECT_THAT(refused([](json& d) { d["surprise"] = 1; }), AllOf(HasSubstr("t.json"), HasSubstr("surprise")));
}

/// A tokenizer.json with visible spaces: tokens 0 to 255 are bytes, 256 to 259 a space, "a", "b" and " a",
/// and 260 the added token "<|e|>".
json document_with_visible_spaces() {
  json vocabulary = json::object();
  for (int byte = 0; byte < 256; ++byte) vocabulary[fmt::format("<0x{:02X}>", byte)] = byte;
  for (const char* text : {"\u2581", "a", "b", "\u2581a"}) vocabulary[text] = vocabulary.size();
  return {{"added_tokens", {{{"id", 260}, {"content", "<|e|>"}}}},
          {"pre_tokenizer",
           {{"type", "Metaspace"}, {"replacement", "\u2581"}, {"prepend_scheme", "first"}, {"split", false}}},
          {"decoder", {{"type", "Metaspace"}}},
          {"model",
           {{"type", "BPE"},
            {"byte_fallback", true},
            {"vocab", vocabulary},
            {"merges", json::array({{"\u2581", "a"}})}}}};
}

TEST(TokenizerJson, StepsThatDoNotGoTogetherAreNamed) {
  const auto refused_in = [](json document, const std::function<void(json&)>& change) {
    change(document);
    return message_of<ConfigurationError>([&] { (void)read_tokenizer_json(document.dump(), "t.json"); });
  };
  const auto of_bytes = [&](const std::function<void(json&)>& change) {
    return refused_in(Files().document(), change);
  };
  const auto of_spaces = [&](const std::function<void(json&)>& change) {
    return refused_in(document_with_visible_spaces(), change);
  };
  const json replace = {{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", "\u2581"}};
  const json split = {
      {"type", "Split"}, {"pattern", {{"Regex", "a+"}}}, {"behavior", "Isolated"}, {"invert", false}};
  EXPECT_EQ(of_bytes([](json&) {}), "");
  EXPECT_EQ(of_bytes([](json& d) {
              d["normalizer"] = {{"type", "Prepend"}, {"prepend", "\u2581"}};
            }),
            "t.json: normalizer has Prepend without Replace, which is not supported");
  EXPECT_EQ(of_bytes([&](json& d) {
              d["pre_tokenizer"]["add_prefix_space"] = true;
              d["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {split, d["pre_tokenizer"]}}};
            }),
            "t.json: pre_tokenizer.pretokenizers[1].add_prefix_space is true, which is not supported: only "
            "false is behind Split");
  EXPECT_EQ(of_bytes([&](json& d) { d["pre_tokenizer"] = split; }),
            "t.json: pre_tokenizer has Split without ByteLevel, which is not supported");
  EXPECT_EQ(of_bytes([&](json& d) { d["normalizer"] = replace; }),
            "t.json: pre_tokenizer has ByteLevel where spaces are replaced, which is not supported");
  EXPECT_EQ(of_bytes([&](json& d) {
              d["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {d["pre_tokenizer"], split}}};
            }),
            "t.json: pre_tokenizer.pretokenizers[1].type is \"Split\", which is not supported: nothing may "
            "follow ByteLevel");
  EXPECT_EQ(of_spaces([](json&) {}), "");
  EXPECT_EQ(of_spaces([](json& d) { d["model"]["ignore_merges"] = true; }),
            "t.json: model.ignore_merges is true, which is not supported: not without ByteLevel");
  EXPECT_EQ(of_spaces([&](json& d) { d["normalizer"] = replace; }),
            "t.json: pre_tokenizer.type is \"Metaspace\", which is not supported: spaces are replaced by the "
            "normalizer already");
  for (const bool given : {false, true}) {
    EXPECT_EQ(of_spaces([&](json& d) {
                d["pre_tokenizer"].erase("split");
                if (given) d["pre_tokenizer"]["split"] = true;
              }),
              "t.json: pre_tokenizer splits at spaces (\"split\"), which is not supported: only \"split\": "
              "false is");
    EXPECT_EQ(of_spaces([&](json& d) {
                d["model"].erase("byte_fallback");
                if (given) d["model"]["byte_fallback"] = false;
              }),
              "t.json: model has no \"byte_fallback\": true, which is not supported without ByteLevel");
  }
  EXPECT_EQ(
      of_spaces([](json& d) { d["decoder"]["type"] = "WordPiece"; }),
      "t.json: decoder.type is \"WordPiece\", which is not supported: ByteLevel, Replace, ByteFallback, "
      "Fuse, Strip and Metaspace are");
}

TEST(TokenizerJson, MetaspaceSaysWhereASpaceComesFirst) {
  const std::vector<std::int32_t> first{259, 260, 258}, always{259, 260, 256, 258}, never{257, 260, 258};
  const auto read = [](const char* scheme) {
    json document = document_with_visible_spaces();
    document["pre_tokenizer"]["prepend_scheme"] = scheme;
    return read_tokenizer_json(document.dump(), "t.json");
  };
  EXPECT_EQ(read("first")->encode("a<|e|>b"), first);
  EXPECT_EQ(read("always")->encode("a<|e|>b"), always);
  EXPECT_EQ(read("never")->encode("a<|e|>b"), never);
  EXPECT_EQ(read("first")->decode(first), "a<|e|>b") << "the space that was put first is left out";
  EXPECT_EQ(read("never")->decode(first), " a<|e|>b") << "this space was in the text";
}

TEST(TokenizerJson, TheClassLlamaTokenizerSaysWhereASpaceComesFirst) {
  TokenizerFiles files;
  files.tokenizer_json = document_with_visible_spaces().dump();
  const auto encode = [&](const std::string& more) {
    files.tokenizer_config = R"({"tokenizer_class": "LlamaTokenizer")" + more + "}";
    return read_tokenizer(files, "tok")->encode("a<|e|>b");
  };
  const std::vector<std::int32_t> first{259, 260, 258}, always{259, 260, 256, 258}, never{257, 260, 258};
  EXPECT_EQ(encode(""), first);
  EXPECT_EQ(encode(R"(, "legacy": true)"), always);
  EXPECT_EQ(encode(R"(, "add_prefix_space": false)"), never);
  EXPECT_EQ(read_tokenizer(files, "tok")->decode(first), " a<|e|>b");
}

TEST(TokenizerJson, FilesThatContradictThemselves) {
  const auto refused = [](const std::function<void(json&)>& change) {
    json document = Files().document();
    change(document);
    return message_of<ConfigurationError>([&] { (void)read_tokenizer_json(document.dump(), "t.json"); });
  };
  EXPECT_EQ(refused([](json& d) { d["model"]["vocab"]["a"] = 98; }),
            "t.json: model.vocab.b is 98, which is the number of another token");
  EXPECT_EQ(refused([](json& d) { d["model"]["vocab"].erase("a"); }),
            "t.json: model.vocab has no token for byte 97");
  EXPECT_EQ(refused([](json& d) {
              d["model"]["merges"].push_back({"x", "y"});
            }),
            "t.json: model.merges[8] is not two tokens whose union is one: 'x' and 'y'");
  EXPECT_EQ(refused([](json& d) { d["model"]["merges"].push_back("xy"); }),
            "t.json: model.merges[8] is not two tokens whose union is one: 'xy' and ''");
  EXPECT_EQ(
      refused([](json& d) { d["added_tokens"][0]["id"] = 97; }),
      "t.json: added_tokens[0] gives '<|endoftext|>' the number 97, but it is token 264, and transformers "
      "takes that one: correct the number, or remove the token");
  EXPECT_EQ(refused([](json& d) {
              d["added_tokens"].push_back({{"id", 300}, {"content", "<|x|>"}});
            }),
            "t.json: added_tokens[1] gives '<|x|>' the number 300, but the next free number is 265, "
            "and transformers takes that one: correct the number, or remove the token");
}

TEST(TokenizerJson, AddedTokensAndTheTokensAroundAText) {
  json document = Files().document();
  for (const auto& [id, text] : {std::pair{265, "<|x|>"}, {266, "<|x|>y"}, {267, "hello!"}}) {
    document["added_tokens"].push_back({{"id", id}, {"content", text}, {"normalized", false}});
  }
  document["post_processor"] = {
      {"type", "TemplateProcessing"},
      {"single",
       {{{"SpecialToken", {{"id", "<|x|>"}, {"type_id", 0}}}},
        {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}}},
      {"pair", json::array()},
      {"special_tokens", {{"<|x|>", {{"id", "<|x|>"}, {"ids", {265}}, {"tokens", {"<|x|>"}}}}}}};
  const auto tokenizer = read_tokenizer_json(document.dump(), "t.json");
  EXPECT_EQ(tokenizer->vocabulary(), 268);
  EXPECT_THAT(tokenizer->encode("<|x|>y<|x|>z"), ElementsAre(266, 265, 'z')) << "the longest first";
  EXPECT_THAT(tokenizer->encode("hello!hello<|x|"), ElementsAre(267, 259, '<', '|', 'x', '|'));
  EXPECT_EQ(tokenizer->decode(std::vector<std::int32_t>{266, 259}), "<|x|>yhello");
  EXPECT_THAT(tokenizer->special().before, ElementsAre(265));
  EXPECT_THAT(tokenizer->special().after, ElementsAre());
}

TEST(TokenizerJson, WholeWordsWithIgnoreMerges) {
  json document = Files().document();
  document["model"]["vocab"]["wool"] = 265;
  EXPECT_THAT(read_tokenizer_json(document.dump(), "t.json")->encode("wool"), ElementsAre('w', 262, 'l'));
  document["model"]["ignore_merges"] = true;
  EXPECT_THAT(read_tokenizer_json(document.dump(), "t.json")->encode("wool"), ElementsAre(265));
}

TEST(Tokenizer, VocabularyAndMergesThatAreWrong) {
  const auto refused = [](const std::function<void(Files&)>& change) {
    Files files;
    change(files);
    return message_of<ConfigurationError>([&] { (void)files.tokenizer(); });
  };
  EXPECT_EQ(message_of<ConfigurationError>([] { (void)read_vocabulary_and_merges("[]", "", "folder"); }),
            "folder: vocab.json is not an object: a list of 0");
  EXPECT_EQ(refused([](Files& f) { f.vocabulary["a"] = "x"; }),
            "folder: vocab.json: a is not an integer: \"x\"");
  EXPECT_EQ(refused([](Files& f) { f.vocabulary["a"] = -1; }),
            "folder: vocab.json: a is -1, which cannot be: from 0 to 16777215 is wanted");
  EXPECT_EQ(refused([](Files& f) { f.vocabulary["a"] = 98; }),
            "folder: vocab.json: two tokens have the number 98");
  EXPECT_EQ(refused([](Files& f) { f.vocabulary.erase("a"); }), "folder: vocab.json: byte 97 has no token");
  EXPECT_THAT(
      refused([](Files& f) { f.merges_text += "x y\n"; }),
      HasSubstr("folder: merges.txt, line 10: 'x y' is not two tokens whose union is one in vocab.json"));
  EXPECT_THAT(refused([](Files& f) { f.merges_text += "xy\n"; }), HasSubstr("line 10: 'xy'"));
}

TEST(Tokenizer, IsLoadedFromAFolder) {
  const tools::test::TemporaryFolder folder;
  const std::string path = folder.path("");
  EXPECT_FALSE(has_tokenizer(path));
  EXPECT_THAT(message_of<ConfigurationError>([&] { (void)load_tokenizer(path); }),
              HasSubstr("has no tokenizer: neither tokenizer.json nor tokenizer.model"));
  EXPECT_THAT(
      message_of<ConfigurationError>([&] { (void)load_tokenizer("some-org/some-model"); }),
      HasSubstr("there is no folder 'some-org/some-model' of a tokenizer, and nothing is downloaded"));
  folder.write("vocab.json", Files().vocabulary.dump());
  EXPECT_FALSE(has_tokenizer(path));
  EXPECT_THAT(message_of<ConfigurationError>([&] { (void)load_tokenizer(path); }),
              HasSubstr("merges.txt' cannot be read: No such file"));
  folder.write("merges.txt", Files().merges_text);
  EXPECT_TRUE(has_tokenizer(path));
  EXPECT_THAT(message_of<ConfigurationError>([&] { (void)load_tokenizer(folder.path("vocab.json")); }),
              HasSubstr("vocab.json' is a file; a tokenizer is named by the folder that holds its files"));
  EXPECT_EQ(load_tokenizer(path)->special().end, 264);
  folder.write("tokenizer.model", "no protocol buffer");
  EXPECT_THAT(message_of<ConfigurationError>([&] { (void)load_tokenizer(path); }),
              AllOf(HasSubstr("tokenizer.model"), HasSubstr("is not a SentencePiece model")));
  json document = Files().document();
  document["added_tokens"].push_back({{"id", 265}, {"content", "<|im_end|>"}, {"normalized", false}});
  folder.write("tokenizer.json", document.dump());
  EXPECT_EQ(load_tokenizer(path)->special().end, 264) << "the usual name";
  folder.write("tokenizer_config.json", R"({"eos_token": "<|im_end|>"})");
  EXPECT_EQ(load_tokenizer(path)->special().end, 265);
  folder.write("tokenizer_config.json", R"({"eos_token": {"content": "<|endoftext|>"}})");
  EXPECT_EQ(load_tokenizer(path)->special().end, 264);
  folder.write("tokenizer_config.json", R"({"eos_token": "<|none|>"})");
  EXPECT_THAT(message_of<ConfigurationError>([&] { (void)load_tokenizer(path); }),
              HasSubstr("eos_token is '<|none|>', which the tokenizer does not have"));
}

TEST(Tokenizer, OfBytes) {
  const auto bytes = make_byte_tokenizer();
  EXPECT_EQ(bytes->vocabulary(), 256);
  EXPECT_THAT(bytes->encode("a\xff"), ElementsAre('a', 255));
  EXPECT_EQ(bytes->decode(std::vector<std::int32_t>{'a', 255, 256}), "a\xff");
}

}  // namespace
}  // namespace tranche::training
