#include "tranche/training/tokenize.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <glob.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "checkpoint/digest.h"
#include "checkpoint/run_lease.h"
#include "core/closest_match.h"
#include "core/text_file.h"
#include "offload/file_system.h"
#include "training/file_content.h"
#include "training/token_parts.h"
#include "tranche/core/error.h"

namespace tranche::training {

namespace {

/// A file's state when the work began.
struct Input {
  std::string path;
  struct stat status {};
  bool lines = false;  ///< JSON lines
};

/// A range of a file that one thread encodes.
struct Part {
  const Input* input = nullptr;
  std::string file;  ///< of its tokens
  std::int64_t begin = 0, end = 0;
};

[[noreturn]] void fail(const std::string& input, const std::string& why) {
  throw ConfigurationError(fmt::format("data file '{}' {}", input, why));
}

struct stat status_of(const std::string& input) {
  struct stat status {};
  if (::stat(input.c_str(), &status) != 0)
    fail(input, fmt::format("cannot be opened: {}", std::strerror(errno)));
  if (S_ISDIR(status.st_mode)) {
    fail(input, fmt::format("is not a file but a folder; a pattern names its files, such as '{}'",
                            (std::filesystem::path(input) / "*.jsonl").string()));
  }
  if (!S_ISREG(status.st_mode)) fail(input, "is not a file");
  if (status.st_size == 0) fail(input, "is empty");
  return status;
}

std::int64_t changed_at(const struct stat& status) {
  return std::int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec;
}

/// Throws if the file has changed since the work began.
void require_unchanged(const Input& input) {
  struct stat now {};
  const bool there = ::stat(input.path.c_str(), &now) == 0;
  if (there && now.st_size == input.status.st_size && changed_at(now) == changed_at(input.status) &&
      now.st_ino == input.status.st_ino && now.st_dev == input.status.st_dev) {
    return;
  }
  const std::string how = !there                              ? "was removed"
                          : now.st_ino != input.status.st_ino ? "was replaced by another file"
                          : now.st_size != input.status.st_size
                              ? fmt::format("went from {} to {} bytes", input.status.st_size, now.st_size)
                              : "was written to";
  fail(input.path,
       how + " while it was read, so that its tokens would be a mixture; start again once it stays as it is");
}

/// The keys of a longer first line are not checked, because that would take memory in proportion.
constexpr std::size_t most_first_line = std::size_t{1} << 24;

/// The first line that is not blank, up to its first most_first_line bytes.
std::string first_line(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string line;
  for (char c = 0; line.size() < most_first_line && file.get(c);) {
    if (c == '\n' && line.find_first_not_of(" \t\r\n") != std::string::npos) break;
    line += c;
    if (line == byte_order_mark) line.clear();
  }
  return line;
}

/// Examines the beginning of each file, and reports kinds that its name does not show.
std::vector<Input> open_inputs(const TokenizeOptions& options) {
  std::vector<Input> inputs;
  const auto note = [&](const std::string& text) {
    if (options.note) options.note(text);
  };
  std::map<std::pair<dev_t, ino_t>, std::string> seen;
  for (const std::string& path : options.inputs) {
    Input& input = inputs.emplace_back(Input{path, status_of(path)});
    const auto [first, is_new] = seen.emplace(std::pair(input.status.st_dev, input.status.st_ino), path);
    if (!is_new)
      note(fmt::format("'{}' is the same file as '{}': its documents are written once more", path,
                       first->second));
    const std::string head = read_head("data file", path);
    input.lines =
        holds_json_lines("data file", path, head, input.status.st_size, options.format, "--data-format");
    if (input.lines && !is_named_as_json_lines(path)) {
      note(
          fmt::format("'{}' holds JSON lines, an object a line, each a document; with --data-format text the "
                      "whole file is one text",
                      path));
    }
    if (input.lines) {
      const std::string line = first_line(path);
      if (line.size() == most_first_line)
        note(fmt::format("'{}': keys of its first line, of more than 16 MiB, are not looked at", path));
      const std::vector<std::string> keys = unread_keys(line, options.chat);
      if (!keys.empty()) {
        note(fmt::format("'{}': keys of its first line that are not read: {}", path, fmt::join(keys, ", ")));
      }
    }
    if (!input.lines && is_named_as_json_lines(path))
      note(fmt::format("'{}' is taken as one text, as --data-format text says", path));
    if (!input.lines && head.starts_with(byte_order_mark))
      note(fmt::format("'{}' begins with a byte order mark, which is left out of its text", path));
  }
  return inputs;
}

std::vector<Part> parts_of(const TokenizeOptions& options, const std::vector<Input>& inputs,
                           const std::string& folder) {
  std::vector<Part> parts;
  for (const Input& input : inputs) {
    const std::int64_t bytes = input.status.st_size, step = input.lines ? options.part_bytes : bytes;
    for (std::int64_t begin = 0; begin < bytes; begin += step) {
      parts.push_back({&input, fmt::format("{}/{:08}.safetensors", folder, parts.size()), begin,
                       std::min(bytes, begin + step)});
    }
  }
  return parts;
}

/// Everything on which the tokens depend.
std::string fingerprint_of(const TokenizeOptions& options, const std::vector<Input>& inputs) {
  nlohmann::ordered_json files = nlohmann::ordered_json::array();
  for (const Input& input : inputs) {
    files.push_back({{"file", input.path},
                     {"bytes", input.status.st_size},
                     {"changed", changed_at(input.status)},
                     {"lines", input.lines}});
  }
  constexpr int version = 4;  // of the part files' format
  const nlohmann::ordered_json all = {
      {"version", version},
      {"inputs", files},
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
  const std::string& path = part.input->path;
  std::ifstream file(path, std::ios::binary);
  std::string line;
  std::int64_t at = part.begin;
  if (part.begin > 0) {  // a line that begins before the range belongs to the previous part
    file.seekg(part.begin - 1);
    std::getline(file, line);
    at += static_cast<std::int64_t>(line.size());
  }
  while (at < part.end && std::getline(file, line)) {
    const std::int64_t begin = at;
    at += static_cast<std::int64_t>(line.size()) + 1;
    if (begin == 0 && line.starts_with(byte_order_mark)) line.erase(0, byte_order_mark.size());
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    try {
      append_document(tokenizer, read_json_line(line, options.chat, "the line"), options.special, documents);
    } catch (const ConfigurationError&) {
      require_unchanged(*part.input);
      const std::int64_t number = lines_before(path, begin) + 1;
      try {
        (void)read_json_line(line, options.chat, fmt::format("data file '{}', line {}", path, number));
      } catch (const ConfigurationError& problem) {
        if (options.format != TextFormat::automatic || is_named_as_json_lines(path)) throw;
        throw ConfigurationError(
            problem.message() +
            "; the file begins as JSON lines do: --data-format text takes it as one text");
      }
      throw;
    }
  }
  if (file.eof() && !file.bad()) return;
  if (at >= part.end && file) return;
  require_unchanged(*part.input);
  fail(path, "cannot be read");
}

/// Reads the file as one document.
Document read_text(const Input& input) {
  Document document{{Segment{std::string(static_cast<std::size_t>(input.status.st_size), '\0'), true}},
                    false};
  std::string& text = document.segments.front().text;
  try {
    detail::posix_file_system()
        .open(input.path, detail::OpenMode::read)
        ->read(0, text.data(), input.status.st_size);
  } catch (const IoError& problem) {
    require_unchanged(input);
    fail(input.path, "cannot be read: " + problem.message());
  }
  if (text.starts_with(byte_order_mark)) text.erase(0, byte_order_mark.size());
  return document;
}

PartSizes encode(const Tokenizer& tokenizer, const TokenizeOptions& options, const Part& part) {
  TokenDocuments documents;
  if (part.input->lines) {
    encode_lines(tokenizer, options, part, documents);
  } else {
    append_document(tokenizer, read_text(*part.input), options.special, documents);
  }
  require_unchanged(*part.input);
  return write_part(part.file, documents);
}

/// Removes what an ended process left of the output and its parts; no other process writes them now.
void remove_leftovers(const TokenizeOptions& options, const std::string& folder) {
  detail::FileSystem& files = detail::posix_file_system();
  const auto remove = [&](const std::string& in, std::string_view name) {
    for (const detail::DirectoryEntry& entry : files.list(in)) {
      if (entry.is_directory || !detail::is_temporary_name(entry.name)) continue;
      const std::string of = entry.name.substr(0, entry.name.rfind(".new-"));
      if (!name.empty() && of != name) continue;
      const std::string path = detail::join_path(in, entry.name);
      files.remove(path);
      if (options.note) options.note(fmt::format("removed '{}', which a process that has ended left", path));
    }
  };
  remove(detail::parent_path(options.output), std::filesystem::path(options.output).filename().string());
  remove(folder, "");
}

/// Keeps the folder's parts if they are from an equal call, and removes them otherwise.
void open_folder(const std::string& folder, const std::string& fingerprint,
                 const std::function<void(const std::string&)>& note) {
  detail::FileSystem& files = detail::posix_file_system();
  const std::string name = folder + "/inputs.json";
  if (files.exists(name) && files.read_file(name) == fingerprint) return;
  const bool own = files.exists(name);
  for (const detail::DirectoryEntry& entry : files.list(folder)) {
    if (entry.name == checkpoint::lease_name) continue;
    if (!own && !entry.name.ends_with(".safetensors")) {
      throw ConfigurationError(
          fmt::format("'{}' holds '{}', which is no part of this command; move it away", folder, entry.name));
    }
  }
  if (own) {
    files.remove(name);  // first, so that the remaining parts are unclaimed
    if (note) note(fmt::format("removed the parts in '{}', which are of another command", folder));
  }
  for (const detail::DirectoryEntry& entry : files.list(folder)) {
    if (entry.name != checkpoint::lease_name) files.remove_all(detail::join_path(folder, entry.name));
  }
  files.replace_file(name, fingerprint);
}

/// Takes the folder of the output's parts for this process alone.
checkpoint::RunLease take_folder(const TokenizeOptions& options, const std::string& folder) {
  detail::posix_file_system().create_directories(folder);
  checkpoint::LeaseOptions lease_options;
  lease_options.say = options.note;
  lease_options.advice = fmt::format(
      "two processes cannot write '{}' at the same time; wait until that one ends, or choose another "
      "--out",
      options.output);
  try {
    checkpoint::RunLease lease = checkpoint::RunLease::take(folder, lease_options);
    lease.require_held();  // a process that just ended may have removed the folder
    return lease;
  } catch (const CheckpointError& problem) {
    throw ConfigurationError(problem.message());
  }
}

/// Encodes the missing parts on several threads, and counts all of them.
PartSizes encode_parts(const Tokenizer& tokenizer, const TokenizeOptions& options,
                       const std::vector<Part>& parts, std::int64_t& reused) {
  PartSizes sizes;
  std::mutex mutex;
  std::atomic<std::size_t> next = 0;
  std::size_t failed = parts.size();
  std::exception_ptr error;  // from the first part that failed
  const auto work = [&] {
    for (std::size_t i = next++; i < parts.size(); i = next++) {
      try {
        const bool there = detail::posix_file_system().exists(parts[i].file);
        const PartSizes own = there ? read_part_sizes(parts[i].file) : encode(tokenizer, options, parts[i]);
        const std::lock_guard lock(mutex);
        sizes += own;
        reused += there ? 1 : 0;
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
  return sizes;
}

void require_conversations(const TokenizeOptions& options, std::int64_t conversations) {
  if (!options.needs_conversations || conversations > 0) return;
  throw ConfigurationError(fmt::format(
      "--chat-template says how conversations are written, but the data hold none: no line of '{}'{} has "
      "\"messages\"; "
      "leave the flag out, or name JSON lines with conversations",
      options.inputs.front(),
      options.inputs.size() > 1 ? fmt::format(" and {} more files", options.inputs.size() - 1) : ""));
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
  const std::vector<Input> inputs = open_inputs(options);
  TokenizeSummary summary;
  for (const Input& input : inputs) ++(input.lines ? summary.json_lines : summary.texts);
  if (summary.json_lines == 0) require_conversations(options, 0);  // checked before all the work
  const std::vector<Part> parts = parts_of(options, inputs, folder);
  std::optional<checkpoint::RunLease> lease(take_folder(options, folder));
  remove_leftovers(options, folder);
  open_folder(folder, fingerprint_of(options, inputs), options.note);

  summary.parts = static_cast<std::int64_t>(parts.size());
  const PartSizes sizes = encode_parts(tokenizer, options, parts, summary.reused);
  for (const Input& input : inputs) require_unchanged(input);
  if (sizes.tokens == 0) throw ConfigurationError("the data files hold no documents");
  require_conversations(options, sizes.conversations);
  if (sizes.empty > 0 && options.note) {
    options.note(fmt::format("documents without a token, which are left out: {} of {}", sizes.empty,
                             sizes.empty + sizes.documents));
  }
  if (sizes.unlearned > 0 && options.note) {
    options.note(
        fmt::format("documents of which no token is learned: {} of {}", sizes.unlearned, sizes.documents));
  }
  if (sizes.not_utf8 > 0 && options.note && !options.tokenizer_digest.empty()) {
    options.note(fmt::format(
        "texts that are not in UTF-8, which the tokenizer expects: {} of {} documents; another "
        "encoding, such as Latin-1, is converted by: iconv -f LATIN1 -t UTF-8 FILE > FILE.utf8.txt",
        sizes.not_utf8, sizes.documents));
  }
  if (llmc && sizes.targets < sizes.tokens) {
    throw ConfigurationError(
        fmt::format("'{}': llm.c's files cannot tell which tokens are learned, and of {} tokens {} "
                    "are not; write a .safetensors file",
                    options.output, sizes.tokens, sizes.tokens - sizes.targets));
  }
  std::vector<std::string> names;
  for (const Part& part : parts) names.push_back(part.file);
  const std::int64_t vocabulary = tokenizer.vocabulary();
  // U8 means that every byte is a token; other tokenizers with as few tokens number them differently.
  const bool bytes = vocabulary == 256 && options.tokenizer_digest.empty();
  const int width = bytes && !llmc ? 1 : vocabulary <= 65536 ? 2 : 4;
  TokenizerStamp made_by;
  if (!options.tokenizer_digest.empty()) made_by = {vocabulary_digest(tokenizer), options.tokenizer_digest};
  lease->require_held();
  if (llmc) {
    join_as_llmc(names, sizes, width, options.output);
  } else {
    join_as_safetensors(names, sizes, width, made_by, options.output);
  }
  // The result is complete. On NFS an open file keeps its folder, so the lease ends before the folder is
  // removed.
  for (const std::string& name : names) detail::posix_file_system().remove_all(name);
  lease.reset();
  try {
    detail::posix_file_system().remove_all(folder);
  } catch (const IoError& problem) {
    if (options.note) options.note(fmt::format("{} stays: {}", folder, problem.message()));
  }
  summary.documents = sizes.documents;
  summary.tokens = sizes.tokens;
  summary.targets = sizes.targets;
  summary.conversations = sizes.conversations;
  return summary;
}

TextFormat parse_text_format(std::string_view name, std::string_view flag) {
  constexpr std::array<std::string_view, 3> names{"auto", "text", "jsonl"};
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (names[i] == name) return static_cast<TextFormat>(i);
  }
  const std::string closest = detail::closest_match(name, {names.begin(), names.end()});
  throw ConfigurationError(fmt::format("{} '{}' is not one of auto, text, jsonl{}", flag, name,
                                       closest.empty() ? "" : "; did you mean " + closest + "?"));
}

std::string tokenizer_digest(const std::string& folder) {
  std::string digests;
  for (const char* name :
       {"tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json",
        "special_tokens_map.json", "added_tokens.json", "config.json"}) {
    const std::string path = folder + "/" + name;
    if (!detail::posix_file_system().exists(path)) continue;
    digests += checkpoint::to_hex(checkpoint::digest_of(detail::read_text_file(path, "tokenizer file")));
  }
  return checkpoint::to_hex(checkpoint::digest_of(digests));
}

std::vector<std::string> files_of_pattern(const std::string& pattern) {
  glob_t found{};
  const int status = ::glob(pattern.c_str(), GLOB_ERR, nullptr, &found);
  std::vector<std::string> names;
  for (std::size_t i = 0; status == 0 && i < found.gl_pathc; ++i) names.emplace_back(found.gl_pathv[i]);
  ::globfree(&found);
  std::sort(names.begin(), names.end());  // in an order independent of the locale
  return names;
}

std::vector<std::string> expand_pattern(const std::string& pattern) {
  if (pattern.find_first_of("*?[") == std::string::npos || detail::posix_file_system().exists(pattern)) {
    return {pattern};
  }
  std::vector<std::string> names = files_of_pattern(pattern);
  if (names.empty()) throw ConfigurationError(fmt::format("no file matches '{}'", pattern));
  return names;
}

}  // namespace tranche::training
