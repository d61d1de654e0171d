#pragma once
/// Files in memory: texts at offsets within any number of zeros, for readers that take a FileSystem.

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "offload/file_system.h"

namespace tranche::fuzz {

/// A read-only file system. Folders exist because of the names of the files in them.
class MemoryFiles : public detail::FileSystem {
 public:
  /// Zeros with texts at their offsets.
  struct Content {
    std::int64_t bytes = 0;
    std::vector<std::pair<std::int64_t, std::string>> texts = {};
  };

  void add(const std::string& path, Content content) { contents_[path] = std::move(content); }
  void add(const std::string& path, std::string_view text) {
    add(path, {static_cast<std::int64_t>(text.size()), {{0, std::string(text)}}});
  }

  std::unique_ptr<detail::File> open(const std::string& path, detail::OpenMode mode,
                                     detail::Caching caching) override;
  std::vector<detail::DirectoryEntry> list(const std::string& path) override;
  std::optional<detail::FileStatus> status(const std::string& path) override;
  void rename(const std::string& from, const std::string& to) override;
  void remove(const std::string& path) override;
  bool create_directory(const std::string& path) override;
  detail::SpaceInfo space(const std::string& path) override;
  void sync_directory(const std::string& path) override;

 private:
  std::map<std::string, Content> contents_;
};

}  // namespace tranche::fuzz
