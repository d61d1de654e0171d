#include "checkpoint/reader.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "checkpoint/convert.h"
#include "checkpoint/reader_impl-inl.h"
#include "core/block8.h"
#include "core/closest_match.h"
#include "tranche/core/error.h"

namespace tranche::checkpoint {

using detail::AlignedBuffer;
using detail::Caching;
using detail::ElementRange;
using detail::join_path;

namespace {

constexpr std::size_t most_open_files = 32;
constexpr std::size_t most_tables = 64;
/// The most ranges of up to a block in flight. So many keep a fast disk busy even while this thread waits for
/// a processor; those that are read in place need no buffer.
constexpr std::size_t most_flights = 32;
/// The least part of a block that is read by a separate operation.
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
    const std::size_t first = tensors.size();
    for (std::size_t t = 0; t < layout.units[u].tensors.size(); ++t) {
      const TensorRecord& tensor = layout.units[u].tensors[t];
      const auto number = static_cast<int>(tensors.size());
      bool unique = names.emplace(tensor.name, number).second;
      for (const std::string& alias : tensor.aliases) unique = names.emplace(alias, number).second && unique;
      if (!unique)
        throw CheckpointError(fmt::format("{}: a name of tensor {} is there twice", path, tensor.name));
      tensors.push_back({tensor.name, static_cast<int>(u), static_cast<int>(t), tensor.shape, tensor.frozen,
                         tensor.state_class});
    }
    holders.resize(tensors.size());
    for (const BufferRecord& buffer : layout.units[u].buffers) {
      for (const InstanceRecord& instance : buffer.instances) {
        for (const PlacedTensor& placed : instance.tensors) {
          holders[first + static_cast<std::size_t>(placed.tensor)].push_back({&instance, &placed});
        }
      }
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
    } catch (const std::exception&) {  // only the first failure is reported
    }
    if (flight.staged) free_buffers.push_back(flight.memory);
  }
  flights.clear();
}

const std::shared_ptr<detail::File>& Reader::Impl::file(int rank, Caching caching) {
  auto found = std::find_if(files.begin(), files.end(), [&](const OpenFile& open) {
    return open.rank == rank && open.caching == caching;
  });
  if (found != files.end()) {
    files.splice(files.begin(), files, found);
  } else {
    files.push_front(
        {rank, caching,
         storage.files.open(join_path(folder, record(rank).name), detail::OpenMode::read, caching)});
    if (files.size() > most_open_files) files.pop_back();
  }
  return files.front().file;
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
  const int rank = flight.tasks.front().rank;
  const FileRecord& shard = record(rank);
  const std::int64_t block = flight.begin / block_bytes;
  const std::int64_t block_end = std::min((block + 1) * block_bytes, shard.digested_bytes);
  std::array<std::uint64_t, static_cast<std::size_t>(leaves_per_block)> leaves;
  leaf_digests(bytes, leaves.data());
  const auto count = static_cast<std::size_t>(divide_round_up(flight.end - flight.begin, leaf_bytes));
  const bool whole = flight.begin == block * block_bytes && flight.end == block_end;
  if (whole && block_digest({leaves.data(), count}) == shard.blocks[static_cast<std::size_t>(block)]) return;
  const auto& expected = table(rank, block);
  const auto first = static_cast<std::size_t>((flight.begin - block * block_bytes) / leaf_bytes);
  for (std::size_t i = 0; i < count; ++i) {
    if (leaves[i] == expected[first + i]) continue;
    const std::int64_t begin = flight.begin + static_cast<std::int64_t>(i) * leaf_bytes;
    const std::int64_t end = std::min(begin + leaf_bytes, flight.end);
    throw CheckpointError(fmt::format("{} is damaged in bytes {} to {}, which hold {}",
                                      join_path(folder, shard.name), begin, end - 1,
                                      content(rank, begin, end)));
  }
}

void Reader::Impl::launch(std::span<const Task> group, std::int64_t begin, std::int64_t end, bool in_place,
                          Caching caching) {
  if (begin == end) return;
  while (flights.size() >= most_flights || (!in_place && free_buffers.empty())) land();
  const Task& task = group.front();
  Flight flight{group, begin, end, nullptr, !in_place, file(task.rank, caching), {}};
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
  auto task = std::partition_point(flight.tasks.begin(), flight.tasks.end(),
                                   [&](const Task& before) { return before.end <= flight.begin; });
  for (; task != flight.tasks.end() && task->begin < flight.end; ++task) {
    const std::int64_t from = std::max(flight.begin, task->begin);
    const std::int64_t to = std::min(flight.end, task->end);
    const std::int64_t element = size_of(task->stored);
    convert(task->stored, flight.memory + (from - flight.begin), task->wanted,
            task->target + (from - task->begin) / element * size_of(task->wanted), (to - from) / element);
  }
}

