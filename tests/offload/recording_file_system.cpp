#include "tests/offload/recording_file_system.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <utility>

#include "tranche/core/error.h"

namespace tranche::testing {

using detail::File;
using detail::join_path;
using detail::OpenMode;

namespace {

using Kind = RecordedOperation::Kind;

class RecordingFile : public File {
 public:
  RecordingFile(RecordingFileSystem& system, std::unique_ptr<File> file, std::uint64_t id, std::string name)
      : File(file->path()), system_(system), file_(std::move(file)), id_(id), name_(std::move(name)) {}

  std::int64_t size() const override { return file_->size(); }
  void preallocate(std::int64_t bytes) override {
    RecordedOperation operation = begin(Kind::preallocate);
    file_->preallocate(bytes);
    operation.bytes = bytes;
    system_.record(std::move(operation));
  }
  void read(std::int64_t offset, void* memory, std::int64_t bytes) override {
    file_->read(offset, memory, bytes);
  }
  void write(std::int64_t offset, const void* memory, std::int64_t bytes) override {
    RecordedOperation operation = begin(Kind::write);
    file_->write(offset, memory, bytes);
    const auto* first = static_cast<const std::byte*>(memory);
    operation.offset = offset;
    operation.bytes = bytes;
    operation.data.assign(first, first + bytes);
    system_.record(std::move(operation));
  }
  void truncate(std::int64_t bytes) override {
    RecordedOperation operation = begin(Kind::truncate);
    file_->truncate(bytes);
    operation.bytes = bytes;
    system_.record(std::move(operation));
  }
  void sync() override {
    RecordedOperation operation = begin(Kind::sync);
    file_->sync();
    system_.record(std::move(operation));
  }
  bool direct() const override { return file_->direct(); }
  std::string direct_refusal() const override { return file_->direct_refusal(); }

