#include "data/token_parts.h"

#include <fmt/format.h>

#include <array>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>

#include "checkpoint/safetensors.h"
#include "offload/file_system.h"
#include "tranche/core/error.h"

namespace tranche::data {

namespace {

using Json = nlohmann::ordered_json;

/// A file that has its name once it is whole and durable.
class NewFile {
 public:
  explicit NewFile(const std::string& path)
      : path_(path),
        temporary_(detail::temporary_name(path)),
        file_(detail::posix_file_system().open(temporary_, detail::OpenMode::create_new)) {}
  template <typename Value>
  void write(std::span<const Value> values) {
    const auto bytes = static_cast<std::int64_t>(values.size_bytes());
    file_->write(at_, values.data(), bytes);
    at_ += bytes;
  }
  void finish() {
    file_->sync();
    file_.reset();
    detail::posix_file_system().rename(temporary_, path_);
    detail::posix_file_system().sync_directory(detail::parent_path(path_));
  }

 private:
  std::string path_, temporary_;
  std::unique_ptr<detail::File> file_;
  std::int64_t at_ = 0;
};

/// The header of a safetensors file, padded to 8 bytes.
std::string header_of(const PartSizes& sizes, const char* token_type, int width, bool targets) {
  Json header = Json::object();
  std::int64_t at = 0;
  const auto add = [&](const char* name, const char* type, std::int64_t count, std::int64_t bytes) {
    header[name] = {{"dtype", type}, {"shape", {count}}, {"data_offsets", {at, at + count * bytes}}};
    at += count * bytes;
  };
  add("document_ends", "I64", sizes.documents, 8);
  add("tokens", token_type, sizes.tokens, width);
  if (targets) add("targets", "U8", sizes.tokens, 1);
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const auto length = static_cast<std::uint64_t>(text.size());
  return std::string(reinterpret_cast<const char*>(&length), 8) + text;
}

template <typename Token>
void write_tokens(NewFile& file, const std::vector<std::int32_t>& tokens) {
  const std::vector<Token> narrow(tokens.begin(), tokens.end());
  file.write(std::span<const Token>(narrow));
}

void write_tokens(NewFile& file, const std::vector<std::int32_t>& tokens, int width) {
  if (width == 1) write_tokens<std::uint8_t>(file, tokens);
  if (width == 2) write_tokens<std::uint16_t>(file, tokens);
  if (width == 4) write_tokens<std::uint32_t>(file, tokens);
}

}  // namespace

void write_part(const std::string& path, const TokenDocuments& documents) {
  NewFile file(path);
  const PartSizes sizes{static_cast<std::int64_t>(documents.tokens.size()),
                        static_cast<std::int64_t>(documents.ends.size()), 0};
  file.write(std::span<const char>(header_of(sizes, "U32", 4, true)));
  file.write(std::span<const std::int64_t>(documents.ends));
  write_tokens(file, documents.tokens, 4);
  file.write(std::span<const std::uint8_t>(documents.targets));
  file.finish();
}

TokenDocuments read_part(const std::string& path) {
  TokenDocuments documents;
  try {
    const checkpoint::SafetensorsFolder folder(detail::posix_file_system(), path);
    const auto file = detail::posix_file_system().open(path, detail::OpenMode::read);
    const auto read = [&](const char* name, const char* type, auto& values) {
      const checkpoint::SafeTensor* tensor = folder.find(name);
      if (tensor == nullptr || tensor->dtype != type)
        throw ConfigurationError("it is no part of `tranche tokenize`");
      values.resize(static_cast<std::size_t>(tensor->elements));
      if (!values.empty()) file->read(tensor->begin, values.data(), tensor->end - tensor->begin);
    };
    read("document_ends", "I64", documents.ends);
    read("tokens", "U32", documents.tokens);
    read("targets", "U8", documents.targets);
  } catch (const Error& problem) {
    throw ConfigurationError(
        fmt::format("'{}' cannot be read: {}; remove its folder and start again", path, problem.message()));
  }
  return documents;
}

void join_as_safetensors(const std::vector<std::string>& parts, const PartSizes& sizes, int width,
                         const std::string& path) {
  NewFile file(path);
  const bool masked = sizes.targets < sizes.tokens;
  file.write(std::span<const char>(header_of(sizes,
                                             width == 1   ? "U8"
                                             : width == 2 ? "U16"
                                                          : "U32",
                                             width, masked)));
  std::int64_t before = 0;
  for (const std::string& part : parts) {
    TokenDocuments documents = read_part(part);
    for (std::int64_t& end : documents.ends) end += before;
    file.write(std::span<const std::int64_t>(documents.ends));
    before += static_cast<std::int64_t>(documents.tokens.size());
  }
  for (const std::string& part : parts) write_tokens(file, read_part(part).tokens, width);
  for (const std::string& part : parts) {
    if (masked) file.write(std::span<const std::uint8_t>(read_part(part).targets));
  }
  file.finish();
}

void join_as_llmc(const std::vector<std::string>& parts, const PartSizes& sizes, int width,
                  const std::string& path) {
  if (sizes.tokens > INT32_MAX) {
    throw ConfigurationError(
        fmt::format("'{}': {} tokens are more than llm.c's header can count; write a "
                    ".safetensors file",
                    path, sizes.tokens));
  }
  std::array<std::int32_t, 256> header{};
  header[0] = width == 2 ? 20240520 : 20240801;
  header[1] = width == 2 ? 1 : 7;
  header[2] = static_cast<std::int32_t>(sizes.tokens);
  NewFile file(path);
  file.write(std::span<const std::int32_t>(header));
  for (const std::string& part : parts) write_tokens(file, read_part(part).tokens, width);
  file.finish();
}

}  // namespace tranche::data
