#include "tests/offload/faulty_file_system.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "offload/io_failure.h"

namespace tranche::testing {

using detail::File;
using detail::SpaceInfo;
using detail::throw_io_error;

namespace {

std::string_view text_of(FileOperation operation) {
  constexpr std::array<std::string_view, file_operation_count> texts{"opening",
                                                                     "reading the size",
                                                                     "read",
                                                                     "write",
                                                                     "preallocation",
                                                                     "truncation",
                                                                     "sync",
                                                                     "renaming",
                                                                     "removal",
                                                                     "making the folder",
                                                                     "listing",
                                                                     "looking up",
                                                                     "asking for the free space",
                                                                     "sync of the folder"};
  return texts[static_cast<std::size_t>(operation)];
}

class FaultyFile : public File {
 public:
  FaultyFile(FaultyFileSystem& system, std::unique_ptr<File> file)
      : File(file->path()), system_(system), file_(std::move(file)) {}

  std::int64_t size() const override {
    system_.pass(FileOperation::size, path());
    return file_->size();
  }
  void preallocate(std::int64_t bytes) override {
    system_.pass(FileOperation::preallocate, path());
    file_->preallocate(bytes);
  }
  void read(std::int64_t offset, void* memory, std::int64_t bytes) override {
    const auto fault = system_.strike(FileOperation::read, path());
    file_->read(offset, memory, fault ? std::min(fault->done_bytes, bytes) : bytes);
    if (fault) fail(*fault, offset, bytes);
  }
  void write(std::int64_t offset, const void* memory, std::int64_t bytes) override {
    const auto fault = system_.strike(FileOperation::write, path());
    file_->write(offset, memory, fault ? std::min(fault->done_bytes, bytes) : bytes);
    if (fault) fail(*fault, offset, bytes);
  }
  void truncate(std::int64_t bytes) override {
    system_.pass(FileOperation::truncate, path());
    file_->truncate(bytes);
  }
  void sync() override {
    system_.pass(FileOperation::sync, path());
    file_->sync();
  }
  bool direct() const override { return file_->direct(); }
  std::string direct_refusal() const override { return file_->direct_refusal(); }

 private:
  [[noreturn]] void fail(const Fault& fault, std::int64_t offset, std::int64_t bytes) const {
    const std::int64_t done = std::min(fault.done_bytes, bytes);
    throw_io_error({std::string(text_of(fault.operation)), path(), fault.code, offset + done, bytes - done});
  }
  FaultyFileSystem& system_;
  std::unique_ptr<File> file_;
};

}  // namespace

void FaultyFileSystem::inject(Fault fault) {
  const std::lock_guard lock(mutex_);
  pending_.push_back({std::move(fault), 0});
}

void FaultyFileSystem::clear() {
  const std::lock_guard lock(mutex_);
  pending_.clear();
}

std::int64_t FaultyFileSystem::count(FileOperation operation) const {
  const std::lock_guard lock(mutex_);
  return counts_[static_cast<std::size_t>(operation)];
}

void FaultyFileSystem::set_free_bytes(std::int64_t bytes) {
  const std::lock_guard lock(mutex_);
  free_bytes_ = bytes;
}

std::optional<Fault> FaultyFileSystem::strike(FileOperation operation, const std::string& path,
                                              const std::string& to) {
  std::optional<Fault> failing;
  std::chrono::milliseconds delay{0};
  {
    const std::lock_guard lock(mutex_);
    ++counts_[static_cast<std::size_t>(operation)];
    for (Pending& pending : pending_) {
      const Fault& fault = pending.fault;
      const bool named = path.find(fault.path_contains) != std::string::npos ||
                         (!to.empty() && to.find(fault.path_contains) != std::string::npos);
      if (fault.operation != operation || !named) continue;
      const int number = ++pending.seen;
      if (number < fault.nth || (fault.times >= 0 && number >= fault.nth + fault.times)) continue;
      delay = std::max(delay, fault.delay);
      if (fault.code != 0 && !failing) failing = fault;
    }
  }
  std::this_thread::sleep_for(delay);
  return failing;
}

void FaultyFileSystem::pass(FileOperation operation, const std::string& path, const std::string& to) {
  const auto fault = strike(operation, path, to);
  if (fault) throw_io_error({std::string(text_of(operation)), path, fault->code, -1, 0});
}

std::unique_ptr<File> FaultyFileSystem::open(const std::string& path, detail::OpenMode mode,
                                             detail::Caching caching) {
  pass(FileOperation::open, path);
  return std::make_unique<FaultyFile>(*this, upstream_.open(path, mode, caching));
}

void FaultyFileSystem::rename(const std::string& from, const std::string& to) {
  pass(FileOperation::rename, from, to);
  upstream_.rename(from, to);
}

void FaultyFileSystem::remove(const std::string& path) {
  pass(FileOperation::remove, path);
  upstream_.remove(path);
}

bool FaultyFileSystem::create_directory(const std::string& path) {
  pass(FileOperation::create_directory, path);
  return upstream_.create_directory(path);
}

std::vector<detail::DirectoryEntry> FaultyFileSystem::list(const std::string& path) {
  pass(FileOperation::list, path);
  return upstream_.list(path);
}

std::optional<detail::FileStatus> FaultyFileSystem::status(const std::string& path) {
  pass(FileOperation::status, path);
  return upstream_.status(path);
}

SpaceInfo FaultyFileSystem::space(const std::string& path) {
  pass(FileOperation::space, path);
  SpaceInfo info = upstream_.space(path);
  const std::lock_guard lock(mutex_);
  if (free_bytes_) info.free_bytes = *free_bytes_;
  return info;
}

void FaultyFileSystem::sync_directory(const std::string& path) {
  pass(FileOperation::sync_directory, path);
  upstream_.sync_directory(path);
}

}  // namespace tranche::testing
