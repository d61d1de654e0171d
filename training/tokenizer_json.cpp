// tokenizer.json, and vocab.json with merges.txt.

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "core/json.h"
#include "core/json_node.h"
#include "training/tokenizer_json.h"
#include "tranche/core/error.h"

namespace tranche::training {

namespace {

using detail::JsonNode;
using Symbols = PairEncoding::Symbols;

/// The most tokens around a text; real files have far fewer.
constexpr std::size_t most_tokens_around = 1024;

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

/// An object with a "type", or the objects of a "Sequence" under `list`; empty if it is null.
std::vector<JsonNode> steps_of(const JsonNode& node, std::string_view list) {
  if (!node) return {};
  if (node["type"].text() != "Sequence") return {node};
  node.allow({"type", list});
  return node[list].items();
}

/// Sets the behaviour of a transformers class for a vocabulary of its kind.
void set_class(TokenizerClass kind, bool prefix_space, bool legacy, BpeDefinition& parts) {
  using Prefix = BpeDefinition::Prefix;
  if (kind == TokenizerClass::llama) {
    parts.space_before = !prefix_space ? Prefix::never : legacy ? Prefix::always : Prefix::first;
    parts.space_once = true;
    parts.visible_spaces = true;
    parts.strips_space = prefix_space;
    return;
  }
  parts.composes = kind == TokenizerClass::qwen2;
  parts.patterns.emplace_back(parts.composes ? qwen2_pattern : gpt2_pattern);
  parts.blank_before = prefix_space;
}

BaseVocabulary vocabulary_of(const PairEncoding& pairs) {
  return {pairs.base(), [&pairs](std::string_view text) { return pairs.token_of(text); }};
}

/// The texts of added tokens are literal.
void mark_added(BpeDefinition& parts) {
  for (const AddedToken& token : parts.added.tokens()) {
    if (!parts.pairs.add_special(token.text, token.token)) {
      throw ConfigurationError(
          fmt::format("added token '{}' gets the number {}, which is another token of the vocabulary",
                      token.text, token.token));
    }
  }
}

class Reader {
 public:
  Reader(std::string_view text, std::string_view origin)
      : origin_(origin), root_(JsonNode::read<ConfigurationError>(text, origin)) {}

