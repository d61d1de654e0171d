// Sequential transfers of one large file by the engines of offload/, beside plain system calls on the same
// disk: pwrite and pread without the page cache, one block at a time, and the shortest io_uring loop with
// registered memory. The ways alternate, so that other users of the disk slow them all equally. Prints
// medians and fractions.
//   bench_block_io [--dir DIR] [--mib N] [--block-kib N] [--depth N] [--repeats N]
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "bench/figures.h"
#include "bench/flags.h"
#include "bench/raw_io.h"
#include "offload/aligned_buffer.h"
#include "offload/block_io.h"
#include "tranche/core/error.h"
#include "tranche/device/memory_resources.h"

namespace {

using namespace tranche;
using bench::median;
using detail::BlockIo;
using detail::BlockIoEngine;
using detail::FileSystem;

struct Settings {
  std::string directory = ".";
  std::int64_t bytes = std::int64_t{1} << 30;
  std::int64_t block = std::int64_t{1} << 20;
  int depth = 16;
  int repeats = 5;
};

void ours(BlockIo& io, detail::File& file, bool writing, char* memory, const Settings& settings) {
  io.wait(writing ? io.write(file, 0, memory, settings.bytes) : io.read(file, 0, memory, settings.bytes));
}

Settings parse(int argc, char** argv) {
  Settings settings;
  bench::parse_flags(
      argc, argv,
      {bench::text_flag("--dir", settings.directory), bench::number_flag("--mib", settings.bytes, 20),
       bench::number_flag("--block-kib", settings.block, 10), bench::number_flag("--depth", settings.depth),
       bench::number_flag("--repeats", settings.repeats)});
  if (settings.bytes < settings.block || settings.bytes % settings.block != 0 || settings.repeats < 1) {
    throw ConfigurationError("--mib must be a multiple of --block-kib, and --repeats at least 1");
  }
  return settings;
}

void run(const Settings& settings) {
  const std::string path = detail::join_path(settings.directory, "tranche-bench-block-io");
  const auto host = make_host_resource(Tier::host);
  detail::AlignedBuffer buffer(*host, settings.bytes, Category::workspace, "bench");
  auto* memory = static_cast<char*>(buffer.data());
  for (std::int64_t i = 0; i < settings.bytes; ++i) memory[i] = static_cast<char>(i * 31 + (i >> 12));

  FileSystem& files = detail::posix_file_system();
  const auto file = files.open(path, detail::OpenMode::create_or_truncate, detail::Caching::direct);
  struct Removal {
    FileSystem& files;
    std::string path;
    ~Removal() { files.remove(path); }
  } removal{files, path};
  file->preallocate(settings.bytes);
  if (!file->direct()) fmt::print("note: {}\n", file->direct_refusal());
  const auto native = file->native();
  const int descriptor = native->direct >= 0 ? native->direct : native->buffered;

  using Way = std::function<void(bool writing)>;
  const auto whole_file = [&](bool writing) {
    return bench::RawTransfer{descriptor, writing, memory, settings.bytes, settings.block};
  };
  std::vector<std::pair<std::string, Way>> ways{
      {"raw, depth 1", [&](bool writing) { bench::transfer_blocking(whole_file(writing)); }}};
  std::unique_ptr<bench::RawRing> ring;
  try {
    ring = std::make_unique<bench::RawRing>(settings.depth, memory, settings.bytes);
    ways.emplace_back("raw io_uring", [&](bool writing) { ring->transfer(whole_file(writing)); });
  } catch (const Error& error) {
    fmt::print("note: no raw io_uring: {}\n", error.message());
  }
  std::vector<std::unique_ptr<BlockIo>> engines;
  std::vector<std::unique_ptr<detail::RegisteredMemory>> registrations;
  for (const BlockIoEngine engine : {BlockIoEngine::uring, BlockIoEngine::threads}) {
    try {
      engines.push_back(detail::make_block_io(
          {.engine = engine, .block_bytes = settings.block, .depth = settings.depth, .hook = {}}));
    } catch (const Error& error) {
      fmt::print("note: {}\n", error.message());
      continue;
    }
    BlockIo& io = *engines.back();
    registrations.push_back(io.register_memory(memory, settings.bytes));
    if (engine == BlockIoEngine::uring && !registrations.back()->registered()) {
      fmt::print("note: {}\n", registrations.back()->refusal());
    }
    ways.emplace_back("offload, " + std::string(name_of(engine)),
                      [&](bool writing) { ours(io, *file, writing, memory, settings); });
  }

  bench::transfer_blocking(whole_file(true));  // the file's preallocated blocks are written once
  file->sync();
  std::map<std::pair<std::size_t, bool>, std::vector<double>> seconds;
  for (int repeat = 0; repeat < settings.repeats; ++repeat) {
    for (const bool writing : {true, false}) {
      for (std::size_t i = 0; i < ways.size(); ++i) {
        // The first way changes with each round.
        const std::size_t way = (i + static_cast<std::size_t>(repeat)) % ways.size();
        const auto begin = std::chrono::steady_clock::now();
        ways[way].second(writing);
        if (writing) file->sync();
        const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
        seconds[{way, writing}].push_back(spent.count());
      }
    }
  }

  fmt::print("{} MiB in blocks of {} KiB, depth {}, median of {}; writes with sync\n", settings.bytes >> 20,
             settings.block >> 10, settings.depth, settings.repeats);
  fmt::print("{:<20}{:>14}{:>10}{:>14}{:>10}\n", "", "write GB/s", "of raw", "read GB/s", "of raw");
  const auto rate = [&](std::size_t way, bool writing) {
    return static_cast<double>(settings.bytes) / median(seconds[{way, writing}]) * 1e-9;
  };
  double best[2] = {0, 0};
  for (std::size_t way = 0; way < ways.size(); ++way) {
    if (!ways[way].first.starts_with("raw")) continue;
    for (const bool writing : {false, true}) best[writing] = std::max(best[writing], rate(way, writing));
  }
  for (std::size_t way = 0; way < ways.size(); ++way) {
    fmt::print("{:<20}{:>14.2f}{:>10.2f}{:>14.2f}{:>10.2f}\n", ways[way].first, rate(way, true),
               rate(way, true) / best[1], rate(way, false), rate(way, false) / best[0]);
  }
  for (std::size_t way = 0; way < ways.size(); ++way) {
    if (ways[way].first.starts_with("raw")) continue;
    fmt::print("engine={} write_of_raw={:.3f} read_of_raw={:.3f}\n", ways[way].first.substr(9),
               rate(way, true) / best[1], rate(way, false) / best[0]);
  }
}

}  // namespace

int main(int argc, char** argv) {
  return tranche::bench::run_program("bench_block_io", [&] { run(parse(argc, argv)); });
}
