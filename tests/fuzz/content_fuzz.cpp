// Detects the kind of a data file from its first bytes.

#include "tests/fuzz/fuzz_target.h"
#include "training/file_content.h"

namespace tranche::fuzz {

namespace {

/// The input is a name and the bytes of the file.
void read_content(std::string_view input) {
  const auto parts = split(input, 2);
  const auto bytes = static_cast<std::int64_t>(parts[1].size());
  const training::FileContent content = training::content_of(parts[0], parts[1], bytes);
  const bool other = content.kind == training::FileContent::Kind::other;
  require(other == !content.what.empty() && other == !content.remedy.empty(),
          "a file is refused without a reason, or has one and is not");
  const training::FileContent again = training::content_of(parts[0], parts[1], bytes);
  require(again.kind == content.kind && again.what == content.what, "a file is of two kinds");
  const bool lines = training::holds_json_lines("file", std::string(parts[0]), parts[1], bytes,
                                                training::TextFormat::automatic, "--flag");
  require(lines == (content.kind == training::FileContent::Kind::json_lines),
          "JSON lines are told in two ways");
}

std::vector<std::string> content_seeds() {
  return {join({"a.txt", "words"}),
          join({"a.jsonl", "{\"text\": \"a \\\" b\"}\r\n{\"text\": [1, {\"b\": null}]}\n"}),
          join({"a.json", "[\n {\"messages\": [{\"role\": \"user\"}]}]"}),
          join({"a.txt", std::string("\xff\xfe") + std::string("a\0b\0c\0d\0e\0", 10)}),
          join({"a.bin", std::string("\x1f\x8b\x08\0\0\0\0\0", 8)}),
          join({"a.gz", std::string("PK\x03\x04", 4) + std::string(26, '\0') + "archive/data.pkl"}),
          join({"a.safetensors", std::string("\x0e\0\0\0\0\0\0\0", 8) + "{\"tokens\": {}}"}),
          join({"a", std::string("\x80\x04\x95\4\0\0\0\0\0\0\0abcdef", 17)})};
}

}  // namespace

Target content_target() {
  return {"content", read_content, content_seeds, {ExitStatus::configuration}};
}

}  // namespace tranche::fuzz
