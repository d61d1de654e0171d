#pragma once
/// Writes one rank's file: payload directly from host memory to its place, computing digests on the way.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/shard_plan.h"
#include "checkpoint/storage.h"
#include "offload/aligned_buffer.h"

namespace tranche::checkpoint {

/// Not thread-safe; not collective: every rank writes its own file at any time. Call either write_image()
/// once, or put() for everything; then finish(). Every failure is a CheckpointError that names file and
/// reason; until then only the temporary folder has been changed.
class ShardWriter {
 public:
  /// Makes `folder` if necessary, checks that the file fits (the error gives the bytes needed and free),
  /// opens it and allocates its blocks. `plan` must outlive this.
  ShardWriter(Storage storage, const ShardPlan& plan, std::string folder);
  /// Waits for transfers in flight; without finish() the file is incomplete.
  ~ShardWriter();
  ShardWriter(const ShardWriter&) = delete;
  ShardWriter& operator=(const ShardWriter&) = delete;

  /// Writes the whole file from `image`: file_bytes() of memory, aligned to 4096, into which the caller has
  /// copied every piece of plan.pieces() at plan.offset_of(piece) and every array at its offset. This call
  /// and finish() fill in the rest, so the image must stay valid until finish() returns. No further copy is
  /// made, and no memory allocated. Returns when everything is written, but not yet durable.
  void write_image(std::span<std::byte> image);

  /// Copies a piece of plan.pieces(), or a range of one; `memory` may be reused on return. Ranges may come in
  /// any order, each element once (else LogicError). Blocks of 4 MiB are written as they fill up, so memory
  /// stays small (one block per section and some in flight) when each section's ranges come in ascending
  /// order.
  void put(const SectionPiece& part, const void* memory);

  /// The same for all of this rank's elements of an array.
  void put_array(int array, const void* memory);

  /// Writes the rest of the file's own parts, waits, and syncs. Throws LogicError when an element was never
  /// put.
  ShardRecord finish();

  /// The most that put() and finish() allocate from storage.memory when each section's ranges come in
  /// ascending order: the sum of the requested bytes; nothing is freed before the writer ends.
  static std::int64_t most_staging_bytes(const ShardPlan& plan);
  /// The most memory allocated for blocks so far.
  std::int64_t staging_bytes() const noexcept { return staging_bytes_; }

 private:
  struct Block {
    detail::AlignedBuffer memory;
    std::int64_t missing = 0;  ///< payload bytes not yet put
  };
  struct Flight {
    detail::IoTicket ticket;
    detail::AlignedBuffer memory;  ///< empty when the caller's memory is written
  };

  std::string context() const;
  std::int64_t block_end(std::int64_t begin) const;
  std::int64_t payload_within(std::int64_t begin, std::int64_t end) const;
  void clear_gaps(std::int64_t begin, std::span<std::byte> bytes) const;
  void claim(std::int64_t begin, std::int64_t end, const std::function<std::string()>& what);
  void put_bytes(std::int64_t at, std::int64_t end, const void* memory,
                 const std::function<std::string()>& what);
  /// The first byte in [begin, end) that was never put; `end` when all were.
  std::int64_t first_missing(std::int64_t begin, std::int64_t end) const;
  Block& open_block(std::int64_t begin);
  void seal(std::int64_t begin, Block block);
  void digest(std::int64_t begin, std::span<const std::byte> bytes);
  void submit(std::int64_t offset, const std::byte* memory, std::int64_t bytes, detail::AlignedBuffer keep);
  void await_oldest();
  void require_complete() const;
  void write_table();

  Storage storage_;
  const ShardPlan& plan_;
  std::string path_;
  std::unique_ptr<detail::File> file_;
  std::vector<std::uint64_t> leaves_;
  std::map<std::int64_t, std::int64_t> given_;  ///< byte ranges of payload that were put: begin -> end
  std::map<std::int64_t, Block> open_;
  std::deque<Flight> flights_;
  std::vector<detail::AlignedBuffer> spare_;
  std::int64_t staging_bytes_ = 0;
  std::span<std::byte> image_;  ///< the argument of write_image()
};

}  // namespace tranche::checkpoint
