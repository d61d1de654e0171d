#include "checkpoint/reader.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "checkpoint/convert.h"
#include "checkpoint/reader_impl-inl.h"
#include "core/closest_match.h"
#include "tranche/core/error.h"

namespace tranche::checkpoint {

using detail::AlignedBuffer;
using detail::ElementRange;
using detail::join_path;

namespace {

constexpr std::size_t most_open_files = 16;
constexpr std::size_t most_tables = 64;
/// Ranges of up to a block on their way at once. As many as keep a fast disk busy also while this thread
/// waits for a processor: those that are read in place take no memory.
constexpr std::size_t most_flights = 32;
/// Less of a block than this is not worth an operation of its own.
constexpr std::int64_t least_in_place = 256 * 1024;

std::int64_t leaf_floor(std::int64_t byte) {
  return byte / leaf_bytes * leaf_bytes;
}

std::int64_t leaf_ceiling(std::int64_t byte) {
  return leaf_floor(byte + leaf_bytes - 1);
}

}  // namespace

Reader::Impl::Impl(Storage given, const std::string& path)
    : storage(given), folder(path), manifest(open_manifest(given.files, path)) {
  const Layout& layout = manifest.layout;
  for (std::size_t u = 0; u < layout.units.size(); ++u) {
    for (std::size_t t = 0; t < layout.units[u].tensors.size(); ++t) {
      const TensorRecord& tensor = layout.units[u].tensors[t];
      const auto number = static_cast<int>(tensors.size());
      bool unique = names.emplace(tensor.name, number).second;
      for (const std::string& alias : tensor.aliases) unique = names.emplace(alias, number).second && unique;
      if (!unique)
        throw CheckpointError(fmt::format("{}: a name of tensor {} is there twice", path, tensor.name));
      tensors.push_back({tensor.name, static_cast<int>(u), static_cast<int>(t), tensor.shape, tensor.frozen});
    }
  }
  for (std::size_t s = 0; s < layout.sections.size(); ++s) {
    std::vector<std::int64_t> at(manifest.shards.size(), 0);
    for (std::size_t u = 0; u <= layout.units.size(); ++u) {
      begins.insert(begins.end(), at.begin(), at.end());
      if (u == layout.units.size()) break;
      const auto& cuts = layout.units[u].cuts(layout.sections[s].frozen);
      for (std::size_t r = 0; r < at.size(); ++r) at[r] += cuts[r + 1] - cuts[r];
    }
  }
  staging =
      AlignedBuffer(storage.memory, staging_buffers * block_bytes, Category::other, "checkpoint reader");
  for (int b = 0; b < staging_buffers; ++b) free_buffers.push_back(buffer(static_cast<std::size_t>(b)));
}

Reader::Impl::~Impl() {
  abandon();
}

void Reader::Impl::abandon() noexcept {
  for (const Flight& flight : flights) {
    try {
      storage.io.wait(flight.ticket);
    } catch (const std::exception&) {  // one failure has been told
    }
    if (flight.staged) free_buffers.push_back(flight.memory);
  }
  flights.clear();
}

const std::shared_ptr<detail::File>& Reader::Impl::file(int rank) {
  auto found = std::find_if(files.begin(), files.end(), [&](const auto& open) { return open.first == rank; });
  if (found != files.end()) {
    files.splice(files.begin(), files, found);
  } else {
    files.emplace_front(rank, storage.files.open(join_path(folder, record(rank).name), detail::OpenMode::read,
                                                 detail::Caching::direct));
    if (files.size() > most_open_files) files.pop_back();
  }
  return files.front().second;
}

std::vector<std::uint64_t> Reader::Impl::read_table(int rank, std::int64_t block) {
  const FileRecord& shard = record(rank);
  const std::int64_t leaves = divide_round_up(shard.digested_bytes, leaf_bytes);
  const std::int64_t first = block * leaves_per_block;
  std::vector<std::uint64_t> entries(static_cast<std::size_t>(std::min(leaves - first, leaves_per_block)));
  const auto bytes = static_cast<std::int64_t>(entries.size() * sizeof(std::uint64_t));
  file(rank)->read(shard.digested_bytes + first * 8, entries.data(), bytes);
  statistics.bytes_read += bytes;
  return entries;
}

const std::vector<std::uint64_t>& Reader::Impl::table(int rank, std::int64_t block) {
  const auto key = std::make_pair(rank, block);
  auto found =
      std::find_if(tables.begin(), tables.end(), [&](const auto& entry) { return entry.first == key; });
  if (found != tables.end()) {
    tables.splice(tables.begin(), tables, found);
    return tables.front().second;
  }
  std::vector<std::uint64_t> entries = read_table(rank, block);
  if (block_digest(entries) != record(rank).blocks[static_cast<std::size_t>(block)]) {
    throw CheckpointError(
        fmt::format("{} is damaged: its digests of bytes {} to {}, which hold {}, are not those that "
                    "were written",
                    join_path(folder, record(rank).name), block * block_bytes,
                    std::min((block + 1) * block_bytes, record(rank).digested_bytes) - 1,
                    content(rank, block * block_bytes, (block + 1) * block_bytes)));
  }
  tables.emplace_front(key, std::move(entries));
  if (tables.size() > most_tables) tables.pop_back();
  return tables.front().second;
}

void Reader::Impl::check(const Flight& flight, std::span<const std::byte> bytes) {
  const FileRecord& shard = record(flight.task.rank);
  const std::int64_t block = flight.begin / block_bytes;
  const std::int64_t block_end = std::min((block + 1) * block_bytes, shard.digested_bytes);
  std::array<std::uint64_t, static_cast<std::size_t>(leaves_per_block)> leaves;
  leaf_digests(bytes, leaves.data());
  const auto count = static_cast<std::size_t>(divide_round_up(flight.end - flight.begin, leaf_bytes));
  const bool whole = flight.begin == block * block_bytes && flight.end == block_end;
  if (whole && block_digest({leaves.data(), count}) == shard.blocks[static_cast<std::size_t>(block)]) return;
  const auto& expected = table(flight.task.rank, block);
  const auto first = static_cast<std::size_t>((flight.begin - block * block_bytes) / leaf_bytes);
  for (std::size_t i = 0; i < count; ++i) {
    if (leaves[i] == expected[first + i]) continue;
    const std::int64_t begin = flight.begin + static_cast<std::int64_t>(i) * leaf_bytes;
    const std::int64_t end = std::min(begin + leaf_bytes, flight.end);
    throw CheckpointError(fmt::format("{} is damaged in bytes {} to {}, which hold {}",
                                      join_path(folder, shard.name), begin, end - 1,
                                      content(flight.task.rank, begin, end)));
  }
}

void Reader::Impl::launch(const Task& task, std::int64_t begin, std::int64_t end, bool in_place) {
  if (begin == end) return;
  while (flights.size() >= most_flights || (!in_place && free_buffers.empty())) land();
  Flight flight{task, begin, end, nullptr, !in_place, file(task.rank), {}};
  flight.memory = in_place ? task.target + (begin - task.begin) : free_buffers.back();
  flight.ticket = storage.io.read(*flight.file, begin, flight.memory, end - begin);
  if (flight.staged) free_buffers.pop_back();
  flights.push_back(std::move(flight));
  statistics.bytes_read += end - begin;
}

void Reader::Impl::land() {
  const Flight flight = std::move(flights.front());
  flights.pop_front();
  if (flight.staged) free_buffers.push_back(flight.memory);
  storage.io.wait(flight.ticket);
  check(flight, {flight.memory, static_cast<std::size_t>(flight.end - flight.begin)});
  if (!flight.staged) return;
  const Task& task = flight.task;
  const std::int64_t from = std::max(flight.begin, task.begin);
  const std::int64_t to = std::min(flight.end, task.end);
  const std::int64_t element = size_of(task.stored);
  convert(task.stored, flight.memory + (from - flight.begin), task.wanted,
          task.target + (from - task.begin) / element * size_of(task.wanted), (to - from) / element);
}

/// True when whole leaves can be read to where they belong: nothing is to be converted, and the memory suits
/// direct transfers where the file takes them.
bool Reader::Impl::can_read_in_place(const Task& task) {
  if (task.stored != task.wanted) return false;
  const auto native = file(task.rank)->native();
  if (!native || native->direct < 0) return true;
  // Leaves begin on multiples of every alignment there is.
  const auto shift = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(task.target)) - task.begin;
  return shift % native->memory_alignment == 0;
}