 private:
  RecordedOperation begin(Kind kind) const {
    RecordedOperation operation;
    operation.kind = kind;
    operation.started = system_.begin();
    operation.object = id_;
    operation.path = name_;
    return operation;
  }
  RecordingFileSystem& system_;
  std::unique_ptr<File> file_;
  std::uint64_t id_;
  std::string name_;
};

std::vector<std::byte> bytes_of(const std::string& text) {
  const auto* first = reinterpret_cast<const std::byte*>(text.data());
  return {first, first + text.size()};
}

std::string last_name(const std::string& path) {
  return path.substr(path.find_last_of('/') + 1);
}

}  // namespace

RecordingFileSystem::RecordingFileSystem(detail::FileSystem& upstream, std::string root)
    : upstream_(upstream), root_(std::filesystem::path(root).lexically_normal().string()) {
  if (!std::filesystem::is_directory(root_))
    throw InvalidArgument("'" + root_ + "' is not a folder to record");
  ids_[""] = 0;
  scan("", 0);
}

// Records the files that exist before the recording.
void RecordingFileSystem::scan(const std::string& path, std::uint64_t id) {
  const std::string full = path.empty() ? root_ : join_path(root_, path);
  initial_[id].is_directory = true;
  for (const detail::DirectoryEntry& entry : upstream_.list(full)) {
    const std::string inner = path.empty() ? entry.name : join_path(path, entry.name);
    const std::uint64_t inner_id = ++last_id_;
    ids_[inner] = inner_id;
    initial_[id].names[entry.name] = inner_id;
    if (entry.is_directory) {
      scan(inner, inner_id);
    } else {
      const std::string content = upstream_.read_file(join_path(root_, inner));
      initial_[inner_id].content = bytes_of(content);
    }
  }
}

std::string RecordingFileSystem::relative(const std::string& path) const {
  const std::string normal = std::filesystem::path(path).lexically_normal().string();
  std::string result = std::filesystem::path(normal).lexically_relative(root_).string();
  if (result.empty() || result.starts_with("..")) {
    throw InvalidArgument("'" + path + "' is not below the recorded folder '" + root_ + "'");
  }
  while (!result.empty() && result.back() == '/') result.pop_back();
  return result == "." ? "" : result;
}

std::uint64_t RecordingFileSystem::id_of(const std::string& relative) const {
  const auto found = ids_.find(relative);
  if (found == ids_.end()) throw LogicError("'" + relative + "' was made past the recording layer");
  return found->second;
}

std::uint64_t RecordingFileSystem::folder_of(const std::string& relative) const {
  const std::string parent = detail::parent_path(relative);
  return id_of(parent == "." ? "" : parent);
}

std::uint64_t RecordingFileSystem::adopt(const std::string& path, const std::string& relative) {
  const std::string content = upstream_.read_file(path);
  RecordedOperation created;
  created.kind = Kind::create;
  created.started = begin();
  created.path = relative;
  created.object = ids_[relative] = ++last_id_;
  created.folder = folder_of(relative);
  record(created);
  RecordedOperation written;
  written.kind = Kind::write;
  written.started = begin();
  written.path = relative;
  written.object = created.object;
  written.bytes = static_cast<std::int64_t>(content.size());
  written.data = bytes_of(content);
  record(std::move(written));
  return created.object;
}

std::unique_ptr<File> RecordingFileSystem::open(const std::string& path, OpenMode mode,
                                                detail::Caching caching) {
  const std::string name = relative(path);
  const std::lock_guard lock(names_mutex_);
  const bool there = upstream_.exists(path);
  RecordedOperation operation;
  operation.started = begin();
  operation.path = name;
  auto file = upstream_.open(path, mode, caching);
  std::uint64_t id = 0;
  if (!there) {
    operation.kind = Kind::create;
    operation.folder = folder_of(name);
    operation.object = id = ids_[name] = ++last_id_;
    record(operation);
  } else if (ids_.count(name) == 0) {
    id = adopt(path, name);
  } else {
    id = id_of(name);
    if (mode == OpenMode::create_or_truncate) {
      operation.kind = Kind::truncate;
      operation.object = id;
      record(operation);
    }
  }
  return std::make_unique<RecordingFile>(*this, std::move(file), id, name);
}

void RecordingFileSystem::rename(const std::string& from, const std::string& to) {
  const std::lock_guard lock(names_mutex_);
  RecordedOperation operation;
  operation.kind = Kind::rename;
  operation.path = relative(from);
  operation.to = relative(to);
  if (ids_.count(operation.path) == 0 && upstream_.exists(from)) adopt(from, operation.path);
  operation.started = begin();
  upstream_.rename(from, to);
  operation.object = id_of(operation.path);
  operation.folder = folder_of(operation.path);
  operation.to_folder = folder_of(operation.to);
  // Files below a folder move with it.
  std::map<std::string, std::uint64_t> moved;
  for (const auto& [name, id] : ids_) {
    if (name == operation.path || name.starts_with(operation.path + "/")) {
      moved[operation.to + name.substr(operation.path.size())] = id;
    } else if (name != operation.to) {
      moved[name] = id;
    }
  }
  ids_ = std::move(moved);
  record(std::move(operation));
}

void RecordingFileSystem::remove(const std::string& path) {
  const std::lock_guard lock(names_mutex_);
  RecordedOperation operation;
  operation.kind = Kind::remove;
  operation.path = relative(path);
  if (ids_.count(operation.path) == 0 && upstream_.exists(path)) adopt(path, operation.path);
  operation.started = begin();
  upstream_.remove(path);
  operation.object = id_of(operation.path);
  operation.folder = folder_of(operation.path);
  ids_.erase(operation.path);
  record(std::move(operation));
}

bool RecordingFileSystem::create_directory(const std::string& path) {
  const std::lock_guard lock(names_mutex_);
  RecordedOperation operation;
  operation.kind = Kind::create_directory;
  operation.started = begin();
  operation.path = relative(path);
  if (!upstream_.create_directory(path)) return false;
  operation.folder = folder_of(operation.path);
  operation.object = ids_[operation.path] = ++last_id_;
  record(std::move(operation));
  return true;
}

void RecordingFileSystem::sync_directory(const std::string& path) {
  const std::lock_guard lock(names_mutex_);
  // Folders above the root may be synced as well, which is not recorded.
  std::string name;
  try {
    name = relative(path);
  } catch (const InvalidArgument&) {
    upstream_.sync_directory(path);
    return;
  }
  RecordedOperation operation;
  operation.kind = Kind::sync_directory;
  operation.started = begin();
  operation.path = name;
  upstream_.sync_directory(path);
  operation.object = id_of(name);
  record(std::move(operation));
}

void RecordingFileSystem::mark(const std::string& text) {
  RecordedOperation operation;
  operation.started = begin();
  operation.path = text;
  record(std::move(operation));
}

void RecordingFileSystem::record(RecordedOperation operation) {
  const std::lock_guard lock(mutex_);
  log_.push_back(std::move(operation));
}

std::size_t RecordingFileSystem::operations() const {
  const std::lock_guard lock(mutex_);
  return log_.size();
}

RecordedOperation RecordingFileSystem::operation(std::size_t index) const {
  const std::lock_guard lock(mutex_);
  return log_.at(index);
}

std::size_t RecordingFileSystem::find_mark(const std::string& text) const {
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < log_.size(); ++i) {
    if (log_[i].kind == Kind::mark && log_[i].path == text) return i;
  }
  throw LogicError("there is no mark '" + text + "' in the recording");
}

