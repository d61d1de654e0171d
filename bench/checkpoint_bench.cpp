// Checkpoints relative to the speed of the disk: the same bytes written and read by this library, by plain
// system calls without the page cache, and by HDF5 alone. The ways alternate in every round, each writes new
// files, and only ratios within a round are compared, because other users may share the disk and its caches.
//   bench_checkpoint [--dir DIR] [--mib N] [--repeats N]
#include <fcntl.h>
#include <fmt/core.h>
#include <hdf5.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "bench/figures.h"
#include "bench/flags.h"
#include "bench/raw_io.h"
#include "checkpoint/folder.h"
#include "checkpoint/reader.h"
#include "checkpoint/shard_writer.h"
#include "offload/aligned_buffer.h"
#include "tranche/core/error.h"

namespace {

using namespace tranche;
using bench::median;
using detail::AlignedBuffer;
using detail::ElementRange;
using detail::io_alignment;
using detail::join_path;
using detail::OpenMode;
using namespace tranche::checkpoint;

struct Settings {
  std::string directory = ".";
  std::int64_t bytes = std::int64_t{1} << 30;
  int repeats = 7;
};

constexpr int readers = 3;  // ranks that read a checkpoint of one rank

/// The layout of blocks of GPT-2 124M, with the number of blocks whose size with Adam's two states is nearest
/// to `bytes`.
Layout make_bench_layout(std::int64_t bytes, int world) {
  const std::int64_t elements = bytes / 12;
  const std::int64_t count = std::max<std::int64_t>(1, elements / 7'087'872);
  std::vector<UnitDescription> units;
  for (std::int64_t u = 0; u < count; ++u) {
    const std::int64_t here = elements / count;
    const std::string name = "h." + std::to_string(u);
    units.push_back({name,
                     1,
                     {{name + ".ln_1.weight", Shape{768}, false, {}},
                      {name + ".attn.weight", Shape{here / 3}, false, {}},
                      {name + ".ln_2.weight", Shape{768}, false, {}},
                      {name + ".mlp.weight", Shape{here - here / 3 - 1536}, false, {}}}});
  }
  return make_layout(units, {{"exp_avg", DataType::float32}, {"exp_avg_sq", DataType::float32}},
                     DataType::float32, DataType::float32, world);
}

class Bench {
 public:
  explicit Bench(const Settings& settings)
      : settings_(settings),
        folder_(join_path(settings.directory, "tranche-bench-checkpoint")),
        layout_(make_bench_layout(settings.bytes, 1)),
        plan_(layout_, 0, step),
        image_(storage().memory, plan_.file_bytes(), Category::workspace, "image"),
        target_(storage().memory, target_bytes(), Category::workspace, "target") {
    std::uint32_t bits = 1;
    for (const SectionPiece& piece : plan_.pieces()) {
      auto* values = reinterpret_cast<std::uint32_t*>(memory() + plan_.offset_of(piece));
      for (std::int64_t i = 0; i < piece.range.size(); ++i) values[i] = bits = bits * 1664525u + 1013904223u;
    }
    std::memset(target_.data(), 1, static_cast<std::size_t>(target_.bytes()));  // touches its pages
    storage().files.remove_all(folder_);
    storage().files.create_directories(folder_);
    try {
      write_ring_.emplace(16, image_bytes(), plan_.file_bytes());
      read_ring_.emplace(16, static_cast<char*>(target_.data()), target_.bytes());
    } catch (const Error& error) {
      fmt::print("note: raw transfers without io_uring: {}\n", error.message());
    }
  }
  ~Bench() { storage().files.remove_all(folder_); }
  Bench(const Bench&) = delete;

  void run();

 private:
  static constexpr std::int64_t step = 7;
  struct Way {
    std::string name;
    std::function<void()> body;
  };

