// tokenizer.json, and vocab.json with merges.txt.

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "core/json.h"
#include "core/json_node.h"
#include "data/bpe_tokenizer.h"
#include "tranche/core/error.h"
#include "tranche/data/tokenizer.h"

namespace tranche::data {

namespace {

using detail::JsonNode;
using Symbols = PairEncoding::Symbols;

constexpr std::int32_t largest_token = (1 << 24) - 1;

/// Throws "ORIGIN: pre_tokenizer.type is "Digits", which is not supported: REASON".
[[noreturn]] void refuse(const JsonNode& node, std::string_view reason) {
  node.fail(fmt::format("is {}, which is not supported: {}", detail::brief_json(node.json()), reason));
}

/// Refuses a flag that is true.
void require_off(const JsonNode& node, std::string_view reason) {
  if (node && node.boolean()) refuse(node, reason);
}

/// Refuses a text that is given and is not `expected`.
void require_text(const JsonNode& node, std::string_view expected) {
  if (node.text() != expected) refuse(node, fmt::format("only \"{}\" is", expected));
}

/// A block of a "type", or the blocks of a "Sequence" under `list`; nothing where it is null.
std::vector<JsonNode> steps_of(const JsonNode& node, std::string_view list) {
  if (!node) return {};
  if (node["type"].text() != "Sequence") return {node};
  node.allow({"type", list});
  return node[list].items();
}

class Reader {
 public:
  Reader(std::string_view text, std::string_view origin)
      : origin_(origin), root_(JsonNode::read<ConfigurationError>(text, origin)) {}

  std::unique_ptr<Tokenizer> read() {
    // Truncation and padding are for the caller of the tokenizer to choose; here nothing asks for them.
    root_.allow({"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer",
                 "post_processor", "decoder", "model"});
    const JsonNode model = root_["model"];
    if (model["type"] && model["type"].text() != "BPE") {
      refuse(model["type"], "BPE is, and SentencePiece's own tokenizer.model");
    }
    read_normalizer();
    read_pre_tokenizer();
    parts_.pairs = PairEncoding(byte_level_ ? Symbols::bytes : Symbols::characters);
    read_model(model);
    read_added();
    read_post_processor();
    read_decoder();
    return std::make_unique<BpeTokenizer>(std::move(parts_));
  }

 private:
  void read_normalizer() {
    for (const JsonNode& step : steps_of(root_["normalizer"], "normalizers")) {
      const std::string type = step["type"].text();
      if (type == "NFC") {
        step.allow({"type"});
        if (parts_.visible_spaces || prepends_) refuse(step["type"], "NFC comes first where it is");
        parts_.composes = true;
      } else if (type == "Prepend") {
        step.allow({"type", "prepend"});
        require_text(step["prepend"], visible_space);
        parts_.space_before = BpeDefinition::Prefix::always;
        prepends_ = true;
      } else if (type == "Replace") {
        step.allow({"type", "pattern", "content"});
        step["pattern"].allow({"String"});
        require_text(step["pattern"]["String"], " ");
        require_text(step["content"], visible_space);
        parts_.visible_spaces = true;
      } else {
        refuse(step["type"], "NFC, Prepend and Replace are");
      }
    }
    if (prepends_ && !parts_.visible_spaces) {
      root_["normalizer"].fail("has Prepend without Replace, which is not supported");
    }
  }

  void read_pre_tokenizer() {
    for (const JsonNode& step : steps_of(root_["pre_tokenizer"], "pretokenizers")) {
      const std::string type = step["type"].text();
      if (byte_level_) refuse(step["type"], "nothing may follow ByteLevel");
      if (type == "ByteLevel") {
        step.allow({"type", "add_prefix_space", "trim_offsets", "use_regex"});
        require_off(step["add_prefix_space"], "only false is");
        if (!step["use_regex"] || step["use_regex"].boolean()) parts_.patterns.emplace_back(gpt2_pattern);
        byte_level_ = true;
      } else if (type == "Split") {
        read_split(step);
      } else if (type == "Metaspace") {
        read_metaspace(step);
      } else {
        refuse(step["type"], "ByteLevel, Split and Metaspace are");
      }
    }
    if (!byte_level_ && !parts_.patterns.empty()) {
      root_["pre_tokenizer"].fail("has Split without ByteLevel, which is not supported");
    }
    if (byte_level_ && parts_.visible_spaces) {
      root_["pre_tokenizer"].fail("has ByteLevel where spaces are replaced, which is not supported");
    }
    if (!byte_level_ && !parts_.visible_spaces) {
      root_["pre_tokenizer"].fail("is missing, which is not supported: ByteLevel or Metaspace is needed");
    }
  }

