#pragma once
/// The parts of Reader that reader.cpp and verify.cpp share.

#include <array>
#include <deque>
#include <span>

#include "checkpoint/digest.h"
#include "checkpoint/reader.h"
#include "offload/aligned_buffer.h"

namespace tranche::checkpoint {

struct Reader::Impl {
  Impl(Storage given, const std::string& path);
  ~Impl();

  /// A range of one shard's payload, and its destination.
  struct Task {
    int rank = 0;
    std::int64_t begin = 0;  ///< byte range in the file
    std::int64_t end = 0;
    DataType stored = DataType::float32;
    DataType wanted = DataType::float32;
    std::byte* target = nullptr;
  };
  /// A read in flight: a part, within one block, of tasks that are consecutive in a file. It goes directly to
  /// its destination or to a staging buffer.
  struct Flight {
    std::span<const Task> tasks;
    std::int64_t begin = 0;  ///< byte range of the leaves
    std::int64_t end = 0;
    std::byte* memory = nullptr;
    bool staged = false;  ///< memory is a staging buffer
    std::shared_ptr<detail::File> file;
    detail::IoTicket ticket;
  };

  const std::shared_ptr<detail::File>& file(int rank, detail::Caching caching = detail::Caching::direct);
  const FileRecord& record(int rank) const { return manifest.shards[static_cast<std::size_t>(rank)].file; }
  void add_tasks(const ReadRequest& request, std::vector<Task>& tasks) const;
  void run(std::vector<Task> tasks);
  bool can_read_in_place(const Task& task);
  void fetch(std::span<const Task> tasks);
  void launch(std::span<const Task> tasks, std::int64_t begin, std::int64_t end, bool in_place,
              detail::Caching caching);
  void land();
  void abandon() noexcept;
  void check(const Flight& flight, std::span<const std::byte> bytes);
  /// The digests of a block's leaves from the file's table, verified; throws CheckpointError when the table
  /// is damaged.
  const std::vector<std::uint64_t>& table(int rank, std::int64_t block);
  std::vector<std::uint64_t> read_table(int rank, std::int64_t block);

  /// Describes the content of a byte range of a rank's file.
  std::string content(int rank, std::int64_t begin, std::int64_t end) const;

  Storage storage;
  std::string folder;
  Manifest manifest;
  std::vector<StoredTensor> tensors;
  std::unordered_map<std::string, int> names;
  /// A buffer that holds a part of a tensor.
  struct Holder {
    const InstanceRecord* instance;
    const PlacedTensor* placed;
  };
  std::vector<std::vector<Holder>> holders;  ///< by tensor
  /// An open file of a rank.
  struct OpenFile {
    int rank;
    detail::Caching caching;
    std::shared_ptr<detail::File> file;
  };
  std::list<OpenFile> files;  ///< most recently used first
  std::list<std::pair<std::pair<int, std::int64_t>, std::vector<std::uint64_t>>> tables;
  detail::AlignedBuffer staging;
  std::vector<std::byte*> free_buffers;
  std::deque<Flight> flights;
  ReadStatistics statistics;

  std::byte* buffer(std::size_t index) const {
    return static_cast<std::byte*>(staging.data()) + static_cast<std::int64_t>(index) * block_bytes;
  }
};

}  // namespace tranche::checkpoint