void Reader::Impl::fetch(const Task& task) {
  const bool in_place = can_read_in_place(task);
  const std::int64_t last = std::min(leaf_ceiling(task.end), record(task.rank).digested_bytes);
  for (std::int64_t at = leaf_floor(task.begin); at < last;) {
    const std::int64_t end = std::min((at / block_bytes + 1) * block_bytes, last);
    // The leaves of this block that the task wants whole.
    const std::int64_t inner_begin = std::max(at, leaf_ceiling(task.begin));
    const std::int64_t inner_end = task.end >= end ? end : leaf_floor(task.end);
    if (in_place && inner_end - inner_begin >= least_in_place) {
      launch(task, at, inner_begin, false);
      launch(task, inner_begin, inner_end, true);
      launch(task, inner_end, end, false);
    } else {
      launch(task, at, end, false);
    }
    at = end;
  }
}

void Reader::Impl::run(const std::vector<Task>& tasks) {
  /// Goes on in the file and in memory where `task` ends, as the tensors of a buffer do.
  const auto continues = [](const Task& task, const Task& next) {
    return next.rank == task.rank && next.begin == task.end && next.stored == task.stored &&
           next.wanted == task.wanted &&
           next.target == task.target + (task.end - task.begin) / size_of(task.stored) * size_of(task.wanted);
  };
  const auto all = [&] {
    for (std::size_t i = 0; i < tasks.size();) {
      Task task = tasks[i];
      for (++i; i < tasks.size() && continues(task, tasks[i]); ++i) task.end = tasks[i].end;
      fetch(task);
    }
    while (!flights.empty()) land();
  };
  try {
    with_reason("cannot load from checkpoint " + folder, all);
  } catch (...) {
    abandon();
    throw;
  }
}