/// True when whole leaves can be read directly into the task's memory: no conversion is needed, and the
/// memory is aligned for direct I/O if the file uses it.
bool Reader::Impl::can_read_in_place(const Task& task) {
  if (task.stored != task.wanted) return false;
  const auto native = file(task.rank)->native();
  if (!native || native->direct < 0) return true;
  // Leaves begin on multiples of every possible alignment.
  const auto shift = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(task.target)) - task.begin;
  return shift % native->memory_alignment == 0;
}

void Reader::Impl::fetch(std::span<const Task> group) {
  const Task& task = group.front();
  const bool in_place = group.size() == 1 && can_read_in_place(task);
  const std::int64_t wanted_end = group.back().end;
  const std::int64_t last = std::min(leaf_ceiling(wanted_end), record(task.rank).digested_bytes);
  std::int64_t wanted = 0;
  for (const Task& one : group) wanted += one.end - one.begin;
  // Other ranks of the host probably want the rest of these leaves: they hold other columns of the tensor.
  const Caching caching =
      wanted < (last - leaf_floor(task.begin)) / 16 * 15 ? Caching::shared : Caching::direct;
  for (std::int64_t at = leaf_floor(task.begin); at < last;) {
    const std::int64_t end = std::min((at / block_bytes + 1) * block_bytes, last);
    // The leaves of this block that the task needs as a whole.
    const std::int64_t inner_begin = std::max(at, leaf_ceiling(task.begin));
    const std::int64_t inner_end = wanted_end >= end ? end : leaf_floor(wanted_end);
    if (in_place && inner_end - inner_begin >= least_in_place) {
      launch(group, at, inner_begin, false, Caching::direct);
      launch(group, inner_begin, inner_end, true, Caching::direct);
      launch(group, inner_end, end, false, Caching::direct);
    } else {
      launch(group, at, end, false, caching);
    }
    at = end;
  }
}

