#include "checkpoint/shard_writer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "checkpoint/digest.h"
#include "tranche/core/error.h"

namespace tranche::checkpoint {

using detail::AlignedBuffer;
using detail::ElementRange;
using detail::io_alignment;

namespace {

/// The most transfers of up to a block in flight that read from the caller's memory: enough to keep the disk
/// busy even while this thread waits for a processor.
constexpr std::size_t most_flights = 32;
/// The most in flight from blocks of our own, which cost memory.
constexpr std::size_t most_block_flights = 6;

}  // namespace

ShardWriter::ShardWriter(Storage storage, const ShardPlan& plan, std::string folder)
    : storage_(storage), plan_(plan), path_(detail::join_path(folder, plan.file_name())) {
  leaves_.resize(static_cast<std::size_t>(plan.leaves()));
  with_reason(context(), [&] {
    storage_.files.create_directories(folder);
    const detail::SpaceInfo space = storage_.files.space(folder);
    if (space.free_bytes < plan.file_bytes()) {
      throw CheckpointError(
          fmt::format("it needs {} bytes, but only {} are free there: remove old checkpoints, or save to "
                      "another file system",
                      plan.file_bytes(), space.free_bytes));
    }
    file_ = storage_.files.open(path_, detail::OpenMode::create_or_truncate, detail::Caching::direct);
    file_->preallocate(plan.file_bytes());
  });
}

ShardWriter::~ShardWriter() {
  while (!flights_.empty()) {
    try {
      await_oldest();
    } catch (const std::exception&) {  // already reported, or irrelevant after a failure
    }
  }
}

std::int64_t ShardWriter::most_staging_bytes(const ShardPlan& plan) {
  const auto sections = static_cast<std::int64_t>(plan.payload().size());
  // The open blocks are the current one of each section, and those in which one section ends and the next
  // begins; another is allocated while fewer than most_block_flights are in flight.
  const std::int64_t at_once = 2 * sections + static_cast<std::int64_t>(most_block_flights);
  const std::int64_t blocks = (plan.table_offset() + block_bytes - 1) / block_bytes;
  return std::min(at_once, blocks) * AlignedBuffer::requested_bytes(block_bytes) +
         AlignedBuffer::requested_bytes(plan.file_bytes() - plan.table_offset());
}

std::string ShardWriter::context() const {
  return "cannot write checkpoint file " + path_;
}

std::int64_t ShardWriter::block_end(std::int64_t begin) const {
  return std::min(begin + block_bytes, plan_.table_offset());
}

std::int64_t ShardWriter::payload_within(std::int64_t begin, std::int64_t end) const {
  std::int64_t bytes = 0;
  for (const ElementRange& dataset : plan_.payload())
    bytes += detail::intersect(dataset, {begin, end}).size();
  return bytes;
}

/// Zeroes the bytes that are not payload and copies the library's metadata over them.
void ShardWriter::clear_gaps(std::int64_t begin, std::span<std::byte> bytes) const {
  const std::int64_t end = begin + static_cast<std::int64_t>(bytes.size());
  std::int64_t at = begin;
  const auto clear_to = [&](std::int64_t to) {
    const ElementRange gap = detail::intersect({at, to}, {begin, end});
    if (!gap.empty())
      std::memset(bytes.data() + (gap.begin - begin), 0, static_cast<std::size_t>(gap.size()));
  };
  for (const ElementRange& dataset : plan_.payload()) {
    clear_to(dataset.begin);
    at = std::max(at, dataset.end);
  }
  clear_to(end);
  plan_.image().overlay(begin, bytes.data(), static_cast<std::int64_t>(bytes.size()));
}

void ShardWriter::digest(std::int64_t begin, std::span<const std::byte> bytes) {
  leaf_digests(bytes, leaves_.data() + begin / leaf_bytes);
}

void ShardWriter::submit(std::int64_t offset, const std::byte* memory, std::int64_t bytes,
                         AlignedBuffer keep) {
  flights_.push_back({storage_.io.write(*file_, offset, memory, bytes), std::move(keep)});
  while (flights_.size() > most_flights) await_oldest();
}

void ShardWriter::await_oldest() {
  Flight flight = std::move(flights_.front());
  flights_.pop_front();
  storage_.io.wait(flight.ticket);
  if (flight.memory) spare_.push_back(std::move(flight.memory));
}

void ShardWriter::write_image(std::span<std::byte> image) {
  if (!image_.empty() || !given_.empty())
    throw LogicError("write_image() of " + path_ + " after pieces of it were given");
  if (static_cast<std::int64_t>(image.size()) != plan_.file_bytes() ||
      reinterpret_cast<std::uintptr_t>(image.data()) % static_cast<std::uintptr_t>(io_alignment) != 0) {
    throw InvalidArgument(fmt::format("write_image() of {} wants {} bytes on a multiple of {}, got {} at {}",
                                      path_, plan_.file_bytes(), io_alignment, image.size(),
                                      static_cast<const void*>(image.data())));
  }
  with_reason(context(), [&] {
    const auto covered = image.first(static_cast<std::size_t>(plan_.table_offset()));
    clear_gaps(0, covered);
    for (std::int64_t begin = 0; begin < plan_.table_offset(); begin += block_bytes) {
      const auto size = static_cast<std::size_t>(block_end(begin) - begin);
      const auto block = covered.subspan(static_cast<std::size_t>(begin), size);
      digest(begin, block);
      submit(begin, block.data(), static_cast<std::int64_t>(size), {});
    }
    while (!flights_.empty()) await_oldest();
    image_ = image;
  });
}

void ShardWriter::claim(std::int64_t begin, std::int64_t end, const std::function<std::string()>& what) {
  auto next = given_.lower_bound(begin);
  if ((next != given_.end() && next->first < end) ||
      (next != given_.begin() && std::prev(next)->second > begin)) {
    throw LogicError(fmt::format("{} are given twice for {}", what(), path_));
  }
  if (next != given_.end() && next->first == end) {
    end = next->second;
    next = given_.erase(next);
  }
  if (next != given_.begin() && std::prev(next)->second == begin) {
    std::prev(next)->second = end;
  } else {
    given_.emplace(begin, end);
  }
}

ShardWriter::Block& ShardWriter::open_block(std::int64_t begin) {
  const auto found = open_.find(begin);
  if (found != open_.end()) return found->second;
  Block block;
  if (spare_.empty() && flights_.size() >= most_block_flights) await_oldest();
  if (!spare_.empty()) {
    block.memory = std::move(spare_.back());
    spare_.pop_back();
  } else {
    block.memory = AlignedBuffer(storage_.memory, block_bytes, Category::other, "checkpoint block");
    staging_bytes_ += AlignedBuffer::requested_bytes(block_bytes);
  }
  const std::int64_t end = block_end(begin);
  block.missing = payload_within(begin, end);
  clear_gaps(begin, {static_cast<std::byte*>(block.memory.data()), static_cast<std::size_t>(end - begin)});
  return open_.emplace(begin, std::move(block)).first->second;
}

void ShardWriter::seal(std::int64_t begin, Block block) {
  const std::int64_t size = block_end(begin) - begin;
  const auto* bytes = static_cast<const std::byte*>(block.memory.data());
  digest(begin, {bytes, static_cast<std::size_t>(size)});
  submit(begin, bytes, size, std::move(block.memory));
}

void ShardWriter::put(const SectionPiece& part, const void* memory) {
  const std::int64_t at = plan_.offset_of(part);
  const SectionRecord& section = plan_.layout().sections[static_cast<std::size_t>(part.section)];
  put_bytes(at, at + section.bytes(part.range.size()), memory, [&] {
    return fmt::format("elements {} to {} of {} of unit {}", part.range.begin, part.range.end,
                       section.dataset, plan_.layout().units[static_cast<std::size_t>(part.unit)].name);
  });
}

void ShardWriter::put_array(int array, const void* memory) {
  const std::int64_t at = plan_.array_offsets().at(static_cast<std::size_t>(array));
  put_bytes(at, at + plan_.array_bytes(array), memory, [&] {
    return "elements of array " + plan_.layout().arrays[static_cast<std::size_t>(array)].name;
  });
}

void ShardWriter::put_bytes(std::int64_t at, std::int64_t end, const void* memory,
                            const std::function<std::string()>& what) {
  if (at == end || at < 0) return;
  if (!image_.empty()) throw LogicError("put() into " + path_ + " after write_image()");
  claim(at, end, what);
  const auto* source = static_cast<const std::byte*>(memory);
  with_reason(context(), [&] {
    while (at < end) {
      const std::int64_t begin = at / block_bytes * block_bytes;
      const std::int64_t part = std::min(end, begin + block_bytes) - at;
      Block& block = open_block(begin);
      std::memcpy(static_cast<std::byte*>(block.memory.data()) + (at - begin), source,
                  static_cast<std::size_t>(part));
      block.missing -= part;
      if (block.missing == 0) {
        Block full = std::move(block);
        open_.erase(begin);
        seal(begin, std::move(full));
      }
      source += part;
      at += part;
    }
  });
}

std::int64_t ShardWriter::first_missing(std::int64_t begin, std::int64_t end) const {
  const auto next = given_.upper_bound(begin);
  if (next == given_.begin()) return begin;
  return std::clamp(std::prev(next)->second, begin, end);
}

void ShardWriter::require_complete() const {
  for (const SectionPiece& piece : plan_.pieces()) {
    const SectionRecord& section = plan_.layout().sections[static_cast<std::size_t>(piece.section)];
    const std::int64_t begin = plan_.offset_of(piece);
    const std::int64_t end = begin + section.bytes(piece.range.size());
    const std::int64_t at = first_missing(begin, end);
    if (at < end) {
      throw LogicError(fmt::format(
          "{} was never given element {} of {} of unit {}", path_,
          piece.range.begin + (at - begin) / section.bytes(section.block.elements) * section.block.elements,
          section.dataset, plan_.layout().units[static_cast<std::size_t>(piece.unit)].name));
    }
  }
  for (std::size_t a = 0; a < plan_.layout().arrays.size(); ++a) {
    const std::int64_t begin = plan_.array_offsets()[a];
    if (begin < 0 || first_missing(begin, begin + 1) > begin) continue;  // such a range is copied as a whole
    throw LogicError(fmt::format("{} was never given array {}", path_, plan_.layout().arrays[a].name));
  }
}

void ShardWriter::write_table() {
  const std::int64_t bytes = plan_.file_bytes() - plan_.table_offset();
  AlignedBuffer table;
  std::byte* memory = nullptr;
  if (image_.empty()) {
    table = AlignedBuffer(storage_.memory, bytes, Category::other, "checkpoint digests");
    memory = static_cast<std::byte*>(table.data());
  } else {
    memory = image_.data() + plan_.table_offset();
  }
  std::memset(memory, 0, static_cast<std::size_t>(bytes));
  std::memcpy(memory, leaves_.data(), leaves_.size() * sizeof(std::uint64_t));
  submit(plan_.table_offset(), memory, bytes, std::move(table));
}

ShardRecord ShardWriter::finish() {
  if (image_.empty()) require_complete();
  ShardRecord record{plan_.rank(),
                     {plan_.file_name(), plan_.file_bytes(), plan_.table_offset(), {}},
                     plan_.offsets(),
                     plan_.array_offsets()};
  with_reason(context(), [&] {
    if (image_.empty()) {  // only blocks without any payload are left
      for (std::int64_t begin = 0; begin < plan_.table_offset(); begin += block_bytes) {
        if (payload_within(begin, block_end(begin)) > 0) continue;
        open_block(begin);
        seal(begin, std::move(open_.extract(begin).mapped()));
      }
    }
    write_table();
    while (!flights_.empty()) await_oldest();
    file_->sync();
    file_.reset();
  });
  for (std::size_t leaf = 0; leaf < leaves_.size(); leaf += static_cast<std::size_t>(leaves_per_block)) {
    const std::size_t count = std::min(leaves_.size() - leaf, static_cast<std::size_t>(leaves_per_block));
    record.file.blocks.push_back(block_digest(std::span(leaves_).subspan(leaf, count)));
  }
  return record;
}

}  // namespace tranche::checkpoint
