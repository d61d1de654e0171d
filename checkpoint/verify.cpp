// Checks every byte of a checkpoint, and describes the contents of damaged ranges.

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <span>

#include "checkpoint/reader_impl-inl.h"
#include "tranche/core/error.h"

namespace tranche::checkpoint {

using detail::BlockIo;
using detail::ElementRange;
using detail::File;
using detail::intersect;
using detail::IoTicket;
using detail::join_path;

namespace {

/// Appends "elements 0 to 9 of weight of tensor a" to a list.
void add(std::string& text, const std::string& part) {
  if (!text.empty()) text += ", ";
  text += part;
}

/// The blocks of a file in order; later ones are read ahead while one is in use.
class BlocksAhead {
 public:
  static constexpr std::int64_t depth = 4;
  /// `memory` holds `depth` blocks.
  BlocksAhead(BlockIo& io, File& file, std::byte* memory, std::int64_t bytes)
      : io_(io), file_(file), memory_(memory), bytes_(bytes) {
    while (asked_ < std::min(bytes_, depth * block_bytes)) ask();
  }
  ~BlocksAhead() {
    for (const IoTicket& ticket : tickets_) {
      try {
        io_.wait(ticket);
      } catch (const std::exception&) {  // only the first failure is reported
      }
    }
  }
  BlocksAhead(const BlocksAhead&) = delete;
  BlocksAhead& operator=(const BlocksAhead&) = delete;

  /// The next block, valid until the next call. Throws the failure of its read.
  std::span<const std::byte> next() {
    if (given_ > 0 && asked_ < bytes_) ask();  // reads into the previous block's buffer
    const IoTicket ticket = tickets_.front();
    tickets_.pop_front();
    const std::int64_t place = given_ / block_bytes % depth;
    const std::int64_t size = std::min(block_bytes, bytes_ - given_);
    given_ += size;
    io_.wait(ticket);
    return {memory_ + place * block_bytes, static_cast<std::size_t>(size)};
  }

 private:
  void ask() {
    const std::int64_t place = asked_ / block_bytes % depth;
    const std::int64_t size = std::min(block_bytes, bytes_ - asked_);
    tickets_.push_back(io_.read(file_, asked_, memory_ + place * block_bytes, size));
    asked_ += size;
  }

