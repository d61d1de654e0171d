// Sequential transfers of one big file by offload/'s engines, beside what plain system calls reach on the
// same disk: pwrite and pread past the page cache, one block at a time, and the shortest io_uring loop with
// registered memory. The ways take turns, so that a disk that others use too is equally slow for all. Prints
// medians and fractions.
//   bench_block_io [--dir DIR] [--mib N] [--block-kib N] [--depth N] [--repeats N]
#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "tranche/core/error.h"
#include "tranche/device/memory_resources.h"
#include "tranche/offload/aligned_buffer.h"
#include "tranche/offload/block_io.h"
#if TRANCHE_HAS_URING
#include <liburing.h>
#endif

namespace {

using namespace tranche;

struct Settings {
  std::string directory = ".";
  std::int64_t bytes = std::int64_t{1} << 30;
  std::int64_t block = std::int64_t{1} << 20;
  int depth = 16;
  int repeats = 5;
};

void check(std::int64_t result, const char* what) {
  if (result < 0) throw Error(fmt::format("{} failed: {}", what, std::strerror(static_cast<int>(-result))));
}

void raw_blocking(int descriptor, bool writing, char* memory, const Settings& settings) {
  for (std::int64_t offset = 0; offset < settings.bytes; offset += settings.block) {
    const auto count = static_cast<std::size_t>(settings.block);
    const auto done = writing ? ::pwrite(descriptor, memory + offset, count, offset)
                              : ::pread(descriptor, memory + offset, count, offset);
    if (done != settings.block) check(done < 0 ? -errno : -EIO, "a raw transfer");
  }
}

#if TRANCHE_HAS_URING
class RawRing {
 public:
  RawRing(int depth, char* memory, std::int64_t bytes) {
    check(io_uring_queue_init(static_cast<unsigned>(depth), &ring_, 0), "io_uring");
    const iovec range{memory, static_cast<std::size_t>(bytes)};
    registered_ = io_uring_register_buffers(&ring_, &range, 1) == 0;
  }
  ~RawRing() { io_uring_queue_exit(&ring_); }
  RawRing(const RawRing&) = delete;
  RawRing& operator=(const RawRing&) = delete;

  void run(int descriptor, bool writing, char* memory, const Settings& settings) {
    std::int64_t next = 0, done = 0;
    const auto submit = [&] {
      io_uring_sqe* entry = io_uring_get_sqe(&ring_);
      const auto count = static_cast<unsigned>(settings.block);
      const auto offset = static_cast<std::uint64_t>(next);
      if (registered_ && writing) {
        io_uring_prep_write_fixed(entry, descriptor, memory + next, count, offset, 0);
      } else if (registered_) {
        io_uring_prep_read_fixed(entry, descriptor, memory + next, count, offset, 0);
      } else if (writing) {
        io_uring_prep_write(entry, descriptor, memory + next, count, offset);
      } else {
        io_uring_prep_read(entry, descriptor, memory + next, count, offset);
      }
      next += settings.block;
    };
    for (int i = 0; i < settings.depth && next < settings.bytes; ++i) submit();
    while (done < settings.bytes) {
      check(io_uring_submit_and_wait(&ring_, 1), "io_uring_submit_and_wait");
      io_uring_cqe* completion = nullptr;
      while (io_uring_peek_cqe(&ring_, &completion) == 0) {
        if (completion->res != settings.block)
          check(completion->res < 0 ? completion->res : -EIO, "io_uring");
        io_uring_cqe_seen(&ring_, completion);
        done += settings.block;
        if (next < settings.bytes) submit();
      }
    }
  }

 private:
  io_uring ring_{};
  bool registered_ = false;
};
#endif

void ours(BlockIo& io, File& file, bool writing, char* memory, const Settings& settings) {
  io.wait(writing ? io.write(file, 0, memory, settings.bytes) : io.read(file, 0, memory, settings.bytes));
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

Settings parse(int argc, char** argv) {
  Settings settings;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (i + 1 == argc) throw ConfigurationError("'" + flag + "' needs a value, or is unknown");
    const std::string value = argv[++i];
    if (flag == "--dir") {
      settings.directory = value;
    } else if (flag == "--mib") {
      settings.bytes = std::stoll(value) << 20;
    } else if (flag == "--block-kib") {
      settings.block = std::stoll(value) << 10;
    } else if (flag == "--depth") {
      settings.depth = std::stoi(value);
    } else if (flag == "--repeats") {
      settings.repeats = std::stoi(value);
    } else {
      throw ConfigurationError("unknown flag '" + flag + "'");
    }
  }
  if (settings.bytes < settings.block || settings.bytes % settings.block != 0 || settings.repeats < 1) {
    throw ConfigurationError("--mib must be a multiple of --block-kib, and --repeats at least 1");
  }
  return settings;
}

void run(const Settings& settings) {
  const std::string path = join_path(settings.directory, "tranche-bench-block-io");
  const auto host = make_host_resource(Tier::host);
  AlignedBuffer buffer(*host, settings.bytes, Category::workspace, "bench");
  auto* memory = static_cast<char*>(buffer.data());
  for (std::int64_t i = 0; i < settings.bytes; ++i) memory[i] = static_cast<char>(i * 31 + (i >> 12));

  FileSystem& files = posix_file_system();
  const auto file = files.open(path, OpenMode::create_or_truncate, Caching::direct);
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
  std::vector<std::pair<std::string, Way>> ways;
  ways.emplace_back("raw, depth 1",
                    [&](bool writing) { raw_blocking(descriptor, writing, memory, settings); });
#if TRANCHE_HAS_URING
  std::unique_ptr<RawRing> ring;
  try {
    ring = std::make_unique<RawRing>(settings.depth, memory, settings.bytes);
    ways.emplace_back("raw io_uring",
                      [&](bool writing) { ring->run(descriptor, writing, memory, settings); });
  } catch (const Error& error) {
    fmt::print("note: no raw io_uring: {}\n", error.message());
  }
#endif
  std::vector<std::unique_ptr<BlockIo>> engines;
  std::vector<std::unique_ptr<RegisteredMemory>> registrations;
  for (const BlockIoEngine engine : {BlockIoEngine::uring, BlockIoEngine::threads}) {
    try {
      engines.push_back(make_block_io(
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

  raw_blocking(descriptor, true, memory, settings);  // preallocated blocks become written ones
  file->sync();
  std::map<std::pair<std::size_t, bool>, std::vector<double>> seconds;
  for (int repeat = 0; repeat < settings.repeats; ++repeat) {
    for (const bool writing : {true, false}) {
      for (std::size_t i = 0; i < ways.size(); ++i) {
        // Nobody is always first.
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
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(parse(argc, argv));
    return 0;
  } catch (const tranche::Error& error) {
    fmt::print(stderr, "bench_block_io: {}\n", error.message());
    return static_cast<int>(error.exit_status());
  }
}
