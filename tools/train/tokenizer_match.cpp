#include "tools/train/tokenizer_match.h"

#include <fmt/format.h>

#include <algorithm>

#include "tranche/core/error.h"
#include "tranche/training/tokenize.h"

namespace tranche::tools {

using training::TokenFile;

namespace {

/// A digest of what a folder holds; empty if it cannot be read.
template <typename Digest>
std::string digest_or_none(const Digest& digest) {
  try {
    return digest();
  } catch (const ConfigurationError&) {
    return {};
  }
}
std::string files_in(const std::string& folder) {
  return digest_or_none([&] { return training::tokenizer_digest(folder); });
}
std::string vocabulary_in(const std::string& folder) {
  return digest_or_none([&] { return training::vocabulary_digest(*training::load_tokenizer(folder)); });
}

bool names_tokenizer(const TokenFile* file) {
  return !file->made_by().vocabulary.empty();
}

}  // namespace

void require_one_kind(const std::vector<const TokenFile*>& files) {
  const auto holds_bytes = [](const TokenFile* file) { return file->width() == 1; };
  const auto bytes = std::find_if(files.begin(), files.end(), holds_bytes),
             tokens = std::find_if_not(files.begin(), files.end(), holds_bytes);
  if (bytes == files.end() || tokens == files.end()) return;
  throw ConfigurationError(
      fmt::format("data file '{}' holds bytes, and '{}' tokens of {} bits: in one run the same numbers would "
                  "mean two texts; make tokens of both with one tokenizer (tranche tokenize)",
                  (*bytes)->path(), (*tokens)->path(), 8 * (*tokens)->width()));
}

std::vector<std::string> notes_on_tokenizers(const std::vector<const TokenFile*>& files,
                                             const std::vector<std::string>& folders) {
  if (std::none_of(files.begin(), files.end(), names_tokenizer)) return {};
  std::string right, whose;
  const auto folder = std::find_if(folders.begin(), folders.end(), training::has_tokenizer);
  if (folder != folders.end()) {
    // The digest of the folder's files is quick, and mostly equal; the vocabulary takes up to a second.
    const std::string digest = files_in(*folder);
    if (std::all_of(files.begin(), files.end(), [&](const TokenFile* file) {
          return !names_tokenizer(file) || file->made_by().files == digest;
        }))
      return {};
    right = vocabulary_in(*folder);
    whose = fmt::format("the model's in '{}'", *folder);
  }
  std::vector<std::string> notes;
  for (const TokenFile* file : files) {
    if (!names_tokenizer(file)) continue;
    if (right.empty()) {
      right = file->made_by().vocabulary;
      whose = fmt::format("that of '{}'", file->path());
    } else if (file->made_by().vocabulary != right) {
      notes.push_back(
          fmt::format("the tokens of '{}' were made with another tokenizer than {}: the same "
                      "numbers mean other text",
                      file->path(), whose));
    }
  }
  return notes;
}

std::string note_on_tokenizer(const training::Tokenizer& given, const std::string& folder,
                              const std::string& own) {
  if (!training::has_tokenizer(own) || files_in(folder) == files_in(own)) return {};
  const std::string right = vocabulary_in(own);
  if (right.empty() || right == training::vocabulary_digest(given)) return {};
  return fmt::format(
      "the tokenizer of --tokenizer '{}' has other tokens than the model's in '{}': the same numbers mean "
      "other text",
      folder, own);
}

}  // namespace tranche::tools