void Reader::Impl::run(std::vector<Task> tasks) {
  /// True when `next` continues `task` in the file and in memory, as the tensors of a buffer do.
  const auto continues = [](const Task& task, const Task& next) {
    return next.rank == task.rank && next.begin == task.end && next.stored == task.stored &&
           next.wanted == task.wanted &&
           next.target == task.target + (task.end - task.begin) / size_of(task.stored) * size_of(task.wanted);
  };
  // Tasks are sorted by file position, so that a leaf with several small ranges is read once.
  std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) {
    return std::pair(a.rank, a.begin) < std::pair(b.rank, b.begin);
  });
  // Small tasks that share a leaf are read together; boxes of a tensor produce many of them.
  const auto shares_leaf = [](const Task& task, const Task& next) {
    const auto small = [](const Task& one) { return one.end - one.begin < least_in_place; };
    return next.rank == task.rank && next.begin >= task.end && next.begin < leaf_ceiling(task.end) &&
           small(task) && small(next);
  };
  std::size_t kept = 0;
  for (std::size_t i = 1; i < tasks.size(); ++i) {
    if (continues(tasks[kept], tasks[i])) {
      tasks[kept].end = tasks[i].end;
    } else {
      tasks[++kept] = tasks[i];
    }
  }
  if (!tasks.empty()) tasks.resize(kept + 1);
  const auto all = [&] {
    for (std::size_t i = 0, next = 0; i < tasks.size(); i = next) {
      for (next = i + 1; next < tasks.size() && shares_leaf(tasks[next - 1], tasks[next]);) ++next;
      fetch(std::span(tasks).subspan(i, next - i));
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
      request.tensor < 0 || request.tensor >= static_cast<int>(tensors.size())) {
    throw InvalidArgument(fmt::format("section {}, tensor {}: {} has {} sections and {} tensors",
                                      request.section, request.tensor, folder, layout.sections.size(),
                                      tensors.size()));
  }
  const auto s = static_cast<std::size_t>(request.section);
  const auto t = static_cast<std::size_t>(request.tensor);
  const SectionRecord& section = layout.sections[s];
  const StoredTensor& tensor = tensors[t];
  const Box box = request.box.empty() ? whole_box(tensor.shape) : request.box;
  if (section.kind_of() != kind_of_buffer(tensor.frozen, tensor.state_class) ||
      !lies_within(box, tensor.shape)) {
    throw InvalidArgument(fmt::format("box {} of {} of tensor {}, which has shape {}{}", to_string(box),
                                      section.dataset, tensor.name, tensor.shape.to_string(),
                                      tensor.frozen ? " and is frozen" : ""));
  }
  const ElementRange range = request.range;
  if (range.begin < 0 || range.end < range.begin || range.end > elements_of(box)) {
    throw InvalidArgument(fmt::format("elements {} to {} of tensor {}, which has {}", range.begin, range.end,
                                      tensor.name, elements_of(box)));
  }
  const std::int64_t block = section.block.elements;
  const auto whole_blocks = [&](std::int64_t begin, std::int64_t end) {
    return begin % block == 0 && (end % block == 0 || end == tensor.shape.elements());
  };
  const bool plain = section.block.name.empty();
  for (const Holder& holder : holders[t]) {
    const auto add_run = [&](const CommonRun& run) {
      if (!plain && (request.dtype != DataType::uint8 || range.begin % block != 0 ||
                     !whole_blocks(run.tensor, run.tensor + run.elements))) {
        throw CheckpointError(fmt::format(
            "{} of tensor {} is stored as {} in blocks of {} elements: elements {} to {} as {} need a "
            "conversion from {} to {} first; whole blocks are read as uint8",
            section.kind, tensor.name, section.block.name, block, run.tensor, run.tensor + run.elements,
            name_of(request.dtype), section.block.name,
            name_of(request.dtype == DataType::uint8 ? DataType::float32 : request.dtype)));
      }
      const std::vector<StoredRange>& ranges = holder.instance->ranges;
      const std::int64_t first = holder.placed->offset + run.second;
      const std::int64_t last = first + run.elements;
      auto stored = std::partition_point(ranges.begin(), ranges.end(),
                                         [&](const StoredRange& before) { return before.end <= first; });
      for (std::int64_t at = first; at < last; ++stored) {
        const std::int64_t end = std::min(last, stored->end);
        const std::int64_t begin = manifest.shards[static_cast<std::size_t>(stored->rank)].offsets[s] +
                                   section.bytes(stored->first + at - stored->begin);
        const std::int64_t bytes = section.bytes(round_up(end - at, block));
        const std::int64_t before = run.first + at - first - range.begin;
        tasks.push_back({stored->rank, begin, begin + bytes, section.dtype, request.dtype,
                         static_cast<std::byte*>(request.memory) +
                             (plain ? before * size_of(request.dtype) : section.bytes(before))});
        at = end;
      }
    };
    common_runs(tensor.shape, box, holder.placed->box, range, add_run);
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
    if (section.kind_of() == kind_of_buffer(tensor.frozen, tensor.state_class)) kinds.push_back(section.kind);
  }
  return kinds;
}

DataType Reader::dtype(const StoredTensor& tensor, std::string_view kind) const {
  const int section = layout().find_section(kind, tensor.frozen, tensor.state_class);
  if (section < 0) {
    std::string kept;
    for (const std::string& other : kinds(tensor)) kept += (kept.empty() ? "" : ", ") + other;
    throw CheckpointError(fmt::format("checkpoint {} keeps no '{}' of {}tensor {}; it keeps {}",
                                      impl_->folder, kind, tensor.frozen ? "frozen " : "", tensor.name,
                                      kept));
  }
  const SectionRecord& found = layout().sections[static_cast<std::size_t>(section)];
  return element_type(found.dtype, found.block);
}

void Reader::read(std::span<const ReadRequest> requests) {
  std::vector<Impl::Task> tasks;
  std::vector<const ReadRequest*> conversions;
  for (const ReadRequest& request : requests) {
    const bool there = request.section >= 0 && request.section < static_cast<int>(layout().sections.size()) &&
                       request.tensor >= 0 && request.tensor < static_cast<int>(tensors().size());
    const SectionRecord section =
        there ? layout().sections[static_cast<std::size_t>(request.section)] : SectionRecord{};
    const DataType stored = element_type(section.dtype, section.block);
    if (there && stored != request.dtype && request.dtype != DataType::uint8 && request.box.empty() &&
        (is_block(stored) || is_block(request.dtype))) {
      conversions.push_back(&request);
      continue;
    }
    ReadRequest own = request;
    if (is_block(stored) && stored == request.dtype) own.dtype = DataType::uint8;
    impl_->add_tasks(own, tasks);
    impl_->statistics.bytes_wanted += section.bytes(round_up(request.range.size(), section.block.elements));
  }
  impl_->run(std::move(tasks));
  for (const ReadRequest* request : conversions) read_converted(*request);
}