void Reader::Impl::add_tasks(const ReadRequest& request, std::vector<Task>& tasks) const {
  const Layout& layout = manifest.layout;
  if (request.section < 0 || request.section >= static_cast<int>(layout.sections.size()) ||
      request.unit < 0 || request.unit >= static_cast<int>(layout.units.size())) {
    throw InvalidArgument(fmt::format("section {}, unit {}: {} has {} sections and {} units", request.section,
                                      request.unit, folder, layout.sections.size(), layout.units.size()));
  }
  const auto s = static_cast<std::size_t>(request.section);
  const auto u = static_cast<std::size_t>(request.unit);
  const SectionRecord& section = layout.sections[s];
  const auto& cuts = layout.units[u].cuts(section.frozen);
  const ElementRange range = request.range;
  if (range.begin < 0 || range.end < range.begin || range.end > cuts.back()) {
    throw InvalidArgument(fmt::format("elements {} to {} of {} of unit {}: its buffer has {}", range.begin,
                                      range.end, section.dataset, layout.units[u].name, cuts.back()));
  }
  auto rank =
      static_cast<std::size_t>(std::upper_bound(cuts.begin(), cuts.end(), range.begin) - cuts.begin() - 1);
  for (std::int64_t at = range.begin; at < range.end; ++rank) {
    const std::int64_t end = std::min(range.end, cuts[rank + 1]);
    if (end <= at) continue;  // a rank that stores none of this unit
    const std::int64_t element = begin_of(s, u, rank) + at - cuts[rank];
    const std::int64_t begin = manifest.shards[rank].offsets[s] + element * size_of(section.dtype);
    tasks.push_back({static_cast<int>(rank), begin, begin + (end - at) * size_of(section.dtype),
                     section.dtype, request.dtype,
                     static_cast<std::byte*>(request.memory) + (at - range.begin) * size_of(request.dtype)});
    at = end;
  }
}

Reader::Reader(Storage storage, const std::string& folder) : impl_(std::make_unique<Impl>(storage, folder)) {}
Reader::~Reader() = default;
Reader::Reader(Reader&&) noexcept = default;

std::int64_t Reader::staging_bytes() {
  return AlignedBuffer::requested_bytes(staging_buffers * block_bytes);
}
const std::string& Reader::folder() const noexcept {
  return impl_->folder;
}
const Manifest& Reader::manifest() const noexcept {
  return impl_->manifest;
}
const std::vector<StoredTensor>& Reader::tensors() const noexcept {
  return impl_->tensors;
}
const ReadStatistics& Reader::statistics() const noexcept {
  return impl_->statistics;
}

const StoredTensor* Reader::find(std::string_view name) const {
  const auto found = impl_->names.find(std::string(name));
  return found == impl_->names.end() ? nullptr : &impl_->tensors[static_cast<std::size_t>(found->second)];
}

const StoredTensor& Reader::tensor(std::string_view name) const {
  if (const StoredTensor* found = find(name)) return *found;
  std::vector<std::string> names;
  for (const StoredTensor& tensor : impl_->tensors) names.push_back(tensor.name);
  const std::string closest = detail::closest_match(name, names);
  throw CheckpointError(fmt::format("checkpoint {} has no tensor '{}'{}", impl_->folder, name,
                                    closest.empty() ? "" : "; the closest match is '" + closest + "'"));
}