std::optional<std::size_t> RecordingFileSystem::durable_by(std::size_t index) const {
  const std::lock_guard lock(mutex_);
  return durable_by_locked(index, log_.size());
}

std::optional<std::size_t> RecordingFileSystem::durable_by_locked(std::size_t index,
                                                                  std::size_t prefix) const {
  const RecordedOperation& operation = log_[index];
  // A rename between folders is durable once both folders are synced.
  bool from = !operation.of_names(), to = operation.kind != Kind::rename;
  for (std::size_t i = index + 1; i < prefix; ++i) {
    const RecordedOperation& sync = log_[i];
    if (index >= sync.started) continue;  // the operation may have begun after the sync
    if (operation.of_content() && sync.kind == Kind::sync && sync.object == operation.object) return i;
    if (!operation.of_names() || sync.kind != Kind::sync_directory) continue;
    from = from || sync.object == operation.folder;
    to = to || sync.object == operation.to_folder;
    if (from && to) return i;
  }
  return std::nullopt;
}

std::string RecordingFileSystem::describe(std::size_t index) const {
  const RecordedOperation o = operation(index);
  switch (o.kind) {
    case Kind::create:
      return fmt::format("{}: creation of {}", index, o.path);
    case Kind::write:
      return fmt::format("{}: write of {} B at {} of {}", index, o.bytes, o.offset, o.path);
    case Kind::truncate:
      return fmt::format("{}: truncation of {} to {} B", index, o.path, o.bytes);
    case Kind::preallocate:
      return fmt::format("{}: preallocation of {} to {} B", index, o.path, o.bytes);
    case Kind::sync:
      return fmt::format("{}: sync of {}", index, o.path);
    case Kind::rename:
      return fmt::format("{}: renaming of {} to {}", index, o.path, o.to);
    case Kind::remove:
      return fmt::format("{}: removal of {}", index, o.path);
    case Kind::create_directory:
      return fmt::format("{}: making of folder {}", index, o.path);
    case Kind::sync_directory:
      return fmt::format("{}: sync of folder {}", index, o.path.empty() ? "." : o.path);
    case Kind::mark:
      return fmt::format("{}: mark '{}'", index, o.path);
  }
  return {};
}

