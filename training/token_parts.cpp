#include "training/token_parts.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>

#include "checkpoint/safetensors.h"
#include "offload/file_system.h"
#include "tranche/core/error.h"

namespace tranche::training {

namespace {

using Json = nlohmann::ordered_json;

/// The number of values copied at a time.
constexpr std::int64_t copied_values = 1 << 16;

/// A file that gets its name once it is complete and durable. Destruction before that removes it.
class NewFile {
 public:
  explicit NewFile(const std::string& path)
      : path_(path),
        temporary_(detail::temporary_name(path)),
        file_(detail::posix_file_system().open(temporary_, detail::OpenMode::create_new)) {}
  ~NewFile() {
    if (finished_) return;
    file_.reset();
    try {
      detail::posix_file_system().remove(temporary_);
    } catch (const IoError&) {  // the next call removes it
    }
  }
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

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
    finished_ = true;
    detail::posix_file_system().sync_directory(detail::parent_path(path_));
  }

 private:
  std::string path_, temporary_;
  std::unique_ptr<detail::File> file_;
  std::int64_t at_ = 0;
  bool finished_ = false;
};

/// A part that is read piece by piece. Throws ConfigurationError naming the file.
class PartFile {
 public:
  explicit PartFile(const std::string& path) : path_(path) {
    guarded([&] {
      const checkpoint::SafetensorsFolder folder(detail::posix_file_system(), path);
      const auto find = [&](const char* name, const char* type) {
        const checkpoint::SafeTensor* tensor = folder.find(name);
        if (tensor == nullptr || tensor->dtype != type)
          throw ConfigurationError("it is no part of `tranche tokenize`");
        return *tensor;
      };
      ends_ = find("document_ends", "I64");
      tokens_ = find("tokens", "U32");
      targets_ = find("targets", "U8");
      counts_ = find("counts", "I64");
      if (targets_.elements != tokens_.elements || counts_.elements != 4)
        throw ConfigurationError("it is no part of `tranche tokenize`");
      file_ = detail::posix_file_system().open(path, detail::OpenMode::read);
    });
  }
  /// These call `visit` with the values, some at a time.
  template <typename Visit>
  void ends(const Visit& visit) const {
    values<std::int64_t>(ends_, visit);
  }
  template <typename Visit>
  void tokens(const Visit& visit) const {
    values<std::uint32_t>(tokens_, visit);
  }
  template <typename Visit>
  void targets(const Visit& visit) const {
    values<std::uint8_t>(targets_, visit);
  }
  PartSizes sizes() const {
    PartSizes sizes{tokens_.elements, ends_.elements};
    targets([&](std::span<const std::uint8_t> some) {
      sizes.targets += std::count(some.begin(), some.end(), std::uint8_t{1});
    });
    values<std::int64_t>(counts_, [&](std::span<const std::int64_t> counts) {
      sizes.conversations = counts[0];
      sizes.empty = counts[1];
      sizes.unlearned = counts[2];
      sizes.not_utf8 = counts[3];
    });
    return sizes;
  }

 private:
  template <typename Call>
  void guarded(const Call& call) const {
    try {
      call();
    } catch (const Error& problem) {
      throw ConfigurationError(fmt::format("'{}' cannot be read: {}; remove its folder and start again",
                                           path_, problem.message()));
    }
  }
  template <typename Value, typename Visit>
  void values(const checkpoint::SafeTensor& tensor, const Visit& visit) const {
    std::vector<Value> some;
    for (std::int64_t at = 0; at < tensor.elements; at += copied_values) {
      some.resize(static_cast<std::size_t>(std::min(copied_values, tensor.elements - at)));
      const auto size = static_cast<std::int64_t>(sizeof(Value));
      guarded([&] {
        file_->read(tensor.begin + at * size, some.data(), static_cast<std::int64_t>(some.size()) * size);
      });
      visit(std::span<const Value>(some));
    }
  }