std::vector<std::string> Reader::kinds(const StoredTensor& tensor) const {
  std::vector<std::string> kinds;
  for (const SectionRecord& section : layout().sections) {
    if (section.frozen == tensor.frozen) kinds.push_back(section.kind);
  }
  return kinds;
}

DataType Reader::dtype(const StoredTensor& tensor, std::string_view kind) const {
  const int section = layout().find_section(kind, tensor.frozen);
  if (section < 0) {
    std::string kept;
    for (const std::string& other : kinds(tensor)) kept += (kept.empty() ? "" : ", ") + other;
    throw CheckpointError(fmt::format("checkpoint {} keeps no '{}' of {}tensor {}; it keeps {}",
                                      impl_->folder, kind, tensor.frozen ? "frozen " : "", tensor.name,
                                      kept));
  }
  return layout().sections[static_cast<std::size_t>(section)].dtype;
}

void Reader::read(std::span<const ReadRequest> requests) {
  std::vector<Impl::Task> tasks;
  for (const ReadRequest& request : requests) {
    impl_->add_tasks(request, tasks);
    const DataType stored = layout().sections[static_cast<std::size_t>(request.section)].dtype;
    impl_->statistics.bytes_wanted += request.range.size() * size_of(stored);
  }
  impl_->run(tasks);
}

ReadRequest Reader::request_for(std::string_view name, std::string_view kind, ElementRange elements,
                                DataType dtype, void* memory) const {
  const StoredTensor& found = tensor(name);
  this->dtype(found, kind);  // says what is kept when this is not
  if (elements.begin < 0 || elements.end < elements.begin || elements.end > found.shape.elements()) {
    throw InvalidArgument(fmt::format("elements {} to {} of tensor {}, which has {}", elements.begin,
                                      elements.end, name, found.shape.elements()));
  }
  const TensorRecord& record =
      layout().units[static_cast<std::size_t>(found.unit)].tensors[static_cast<std::size_t>(found.index)];
  return {layout().find_section(kind, found.frozen),
          found.unit,
          {record.offset + elements.begin, record.offset + elements.end},
          dtype,
          memory};
}

void Reader::read_tensor(std::string_view name, std::string_view kind, ElementRange elements, DataType dtype,
                         void* memory) {
  read(request_for(name, kind, elements, dtype, memory));
}

const ArrayRecord& Reader::array(std::string_view name) const {
  std::vector<std::string> names;
  for (const ArrayRecord& array : layout().arrays) {
    if (array.name == name) return array;
    names.push_back(array.name);
  }
  const std::string closest = detail::closest_match(name, names);
  const std::string others = !closest.empty() ? "; the closest match is '" + closest + "'"
                             : names.empty()  ? ", nor any other"
                                              : fmt::format("; it has {}", fmt::join(names, ", "));
  throw CheckpointError(fmt::format("checkpoint {} has no array '{}'{}", impl_->folder, name, others));
}

void Reader::read_array(const ArrayRecord& array, int rank, ElementRange elements, void* memory) {
  const std::vector<ArrayRecord>& arrays = layout().arrays;
  if (!array.per_rank) rank = 0;  // whichever asks
  const auto index =
      static_cast<std::size_t>(std::find(arrays.begin(), arrays.end(), array) - arrays.begin());
  if (index == arrays.size() || rank < 0 || rank >= layout().world || elements.begin < 0 ||
      elements.end < elements.begin || elements.end > array.shape(rank).elements()) {
    throw InvalidArgument(fmt::format("elements {} to {} of array {} of rank {}: the checkpoint has no such",
                                      elements.begin, elements.end, array.name, rank));
  }
  const std::int64_t width = size_of(array.dtype);
  std::vector<Impl::Task> tasks;
  for (int from = array.per_rank ? rank : 0; from <= (array.per_rank ? rank : layout().world - 1); ++from) {
    const ElementRange held = array.range(from), part = detail::intersect(held, elements);
    if (part.empty()) continue;
    const std::int64_t offset = impl_->manifest.shards[static_cast<std::size_t>(from)].array_offsets[index];
    tasks.push_back({from, offset + (part.begin - held.begin) * width,
                     offset + (part.end - held.begin) * width, array.dtype, array.dtype,
                     static_cast<std::byte*>(memory) + (part.begin - elements.begin) * width});
  }
  impl_->statistics.bytes_wanted += elements.size() * width;
  impl_->run(tasks);
}

}  // namespace tranche::checkpoint
