#include "training/sentencepiece_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <optional>
#include <unordered_set>

#include "training/word_pattern.h"
#include "tranche/core/error.h"

namespace tranche::training {

namespace {

/// One field of a protocol buffer message: a number, or bytes.
struct Field {
  std::uint64_t id = 0, number = 0;
  std::string_view bytes;
  bool has_bytes = false;
};

/// The fields of a message, one after the other.
class Message {
 public:
  Message(std::string_view rest, std::string_view origin) : rest_(rest), origin_(origin) {}

  std::optional<Field> next() {
    if (rest_.empty()) return std::nullopt;
    const std::uint64_t key = varint();
    Field field;
    field.id = key >> 3;
    switch (key & 7) {
      case 0:
        field.number = varint();
        break;
      case 1:
        field.number = little_endian(8);
        break;
      case 2:
        field.bytes = take(varint());
        field.has_bytes = true;
        break;
      case 5:
        field.number = little_endian(4);
        break;
      default:
        fail(fmt::format("a field has wire type {}", key & 7));
    }
    return field;
  }

  [[noreturn]] void fail(const std::string& why) const {
    throw ConfigurationError(fmt::format("{} is not a SentencePiece model: {}", origin_, why));
  }

 private:
  std::uint64_t varint() {
    std::uint64_t value = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
      const auto byte = static_cast<unsigned char>(take(1)[0]);
      value |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) return value;
    }
    fail("a number has more than 64 bits");
  }
  std::uint64_t little_endian(std::size_t size) {
    std::uint64_t value = 0;
    const std::string_view bytes = take(size);
    for (std::size_t i = size; i > 0; --i) value = value << 8 | static_cast<unsigned char>(bytes[i - 1]);
    return value;
  }
  std::string_view take(std::uint64_t size) {
    if (size > rest_.size()) fail("it ends within a field");
    const std::string_view bytes = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return bytes;
  }

  std::string_view rest_, origin_;
};

SentencePieceModel::Piece read_piece(std::string_view bytes, std::string_view origin) {
  SentencePieceModel::Piece piece;
  Message message(bytes, origin);
  while (const auto field = message.next()) {
    if (field->id == 1 && field->has_bytes) piece.text = field->bytes;
    if (field->id == 2) piece.score = std::bit_cast<float>(static_cast<std::uint32_t>(field->number));
    if (field->id == 3) {
      if (field->number < 1 || field->number > 6)
        message.fail(fmt::format("a piece has type {}", field->number));
      piece.kind = static_cast<SentencePieceModel::Kind>(field->number);
    }
  }
  return piece;
}

void read_trainer(std::string_view bytes, std::string_view origin, SentencePieceModel& model) {
  // A negative token number means that there is none.
  bool unknown = true, begin = true, end = true;
  Message message(bytes, origin);
  while (const auto field = message.next()) {
    const bool there = static_cast<std::int32_t>(field->number) >= 0;
    switch (field->id) {
      case 3:
        model.pair_encoding = field->number == 2;
        break;
      case 35:
        model.byte_fallback = field->number != 0;
        break;
      case 40:
        unknown = there;
        break;
      case 41:
        begin = there;
        break;
      case 42:
        end = there;
        break;
      case 45:
        model.unknown = field->bytes;
        break;
      case 46:
        model.begin = field->bytes;
        break;
      case 47:
        model.end = field->bytes;
        break;
      default:
        break;
    }
  }
  if (!unknown) model.unknown.clear();
  if (!begin) model.begin.clear();
  if (!end) model.end.clear();
}

void read_normalizer(std::string_view bytes, std::string_view origin, SentencePieceModel& model) {
  Message message(bytes, origin);
  while (const auto field = message.next()) {
    switch (field->id) {
      case 2:
        model.normalizes = !field->bytes.empty();
        break;
      case 3:
        model.adds_prefix = field->number != 0;
        break;
      case 4:
        model.removes_spaces = field->number != 0;
        break;
      case 5:
        model.escapes_spaces = field->number != 0;
        break;
      default:
        break;
    }
  }
}

/// True for lines with a base64 word and its number, as in Llama 3's tokenizer.model.
bool is_tiktoken(std::string_view bytes) {
  const std::string_view line = bytes.substr(0, bytes.find('\n'));
  const std::size_t blank = line.find(' ');
  if (blank == std::string_view::npos || blank == 0 || blank % 4 != 0 || blank + 1 == line.size())
    return false;
  const auto all = [](std::string_view text, std::string_view letters) {
    return text.find_first_not_of(letters) == std::string_view::npos;
  };
  return all(line.substr(0, blank), "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=") &&
         all(line.substr(blank + 1), "0123456789\r");
}

}  // namespace

SentencePieceModel read_sentencepiece_model(std::string_view bytes, std::string_view origin) {
  if (is_tiktoken(bytes)) {
    throw ConfigurationError(fmt::format(
        "{} is not a SentencePiece model but tiktoken's list of words, as Llama 3's original files "
        "have it, which does not say how text is split and which tokens are added: put the "
        "tokenizer.json of the model's Hugging Face folder beside it",
        origin));
  }
  if (bytes.starts_with("version https://git-lfs")) {
    throw ConfigurationError(
        fmt::format("{} is a pointer of Git LFS, not the file itself: fetch it with 'git lfs pull'", origin));
  }
  SentencePieceModel model;
  Message message(bytes, origin);
  while (const auto field = message.next()) {
    if (field->id == 1 && field->has_bytes) model.pieces.push_back(read_piece(field->bytes, origin));
    if (field->id == 2 && field->has_bytes) read_trainer(field->bytes, origin, model);
    if (field->id == 3 && field->has_bytes) read_normalizer(field->bytes, origin, model);
  }
  if (model.pieces.empty()) message.fail("it has no pieces");
  std::unordered_set<std::string_view> texts;
  for (const SentencePieceModel::Piece& piece : model.pieces) {
    const auto token = &piece - model.pieces.data();
    if (piece.text.empty() || utf8_prefix(piece.text) != piece.text.size())
      message.fail(fmt::format("piece {} is empty or not UTF-8", token));
    if (!texts.insert(piece.text).second)
      message.fail(fmt::format("piece {} is there twice: '{}'", token, piece.text));
  }
  return model;
}

}  // namespace tranche::training