  Storage storage() const { return local_; }
  std::byte* memory() const { return static_cast<std::byte*>(image_.data()); }
  char* image_bytes() const { return static_cast<char*>(image_.data()); }
  std::string in_folder(const std::string& name) const { return join_path(folder_, name); }
  std::int64_t target_bytes() const {
    const auto buffers = static_cast<std::int64_t>(layout_.sections.size() * layout_.units.size());
    return plan_.file_bytes() + buffers * readers * 2 * io_alignment;
  }
  std::string saved() const { return join_path(in_folder("run"), step_name(step)); }

  void raw(bool writing, const std::string& path);
  ShardRecord write_image(const std::string& folder);
  void write_pieces(const std::string& folder);
  void save(const std::string& parent);
  void write_by_hdf5(const std::string& path);
  void read(int world, bool by_unit, bool compare);
  void forget();
  void measure(const std::vector<Way>& ways, int round);
  void print(const std::string& name, const std::string& floor, const char* bar) const;
  double fraction(const std::string& name, const std::string& floor) const;

  const Settings settings_;
  const std::string folder_;
  LocalStorage local_;
  Layout layout_;
  ShardPlan plan_;
  AlignedBuffer image_;
  AlignedBuffer target_;
  std::optional<bench::RawRing> write_ring_;
  std::optional<bench::RawRing> read_ring_;
  std::map<std::string, std::vector<double>> seconds_;
};

void Bench::raw(bool writing, const std::string& path) {
  const auto file =
      storage().files.open(path, writing ? OpenMode::create_new : OpenMode::read, detail::Caching::direct);
  if (writing) file->preallocate(plan_.file_bytes());
  const auto native = file->native();
  auto& ring = writing ? write_ring_ : read_ring_;
  const bench::RawTransfer transfer{native->direct >= 0 ? native->direct : native->buffered, writing,
                                    writing ? image_bytes() : static_cast<char*>(target_.data()),
                                    plan_.file_bytes()};
  if (ring) {
    ring->transfer(transfer);
  } else {
    bench::transfer_blocking(transfer);
  }
  if (writing) file->sync();
}

ShardRecord Bench::write_image(const std::string& folder) {
  ShardWriter writer(storage(), plan_, folder);
  writer.write_image({memory(), static_cast<std::size_t>(plan_.file_bytes())});
  return writer.finish();
}

/// Writes tile by tile, as an update does: all kinds of state of a tile, then the next tile.
void Bench::write_pieces(const std::string& folder) {
  constexpr std::int64_t tile = 1 << 20;
  ShardWriter writer(storage(), plan_, folder);
  for (const SectionPiece& whole : plan_.pieces()) {
    if (whole.section != 0) continue;
    for (std::int64_t at = whole.range.begin; at < whole.range.end; at += tile) {
      SectionPiece piece = whole;
      piece.range = {at, std::min(at + tile, whole.range.end)};
      for (; piece.section < static_cast<int>(layout_.sections.size()); ++piece.section) {
        writer.put(piece, memory() + plan_.offset_of(piece));
      }
    }
  }
  writer.finish();
}

/// A whole save, with manifest, model.h5 and `latest`.
void Bench::save(const std::string& parent) {
  RunFolder run(storage(), parent, 1);
  run.prepare(step, plan_.file_bytes());
  Manifest manifest;
  manifest.layout = layout_;
  manifest.run.step = step;
  manifest.shards.push_back(write_image(run.temporary(step)));
  run.commit(manifest, checkpoint::make_master_image(manifest.layout));
}

/// HDF5 alone: a contiguous dataset for each section, closed and synced.
void Bench::write_by_hdf5(const std::string& path) {
  const auto require = [](std::int64_t result) {
    if (result < 0) throw Error("HDF5 has failed");
    return result;
  };
  const hid_t file = require(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT));
  for (std::size_t s = 0; s < layout_.sections.size(); ++s) {
    const auto elements = static_cast<hsize_t>(layout_.section_elements(static_cast<int>(s), 0));
    const hid_t space = require(H5Screate_simple(1, &elements, nullptr));
    const hid_t set = require(H5Dcreate2(file, layout_.sections[s].kind.c_str(), H5T_NATIVE_FLOAT, space,
                                         H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
    require(H5Dwrite(set, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, memory() + plan_.offsets()[s]));
    H5Dclose(set);
    H5Sclose(space);
  }
  require(H5Fclose(file));
  storage().files.open(path, OpenMode::update)->sync();
}

/// Reads the parts of the checkpoint that each of `world` ranks needs, rank after rank, each with its own
/// reader: every tensor's elements in the rank's shard, into memory as an engine has it. by_unit: one call
/// for each unit and kind instead of one for all.
void Bench::read(int world, bool by_unit, bool compare) {
  const Layout wanted = make_bench_layout(settings_.bytes, world);
  for (int rank = 0; rank < world; ++rank) {
    auto* at = static_cast<std::byte*>(target_.data());
    Reader reader(storage(), saved());
    std::vector<ReadRequest> requests;
    std::vector<std::size_t> ends;
    const ShardPlan plan(wanted, rank, step);
    for (const SectionPiece& piece : plan.pieces()) {
      const SectionRecord& kept = wanted.sections[static_cast<std::size_t>(piece.section)];
      const UnitRecord& unit = wanted.units[static_cast<std::size_t>(piece.unit)];
      const BufferRecord& buffer = unit.buffers[static_cast<std::size_t>(piece.buffer)];
      for (const PlacedTensor& placed : buffer.instances[static_cast<std::size_t>(piece.instance)].tensors) {
        const ElementRange part =
            detail::intersect({placed.offset, placed.offset + elements_of(placed.box)}, piece.range);
        if (part.empty()) continue;
        requests.push_back(reader.request_for(unit.tensors[static_cast<std::size_t>(placed.tensor)].name,
                                              kept.kind,
                                              {part.begin - placed.offset, part.end - placed.offset},
                                              kept.dtype, at + (part.begin - piece.range.begin) * 4));
      }
      at += round_up(piece.range.size() * 4, io_alignment);
      ends.push_back(requests.size());
    }
    if (by_unit) {
      std::size_t begin = 0;
      for (const std::size_t end : ends) {
        reader.read(std::span(requests).subspan(begin, end - begin));
        begin = end;
      }
    } else {
      reader.read(requests);
    }
    if (!compare) continue;
    for (const ReadRequest& request : requests) {
      const StoredTensor& tensor = reader.tensors()[static_cast<std::size_t>(request.tensor)];
      const std::int64_t offset = layout_.units[static_cast<std::size_t>(tensor.unit)]
                                      .buffers[0]
                                      .instances[0]
                                      .tensors[static_cast<std::size_t>(tensor.index)]
                                      .offset;
      const SectionPiece piece{
          request.section, tensor.unit, 0, 0, {offset + request.range.begin, offset + request.range.end}};
      if (std::memcmp(request.memory, memory() + plan_.offset_of(piece),
                      static_cast<std::size_t>(request.range.size() * 4)) != 0)
        throw Error("what was read is not what was written");
    }
  }
}

/// Removes the files of all ways, waits until the disk is idle, and empties the page cache.
void Bench::forget() {
  detail::FileSystem& files = storage().files;
  for (const detail::DirectoryEntry& entry : files.list(folder_)) {
    if (entry.name != "run") files.remove_all(in_folder(entry.name));
  }
  const int descriptor = ::open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0 || ::syncfs(descriptor) != 0) throw Error("the folder cannot be synced");
  ::close(descriptor);
}

void Bench::measure(const std::vector<Way>& ways, int round) {
  for (std::size_t i = 0; i < ways.size(); ++i) {
    const Way& way = ways[(i + static_cast<std::size_t>(round)) % ways.size()];  // the first way changes with
                                                                                 // each round
    const auto begin = std::chrono::steady_clock::now();
    way.body();
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
    seconds_[way.name].push_back(spent.count());
    forget();
  }
}

double Bench::fraction(const std::string& name, const std::string& floor) const {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < seconds_.at(name).size(); ++i) {
    ratios.push_back(seconds_.at(floor)[i] / seconds_.at(name)[i]);
  }
  return median(ratios);
}

