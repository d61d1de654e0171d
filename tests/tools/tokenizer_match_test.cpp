#include "tools/train/tokenizer_match.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <filesystem>

#include "tests/tools/temporary.h"
#include "tranche/training/tokenize.h"

namespace tranche::tools {
namespace {

using test::TemporaryFolder;
using testing::ElementsAre;
using testing::IsEmpty;

/// Writes a tokenizer whose tokens are the bytes, two of them with swapped numbers if `swapped`.
std::string write_tokenizer(const TemporaryFolder& folder, const std::string& name, bool swapped,
                            const std::string& merges = "#version: 0.2\n") {
  std::string json;
  int next = 256;
  for (int byte = 0; byte < 256; ++byte) {
    const bool visible = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
    const int number = swapped && (byte == 'a' || byte == 'b') ? 'a' + 'b' - byte : byte;
    json += fmt::format("{}\"\\u{:04x}\":{}", byte == 0 ? "{" : ",", visible ? byte : next++, number);
  }
  std::filesystem::create_directories(folder.path(name));
  folder.write(name + "/vocab.json", json + "}");
  folder.write(name + "/merges.txt", merges);
  return folder.path(name);
}

TEST(TokenizerMatch, TokensOfAnotherTokenizerAreSaid) {
  const TemporaryFolder folder;
  const std::string own = write_tokenizer(folder, "own", false),
                    other = write_tokenizer(folder, "other", true),
                    again = write_tokenizer(folder, "again", false, "#version: 0.1\n"),
                    text = folder.write("t.txt", test::some_text(300));
  const auto tokens = [&](const std::string& name, const std::string& tokenizer) {
    training::TokenizeOptions how;
    how.inputs = {text};
    how.output = folder.path(name);
    if (tokenizer.empty()) {
      (void)training::tokenize_files(*training::make_byte_tokenizer(), how);
    } else {
      how.tokenizer_digest = training::tokenizer_digest(tokenizer);
      (void)training::tokenize_files(*training::load_tokenizer(tokenizer), how);
    }
    return training::TokenFile(how.output);
  };
  const training::TokenFile a = tokens("a.safetensors", own), b = tokens("b.safetensors", other),
                            unnamed = tokens("u.safetensors", "");
  const auto line = [](const training::TokenFile& file, const std::string& whose) {
    return "the tokens of '" + file.path() + "' were made with another tokenizer than " + whose +
           ": the same numbers mean other text";
  };
  EXPECT_THAT(notes_on_tokenizers({&a}, {folder.path("none"), own}), IsEmpty());
  EXPECT_THAT(notes_on_tokenizers({&a}, {again}), IsEmpty()) << "other files, the same tokens";
  EXPECT_THAT(notes_on_tokenizers({&a, &unnamed, &b}, {own, other}),
              ElementsAre(line(b, "the model's in '" + own + "'")));
  EXPECT_THAT(notes_on_tokenizers({&a, &b}, {}), ElementsAre(line(b, "that of '" + a.path() + "'")));
  folder.write("again/vocab.json", "[]");
  EXPECT_THAT(notes_on_tokenizers({&a, &b}, {again}), ElementsAre(line(b, "that of '" + a.path() + "'")))
      << "a tokenizer that cannot be read";
  EXPECT_THAT(notes_on_tokenizers({&unnamed}, {other}), IsEmpty());

  const auto given = training::load_tokenizer(other);
  EXPECT_EQ(note_on_tokenizer(*given, other, own), "the tokenizer of --tokenizer '" + other +
                                                       "' has other tokens than the model's in '" + own +
                                                       "': the same numbers mean other text");
  EXPECT_EQ(note_on_tokenizer(*given, other, other), "");
  EXPECT_EQ(note_on_tokenizer(*given, other, again), "") << "which cannot be read";
  EXPECT_EQ(note_on_tokenizer(*given, other, folder.path("none")), "");
}

}  // namespace
}  // namespace tranche::tools
