#include "checkpoint/companions.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "checkpoint/digest.h"
#include "checkpoint/storage.h"
#include "tranche/core/error.h"

namespace tranche::checkpoint {

using detail::join_path;

const Companion* find_companion(const Companions& companions, std::string_view name) {
  const auto found = std::find_if(companions.begin(), companions.end(),
                                  [&](const Companion& companion) { return companion.name == name; });
  return found == companions.end() ? nullptr : &*found;
}

std::string problem_of_companion_name(std::string_view name) {
  const auto plain = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '-';
  };
  if (name.empty() || name.size() > 64) return "has no character, or more than 64";
  if (name.front() == '.') return "begins with a dot";
  if (!std::all_of(name.begin(), name.end(), plain)) return "is not of letters, digits, '.', '_' and '-'";
  return {};
}

std::int64_t bytes_of(const Companions& companions) {
  std::int64_t bytes = 0;
  for (const Companion& companion : companions) bytes += static_cast<std::int64_t>(companion.bytes.size());
  return bytes;
}

std::vector<FileRecord> write_companions(detail::FileSystem& files, const std::string& checkpoint,
                                         const Companions& companions) {
  std::vector<FileRecord> records;
  if (companions.empty()) return records;
  if (companions.size() > most_companions) {
    throw CheckpointError(
        fmt::format("{} files are to travel with the weights; {} can", companions.size(), most_companions));
  }
  const std::string folder = join_path(checkpoint, std::string(companion_folder));
  files.create_directories(folder);
  for (const Companion& companion : companions) {
    const auto bytes = static_cast<std::int64_t>(companion.bytes.size());
    if (const std::string problem = problem_of_companion_name(companion.name); !problem.empty())
      throw CheckpointError(
          fmt::format("the name '{}' of a file beside the weights {}", companion.name, problem));
    if (bytes > companion_limit) {
      throw CheckpointError(
          fmt::format("{} has {} bytes; a file that travels with the weights has at most {}", companion.name,
                      bytes, companion_limit));
    }
    const auto file = files.open(join_path(folder, companion.name), detail::OpenMode::create_or_truncate);
    file->write(0, companion.bytes.data(), bytes);
    file->sync();
    records.push_back(
        {companion.name, bytes, bytes, block_digests(std::as_bytes(std::span(companion.bytes)))});
  }
  files.sync_directory(folder);
  return records;
}

Companions read_companions(detail::FileSystem& files, const std::string& checkpoint,
                           const Manifest& manifest) {
  Companions companions;
  with_reason("cannot load from checkpoint " + checkpoint, [&] {
    for (const FileRecord& record : manifest.companions) {
      const std::string path = join_path(join_path(checkpoint, std::string(companion_folder)), record.name);
      Companion companion{record.name, files.read_file(path, companion_limit)};
      if (block_digests(std::as_bytes(std::span(companion.bytes))) != record.blocks)
        throw CheckpointError(path + " is damaged: it is not what was written");
      companions.push_back(std::move(companion));
    }
  });
  return companions;
}

}  // namespace tranche::checkpoint
