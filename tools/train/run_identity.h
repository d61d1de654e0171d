#pragma once
/// The description that `tranche train` writes into every checkpoint: enough to use the weights without the
/// run's flags, and to refuse to continue with another model or other tokens.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "tranche/models/model_registry.h"

namespace tranche::tools {

/// The encoding of text into tokens.
struct Tokenizer {
  enum class Kind : std::uint8_t { bytes, tokens };
  Kind kind = Kind::bytes;
  std::int64_t vocabulary = 256;  ///< for `tokens`: numbers below this, encoded elsewhere; bytes are 256
  friend bool operator==(const Tokenizer&, const Tokenizer&) = default;
};
/// "bytes", or "tokens below 50257".
std::string describe(const Tokenizer& tokenizer);

/// A checkpoint's user JSON (SaveOptions::user):
///     {"program": "tranche", "model": {config.json of the model}, "sequence": 256,
///      "tokenizer": {"kind": "bytes"} or {"kind": "tokens", "vocabulary": 50257}, "data": "a/path",
///      "windows": {"training": 1000, "held_out": 50}, "digests": {"data": "0123456789abcdef"}}
/// "windows" and "digests" may be missing; "digests" has "validation_data" too where that is a file of its
/// own.
struct RunIdentity {
  std::shared_ptr<const models::LanguageModel> model;
  std::int64_t sequence = 0;  ///< tokens of the training sequences
  Tokenizer tokenizer;
  std::string data;  ///< as given; empty: none (an imported model)
  /// The number of windows in the training and the held-out tokens, on which the order of samples depends; 0:
  /// unknown.
  std::int64_t training_windows = 0, held_out_windows = 0;
  /// TokenFile::digest() of both files; empty: unknown, or not a separate file.
  std::string data_digest{}, validation_digest{};

  std::string to_json() const;
  /// Strict, except that unknown keys are ignored; `models` reads the model. Throws CheckpointError naming
  /// `origin` (the checkpoint) and the key for text from another program, a missing key, a wrong type, or an
  /// invalid model.
  static RunIdentity from_json(std::string_view text, std::string_view origin,
                               const models::ModelRegistry& models);
  /// True when the text claims to be written by this program, whether or not from_json() can read it.
  static bool wrote(std::string_view text);

  friend bool operator==(const RunIdentity& a, const RunIdentity& b) { return a.to_json() == b.to_json(); }
};

}  // namespace tranche::tools