void Bench::print(const std::string& name, const std::string& floor, const char* bar) const {
  const auto rate = [&](const std::string& way) {
    return static_cast<double>(plan_.payload_bytes()) / median(seconds_.at(way)) * 1e-9;
  };
  std::vector<double> ratios;
  for (std::size_t i = 0; i < seconds_.at(name).size(); ++i) {
    ratios.push_back(seconds_.at(floor)[i] / seconds_.at(name)[i]);
  }
  const auto [least, most] = std::minmax_element(ratios.begin(), ratios.end());
  fmt::print("{:<32}{:>7.2f}  {:<26}{:>6.2f}{:>8.2f}  {:.2f} to {:.2f}{:>8}\n", name, rate(name), floor,
             rate(floor), median(ratios), *least, *most, bar);
}

void Bench::run() {
  const std::vector<Way> writing{
      {"raw write", [&] { raw(true, in_folder("raw")); }},
      {"write, whole image", [&] { write_image(in_folder("image")); }},
      {"write, pieces", [&] { write_pieces(in_folder("pieces")); }},
      {"save with manifest", [&] { save(in_folder("save")); }},
      {"H5Dwrite, fsync", [&] { write_by_hdf5(in_folder("plain.h5")); }},
  };
  const std::vector<Way> reading{
      {"raw read", [&] { raw(false, join_path(saved(), plan_.file_name())); }},
      {"read, same ranks", [&] { read(1, false, false); }},
      {"read, 1 rank's file by 3", [&] { read(readers, false, false); }},
      {"read, a call a buffer", [&] { read(1, true, false); }},
  };
  save(in_folder("run"));
  read(1, false, true);
  read(readers, false, true);
  forget();
  for (int round = 0; round < settings_.repeats; ++round) {
    measure(writing, round);
    measure(reading, round);
  }
  fmt::print("{} MiB of payload, {} rounds; GB/s, medians; fractions are of the same round\n",
             plan_.payload_bytes() >> 20, settings_.repeats);
  fmt::print("{:<32}{:>7}  {:<26}{:>6}{:>8}  {:<12}{:>8}\n", "", "GB/s", "measured against", "GB/s", "median",
             "least, most", "bar");
  print("write, whole image", "raw write", "0.92");
  print("write, pieces", "raw write", "0.92");
  print("save with manifest", "raw write", "");
  print("write, whole image", "H5Dwrite, fsync", "1.3");
  print("H5Dwrite, fsync", "raw write", "");
  print("read, same ranks", "raw read", "0.9");
  print("read, 1 rank's file by 3", "raw read", "0.9");
  print("read, a call a buffer", "raw read", "");
  const double overhead =
      static_cast<double>(plan_.file_bytes()) / static_cast<double>(plan_.payload_bytes());
  fmt::print("file bytes of payload: {:.5f} (bar 1.001)\n", overhead);
  fmt::print(
      "write_of_raw={:.3f} write_of_hdf5={:.3f} read_of_raw={:.3f} reshard_of_raw={:.3f} "
      "bytes_of_payload={:.5f}\n",
      fraction("write, whole image", "raw write"), fraction("write, whole image", "H5Dwrite, fsync"),
      fraction("read, same ranks", "raw read"), fraction("read, 1 rank's file by 3", "raw read"), overhead);
}

Settings parse(int argc, char** argv) {
  Settings settings;
  bench::parse_flags(
      argc, argv,
      {bench::text_flag("--dir", settings.directory), bench::number_flag("--mib", settings.bytes, 20),
       bench::number_flag("--repeats", settings.repeats)});
  if (settings.bytes < std::int64_t{1} << 20 || settings.repeats < 1) {
    throw ConfigurationError("--mib and --repeats must be at least 1");
  }
  return settings;
}

}  // namespace

int main(int argc, char** argv) {
  return tranche::bench::run_program("bench_checkpoint", [&] { Bench(parse(argc, argv)).run(); });
}
