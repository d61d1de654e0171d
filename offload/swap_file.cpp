#include "offload/swap_file.h"

#include <fmt/core.h>

#include <cerrno>
#include <vector>

#include "offload/aligned_buffer.h"
#include "offload/swap_names.h"
#include "tranche/core/error.h"
#include "tranche/core/shape.h"

namespace tranche::detail {
namespace {

constexpr std::string_view remedies =
    "free space there, use another folder, more ranks on more nodes, or keep part of the state in memory "
    "(offload_optimizer.ratio)";

}  // namespace

struct SwapFile::Impl {
  Impl(SwapFileOptions the_options, FileSystem& the_files, Ledger& the_ledger)
      : options(std::move(the_options)), files(the_files), ledger(the_ledger) {}

  struct TrackedRange {
    Category category;
    std::int64_t bytes;
    std::string tag;
  };

  void remove_stale_files(const ProcessIdentity& self);
  void need(std::int64_t wanted, std::string_view by) const;

  const SwapFileOptions options;
  FileSystem& files;
  Ledger& ledger;
  std::vector<TrackedRange> tracked_ranges;
  std::int64_t bytes = 0;
  bool created = false;
  std::unique_ptr<File> file;
};

void SwapFile::Impl::remove_stale_files(const ProcessIdentity& self) {
  for (const DirectoryEntry& entry : files.list(options.directory)) {
    if (entry.is_directory || !is_stale_swap_file(files, options.directory, entry.name, self)) continue;
    try {
      files.remove(join_path(options.directory, entry.name));
    } catch (const IoError&) {
      // Another rank was faster, or the file is another user's. Neither is an obstacle.
    }
  }
}

void SwapFile::Impl::need(std::int64_t wanted, std::string_view by) const {
  const SpaceInfo space = files.space(options.directory);
  if (wanted <= space.free_bytes) return;
  throw OutOfMemory(
      fmt::format("the nvme tier of {} needs {} ({} B) in '{}', but only {} ({} B) of {} are "
                  "free; {}",
                  by, format_bytes(wanted), wanted, options.directory, format_bytes(space.free_bytes),
                  space.free_bytes, format_bytes(space.total_bytes), remedies));
}

SwapFile::SwapFile(SwapFileOptions options, FileSystem& files, Ledger& ledger)
    : impl_(std::make_unique<Impl>(std::move(options), files, ledger)) {
  const SwapFileOptions& o = impl_->options;
  if (o.directory.empty()) throw InvalidArgument("the nvme tier needs a folder (nvme_path)");
  if (o.ranks_on_node < 1 || o.limit_bytes < 0 || o.rank < 0) {
    throw InvalidArgument(fmt::format(
        "a swap file of rank {}, {} ranks on the node and a limit of {} B: rank and limit must not be "
        "negative, ranks must be at least 1",
        o.rank, o.ranks_on_node, o.limit_bytes));
  }
  if (o.simulated) return;
  // The folder is not created here: with a mistyped name or an unmounted disk, the state would go to another
  // disk.
  const auto status = files.status(o.directory);
  if (status && status->is_directory) return;
  throw ConfigurationError(fmt::format(
      "the folder of the nvme tier, '{}', {}; make it on the disk that is meant, or give another one "
      "(offload_optimizer.nvme_path and offload_param.nvme_path, --nvme-path)",
      o.directory, status ? "is a file" : "is not there"));
}

SwapFile::~SwapFile() {
  for (const auto& range : impl_->tracked_ranges) {
    impl_->ledger.released(Tier::nvme, range.category, range.bytes, range.tag);
  }
}

std::int64_t SwapFile::reserve(std::int64_t bytes, Category category, std::string_view tag) {
  Impl& self = *impl_;
  if (bytes < 0) {
    throw InvalidArgument(
        fmt::format("'{}' reserves {} B of the nvme tier: must not be negative", tag, bytes));
  }
  if (self.created) {
    throw LogicError(
        fmt::format("'{}' reserves {} B of the nvme tier, but its file has been made", tag, bytes));
  }
  const std::int64_t rounded = checked_add(bytes, io_alignment - 1) / io_alignment * io_alignment;
  const std::int64_t limit = self.options.limit_bytes;
  if (limit > 0 && rounded > limit - self.bytes) {
    const std::string doing = self.ledger.doing();
    throw OutOfMemory(
        fmt::format("{}{}'{}' ({}) asks for {} ({} B) of nvme memory, but the limit is {} ({} B), of which "
                    "{} ({} B) are held and only {} are left; use more ranks, keep part of the state in "
                    "memory (offload_optimizer.ratio), or raise the limit\n{}",
                    doing, doing.empty() ? "" : ": ", tag, name_of(category), format_bytes(bytes), bytes,
                    format_bytes(limit), limit, format_bytes(self.bytes), self.bytes,
                    format_bytes(limit - self.bytes), self.ledger.table()),
        true);
  }
  const std::int64_t offset = self.bytes;
  const std::int64_t total = checked_add(self.bytes, rounded);
  if (rounded == 0) return offset;
  self.tracked_ranges.push_back({category, rounded, std::string(tag)});
  try {
    self.ledger.allocated(Tier::nvme, category, rounded, tag);
  } catch (...) {
    self.tracked_ranges.pop_back();
    throw;
  }
  self.bytes = total;
  return offset;
}

void SwapFile::check_space() {
  Impl& self = *impl_;
  if (self.options.simulated) return;
  const int ranks = self.options.ranks_on_node;
  self.need(checked_multiply(self.bytes, ranks),
            ranks == 1 ? std::string("this rank")
                       : fmt::format("the {} ranks of this node, {} each,", ranks, format_bytes(self.bytes)));
}

void SwapFile::create() {
  Impl& self = *impl_;
  if (self.created)
    throw LogicError("the swap file of rank " + std::to_string(self.options.rank) + " was made before");
  if (self.options.simulated) {
    self.created = true;
    return;
  }
  const ProcessIdentity owner = this_process();
  self.remove_stale_files(owner);
  const std::string by = fmt::format("rank {}", self.options.rank);
  self.need(self.bytes, by);
  const std::string path = join_path(self.options.directory, swap_name(owner, self.options.rank));
  std::unique_ptr<File> file;
  try {
    file = self.files.open(path, OpenMode::create_new, Caching::direct);
  } catch (const IoError& error) {
    if (error.code() != EACCES && error.code() != EPERM && error.code() != EROFS) throw;
    throw ConfigurationError(fmt::format("the folder of the nvme tier, '{}', takes no file of this user: {}",
                                         self.options.directory, error.message()));
  }
  lock_swap(*file);
  try {
    self.files.remove(path);
  } catch (const IoError& error) {
    // Another run has removed it as stale; only the name had to be removed.
    if (error.code() != ENOENT) {
      file.reset();  // some file systems cannot remove open files
      try {
        self.files.remove(path);
      } catch (const IoError&) {
        // The first error is thrown below.
      }
      throw;
    }
  }
  try {
    file->preallocate(self.bytes);
  } catch (const IoError& error) {
    if (error.code() != ENOSPC && error.code() != EDQUOT) throw;
    throw OutOfMemory(fmt::format("the nvme tier of {} needs {} ({} B) in '{}': {}; {}", by,
                                  format_bytes(self.bytes), self.bytes, self.options.directory,
                                  error.message(), remedies));
  }
  self.file = std::move(file);
  self.created = true;
}

std::int64_t SwapFile::bytes() const noexcept {
  return impl_->bytes;
}

File& SwapFile::file() {
  if (!impl_->file) {
    throw LogicError(impl_->options.simulated ? "a simulated swap file has no file"
                                              : "the swap file has not been made: call create() first");
  }
  return *impl_->file;
}

bool SwapFile::simulated() const noexcept {
  return impl_->options.simulated;
}

std::string SwapFile::description() const {
  std::string how = "not made yet";
  if (impl_->options.simulated) {
    how = "simulated";
  } else if (impl_->file) {
    how = impl_->file->direct() ? std::string("direct I/O")
                                : "through the page cache: " + impl_->file->direct_refusal();
  }
  return fmt::format("{} in {} ({})", format_bytes(impl_->bytes), impl_->options.directory, how);
}

}  // namespace tranche::detail
