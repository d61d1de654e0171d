#pragma once
/// Writes one rank's file: payload straight from host memory to its place, digests on the way.

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

/// Not thread-safe; not collective: every rank writes its own file when it likes. Either one write_image(),
/// or put() of everything; then finish(). Every failure is a CheckpointError that names file and reason;
/// nothing but the temporary folder has been touched by then.
class ShardWriter {
 public:
  /// Makes `folder` if need be, checks that the file fits (the error says how much is needed and free), opens
  /// it and allocates its blocks. `plan` must outlive this.
  ShardWriter(Storage storage, const ShardPlan& plan, std::string folder);
  /// Waits for transfers under way; the file is then unfinished.
  ~ShardWriter();
  ShardWriter(const ShardWriter&) = delete;
  ShardWriter& operator=(const ShardWriter&) = delete;

  /// Writes the whole file from `image`, file_bytes() of memory on a multiple of 4096 into which the caller
  /// has copied every piece of plan.pieces() at plan.offset_of(piece) and every array at its offset; this
  /// call and finish() fill in the rest, so the image stays valid until finish() returns. No further copy is
  /// made, and no memory taken. Returns when the disk has taken all (not: made it durable).
  void write_image(std::span<std::byte> image);

  /// Copies a piece of plan.pieces(), or a range of one; `memory` may be reused on return. Ranges may come in
  /// any order, each element once (else LogicError); blocks of 4 MiB are written as they fill up, so memory
  /// stays small, one block a section and some under way, when each section's ranges come in ascending order.
  void put(const SectionPiece& part, const void* memory);

  /// The same for all of this rank's elements of an array.
  void put_array(int array, const void* memory);

  /// Writes what is missing of the file's own parts, waits, syncs. LogicError when an element was never
  /// given.
  ShardRecord finish();

  /// The most that put() and finish() take of storage.memory when each section's ranges come in ascending
  /// order: sum of the bytes asked of the resource; nothing goes back before the writer ends.
  static std::int64_t most_staging_bytes(const ShardPlan& plan);
  /// Most memory taken for blocks so far.
  std::int64_t staging_bytes() const noexcept { return staging_bytes_; }

 private:
  struct Block {
    detail::AlignedBuffer memory;
    std::int64_t missing = 0;  ///< payload bytes yet to come
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
  /// The first byte from `begin` to `end` that was never given; `end` when all were.
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
  std::map<std::int64_t, std::int64_t> given_;  ///< ranges of the file's payload that have come: begin -> end
  std::map<std::int64_t, Block> open_;
  std::deque<Flight> flights_;
  std::vector<detail::AlignedBuffer> spare_;
  std::int64_t staging_bytes_ = 0;
  std::span<std::byte> image_;  ///< of write_image()
};

}  // namespace tranche::checkpoint