  std::vector<NamedToken> added_tokens() const {
    std::vector<NamedToken> tokens;
    if (!root_["added_tokens"]) return tokens;
    for (const JsonNode& entry : root_["added_tokens"].items()) {
      entry.allow({"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
      (void)entry["id"].integer<std::int32_t>(0, largest_token);
      tokens.push_back(read_named_token(entry));
      tokens.back().normalized = entry["normalized"] && entry["normalized"].boolean();
    }
    return tokens;
  }

  /// Refuses normalized added tokens if a normalizer would put a space before them.
  void require_raw(const TokenizerLayout& layout) const {
    layout.require_raw([this](const std::string&) { return prepends_; }, "with a Prepend normalizer");
  }

  BpeDefinition read(TokenizerClass kind, bool prefix_space, bool legacy) {
    // Truncation and padding are chosen by the tokenizer's caller, so their values are ignored here.
    root_.allow({"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer",
                 "post_processor", "decoder", "model"});
    const JsonNode model = root_["model"];
    if (model["type"] && model["type"].text() != "BPE") {
      refuse(model["type"], "only \"BPE\" is");
    }
    // A specific class uses only the vocabulary, the merges and the tokens around a text from the file.
    const bool own = kind != TokenizerClass::generic && kind != TokenizerClass::unnamed;
    if (own) {
      byte_level_ = kind != TokenizerClass::llama;
      set_class(kind, prefix_space, legacy, parts_);
    } else {
      read_normalizer();
      read_pre_tokenizer();
    }
    parts_.pairs = PairEncoding(byte_level_ ? Symbols::bytes : Symbols::characters);
    read_model(model, own);
    if (!own) {
      read_added();
      read_decoder();
    }
    read_post_processor();
    return std::move(parts_);
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
        parts_.blank_before = step["add_prefix_space"] && step["add_prefix_space"].boolean();
        if (parts_.blank_before && !parts_.patterns.empty())
          refuse(step["add_prefix_space"], "only false is behind Split");
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

  void read_model(const JsonNode& model, bool own) {
    model.allow({"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
                 "fuse_unk", "byte_fallback", "ignore_merges", "vocab", "merges"});
    if (model["dropout"]) refuse(model["dropout"], "only null is");
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      if (model[key]) require_text(model[key], "");
    }
    if (!own) {
      if (!byte_level_ && (!model["byte_fallback"] || !model["byte_fallback"].boolean())) {
        model.fail("has no \"byte_fallback\": true, which is not supported without ByteLevel");
      }
      if (byte_level_) require_off(model["byte_fallback"], "not with ByteLevel");
      parts_.whole_words = model["ignore_merges"] && model["ignore_merges"].boolean();
      if (parts_.whole_words && !byte_level_) refuse(model["ignore_merges"], "not without ByteLevel");
    }
    for (const auto& [text, number] : model["vocab"].members()) {
      const auto token = number.integer<std::int32_t>(0, largest_token);
      if (!parts_.pairs.add_token(text, token))
        number.fail(fmt::format("is {}, which is the number of another token", token));
    }
    if (const int byte = parts_.pairs.byte_without_token(); byte >= 0) {
      model["vocab"].fail(
          fmt::format("has no token for byte {}{}", byte,
                      own ? ", which the class of the tokenizer (tokenizer_class, model_type) needs" : ""));
    }
    for (const JsonNode& merge : model["merges"].items()) read_merge(merge);
  }

  /// Reads two texts, or one with a space between them.
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
    TokenizerLayout layout;
    layout.listed = added_tokens();
    require_raw(layout);
    (void)add_tokens(layout, vocabulary_of(parts_.pairs), parts_.added);
    mark_added(parts_);
  }

  void read_post_processor() {
    for (const JsonNode& step : steps_of(root_["post_processor"], "processors")) {
      const std::string type = step["type"].text();
      if (type == "ByteLevel") continue;  // affects offsets only
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
          if (tokens.size() == most_tokens_around)
            id.fail(
                fmt::format("is one token too many: at most {} may be around a text", most_tokens_around));
          tokens.push_back(id.integer<std::int32_t>(0, largest_token));
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

/// Checks that every number is that of a token.
void require_tokens(const std::vector<std::int32_t>& tokens, const BpeDefinition& parts,
                    std::string_view origin) {
  for (const std::int32_t token : tokens) {
    if (parts.pairs.bytes_of(token).empty()) {
      throw ConfigurationError(
          fmt::format("{}: post_processor puts {} around texts, which is no token", origin, token));
    }
  }
}

std::unique_ptr<Tokenizer> finish(BpeDefinition parts, std::string_view origin) {
  require_tokens(parts.special.before, parts, origin);
  require_tokens(parts.special.after, parts, origin);
  return std::make_unique<BpeTokenizer>(std::move(parts));
}

/// Adds a layout's tokens. The tokens around a text in tokenizer.json take precedence.
void add_layout(const TokenizerLayout& layout, bool has_json, BpeDefinition& parts) {
  SpecialTokens special = add_tokens(layout, vocabulary_of(parts.pairs), parts.added);
  mark_added(parts);
  if (has_json) {
    parts.special.end = special.end;
  } else {
    parts.special = std::move(special);
  }
}

BpeDefinition read_two_files(std::string_view vocabulary_json, std::string_view merges,
                             std::string_view origin) {
  const auto refuse_files = [&](const std::string& what) {
    throw ConfigurationError(fmt::format("{}: {}", origin, what));
  };
  BpeDefinition parts;
  const JsonNode vocabulary =
      JsonNode::read<ConfigurationError>(vocabulary_json, fmt::format("{}: vocab.json", origin));
  for (const auto& [text, number] : vocabulary.members()) {
    const auto token = number.integer<std::int32_t>(0, largest_token);
    if (!parts.pairs.add_token(text, token)) {
      refuse_files(fmt::format("vocab.json: two tokens have the number {}", token));
    }
  }
  if (const int byte = parts.pairs.byte_without_token(); byte >= 0) {
    refuse_files(fmt::format("vocab.json: byte {} has no token", byte));
  }
  std::istringstream lines{std::string(merges)};
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    if (line.ends_with('\r')) line.pop_back();
    if (line.empty() || line.starts_with("#version")) continue;
    const std::size_t blank = line.find(' ');
    if (blank == std::string::npos || !parts.pairs.add_merge(std::string_view(line).substr(0, blank),
                                                             std::string_view(line).substr(blank + 1))) {
      refuse_files(fmt::format("merges.txt, line {}: '{}' is not two tokens whose union is one in vocab.json",
                               number, line));
    }
  }
  return parts;
}

}  // namespace

std::unique_ptr<Tokenizer> read_tokenizer_json(std::string_view text, std::string_view origin) {
  return finish(Reader(text, origin).read(TokenizerClass::generic, false, false), origin);
}

std::unique_ptr<Tokenizer> read_tokenizer_json(const TokenizerFiles& files, const std::string& folder) {
  const std::string origin = folder + "/tokenizer.json";
  Reader reader(*files.tokenizer_json, origin);
  const TokenizerLayout layout = read_layout(
      files, folder, reader.added_tokens(), files.tokenizer_json->find("\"ByteLevel\"") != std::string::npos);
  BpeDefinition parts =
      reader.read(layout.kind, layout.prefix_space.value_or(layout.kind == TokenizerClass::llama),
                  layout.legacy.value_or(false));
  reader.require_raw(layout);
  add_layout(layout, true, parts);
  return finish(std::move(parts), origin);
}

std::unique_ptr<Tokenizer> read_vocabulary_and_merges(std::string_view vocabulary_json,
                                                      std::string_view merges, std::string_view origin) {
  BpeDefinition parts = read_two_files(vocabulary_json, merges, origin);
  parts.patterns.emplace_back(gpt2_pattern);
  constexpr const char* end = "<|endoftext|>";
  if (const auto token = parts.pairs.token_of(end)) {
    (void)parts.added.add(end, false, token, parts.pairs.base());
    parts.special.end = *token;
  }
  return std::make_unique<BpeTokenizer>(std::move(parts));
}

std::unique_ptr<Tokenizer> read_vocabulary_and_merges(const TokenizerFiles& files,
                                                      const std::string& folder) {
  TokenizerLayout layout = read_layout(files, folder, {}, false);
  BpeDefinition parts = read_two_files(*files.vocabulary, *files.merges, folder);
  if (layout.kind == TokenizerClass::unnamed && parts.pairs.token_of("<|endoftext|>")) {
    layout.kind = TokenizerClass::gpt2;
    layout.set_default("bos_token", "<|endoftext|>");
    layout.set_default("eos_token", "<|endoftext|>");
  }
  if (layout.kind != TokenizerClass::gpt2 && layout.kind != TokenizerClass::qwen2) {
    throw ConfigurationError(fmt::format(
        "{}: vocab.json and merges.txt do not say how text is split in words{}: put a tokenizer.json beside "
        "them, or "
        "name GPT2Tokenizer or Qwen2Tokenizer as tokenizer_class of tokenizer_config.json",
        folder,
        layout.kind == TokenizerClass::unnamed ? ""
                                               : fmt::format(", and {} does not know", layout.kind_name)));
  }
  set_class(layout.kind, layout.prefix_space.value_or(false), false, parts);
  add_layout(layout, false, parts);
  return std::make_unique<BpeTokenizer>(std::move(parts));
}

}  // namespace tranche::training