  void read_split(const JsonNode& step) {
    step.allow({"type", "pattern", "behavior", "invert"});
    require_text(step["behavior"], "Isolated");
    require_off(step["invert"], "only false is");
    step["pattern"].allow({"Regex"});
    const JsonNode pattern = step["pattern"]["Regex"];
    try {
      parts_.patterns.emplace_back(pattern.text());
    } catch (const InvalidArgument& problem) {
      refuse(pattern, problem.message());
    }
  }

  void read_metaspace(const JsonNode& step) {
    step.allow({"type", "replacement", "add_prefix_space", "prepend_scheme", "split", "str_rep"});
    require_text(step["replacement"], visible_space);
    if (parts_.visible_spaces) refuse(step["type"], "spaces are replaced by the normalizer already");
    if (!step["split"] || step["split"].boolean()) {
      step.fail("splits at spaces (\"split\"), which is not supported: only \"split\": false is");
    }
    using Prefix = BpeDefinition::Prefix;
    const std::string scheme = step["prepend_scheme"].choice({"first", "always", "never"});
    parts_.space_before = scheme == "first"    ? Prefix::first
                          : scheme == "always" ? Prefix::always
                                               : Prefix::never;
    parts_.space_once = true;
    parts_.visible_spaces = true;
  }

  void read_model(const JsonNode& model) {
    model.allow({"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
                 "fuse_unk", "byte_fallback", "ignore_merges", "vocab", "merges"});
    if (model["dropout"]) refuse(model["dropout"], "only null is");
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      if (model[key]) require_text(model[key], "");
    }
    if (!byte_level_ && (!model["byte_fallback"] || !model["byte_fallback"].boolean())) {
      model.fail("has no \"byte_fallback\": true, which is not supported without ByteLevel");
    }
    if (byte_level_) require_off(model["byte_fallback"], "not with ByteLevel");
    parts_.whole_words = model["ignore_merges"] && model["ignore_merges"].boolean();
    if (parts_.whole_words && !byte_level_) refuse(model["ignore_merges"], "not without ByteLevel");
    for (const auto& [text, number] : model["vocab"].members()) {
      const auto token = number.integer<std::int32_t>(0, largest_token);
      if (!parts_.pairs.add_token(text, token)) number.fail(fmt::format("is {}, as another token's", token));
    }
    if (const int byte = parts_.pairs.byte_without_token(); byte >= 0) {
      model["vocab"].fail(fmt::format("has no token for byte {}", byte));
    }
    for (const JsonNode& merge : model["merges"].items()) read_merge(merge);
  }

  /// Two texts, or one with a space between them.
  void read_merge(const JsonNode& merge) {
    std::string left, right;
    if (merge.json().is_array()) {
      const std::vector<JsonNode> both = merge.items(2, 2);
      left = both[0].text();
      right = both[1].text();
    } else {
      const std::string text = merge.text();
      const std::size_t blank = text.find(' ');
      left = text.substr(0, blank);
      if (blank != std::string::npos) right = text.substr(blank + 1);
    }
    if (!parts_.pairs.add_merge(left, right)) {
      merge.fail(fmt::format("is not two tokens whose union is one: '{}' and '{}'", left, right));
    }
  }