  std::string path_;
  checkpoint::SafeTensor ends_, tokens_, targets_, counts_;
  std::unique_ptr<detail::File> file_;
};

/// The header of a safetensors file, padded to 8 bytes.
std::string header_of(const PartSizes& sizes, const char* token_type, int width, bool targets, bool part,
                      const TokenizerStamp& made_by = {}) {
  Json header = Json::object();
  if (!made_by.vocabulary.empty()) {
    header["__metadata__"] = {{stamp_key, made_by.vocabulary}, {stamp_files_key, made_by.files}};
  }
  std::int64_t at = 0;
  const auto add = [&](const char* name, const char* type, std::int64_t count, std::int64_t bytes) {
    header[name] = {{"dtype", type}, {"shape", {count}}, {"data_offsets", {at, at + count * bytes}}};
    at += count * bytes;
  };
  if (part) add("counts", "I64", 4, 8);
  add("document_ends", "I64", sizes.documents, 8);
  add("tokens", token_type, sizes.tokens, width);
  if (targets) add("targets", "U8", sizes.tokens, 1);
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const auto length = static_cast<std::uint64_t>(text.size());
  return std::string(reinterpret_cast<const char*>(&length), 8) + text;
}

template <typename Token>
void write_as(NewFile& file, std::span<const std::uint32_t> tokens) {
  const std::vector<Token> narrow(tokens.begin(), tokens.end());
  file.write(std::span<const Token>(narrow));
}

void write_tokens(NewFile& file, const std::vector<std::string>& parts, int width) {
  for (const std::string& part : parts) {
    PartFile(part).tokens([&](std::span<const std::uint32_t> tokens) {
      if (width == 1) write_as<std::uint8_t>(file, tokens);
      if (width == 2) write_as<std::uint16_t>(file, tokens);
      if (width == 4) file.write(tokens);
    });
  }
}

/// Throws unless the parts are unchanged since they were counted.
void require_sizes(const std::vector<std::string>& parts, const PartSizes& sizes) {
  PartSizes found;
  for (const std::string& part : parts) found += read_part_sizes(part);
  if (found == sizes) return;
  throw ConfigurationError(
      fmt::format("the parts beside '{}' hold {} tokens of {} documents, but {} tokens of {} documents were "
                  "written there: "
                  "something else wrote to them; remove their folder and start again",
                  parts.front(), found.tokens, found.documents, sizes.tokens, sizes.documents));
}

}  // namespace

PartSizes& PartSizes::operator+=(const PartSizes& other) {
  tokens += other.tokens;
  documents += other.documents;
  targets += other.targets;
  conversations += other.conversations;
  empty += other.empty;
  unlearned += other.unlearned;
  not_utf8 += other.not_utf8;
  return *this;
}

PartSizes write_part(const std::string& path, const TokenDocuments& documents) {
  NewFile file(path);
  const PartSizes sizes{static_cast<std::int64_t>(documents.tokens.size()),
                        static_cast<std::int64_t>(documents.ends.size()),
                        std::count(documents.targets.begin(), documents.targets.end(), std::uint8_t{1}),
                        documents.conversations,
                        documents.empty,
                        documents.unlearned,
                        documents.not_utf8};
  file.write(std::span<const char>(header_of(sizes, "U32", 4, true, true)));
  const std::array counts{sizes.conversations, sizes.empty, sizes.unlearned, sizes.not_utf8};
  file.write(std::span<const std::int64_t>(counts));
  file.write(std::span<const std::int64_t>(documents.ends));
  file.write(std::span<const std::int32_t>(documents.tokens));  // no token is negative
  file.write(std::span<const std::uint8_t>(documents.targets));
  file.finish();
  return sizes;
}

PartSizes read_part_sizes(const std::string& path) {
  return PartFile(path).sizes();
}

void join_as_safetensors(const std::vector<std::string>& parts, const PartSizes& sizes, int width,
                         const TokenizerStamp& made_by, const std::string& path) {
  require_sizes(parts, sizes);
  NewFile file(path);
  const bool masked = sizes.targets < sizes.tokens;
  const char* const type = width == 1 ? "U8" : width == 2 ? "U16" : "U32";
  file.write(std::span<const char>(header_of(sizes, type, width, masked, false, made_by)));
  std::int64_t before = 0;
  for (const std::string& part : parts) {
    std::int64_t last = 0;
    PartFile(part).ends([&](std::span<const std::int64_t> ends) {
      std::vector<std::int64_t> moved(ends.begin(), ends.end());
      for (std::int64_t& end : moved) end += before;
      last = moved.back();
      file.write(std::span<const std::int64_t>(moved));
    });
    before = std::max(before, last);
  }
  write_tokens(file, parts, width);
  for (const std::string& part : parts) {
    if (masked) PartFile(part).targets([&](std::span<const std::uint8_t> targets) { file.write(targets); });
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
  require_sizes(parts, sizes);
  std::array<std::int32_t, 256> header{};
  header[0] = width == 2 ? 20240520 : 20240801;
  header[1] = width == 2 ? 1 : 7;
  header[2] = static_cast<std::int32_t>(sizes.tokens);
  NewFile file(path);
  file.write(std::span<const std::int32_t>(header));
  write_tokens(file, parts, width);
  file.finish();
}

}  // namespace tranche::training