void Reader::read_converted(const ReadRequest& request) {
  constexpr std::int64_t most = std::int64_t{1} << 18;
  const SectionRecord& section = layout().sections[static_cast<std::size_t>(request.section)];
  const StoredTensor& tensor = tensors().at(static_cast<std::size_t>(request.tensor));
  const DataType stored = element_type(section.dtype, section.block), wanted = request.dtype;
  const ElementRange range = request.range;
  if (range.begin < 0 || range.end < range.begin || range.end > tensor.shape.elements() ||
      range.begin % block_elements_of(wanted) != 0) {
    throw InvalidArgument(
        fmt::format("elements {} to {} of tensor {} cannot be read as {}: they lie outside its {}, or begin "
                    "within a block",
                    range.begin, range.end, tensor.name, name_of(wanted), tensor.shape.elements()));
  }
  auto* const memory = static_cast<std::byte*>(request.memory);
  std::vector<float> values;
  std::vector<std::byte> blocks;
  for (std::int64_t at = range.begin; at < range.end; at += most) {
    const ElementRange part{at, std::min(at + most, range.end)};
    std::int64_t before = 0;  // values before the part, in its first block
    if (is_block(stored)) {
      before = at % section.block.elements;
      const ElementRange whole{at - before,
                               std::min(round_up(part.end, section.block.elements), tensor.shape.elements())};
      blocks.resize(static_cast<std::size_t>(bytes_of(stored, whole.size())));
      read({request.section, request.tensor, whole, DataType::uint8, blocks.data(), {}});
      values.resize(static_cast<std::size_t>(whole.size()));
      detail::decode_blocks8(stored, blocks.data(), values);
    } else {
      values.resize(static_cast<std::size_t>(part.size()));
      read({request.section, request.tensor, part, DataType::float32, values.data(), {}});
    }
    const std::span<const float> own =
        std::span(values).subspan(static_cast<std::size_t>(before), static_cast<std::size_t>(part.size()));
    std::byte* const to = memory + bytes_of(wanted, at - range.begin);
    if (is_block(wanted)) {
      detail::encode_blocks8(wanted, own, to);
    } else {
      convert(DataType::float32, own.data(), wanted, to, part.size());
    }
  }
}

ReadRequest Reader::request_for(std::string_view name, std::string_view kind, ElementRange elements,
                                DataType dtype, void* memory, Box box) const {
  const StoredTensor& found = tensor(name);
  this->dtype(found, kind);  // throws with the kinds that are stored if this one is not
  return {layout().find_section(kind, found.frozen, found.state_class),
          static_cast<int>(&found - impl_->tensors.data()),
          elements,
          dtype,
          memory,
          std::move(box)};
}

void Reader::read_tensor(std::string_view name, std::string_view kind, ElementRange elements, DataType dtype,
                         void* memory, Box box) {
  read(request_for(name, kind, elements, dtype, memory, std::move(box)));
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
  if (!array.per_rank) rank = 0;  // any rank can read a global array
  const auto index =
      static_cast<std::size_t>(std::find(arrays.begin(), arrays.end(), array) - arrays.begin());
  if (index == arrays.size() || rank < 0 || rank >= layout().world || elements.begin < 0 ||
      elements.end < elements.begin || elements.end > array.shape(rank).elements()) {
    throw InvalidArgument(fmt::format("elements {} to {} of array {} of rank {}: the checkpoint has no such",
                                      elements.begin, elements.end, array.name, rank));
  }
  const std::int64_t width = size_of(array.dtype);
  std::vector<Impl::Task> tasks;
  const std::vector<StoredRange> whole{{rank, 0, array.shape(rank).elements(), 0}};
  for (const StoredRange& held : array.per_rank ? whole : array.ranges) {
    const ElementRange part = detail::intersect(held.range(), elements);
    if (part.empty()) continue;
    const std::int64_t offset =
        impl_->manifest.shards[static_cast<std::size_t>(held.rank)].array_offsets[index];
    tasks.push_back({held.rank, offset + (part.begin - held.begin) * width,
                     offset + (part.end - held.begin) * width, array.dtype, array.dtype,
                     static_cast<std::byte*>(memory) + (part.begin - elements.begin) * width});
  }
  impl_->statistics.bytes_wanted += elements.size() * width;
  impl_->run(std::move(tasks));
}

}  // namespace tranche::checkpoint