  BlockIo& io_;
  File& file_;
  std::byte* memory_;
  std::int64_t bytes_;
  std::int64_t asked_ = 0, given_ = 0;
  std::deque<IoTicket> tickets_;
};

}  // namespace

std::string Reader::Impl::content(int rank, std::int64_t begin, std::int64_t end) const {
  constexpr int most = 8;  // a leaf may hold hundreds of small tensors
  const Layout& layout = manifest.layout;
  const auto r = static_cast<std::size_t>(rank);
  std::string text;
  int named = 0;
  int more = 0;
  const auto name = [&](const std::string& part) {
    if (named++ < most) {
      add(text, part);
    } else {
      ++more;
    }
  };
  const auto name_tensors = [&](const SectionRecord& section, const UnitRecord& unit,
                                const InstanceRecord& instance, ElementRange flat) {
    bool any = false;
    for (const PlacedTensor& placed : instance.tensors) {
      const std::int64_t elements = elements_of(placed.box);
      const ElementRange part = intersect({placed.offset, placed.offset + elements}, flat);
      if (part.empty()) continue;
      any = true;
      const TensorRecord& tensor = unit.tensors[static_cast<std::size_t>(placed.tensor)];
      name(fmt::format("elements {} to {} of {} of tensor {}{}", part.begin - placed.offset,
                       part.end - placed.offset - 1, section.kind, tensor.name,
                       elements == tensor.shape.elements() ? "" : to_string(placed.box)));
    }
    if (!any) name(fmt::format("padding of {} of unit {}", section.dataset, unit.name));
  };
  for (std::size_t s = 0; s < layout.sections.size(); ++s) {
    const SectionRecord& section = layout.sections[s];
    const std::int64_t offset = manifest.shards[r].offsets[s];
    if (offset < 0) continue;
    for (const UnitRecord& unit : layout.units) {
      for (const BufferRecord& buffer : unit.buffers) {
        if (buffer.kind_of() != section.kind_of()) continue;
        for (const InstanceRecord& instance : buffer.instances) {
          for (const StoredRange& range : instance.ranges) {
            if (range.rank != rank) continue;
            const std::int64_t first = offset + section.bytes(range.first);
            const ElementRange bytes =
                intersect({first, first + section.bytes(range.range().size())}, {begin, end});
            if (bytes.empty()) continue;
            // The elements of the flat buffer that the bytes overlap.
            const std::int64_t block = section.block.elements, width = section.bytes(block);
            name_tensors(section, unit, instance,
                         {range.begin + (bytes.begin - first) / width * block,
                          range.begin + divide_round_up(bytes.end - first, width) * block});
          }
        }
      }
    }
  }
  for (std::size_t a = 0; a < layout.arrays.size(); ++a) {
    const ArrayRecord& array = layout.arrays[a];
    const std::int64_t offset = manifest.shards[r].array_offsets[a];
    if (offset < 0) continue;
    const ElementRange held = array.range(rank);
    const std::int64_t element = size_of(array.dtype);
    const ElementRange bytes = intersect({offset, offset + held.size() * element}, {begin, end});
    if (bytes.empty()) continue;
    name(fmt::format("elements {} to {} of array {}{}", held.begin + (bytes.begin - offset) / element,
                     held.begin + divide_round_up(bytes.end - offset, element) - 1, array.name,
                     array.per_rank ? fmt::format(" of rank {}", rank) : ""));
  }
  if (more > 0) text += fmt::format(" and {} more", more);
  return text.empty() ? "the HDF5 file's own structure" : text;
}

std::vector<Damage> Reader::verify(const ReadProgress& progress) {
  Impl& impl = *impl_;
  std::vector<Damage> found;
  const auto looked_at = [&](std::int64_t bytes) {
    impl.statistics.bytes_read += bytes;
    if (progress) progress(bytes);
  };
  const auto check_blocks = [&](const FileRecord& file, File& open, int rank, const std::string& content) {
    std::vector<std::uint64_t> leaves;
    BlocksAhead blocks(impl.storage.io, open, impl.buffer(0), file.digested_bytes);
    for (std::size_t b = 0; b < file.blocks.size(); ++b) {
      const std::span<const std::byte> bytes = blocks.next();
      const std::int64_t begin = static_cast<std::int64_t>(b) * block_bytes;
      const std::int64_t end = begin + static_cast<std::int64_t>(bytes.size());
      leaves.resize(static_cast<std::size_t>(divide_round_up(end - begin, leaf_bytes)));
      leaf_digests(bytes, leaves.data());
      looked_at(end - begin);
      const bool whole = block_digest(leaves) == file.blocks[b];
      const std::vector<std::uint64_t> table =
          rank < 0 ? std::vector<std::uint64_t>{} : impl.read_table(rank, static_cast<std::int64_t>(b));
      if (whole) {
        if (rank >= 0 && table != leaves) {
          const std::int64_t at = file.digested_bytes + static_cast<std::int64_t>(b) * leaves_per_block * 8;
          found.push_back(
              {file.name, at, at + static_cast<std::int64_t>(leaves.size()) * 8,
               fmt::format("the digests of bytes {} to {} are damaged (the bytes are not)", begin, end - 1)});
        }
      } else if (rank < 0) {
        found.push_back({file.name, begin, end, content});
      } else if (block_digest(table) != file.blocks[b]) {
        found.push_back({file.name, begin, end, impl.content(rank, begin, end) + ", and their digests"});
      } else {
        for (std::size_t leaf = 0; leaf < leaves.size(); ++leaf) {
          if (leaves[leaf] == table[leaf]) continue;
          const std::int64_t at = begin + static_cast<std::int64_t>(leaf) * leaf_bytes;
          const std::int64_t to = std::min(at + leaf_bytes, end);
          found.push_back({file.name, at, to, impl.content(rank, at, to)});
        }
      }
    }
  };
  const auto check_rest = [&](const FileRecord& file, File& open) {
    // After the table's entries there are only zeros.
    std::int64_t at = file.digested_bytes + divide_round_up(file.digested_bytes, leaf_bytes) * 8;
    while (at < file.bytes) {
      const std::int64_t size = std::min(file.bytes - at, block_bytes);
      std::byte* memory = impl.buffer(0);
      impl.storage.io.wait(impl.storage.io.read(open, at, memory, size));
      looked_at(size);
      if (std::any_of(memory, memory + size, [](std::byte b) { return b != std::byte{0}; })) {
        found.push_back({file.name, at, at + size, "what follows the digests is not zero"});
      }
      at += size;
    }
  };
  const auto guarded = [&](const FileRecord& file, const auto& body) {
    try {
      body();
    } catch (const IoError& problem) {
      found.push_back({file.name, 0, file.bytes, problem.message()});
    }
  };
  for (const ShardRecord& shard : impl.manifest.shards) {
    guarded(shard.file, [&] {
      const std::shared_ptr<File> open = impl.file(shard.rank);
      check_blocks(shard.file, *open, shard.rank, {});
      check_rest(shard.file, *open);
    });
  }
  guarded(impl.manifest.master, [&] {
    const auto open =
        impl.storage.files.open(join_path(impl.folder, impl.manifest.master.name), detail::OpenMode::read);
    check_blocks(impl.manifest.master, *open, -1, "views of whole tensors; no state is stored here");
  });
  for (FileRecord companion : impl.manifest.companions) {
    companion.name = join_path(std::string(companion_folder), companion.name);
    guarded(companion, [&] {
      const auto open =
          impl.storage.files.open(join_path(impl.folder, companion.name), detail::OpenMode::read);
      check_blocks(companion, *open, -1, "a file that travels with the weights");
    });
  }
  return found;
}

std::vector<Damage> verify(Storage storage, const std::string& folder, bool full,
                           const ReadProgress& progress) {
  std::vector<Damage> found;
  const auto check = [&](const std::string& path, const std::string& prefix) {
    try {
      if (!full) {
        open_manifest(storage.files, path);
        return;
      }
      for (Damage& damage : Reader(storage, path).verify(progress)) {
        damage.file = prefix + damage.file;
        found.push_back(std::move(damage));
      }
    } catch (const CheckpointError& problem) {
      found.push_back({prefix, 0, 0, problem.message()});
    }
  };
  if (storage.files.exists(join_path(folder, std::string(manifest_name)))) {
    check(folder, "");
    return found;
  }
  std::vector<Listed> listed;
  try {
    listed = list_checkpoints(storage.files, folder);
    const std::string path = join_path(folder, std::string(latest_name));
    if (storage.files.exists(path)) {
      const std::string text = storage.files.read_file(path, small_file_bytes);
      const std::string name = parse_latest(text);
      if (name.empty()) {
        found.push_back(
            {std::string(latest_name), 0, static_cast<std::int64_t>(text.size()), "it is damaged"});
      } else if (!storage.files.exists(join_path(folder, name))) {
        found.push_back({std::string(latest_name), 0, static_cast<std::int64_t>(text.size()),
                         "it names " + name + ", which is not there"});
      }
    } else if (!listed.empty()) {
      found.push_back({std::string(latest_name), 0, 0, "it is missing"});
    }
  } catch (const Error& problem) {
    found.push_back({folder, 0, 0, problem.message()});
  }
  if (listed.empty() && found.empty()) found.push_back({folder, 0, 0, "there is no checkpoint here"});
  for (const Listed& entry : listed) {
    check(entry.path, entry.path.substr(entry.path.rfind('/') + 1) + "/");
  }
  return found;
}

std::string describe(const Damage& damage) {
  if (damage.end <= damage.begin) return fmt::format("{}: {}", damage.file, damage.what);
  return fmt::format("{}, bytes {} to {}: {}", damage.file, damage.begin, damage.end - 1, damage.what);
}

}  // namespace tranche::checkpoint
