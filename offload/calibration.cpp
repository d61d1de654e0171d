#include "offload/calibration.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>
#include <stop_token>
#include <thread>

#include "core/json.h"
#include "core/json_node.h"
#include "offload/aligned_buffer.h"
#include "offload/io_failure.h"
#include "tranche/core/error.h"

namespace tranche::detail {
namespace {

using Json = nlohmann::json;
using Clock = std::chrono::steady_clock;
constexpr int schema = 1;
constexpr std::int64_t largest_memory = std::int64_t{1} << 20;
constexpr std::size_t moved_bytes = std::size_t{64} << 20;  // more than a cache holds

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// A file that is removed however the calibration ends.
class ScratchFile {
 public:
  ScratchFile(FileSystem& files, std::string path) : files_(files), path_(std::move(path)) {
    file_ = files_.open(path_, OpenMode::create_new, Caching::direct);
  }
  ~ScratchFile() {
    file_.reset();
    try {
      files_.remove(path_);
    } catch (const IoError&) {
      // The cause of a failed removal also makes the calibration itself fail.
    }
  }
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;
  File& operator*() { return *file_; }

 private:
  FileSystem& files_;
  std::string path_;
  std::unique_ptr<File> file_;
};

BlockIoCandidate try_candidate(const CalibrationRequest& request, const BlockIoOptions& options, File& file,
                               AlignedBuffer& memory) {
  BlockIoCandidate candidate{options.engine, options.block_bytes, options.depth, 0, 0};
  const auto io = make_block_io(options);
  const auto registration = io->register_memory(memory.data(), request.file_bytes);
  double writing = 0, reading = 0;
  int passes = 0;
  do {
    auto begin = Clock::now();
    io->wait(io->write(file, 0, memory.data(), request.file_bytes));
    if (!file.direct()) file.sync();  // otherwise only the page cache would have been written
    writing += seconds_since(begin);
    begin = Clock::now();
    io->wait(io->read(file, 0, memory.data(), request.file_bytes));
    reading += seconds_since(begin);
    ++passes;
  } while ((writing + reading) * (passes + 1) / passes < request.seconds_per_candidate);
  const double bytes = static_cast<double>(request.file_bytes) * passes;
  candidate.write_bytes_per_second = bytes / std::max(writing, 1e-9);
  candidate.read_bytes_per_second = bytes / std::max(reading, 1e-9);
  return candidate;
}

// Device numbers may change at a reboot; then the key differs and the measurement is repeated.
std::string key_of(const std::string& directory, const std::vector<BlockIoEngine>& engines) {
  struct stat status {};
  if (::stat(directory.c_str(), &status) != 0) throw_io_error({"looking up", directory, errno, -1, 0});
  std::string key = "device " + std::to_string(status.st_dev);
  for (const BlockIoEngine engine : engines) key += ", " + std::string(name_of(engine));
  return key;
}

void take_best(BlockIoCalibration& calibration) {
  const BlockIoCandidate& best = calibration.candidates.front();
  calibration.options.engine = best.engine;
  calibration.options.block_bytes = best.block_bytes;
  calibration.options.depth = best.depth;
}

Json parsed(std::string_view text) {
  Json json = parse_json(text);
  const bool usable = json.is_object() && json.value("schema", Json()) == Json(schema) &&
                      json.contains("results") && json["results"].is_object();
  if (!usable) json = Json{{"schema", schema}, {"results", Json::object()}};
  return json;
}

}  // namespace

std::string remember_calibration(std::string_view earlier, const std::string& key,
                                 const BlockIoCalibration& calibration) {
  Json json = parsed(earlier);
  Json tried = Json::array();
  for (const BlockIoCandidate& candidate : calibration.candidates) {
    tried.push_back({{"engine", name_of(candidate.engine)},
                     {"block_bytes", candidate.block_bytes},
                     {"depth", candidate.depth},
                     {"write_bytes_per_second", candidate.write_bytes_per_second},
                     {"read_bytes_per_second", candidate.read_bytes_per_second}});
  }
  json["results"][key] = {{"direct", calibration.direct}, {"candidates", tried}};
  return json.dump(2) + "\n";
}

bool recall_calibration(std::string_view text, const std::string& key, BlockIoCalibration& calibration) {
  try {
    const JsonNode root = JsonNode::read<ConfigurationError>(text, "a calibration");
    (void)root["schema"].integer(schema, schema);
    const JsonNode found = root["results"][key];
    std::vector<BlockIoCandidate> candidates;
    for (const JsonNode& tried : found["candidates"].items(1)) {
      const std::string engine =
          tried["engine"].choice({name_of(BlockIoEngine::uring), name_of(BlockIoEngine::threads)});
      candidates.push_back(
          {engine == name_of(BlockIoEngine::uring) ? BlockIoEngine::uring : BlockIoEngine::threads,
           tried["block_bytes"].integer(io_alignment, 1 << 30), tried["depth"].integer<int>(1, 1024),
           tried["write_bytes_per_second"].number(0), tried["read_bytes_per_second"].number(0)});
    }
    calibration.direct = found["direct"].boolean();
    calibration.candidates = std::move(candidates);
  } catch (const ConfigurationError&) {
    return false;  // for example edited by hand: measuring again repairs it
  }
  take_best(calibration);
  calibration.remembered = true;
  return true;
}

BlockIoCalibration calibrate_block_io(const CalibrationRequest& request, MemoryResource& resource,
                                      FileSystem& files) {
  if (request.file_bytes < io_alignment) {
    throw InvalidArgument("calibration with " + std::to_string(request.file_bytes) + " B: at least " +
                          std::to_string(io_alignment) + " are needed");
  }
  BlockIoCalibration result;
  // `automatic` is resolved first, so that an engine that exists is remembered.
  std::vector<BlockIoEngine> engines{make_block_io({.engine = request.engine, .hook = {}})->engine()};
  if (request.engine == BlockIoEngine::automatic && engines[0] == BlockIoEngine::uring) {
    engines.push_back(BlockIoEngine::threads);
  }
  const std::string key = key_of(request.directory, engines);
  std::string earlier;
  if (!request.memory_path.empty() && files.exists(request.memory_path)) {
    earlier = files.read_file(request.memory_path, largest_memory);
    if (recall_calibration(earlier, key, result)) return result;
  }

  // Ranks that calibrate at the same time must not write to the same file.
  ScratchFile scratch(files, temporary_name(join_path(request.directory, ".tranche-calibration")));
  File& file = *scratch;
  result.direct = file.direct();
  file.preallocate(request.file_bytes);
  AlignedBuffer memory(resource, request.file_bytes, Category::workspace, "calibration of block I/O");
  std::memset(memory.data(), 0x5a, static_cast<std::size_t>(request.file_bytes));
  constexpr std::int64_t kibibyte = 1024;
  const std::pair<std::int64_t, int> pairs[] = {
      {1024 * kibibyte, 16}, {1024 * kibibyte, 8}, {1024 * kibibyte, 4}, {256 * kibibyte, 32},
      {256 * kibibyte, 16},  {4096 * kibibyte, 4}, {4096 * kibibyte, 8}};
  // A pass that is not measured, because the first one turns preallocated blocks into written ones.
  BlockIoOptions options = result.options;
  CalibrationRequest once = request;
  once.seconds_per_candidate = 0;
  options.engine = engines[0];
  try_candidate(once, options, file, memory);
  for (const BlockIoEngine engine : engines) {
    for (const auto& [block_bytes, depth] : pairs) {
      options.engine = engine;
      options.block_bytes = block_bytes;
      options.depth = depth;
      result.candidates.push_back(try_candidate(request, options, file, memory));
    }
  }
  const auto time = [](const BlockIoCandidate& c) {
    return 1 / c.write_bytes_per_second + 1 / c.read_bytes_per_second;
  };
  std::stable_sort(result.candidates.begin(), result.candidates.end(),
                   [&](const BlockIoCandidate& a, const BlockIoCandidate& b) { return time(a) < time(b); });
  take_best(result);
  if (!request.memory_path.empty()) {
    files.replace_file(request.memory_path, remember_calibration(earlier, key, result));
  }
  return result;
}

DiskRates measure_both_ways(const CalibrationRequest& request, const BlockIoOptions& options,
                            int busy_threads, double seconds, MemoryResource& resource, FileSystem& files) {
  const std::int64_t bytes = request.file_bytes;
  const std::string name = join_path(request.directory, ".tranche-calibration");
  ScratchFile source(files, temporary_name(name)), target(files, temporary_name(name));
  AlignedBuffer memory(resource, 2 * bytes, Category::workspace, "calibration of block I/O");
  std::memset(memory.data(), 0x5a, static_cast<std::size_t>(2 * bytes));
  void* const half = static_cast<std::byte*>(memory.data()) + bytes;
  const auto io = make_block_io(options);
  const auto registration = io->register_memory(memory.data(), 2 * bytes);
  for (ScratchFile* file : {&source, &target}) {  // a first pass turns preallocated blocks into written ones
    (**file).preallocate(bytes);
    io->wait(io->write(**file, 0, half, bytes));
  }
  const auto timed = [&](bool reads, bool writes) {
    const auto begin = Clock::now();
    int passes = 0;
    do {
      std::vector<IoTicket> tickets;
      if (reads) tickets.push_back(io->read(*source, 0, memory.data(), bytes));
      if (writes) tickets.push_back(io->write(*target, 0, half, bytes));
      for (const IoTicket ticket : tickets) io->wait(ticket);
      if (writes && !(*target).direct()) (*target).sync();
      ++passes;
    } while (seconds_since(begin) * (passes + 1) / passes < seconds / 4);
    return seconds_since(begin) / passes;
  };
  const double reading = timed(true, false), writing = timed(false, true), both = timed(true, true);
  std::vector<std::jthread> busy;
  for (int i = 0; i < busy_threads; ++i) {
    busy.emplace_back([](const std::stop_token& stop) {
      std::vector<char> from(moved_bytes, 'a'), to(moved_bytes, 'b');
      while (!stop.stop_requested()) from.swap(to), std::memcpy(to.data(), from.data(), to.size());
    });
  }
  return rates_of(bytes, reading, writing, both, timed(true, true));
}

DiskRates rates_of(std::int64_t bytes, double reading, double writing, double both, double beside_threads) {
  const double rate = static_cast<double>(bytes) * (reading + writing) / both;
  return {rate / reading, rate / writing, std::max(1.0, beside_threads / both)};
}

}  // namespace tranche::detail
