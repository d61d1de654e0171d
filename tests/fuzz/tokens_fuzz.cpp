// Token files in each of their formats.

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstring>

#include "tests/fuzz/fuzz_target.h"
#include "tranche/training/token_file.h"

namespace tranche::fuzz {

namespace {

using training::DataFormat;
using training::TokenFile;

constexpr std::array formats{DataFormat::automatic, DataFormat::text,   DataFormat::llmc,
                             DataFormat::nanogpt,   DataFormat::uint32, DataFormat::safetensors};

/// A nameless file that disappears with this object.
class NamelessFile {
 public:
  explicit NamelessFile(std::string_view text) : file_(::memfd_create("tokens", MFD_CLOEXEC)) {
    require(file_ >= 0 && ::write(file_, text.data(), text.size()) == static_cast<ssize_t>(text.size()),
            "a file in memory cannot be written");
  }
  ~NamelessFile() { ::close(file_); }
  NamelessFile(const NamelessFile&) = delete;
  NamelessFile& operator=(const NamelessFile&) = delete;
  std::string path() const { return "/proc/self/fd/" + std::to_string(file_); }

 private:
  int file_;
};

/// The first byte chooses the format and the vocabulary.
void read_tokens(std::string_view input) {
  const auto choice = static_cast<unsigned char>(input.empty() ? 0 : input.front());
  const NamelessFile file(input.substr(input.empty() ? 0 : 1));
  const TokenFile tokens(file.path(), formats[choice % formats.size()]);
  require(tokens.size() > 0, "a file of tokens has none");
  const std::int64_t vocabulary = (choice & 4) != 0 ? 256 : 50257;
  std::vector<std::int32_t> into(static_cast<std::size_t>(std::min<std::int64_t>(tokens.size(), 1000)));
  if (tokens.format() == DataFormat::text) {
    tokens.read_text(0, tokens.size(), [](std::span<const std::uint8_t>) {});
  }
  for (const std::int64_t end : tokens.document_ends()) {
    require(end > 0 && end <= tokens.size(), "a document ends outside of the file");
  }
  tokens.require_within(vocabulary);
  std::vector<std::uint8_t> learned(into.size());
  tokens.read_targets(tokens.size() - static_cast<std::int64_t>(into.size()), learned);
  tokens.read(tokens.size() - static_cast<std::int64_t>(into.size()), into, vocabulary);
}

std::vector<std::string> tokens_seeds() {
  const std::array<std::uint16_t, 5> numbers{1, 2, 255, 7, 50256};
  const std::string words(reinterpret_cast<const char*>(numbers.data()), sizeof numbers);
  std::array<std::int32_t, 256> header{20240520, 1, 5};
  const std::string llmc = std::string(reinterpret_cast<const char*>(header.data()), sizeof header) + words;
  header[0] = 20240801;
  header[1] = 7;
  const std::array<std::uint32_t, 5> wide{1, 2, 255, 7, 50256};
  const std::string wide_words(reinterpret_cast<const char*>(wide.data()), sizeof wide);
  const std::string wide_llmc =
      std::string(reinterpret_cast<const char*>(header.data()), sizeof header) + wide_words;
  const std::string table = R"({"document_ends":{"dtype":"I64","shape":[1],"data_offsets":[0,8]},)"
                            R"("tokens":{"dtype":"U16","shape":[5],"data_offsets":[8,18]},)"
                            R"("targets":{"dtype":"U8","shape":[5],"data_offsets":[18,23]}})";
  const std::array<std::int64_t, 1> ends{5};
  const auto length = static_cast<std::uint64_t>(table.size());
  const std::string documents = std::string(reinterpret_cast<const char*>(&length), 8) + table +
                                std::string(reinterpret_cast<const char*>(ends.data()), 8) + words +
                                "\1\1\1\1\1";
  return {std::string(1, '\x30') + wide_llmc,
          '\x0b' + documents,
          '\x0a' + wide_words,
          std::string(1, '\0') + llmc,
          '\1' + std::string("a text of some words"),
          '\2' + llmc,
          '\3' + words};
}

}  // namespace

Target tokens_target() {
  return {"tokens", read_tokens, tokens_seeds, {ExitStatus::configuration}};
}

}  // namespace tranche::fuzz
