#include "tranche/data/tokenize.h"

#include <fmt/format.h>
#include <glob.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "checkpoint/digest.h"
#include "core/text_file.h"
#include "data/token_parts.h"
#include "offload/file_system.h"
#include "tranche/core/error.h"

namespace tranche::data {

namespace {

/// A range of a file that one thread encodes.
struct Part {
  std::string input, file;  ///< file: of its tokens
  std::int64_t begin = 0, end = 0;
  bool lines = false;  ///< of JSON: those that begin in the range
};

[[noreturn]] void fail(const std::string& input, const std::string& why) {
  throw ConfigurationError(fmt::format("data file '{}' {}", input, why));
}

struct stat status_of(const std::string& input) {
  struct stat status {};
  if (::stat(input.c_str(), &status) != 0)
    fail(input, fmt::format("cannot be opened: {}", std::strerror(errno)));
  if (!S_ISREG(status.st_mode)) fail(input, "is not a file");
  if (status.st_size == 0) fail(input, "is empty");
  return status;
}

bool ends_with_any(std::string_view name, std::initializer_list<std::string_view> endings) {
  return std::any_of(endings.begin(), endings.end(),
                     [&](std::string_view each) { return name.ends_with(each); });
}

std::vector<Part> parts_of(const TokenizeOptions& options, const std::string& folder) {
  std::vector<Part> parts;
  for (const std::string& input : options.inputs) {
    const std::int64_t bytes = status_of(input).st_size;
    const bool lines = ends_with_any(input, {".jsonl", ".ndjson"});
    if (ends_with_any(input, {".bin", ".safetensors", ".gz", ".zst", ".parquet", ".json"})) {
      fail(input, "is neither text nor JSON lines (.jsonl)");
    }
    const std::int64_t step = lines ? options.part_bytes : bytes;
    for (std::int64_t begin = 0; begin < bytes; begin += step) {
      parts.push_back({input, fmt::format("{}/{:08}.safetensors", folder, parts.size()), begin,
                       std::min(bytes, begin + step), lines});
    }
  }
  return parts;
}

/// Everything that the tokens depend on.
std::string fingerprint_of(const TokenizeOptions& options) {
  nlohmann::ordered_json inputs = nlohmann::ordered_json::array();
  for (const std::string& input : options.inputs) {
    const struct stat status = status_of(input);
    const std::int64_t changed = std::int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec;
    inputs.push_back({{"file", input}, {"bytes", status.st_size}, {"changed", changed}});
  }
  const nlohmann::ordered_json all = {
      {"inputs", inputs},
      {"tokenizer", options.tokenizer_digest},
      {"template", checkpoint::to_hex(checkpoint::digest_of(fingerprint(options.chat)))},
      {"special", options.special},
      {"part_bytes", options.part_bytes}};
  return all.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

std::int64_t lines_before(const std::string& input, std::int64_t end) {
  std::ifstream file(input, std::ios::binary);
  std::int64_t lines = 0;
  for (std::int64_t at = 0; at < end && file; ++at) lines += file.get() == '\n' ? 1 : 0;
  return lines;
}

void encode_lines(const Tokenizer& tokenizer, const TokenizeOptions& options, const Part& part,
                  TokenDocuments& documents) {
  std::ifstream file(part.input, std::ios::binary);
  std::string line;
  std::int64_t at = part.begin;
  if (part.begin > 0) {  // a line that begins before the range is the part's before
    file.seekg(part.begin - 1);
    std::getline(file, line);
    at += static_cast<std::int64_t>(line.size());
  }
  while (at < part.end && std::getline(file, line)) {
    const std::int64_t begin = at;
    at += static_cast<std::int64_t>(line.size()) + 1;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    try {
      append_document(tokenizer, read_json_line(line, options.chat, "the line"), options.special, documents);
    } catch (const ConfigurationError&) {
      const std::int64_t number = lines_before(part.input, begin) + 1;
      (void)read_json_line(line, options.chat, fmt::format("data file '{}', line {}", part.input, number));
      throw;
    }
  }
  if (file.bad() || (!file.eof() && file.fail())) fail(part.input, "cannot be read");
}

TokenDocuments encode(const Tokenizer& tokenizer, const TokenizeOptions& options, const Part& part) {
  TokenDocuments documents;
  if (part.lines) {
    encode_lines(tokenizer, options, part, documents);
  } else {
    const Document whole{
        {{detail::read_text_file(part.input, "data file", detail::Pipes::refused, INT64_MAX), true}}, false};
    append_document(tokenizer, whole, options.special, documents);
  }
  return documents;
}

PartSizes sizes_of(const TokenDocuments& documents) {
  return {static_cast<std::int64_t>(documents.tokens.size()),
          static_cast<std::int64_t>(documents.ends.size()),
          std::count(documents.targets.begin(), documents.targets.end(), std::uint8_t{1})};
}

/// Takes the folder's parts where they are of the same call, and removes them otherwise.
void open_folder(const std::string& folder, const std::string& fingerprint) {
  detail::FileSystem& files = detail::posix_file_system();
  const std::string name = folder + "/inputs.json";
  if (files.exists(name) && files.read_file(name) == fingerprint) return;
  if (files.exists(folder) && !files.exists(name)) {
    for (const detail::DirectoryEntry& entry : files.list(folder)) {
      if (!entry.name.ends_with(".safetensors") && !detail::is_temporary_name(entry.name)) {
        throw ConfigurationError(fmt::format(
            "'{}' holds '{}', which is no part of this command; move it away", folder, entry.name));
      }
    }
  }
  files.remove_all(folder);
  files.create_directories(folder);
  files.replace_file(name, fingerprint);
}

}  // namespace

TokenizeSummary tokenize_files(const Tokenizer& tokenizer, const TokenizeOptions& options) {
  const bool llmc = options.output.ends_with(".bin");
  if (!llmc && !options.output.ends_with(".safetensors")) {
    throw ConfigurationError(
        fmt::format("'{}' ends neither in .safetensors nor in .bin (llm.c's)", options.output));
  }
  require_names(tokenizer, options.chat.built_in);
  const std::string folder = options.output + ".parts";
  const std::vector<Part> parts = parts_of(options, folder);
  open_folder(folder, fingerprint_of(options));

  TokenizeSummary summary;
  summary.parts = static_cast<std::int64_t>(parts.size());
  PartSizes sizes;
  std::mutex mutex;
  std::atomic<std::size_t> next = 0;
  std::size_t failed = parts.size();
  std::exception_ptr error;  // of the first part that failed
  const auto work = [&] {
    for (std::size_t i = next++; i < parts.size(); i = next++) {
      try {
        const bool there = detail::posix_file_system().exists(parts[i].file);
        const TokenDocuments documents =
            there ? read_part(parts[i].file) : encode(tokenizer, options, parts[i]);
        if (!there) write_part(parts[i].file, documents);
        const PartSizes own = sizes_of(documents);
        const std::lock_guard lock(mutex);
        sizes.tokens += own.tokens;
        sizes.documents += own.documents;
        sizes.targets += own.targets;
        summary.reused += there ? 1 : 0;
        if (options.progress) options.progress(parts[i].end - parts[i].begin);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (i < failed) error = std::current_exception();
        failed = std::min(failed, i);
        next = parts.size();
      }
    }
  };
  std::vector<std::thread> threads;
  for (int i = 1; i < options.threads; ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  if (error) std::rethrow_exception(error);

  if (sizes.tokens == 0) throw ConfigurationError("the data files hold no documents");
  if (llmc && sizes.targets < sizes.tokens) {
    throw ConfigurationError(
        fmt::format("'{}': llm.c's files cannot tell which tokens are learned, and of {} tokens {} "
                    "are not; write a .safetensors file",
                    options.output, sizes.tokens, sizes.tokens - sizes.targets));
  }
  std::vector<std::string> names;
  for (const Part& part : parts) names.push_back(part.file);
  const std::int64_t vocabulary = tokenizer.vocabulary();
  // U8 says that every byte is a token; other tokenizers of so few tokens number them differently.
  const bool bytes = vocabulary == 256 && options.tokenizer_digest.empty();
  const int width = bytes && !llmc ? 1 : vocabulary <= 65536 ? 2 : 4;
  (llmc ? join_as_llmc : join_as_safetensors)(names, sizes, width, options.output);
  detail::posix_file_system().remove_all(folder);
  summary.documents = sizes.documents;
  summary.tokens = sizes.tokens;
  summary.targets = sizes.targets;
  return summary;
}

std::string tokenizer_digest(const std::string& folder) {
  std::string digests;
  for (const char* name :
       {"tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json"}) {
    const std::string path = folder + "/" + name;
    if (!detail::posix_file_system().exists(path)) continue;
    digests += checkpoint::to_hex(checkpoint::digest_of(detail::read_text_file(path, "tokenizer file")));
  }
  return checkpoint::to_hex(checkpoint::digest_of(digests));
}

std::vector<std::string> expand_pattern(const std::string& pattern) {
  if (pattern.find_first_of("*?[") == std::string::npos || detail::posix_file_system().exists(pattern)) {
    return {pattern};
  }
  glob_t found{};
  const int status = ::glob(pattern.c_str(), GLOB_ERR, nullptr, &found);
  std::vector<std::string> names;
  for (std::size_t i = 0; status == 0 && i < found.gl_pathc; ++i) names.emplace_back(found.gl_pathv[i]);
  ::globfree(&found);
  if (names.empty()) throw ConfigurationError(fmt::format("no file matches '{}'", pattern));
  std::sort(names.begin(), names.end());  // whatever the locale
  return names;
}

}  // namespace tranche::data