void RecordingFileSystem::replay(std::size_t prefix, const CrashPolicy& policy,
                                 const std::string& folder) const {
  const std::lock_guard lock(mutex_);
  if (prefix > log_.size()) {
    throw InvalidArgument(fmt::format("replay of {} operations of a recording of {}", prefix, log_.size()));
  }
  std::mt19937_64 random(policy.seed);
  const bool partial = policy.crash == Crash::torn || policy.crash == Crash::reordered;
  // All, most, half, some or none of what is not durable, so that both extremes occur.
  const std::uint64_t eighths = std::vector<std::uint64_t>{1, 2, 4, 6, 7}[random() % 5];
  Objects objects = initial_;
  // A folder exists even if only a later change of its name reached the disk.
  for (const RecordedOperation& operation : log_) {
    if (operation.kind == Kind::create_directory) objects[operation.object].is_directory = true;
  }
  // When writes are torn, changes of names that are not durable reach the disk in order, up to this one.
  std::size_t names_until = prefix;
  if (policy.crash == Crash::torn) names_until = static_cast<std::size_t>(random() % (prefix + 2));
  for (std::size_t i = 0; i < log_.size(); ++i) {
    const RecordedOperation& operation = log_[i];
    const bool complete = i < prefix;
    if (!complete && (!partial || operation.started > prefix))
      continue;  // it has not begun, or it left nothing
    if (!operation.of_names() && !operation.of_content()) continue;
    const std::uint64_t draw = random();
    bool reached = complete && (policy.crash == Crash::kept || durable_by_locked(i, prefix));
    if (!reached && policy.crash == Crash::torn && operation.kind == Kind::write) {
      write_sectors(objects[operation.object], operation, policy, draw);
    } else if (!reached) {
      const bool torn_name = policy.crash == Crash::torn && operation.of_names();
      reached = torn_name ? i <= names_until : partial && draw % 8 < eighths;
    }
    if (reached) apply(objects, operation);
  }
  materialise(objects, 0, folder);
}

void RecordingFileSystem::apply(Objects& objects, const RecordedOperation& operation) {
  Object& object = objects[operation.object];
  const auto bytes = static_cast<std::size_t>(operation.bytes);
  switch (operation.kind) {
    case Kind::create:
    case Kind::create_directory:
      objects[operation.folder].names[last_name(operation.path)] = operation.object;
      break;
    case Kind::remove: {
      auto& names = objects[operation.folder].names;
      const auto found = names.find(last_name(operation.path));
      if (found != names.end() && found->second == operation.object) names.erase(found);
      break;
    }
    case Kind::rename: {
      auto& names = objects[operation.folder].names;
      const auto found = names.find(last_name(operation.path));
      if (found != names.end() && found->second == operation.object) names.erase(found);
      objects[operation.to_folder].names[last_name(operation.to)] = operation.object;
      break;
    }
    case Kind::truncate:
      object.content.resize(bytes);
      break;
    case Kind::preallocate:
      object.content.resize(std::max(object.content.size(), bytes));
      break;
    case Kind::write: {
      const auto offset = static_cast<std::size_t>(operation.offset);
      if (bytes == 0) break;
      object.content.resize(std::max(object.content.size(), offset + bytes));
      std::memcpy(object.content.data() + offset, operation.data.data(), bytes);
      break;
    }
    default:
      break;
  }
}

// Writes a drawn part of the write's sectors. The size may have grown in any case.
void RecordingFileSystem::write_sectors(Object& object, const RecordedOperation& operation,
                                        const CrashPolicy& policy, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const std::uint64_t quarters = random() % 5;  // none to all
  const std::int64_t end = operation.offset + operation.bytes;
  if (quarters > 0 && random() % 2 == 0) {
    object.content.resize(std::max(object.content.size(), static_cast<std::size_t>(end)));
  }
  for (std::int64_t begin = operation.offset; begin < end;) {
    const std::int64_t next = std::min(end, (begin / policy.sector_bytes + 1) * policy.sector_bytes);
    if (random() % 4 < quarters) {
      object.content.resize(std::max(object.content.size(), static_cast<std::size_t>(next)));
      std::memcpy(object.content.data() + begin, operation.data.data() + (begin - operation.offset),
                  static_cast<std::size_t>(next - begin));
    }
    begin = next;
  }
}

void RecordingFileSystem::materialise(const Objects& objects, std::uint64_t id, const std::string& path) {
  const Object& object = objects.at(id);
  if (object.is_directory) {
    std::filesystem::create_directories(path);
    for (const auto& [name, inner] : object.names) materialise(objects, inner, join_path(path, name));
    return;
  }
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(reinterpret_cast<const char*>(object.content.data()),
             static_cast<std::streamsize>(object.content.size()));
  if (!file) throw LogicError("'" + path + "' cannot be written for a replay");
}

}  // namespace tranche::testing
