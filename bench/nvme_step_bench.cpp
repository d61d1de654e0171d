// A step of Adam whose states live on NVMe, relative to its bounds: the same reads and writes without the
// update, and the update without reads and writes. These transfers are compared with fio on the same disk, if
// it is installed. The ways alternate in every round; only ratios within a round are compared, because other
// users may share the disk and its caches.
//   bench_nvme_step [--dir DIR] [--elements N] [--tile N] [--buffers N] [--threads N] [--repeats N]
//                   [--updates N]   (repeats of each tile's update: if an update takes far less time than its
//                   transfers, overlap does not show)
//                   [--engine automatic|io_uring|threads] [--block-kib N] [--depth N]   (default: calibrated)
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "bench/figures.h"
#include "bench/flags.h"
#include "offload/aligned_buffer.h"
#include "offload/calibration.h"
#include "offload/tile_ring.h"
#include "tranche/core/error.h"
#include "tranche/device/device.h"
#include "tranche/kernels/optimizer_update.h"

namespace {

using namespace tranche;
using bench::median;
using detail::AlignedBuffer;
using detail::BlockIoEngine;
using detail::BlockIoOptions;
using detail::join_path;
using detail::posix_file_system;
using detail::TileRef;

struct Settings {
  std::string directory = ".";
  std::int64_t elements = std::int64_t{1} << 25;  // 384 MiB of state
  std::int64_t tile = std::int64_t{1} << 20;
  int buffers = 4;
  int threads = 1;
  int repeats = 7;
  int updates = 1;
  BlockIoEngine engine = BlockIoEngine::automatic;
  std::int64_t block = 0;  // 0: calibrated, like depth
  int depth = 0;
};

class Bench {
 public:
  explicit Bench(const Settings& settings);
  void run();

 private:
  using Fractions = std::vector<double>;

  BlockIoOptions io_options();
  void prepare();
  void pass(bool transfers, bool update);
  void update_tile(const std::vector<void*>& data, std::int64_t first, std::int64_t count);
  double seconds_of(const std::function<void()>& body);
  /// Seconds in which fio reads and writes as many bytes; if fio is not installed, prints that and returns
  /// nullopt.
  std::optional<double> fio_seconds();
  static void print(const char* name, const Fractions& fractions, const char* bar);