  void read_added() {
    if (!root_["added_tokens"]) return;
    for (const JsonNode& entry : root_["added_tokens"].items()) {
      entry.allow({"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
      for (const char* flag : {"single_word", "lstrip", "rstrip"}) require_off(entry[flag], "only false is");
      AddedToken token{entry["content"].text(), entry["id"].integer<std::int32_t>(0, largest_token),
                       entry["normalized"] && entry["normalized"].boolean()};
      if (token.normalized && prepends_) refuse(entry["normalized"], "not with a Prepend normalizer");
      if (!parts_.pairs.add_special(token.text, token.token)) {
        entry["id"].fail(fmt::format("is {}, which is another token of the vocabulary", token.token));
      }
      parts_.added.push_back(std::move(token));
    }
  }

  void read_post_processor() {
    for (const JsonNode& step : steps_of(root_["post_processor"], "processors")) {
      const std::string type = step["type"].text();
      if (type == "ByteLevel") continue;  // it changes offsets alone
      if (type != "TemplateProcessing") refuse(step["type"], "ByteLevel and TemplateProcessing are");
      bool behind = false;
      for (const JsonNode& piece : step["single"].items()) {
        if (piece["Sequence"]) {
          if (behind) piece.fail("is the text for the second time");
          behind = true;
          continue;
        }
        const std::string name = piece["SpecialToken"]["id"].text();
        for (const JsonNode& id : step["special_tokens"][name]["ids"].items()) {
          auto& tokens = behind ? parts_.special.after : parts_.special.before;
          tokens.push_back(
              id.integer<std::int32_t>(0, static_cast<std::int32_t>(parts_.pairs.vocabulary()) - 1));
        }
      }
    }
  }

  void read_decoder() {
    for (const JsonNode& step : steps_of(root_["decoder"], "decoders")) {
      const std::string type = step["type"].text();
      if (byte_level_ != (type == "ByteLevel")) {
        refuse(step["type"], byte_level_ ? "the pre_tokenizer needs ByteLevel" : "not without ByteLevel");
      }
      if (type == "Strip") {
        require_text(step["content"], " ");
        if (step["start"].integer() > 1) refuse(step["start"], "0 and 1 are");
        if (step["stop"].integer() != 0) refuse(step["stop"], "0 is");
        parts_.strips_space = step["start"].integer() == 1;
      } else if (type == "Metaspace") {
        parts_.strips_space = parts_.space_before != BpeDefinition::Prefix::never;
      } else if (type == "Replace") {
        require_text(step["pattern"]["String"], visible_space);
        require_text(step["content"], " ");
      } else if (type != "ByteLevel" && type != "ByteFallback" && type != "Fuse") {
        refuse(step["type"], "ByteLevel, Replace, ByteFallback, Fuse, Strip and Metaspace are");
      }
    }
  }

  std::string origin_;
  JsonNode root_;
  BpeDefinition parts_;
  bool byte_level_ = false, prepends_ = false;
};

}  // namespace

std::unique_ptr<Tokenizer> read_tokenizer_json(std::string_view text, std::string_view origin) {
  return Reader(text, origin).read();
}

std::unique_ptr<Tokenizer> read_vocabulary_and_merges(std::string_view vocabulary_json,
                                                      std::string_view merges, std::string_view origin) {
  const auto refuse_files = [&](const std::string& what) {
    throw ConfigurationError(fmt::format("{}: {}", origin, what));
  };
  constexpr std::string_view end_of_text = "<|endoftext|>";
  BpeDefinition parts;
  parts.patterns.emplace_back(gpt2_pattern);
  const JsonNode vocabulary =
      JsonNode::read<ConfigurationError>(vocabulary_json, fmt::format("{}: vocab.json", origin));
  for (const auto& [text, number] : vocabulary.members()) {
    const auto token = number.integer<std::int32_t>(0, largest_token);
    if (!parts.pairs.add_token(text, token)) {
      refuse_files(fmt::format("vocab.json: two tokens have the number {}", token));
    }
    if (text == end_of_text) {
      parts.added.push_back({text, token, false});
      parts.special.end = token;
    }
  }
  if (const int byte = parts.pairs.byte_without_token(); byte >= 0) {
    refuse_files(fmt::format("vocab.json: byte {} has no token", byte));
  }
  std::istringstream lines{std::string(merges)};
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    if (line.ends_with('\r')) line.pop_back();
    if (line.empty() || (number == 1 && line.starts_with("#version"))) continue;
    const std::size_t blank = line.find(' ');
    if (blank == std::string::npos || !parts.pairs.add_merge(std::string_view(line).substr(0, blank),
                                                             std::string_view(line).substr(blank + 1))) {
      refuse_files(fmt::format("merges.txt, line {}: '{}' is not two tokens whose union is one in vocab.json",
                               number, line));
    }
  }
  return std::make_unique<BpeTokenizer>(std::move(parts));
}

}  // namespace tranche::data