  const Settings settings_;
  std::unique_ptr<Device> device_;
  Ledger ledger_;
  MemoryResource& host_;
  BlockIoOptions options_;
  std::unique_ptr<detail::BlockIo> io_;
  std::unique_ptr<Stream> stream_;
  detail::SwapFile swap_;
  detail::TileRegion region_;
  std::optional<detail::TileRing> ring_;
  AlignedBuffer gradient_, weight_;
  std::vector<AlignedBuffer> tiles_;  // used by the update alone
  bool fio_usable_ = true;
};

Bench::Bench(const Settings& settings)
    : settings_(settings),
      device_(make_device({})),
      host_(device_->memory(Tier::host)),
      options_(io_options()),
      io_(detail::make_block_io(options_)),
      stream_(device_->create_host_stream("update", settings.threads)),
      swap_({.directory = settings.directory}, posix_file_system(), ledger_),
      region_(detail::reserve_region(swap_, settings.elements, settings.tile, {4, 4, 4}, Category::optimizer,
                                     "states")),
      gradient_(host_, 4 * settings.elements, Category::gradients, "gradient"),
      weight_(host_, 2 * settings.elements, Category::parameters, "weight") {
  swap_.create();
  ring_.emplace(detail::TileRingOptions{settings.buffers, region_.bytes_of(0)}, swap_, io_.get(), host_);
  for (int i = 0; i < settings.buffers; ++i) {
    tiles_.emplace_back(host_, region_.bytes_of(0), Category::workspace, "tile");
  }
}

BlockIoOptions Bench::io_options() {
  if (settings_.block > 0 && settings_.depth > 0) {
    return {settings_.engine, settings_.block, settings_.depth, {}};
  }
  detail::CalibrationRequest request;
  request.directory = settings_.directory;
  request.engine = settings_.engine;
  BlockIoOptions options = detail::calibrate_block_io(request, host_).options;
  if (settings_.block > 0) options.block_bytes = settings_.block;
  if (settings_.depth > 0) options.depth = settings_.depth;
  return options;
}

// The values resemble a model's, and the blocks have been written once, as in every step after the first.
void Bench::prepare() {
  std::uint32_t bits = 1;
  const auto draw = [&] {
    bits = bits * 1664525u + 1013904223u;
    return static_cast<float>(bits >> 8) * 0x1p-24f - 0.5f;
  };
  auto* gradient = static_cast<float*>(gradient_.data());
  for (std::int64_t i = 0; i < settings_.elements; ++i) gradient[i] = draw();
  std::fill_n(static_cast<char*>(weight_.data()), weight_.bytes(), 0);
  const auto fill = [&](void* data, std::int64_t count, bool positive) {
    for (std::int64_t i = 0; i < count; ++i) {
      static_cast<float*>(data)[i] = positive ? draw() + 0.5f : draw();
    }
  };
  std::vector<TileRef> refs;
  for (std::int64_t tile = 0; tile < region_.tiles(); ++tile) refs.push_back({&region_, tile});
  ring_->begin(refs, false);
  for (std::size_t tile = 0; tile < refs.size(); ++tile) {
    const detail::TileMemory memory = ring_->open(*stream_);
    stream_->enqueue("fill", [memory, fill] {
      for (std::size_t t = 0; t < memory.data.size(); ++t) fill(memory.data[t], memory.elements, t == 2);
    });
    ring_->close(*stream_, true);
  }
  ring_->end(*stream_);
  for (const AlignedBuffer& tile : tiles_) {
    for (int t = 0; t < 3; ++t) {
      fill(static_cast<char*>(tile.data()) + region_.offset_in_tile(0, t), region_.elements_of(0), t == 2);
    }
  }
  stream_->synchronize();
}

void Bench::update_tile(const std::vector<void*>& data, std::int64_t first, std::int64_t count) {
  static const kernels::AdamArguments arguments{
      .learning_rate = 1e-4f, .weight_decay = 0.01f, .step_size = 1e-4f};
  const kernels::UpdateSegment all{0, count, 0};
  const auto state = [&](int t) {
    return TensorView{data[static_cast<std::size_t>(t)], DataType::float32, Shape{count}};
  };
  kernels::adam_update(
      *stream_, {&arguments}, {&all, 1},
      ConstTensorView{static_cast<float*>(gradient_.data()) + first, DataType::float32, Shape{count}},
      state(0), state(1), state(2),
      TensorView{static_cast<char*>(weight_.data()) + 2 * first, DataType::bfloat16, Shape{count}});
}

void Bench::pass(bool transfers, bool update) {
  std::vector<TileRef> refs;
  for (std::int64_t tile = 0; tile < region_.tiles(); ++tile) refs.push_back({&region_, tile});
  if (transfers) ring_->begin(refs);
  for (std::int64_t tile = 0; tile < region_.tiles(); ++tile) {
    std::vector<void*> data;
    if (transfers) {
      data = ring_->open(*stream_).data;
    } else {
      auto* base = static_cast<char*>(
          tiles_[static_cast<std::size_t>(tile % static_cast<std::int64_t>(tiles_.size()))].data());
      for (int t = 0; t < 3; ++t) data.push_back(base + region_.offset_in_tile(tile, t));
    }
    for (int i = 0; update && i < settings_.updates; ++i) {
      update_tile(data, region_.first_element(tile), region_.elements_of(tile));
    }
    if (transfers) ring_->close(*stream_, true);
  }
  if (transfers) ring_->end(*stream_);
  stream_->synchronize();
}

double Bench::seconds_of(const std::function<void()>& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

std::optional<double> Bench::fio_seconds() {
  if (!fio_usable_) return std::nullopt;
  const auto give_up = [&](const std::string& reason) {
    fmt::print("note: no comparison with fio: {}\n", reason);
    fio_usable_ = false;
    return std::nullopt;
  };
  // fio reads the first half of one file and writes the second half at the same time. It runs with half of
  // the depth for each (as many blocks in flight as ours until one of them is done) and with all of it for
  // each; the better result counts.
  const std::int64_t bytes = region_.bytes() / options_.block_bytes * options_.block_bytes;
  if (bytes == 0) return give_up("the region is smaller than a block");
  const std::string path = join_path(settings_.directory, "tranche-bench-nvme-step.fio");
  const auto shell = [&](const std::string& command) -> std::optional<std::string> {
    std::string text;
    const std::unique_ptr<FILE, int (*)(FILE*)> pipe(::popen((command + " 2>/dev/null").c_str(), "r"),
                                                     [](FILE* file) { return file ? ::pclose(file) : 0; });
    if (!pipe) return std::nullopt;
    char part[4096];
    while (const std::size_t got = std::fread(part, 1, sizeof(part), pipe.get())) text.append(part, got);
    return text;
  };
  const auto version = shell("fio --version");
  if (!version || !version->starts_with("fio-")) return give_up("it is not installed");
  if (!posix_file_system().exists(path)) {
    shell(fmt::format("fio --name=fill --rw=write --filename='{}' --direct=1 --bs=1M --size={}", path,
                      2 * bytes));
  }
  double best = 0;
  for (const int depth : {std::max(1, options_.depth / 2), options_.depth}) {
    const std::string common = fmt::format(
        "--filename='{}' --direct=1 --ioengine=io_uring --fixedbufs=1 --thread --bs={} --iodepth={} "
        "--size={}",
        path, options_.block_bytes, depth, bytes);
    const auto text = shell(fmt::format(
        "fio --output-format=json --name=read --rw=read --offset=0 {} --name=write --rw=write --offset={} {}",
        common, bytes, common));
    const auto report = nlohmann::json::parse(text.value_or(""), nullptr, false);
    if (report.is_discarded() || !report.contains("jobs") || report["jobs"].size() != 2) {
      return give_up("it did not run (refused io_uring, or direct I/O)");
    }
    double milliseconds = 0;
    std::int64_t moved = 0;
    for (const auto& job : report["jobs"]) {
      for (const char* direction : {"read", "write"}) {
        milliseconds = std::max(milliseconds, job[direction]["runtime"].get<double>());
        moved += job[direction]["io_bytes"].get<std::int64_t>();
      }
    }
    if (moved != 2 * bytes) return give_up(fmt::format("it moved {} B of {}", moved, 2 * bytes));
    best = best == 0 ? milliseconds : std::min(best, milliseconds);
  }
  return best * 1e-3 * static_cast<double>(region_.bytes()) / static_cast<double>(bytes);
}

void Bench::print(const char* name, const Fractions& fractions, const char* bar) {
  const auto [least, most] = std::minmax_element(fractions.begin(), fractions.end());
  fmt::print("{:<58}{:>6.2f}  ({:.2f} to {:.2f}; wanted: {})\n", name, median(fractions), *least, *most, bar);
}

void Bench::run() {
  fmt::print(
      "{} elements, tiles of {}, {} buffers, {} threads, {} updates; {}, blocks of {} KiB, depth {}; swap "
      "file {}\n",
      settings_.elements, settings_.tile, settings_.buffers, settings_.threads, settings_.updates,
      name_of(io_->engine()), options_.block_bytes >> 10, options_.depth, swap_.description());
  struct Removal {
    std::string path;
    ~Removal() {
      if (posix_file_system().exists(path)) posix_file_system().remove(path);
    }
  } removal{join_path(settings_.directory, "tranche-bench-nvme-step.fio")};
  prepare();
  pass(true, true);
  fio_seconds();  // creates its file
  std::map<std::string, Fractions> seconds;
  Fractions of_bound, of_fio;
  std::mt19937 order(1);
  for (int round = 0; round < settings_.repeats; ++round) {
    double a = 0, b = 0, c = 0;
    std::optional<double> fio;
    std::vector<std::function<void()>> ways{[&] { fio = fio_seconds(); },
                                            [&] { a = seconds_of([&] { pass(true, false); }); },
                                            [&] { c = seconds_of([&] { pass(true, true); }); },
                                            [&] { b = seconds_of([&] { pass(false, true); }); }};
    // The order is random, so that the after-effects of a variant (a disk that is still busy) do not always
    // affect the same one.
    std::shuffle(ways.begin(), ways.end(), order);
    for (const auto& way : ways) way();
    seconds["transfers"].push_back(a);
    seconds["update"].push_back(b);
    seconds["step"].push_back(c);
    of_bound.push_back(c / std::max(a, b));
    if (fio) of_fio.push_back(*fio / a);
  }
  const double bytes = 2 * static_cast<double>(region_.bytes());
  for (const auto& [name, values] : seconds) {
    fmt::print("{:<12}{:>9.1f} ms", name, median(values) * 1e3);
    if (name != "update") fmt::print("  {:.2f} GB/s read and written", bytes / median(values) * 1e-9);
    fmt::print("\n");
  }
  print("step / max(transfers without update, update alone)", of_bound, "at most 1.05");
  if (!of_fio.empty())
    print("transfers / fio's on the same disk, same block and depth", of_fio, "at least 0.9");
  fmt::print("step_of_bound={:.3f} io_of_fio={}\n", median(of_bound),
             of_fio.empty() ? std::string("none") : fmt::format("{:.3f}", median(of_fio)));
}

BlockIoEngine engine_of(const std::string& name) {
  std::vector<std::string> names;
  for (const BlockIoEngine engine :
       {BlockIoEngine::automatic, BlockIoEngine::uring, BlockIoEngine::threads}) {
    if (name == name_of(engine)) return engine;
    names.emplace_back(name_of(engine));
  }
  throw ConfigurationError(fmt::format("--engine '{}' is not one of {}", name, fmt::join(names, ", ")));
}

Settings parse(int argc, char** argv) {
  Settings settings;
  bench::parse_flags(argc, argv,
                     {bench::text_flag("--dir", settings.directory),
                      bench::number_flag("--elements", settings.elements),
                      bench::number_flag("--tile", settings.tile),
                      bench::number_flag("--buffers", settings.buffers),
                      bench::number_flag("--threads", settings.threads),
                      bench::number_flag("--updates", settings.updates),
                      bench::number_flag("--repeats", settings.repeats),
                      bench::number_flag("--block-kib", settings.block, 10),
                      bench::number_flag("--depth", settings.depth),
                      {"--engine", [&](const std::string& value) { settings.engine = engine_of(value); }}});
  if (settings.elements < 1 || settings.tile < 1 || settings.repeats < 1 || settings.updates < 1) {
    throw ConfigurationError("--elements, --tile, --updates and --repeats must be at least 1");
  }
  return settings;
}

}  // namespace

int main(int argc, char** argv) {
  return tranche::bench::run_program("bench_nvme_step", [&] { Bench(parse(argc, argv)).run(); });
}
