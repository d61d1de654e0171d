// Collectives among ranks of one host, ours and Open MPI's in alternation:
//   scripts/run_mpi.sh 2 build/release/bin/bench_collectives [--sizes 64K,1M,64M] [--rounds N] [--json FILE]
//       [--seconds S of a turn] [--operations reduce_scatter,...] [--ways bare,shared,...]
// Sizes and bus bandwidth are defined as in nccl-tests. The size is that of the whole input of a
// reduce-scatter, of the whole output of an all-gather, and of the values of an all-reduce. The bandwidth is
// size / time x (N-1)/N, and twice that for all-reduce.
//
// Ways:
//   bare       the same sums and copies by the same kernels on the rank's own memory, without an exchange
//   shared     buffers in the window
//   copied     buffers outside of the window
//   messages   messages instead of the window
//   mpi        Open MPI's choice of algorithm
//   mpi best   the fastest of Open MPI's algorithms, each on its own communicator
//
// Each bound is a time for the bytes that must be read and written, divided by the measured time:
//   of_bound         at the speed of a streaming copy of heap memory by all ranks at once, in the same round
//                    (on a virtual machine other guests change that speed by half within a minute)
//   of_window_bound  likewise with a copy of the window's memory
//   of_first_bound   at the speed of the fastest of seven copies before the first round
// All ways use fp32, except "shared bf16", whose sizes are in bf16 and whose sums are fp32.
#include <fmt/core.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/figures.h"
#include "comm/window_memory.h"
#include "core/clock.h"
#include "device/large_copy.h"
#include "tranche/comm/mpi.h"
#include "tranche/core/error.h"
#include "tranche/core/shape.h"
#include "tranche/device/device.h"
#include "tranche/device/memory_resources.h"
#include "tranche/kernels/reduction.h"

namespace {

using namespace tranche;
using bench::median;

struct Settings {
  std::vector<std::int64_t> sizes{64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20};
  int rounds = 11;
  double seconds = 0.02;                      // duration of the calls of one turn
  std::vector<std::string> operations, ways;  // empty: all
  std::string json;
};

std::int64_t bytes_of(const std::string& text) {
  std::size_t end = 0;
  const std::int64_t number = std::stoll(text, &end);
  if (end == text.size()) return number;
  if (text[end] == 'K') return number << 10;
  if (text[end] == 'M') return number << 20;
  throw InvalidArgument("a size is a number, with K or M: " + text);
}

std::vector<std::string> list_of(const std::string& text) {
  std::vector<std::string> result;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    result.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return result;
}

bool chosen(const std::vector<std::string>& names, const std::string& name) {
  return names.empty() || std::find(names.begin(), names.end(), name) != names.end();
}

Settings settings_of(int count, char** arguments) {
  Settings settings;
  for (int i = 1; i + 1 < count; i += 2) {
    const std::string flag = arguments[i], value = arguments[i + 1];
    if (flag == "--sizes") {
      settings.sizes.clear();
      for (const std::string& size : list_of(value)) settings.sizes.push_back(bytes_of(size));
    } else if (flag == "--operations") {
      settings.operations = list_of(value);
    } else if (flag == "--ways") {
      settings.ways = list_of(value);
    } else if (flag == "--rounds") {
      settings.rounds = std::stoi(value);
    } else if (flag == "--seconds") {
      settings.seconds = std::stod(value);
    } else if (flag == "--json") {
      settings.json = value;
    } else {
      throw InvalidArgument("unknown flag " + flag);
    }
  }
  if (count % 2 == 0) throw InvalidArgument(std::string("no value for ") + arguments[count - 1]);
  return settings;
}

/// Selects Open MPI's algorithm of a collective for communicators that are created afterwards; 0: its own
/// choice. Returns false if the library has no such variable.
bool choose_algorithm(const std::string& collective, int algorithm) {
  const std::string name = "coll_tuned_" + collective + "_algorithm";
  int index = 0, count = 0;
  if (MPI_T_cvar_get_index(name.c_str(), &index) != MPI_SUCCESS) return false;
  MPI_T_cvar_handle handle;
  if (MPI_T_cvar_handle_alloc(index, nullptr, &handle, &count) != MPI_SUCCESS) return false;
  const bool written = MPI_T_cvar_write(handle, &algorithm) == MPI_SUCCESS;
  MPI_T_cvar_handle_free(&handle);
  return written;
}

enum class Kind { reduce_scatter, all_gather, all_reduce };

struct Way {
  std::string name;
  std::function<void()> call;
  std::vector<double> seconds;
};

class Bench {
 public:
  explicit Bench(const Settings& settings);
  ~Bench();
  void run();

 private:
  struct Algorithm {
    Kind kind;
    int number;
    MPI_Comm comm;
  };
  std::unique_ptr<Communicator> communicator(NodeCollectives collectives, comm::WindowMemory* window);
  void make_algorithms();
  std::vector<Way> streams();
  double stream_traffic() const { return 2 * static_cast<double>(stream_bytes) * ranks_; }
  void bare(Kind kind, std::int64_t count);
  std::vector<Way> ways(Kind kind, std::int64_t size);
  void measure(Kind kind, std::int64_t size);
  double turn(Way& way);

  Settings settings_;
  int rank_ = 0, ranks_ = 1;
  comm::WindowMemory window_{Tier::host};
  std::unique_ptr<MemoryResource> heap_ = make_host_resource(Tier::host);
  std::unique_ptr<Communicator> shared_, messages_;
  std::unique_ptr<Device> device_ = make_device({});
  std::unique_ptr<Stream> kernels_ = device_->create_inline_stream("bench", 1);
  std::vector<Algorithm> algorithms_;
  Buffer full_, part_, private_full_, private_part_;
  static constexpr std::int64_t stream_bytes = std::int64_t{64} << 20;
  Buffer heap_stream_, window_stream_;  // twice the bytes of the largest operand
  double stream_ = 0;                   // bytes per second of all ranks, measured at the start
  nlohmann::json results_ = nlohmann::json::array();
};

Bench::Bench(const Settings& settings) : settings_(settings) {
  MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks_);
  shared_ = communicator(NodeCollectives::shared, &window_);
  messages_ = communicator(NodeCollectives::messages, nullptr);
  make_algorithms();
  const std::int64_t largest = *std::max_element(settings.sizes.begin(), settings.sizes.end());
  const auto buffer = [&](MemoryResource& memory, const char* name) {
    Buffer result(memory, largest + 4096, Category::gradients, name);
    std::fill_n(static_cast<float*>(result.data()), (largest + 4096) / 4, 1.0f + static_cast<float>(rank_));
    return result;
  };
  heap_stream_ = Buffer(*heap_, 2 * stream_bytes, Category::gradients, "heap stream");
  window_stream_ = Buffer(window_, 2 * stream_bytes, Category::gradients, "window stream");
  for (Buffer* each : {&heap_stream_, &window_stream_})
    std::fill_n(static_cast<float*>(each->data()), stream_bytes / 2, 1.0f);
  full_ = buffer(window_, "full");
  part_ = buffer(window_, "part");
  private_full_ = buffer(*heap_, "private full");
  private_part_ = buffer(*heap_, "private part");
}

Bench::~Bench() {
  for (Algorithm& each : algorithms_) MPI_Comm_free(&each.comm);
}

std::unique_ptr<Communicator> Bench::communicator(NodeCollectives collectives, comm::WindowMemory* window) {
  CommunicatorOptions options;
  options.collectives = collectives;
  options.window = window;
  options.memory = window;
  return adopt_mpi_communicator(MPI_COMM_WORLD, Progress::thread, options);
}

void Bench::make_algorithms() {
  // The numbers of the algorithms in Open MPI 4.1's component "tuned"; 0 is its own choice.
  const std::map<Kind, std::pair<const char*, std::vector<int>>> known{
      {Kind::reduce_scatter, {"reduce_scatter_block", {0, 1, 2, 3, 4}}},
      {Kind::all_gather, {"allgather", {0, 1, 2, 3, 4, 5, 6}}},
      {Kind::all_reduce, {"allreduce", {0, 1, 2, 3, 4, 5, 6}}}};
  for (const auto& [kind, names] : known) {
    for (const int number : names.second) {
      // Neighbour exchange needs an even number of ranks, the two-process exchange exactly two.
      if (kind == Kind::all_gather && ((number == 5 && ranks_ % 2 != 0) || (number == 6 && ranks_ != 2)))
        continue;
      if (!choose_algorithm(names.first, number) && number != 0) continue;
      MPI_Comm comm = MPI_COMM_NULL;
      MPI_Comm_dup(MPI_COMM_WORLD, &comm);
      algorithms_.push_back({kind, number, comm});
    }
    choose_algorithm(names.first, 0);
  }
}

/// Streaming copies by all ranks at once: one of heap memory and one of the window's.
std::vector<Way> Bench::streams() {
  std::vector<Way> result;
  for (const auto& [name, from] :
       {std::pair{"stream", &heap_stream_}, std::pair{"window stream", &window_stream_}}) {
    result.push_back({name,
                      [data = static_cast<unsigned char*>(from->data())] {
                        detail::copy_past_caches(data + stream_bytes, data, stream_bytes);
                      },
                      {}});
  }
  return result;
}

/// A rank's part of the work of a collective of `count` elements per rank, using only its own memory.
void Bench::bare(Kind kind, std::int64_t count) {
  auto* full = static_cast<float*>(full_.data());
  auto* part = static_cast<float*>(part_.data());
  const auto sum = [&](std::int64_t elements, float* out) {
    std::vector<const void*> pieces;
    for (int piece = 0; piece < ranks_; ++piece) pieces.push_back(full + piece * elements);
    kernels::ordered_sum(*kernels_, pieces, DataType::float32, ranks_, false,
                         TensorView{out, DataType::float32, Shape{elements}},
                         elements * 4 >= 1 << 20 ? kernels::SumTarget::memory : kernels::SumTarget::caches);
  };
  if (kind == Kind::reduce_scatter) return sum(count, part);
  for (int piece = 0; piece < ranks_; ++piece) detail::copy_large(full + piece * count, part, count * 4);
}

/// Seconds of one call, from the start of the first rank to the end of the last. The ranks of a node share a
/// clock; if there are more ranks than cores, one may start when another has ended, so that its own duration
/// is meaningless. Calls are repeated until the turn is long enough.
double Bench::turn(Way& way) {
  int calls = 1;
  for (;;) {
    MPI_Barrier(MPI_COMM_WORLD);
    double begin_and_end[2] = {-detail::seconds_now(), 0};
    for (int i = 0; i < calls; ++i) way.call();
    begin_and_end[1] = detail::seconds_now();
    double outermost[2];
    MPI_Allreduce(begin_and_end, outermost, 2, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    const double seconds = outermost[0] + outermost[1];
    if (seconds >= settings_.seconds || calls >= 1000) return seconds / calls;
    calls = seconds <= 0 ? calls * 10
                         : std::min(1000, static_cast<int>(calls * settings_.seconds / seconds * 1.3) + 1);
  }
}

std::vector<Way> Bench::ways(Kind kind, std::int64_t size) {
  std::vector<Way> result;
  const std::int64_t count = size / 4 / (kind == Kind::all_reduce ? 1 : ranks_);
  const auto ours = [&](const std::string& name, Communicator& comm, const Buffer& full, const Buffer& part,
                        DataType dtype) {
    const std::int64_t elements = count * 4 / size_of(dtype);
    result.push_back({name,
                      [=, &comm, full = full.data(), part = part.data()] {
                        Event done;
                        if (kind == Kind::reduce_scatter) {
                          done =
                              comm.reduce_scatter(full, dtype, part, DataType::float32, elements, {}, {}, {});
                        } else if (kind == Kind::all_gather) {
                          done = comm.all_gather(part, full, elements, dtype, 0, {}, {});
                        } else {
                          // The operation is the maximum, because repeated sums would grow without limit.
                          done = comm.all_reduce(full, elements, dtype, ReduceOperation::maximum, {});
                        }
                        done.wait();
                      },
                      {}});
  };
  if (kind != Kind::all_reduce) result.push_back({"bare", [=, this] { bare(kind, count); }, {}});
  ours("shared", *shared_, full_, part_, DataType::float32);
  if (kind == Kind::reduce_scatter) ours("shared bf16", *shared_, full_, part_, DataType::bfloat16);
  ours("copied", *shared_, private_full_, private_part_, DataType::float32);
  ours("messages", *messages_, private_full_, private_part_, DataType::float32);
  for (const Algorithm& each : algorithms_) {
    if (each.kind != kind) continue;
    const std::string name = each.number == 0 ? "mpi" : fmt::format("mpi algorithm {}", each.number);
    const int n = static_cast<int>(count);
    result.push_back({name,
                      [=, this] {
                        void *full = private_full_.data(), *part = private_part_.data();
                        if (kind == Kind::reduce_scatter) {
                          MPI_Reduce_scatter_block(full, part, n, MPI_FLOAT, MPI_SUM, each.comm);
                        } else if (kind == Kind::all_gather) {
                          MPI_Allgather(part, n, MPI_FLOAT, full, n, MPI_FLOAT, each.comm);
                        } else {
                          MPI_Allreduce(MPI_IN_PLACE, full, n, MPI_FLOAT, MPI_MAX, each.comm);
                        }
                      },
                      {}});
  }
  return result;
}

void Bench::measure(Kind kind, std::int64_t size) {
  const char* operation = kind == Kind::reduce_scatter ? "reduce_scatter"
                          : kind == Kind::all_gather   ? "all_gather"
                                                       : "all_reduce";
  if (!chosen(settings_.operations, operation)) return;
  std::vector<Way> all = ways(kind, size);
  // "mpi" includes the measurement of all of its algorithms.
  std::erase_if(all, [&](const Way& way) {
    return !chosen(settings_.ways, way.name.rfind("mpi", 0) == 0 ? "mpi" : way.name);
  });
  for (Way& stream : streams()) all.push_back(std::move(stream));
  for (Way& way : all) turn(way);  // maps pages and allocates the algorithms' buffers
  for (int round = 0; round < settings_.rounds; ++round) {
    for (Way& way : all) way.seconds.push_back(turn(way));
  }
  const auto find = [&](const std::string& name) {
    return *std::find_if(all.begin(), all.end(), [&](const Way& way) { return way.name == name; });
  };
  Way best{"mpi best", nullptr, {}};
  std::string best_name;
  for (const Way& way : all) {
    if (way.name.rfind("mpi", 0) != 0) continue;
    if (best.seconds.empty() || median(way.seconds) < median(best.seconds)) {
      best.seconds = way.seconds;
      best_name = way.name;
    }
  }
  if (best.seconds.empty()) best.seconds.assign(static_cast<std::size_t>(settings_.rounds), 0);
  const bool with_mpi = !best_name.empty();
  const std::vector<double> mpi_seconds = with_mpi ? find("mpi").seconds : best.seconds;
  const Way stream = find("stream"), window_stream = find("window stream");
  std::erase_if(all, [](const Way& way) {
    return way.name.rfind("mpi algorithm", 0) == 0 || way.name.find("stream") != std::string::npos;
  });
  if (with_mpi) all.push_back(best);
  const double n = ranks_, bytes = static_cast<double>(size);
  for (const Way& way : all) {
    const double seconds = median(way.seconds);
    const double fastest = *std::min_element(way.seconds.begin(), way.seconds.end());
    const double bus = bytes / seconds * (n - 1) / n * (kind == Kind::all_reduce ? 2 : 1) / 1e9;
    // The bytes that one rank has to read and to write. Sums of bf16 operands are fp32, so they have twice
    // the bytes.
    const double written = way.name == "shared bf16" ? 2 : 1;
    const double moved = kind == Kind::reduce_scatter ? bytes + written * bytes / n
                         : kind == Kind::all_gather   ? 2 * bytes
                                                      : bytes * (1 + 1 / n + 2 * (n - 1) / n);
    const double bound = moved * n / stream_, streams_of_bound = moved * n / stream_traffic();
    std::vector<double> over_mpi, over_best, of_bound, of_window_bound;
    for (std::size_t round = 0; round < way.seconds.size(); ++round) {
      of_bound.push_back(streams_of_bound * stream.seconds[round] / way.seconds[round]);
      of_window_bound.push_back(streams_of_bound * window_stream.seconds[round] / way.seconds[round]);
      over_mpi.push_back(mpi_seconds[round] / way.seconds[round]);
      over_best.push_back(best.seconds[round] / way.seconds[round]);
    }
    if (rank_ != 0) continue;
    fmt::print(
        "operation={} ranks={} bytes={} way=\"{}\" microseconds={:.1f} bus_gb_s={:.2f} of_bound={:.3f} "
        "of_window_bound={:.3f} of_first_bound={:.3f} fastest_of_first_bound={:.3f} over_mpi={:.2f} "
        "over_mpi_best={:.2f}{}\n",
        operation, ranks_, size, way.name, seconds * 1e6, bus, median(of_bound), median(of_window_bound),
        bound / seconds, bound / fastest, median(over_mpi), median(over_best),
        way.name == "mpi best" ? " (" + best_name + ")" : "");
    results_.push_back({{"operation", operation},
                        {"ranks", ranks_},
                        {"bytes", size},
                        {"way", way.name},
                        {"seconds", seconds},
                        {"bus_gb_s", bus},
                        {"of_bound", median(of_bound)},
                        {"of_window_bound", median(of_window_bound)},
                        {"of_first_bound", bound / seconds},
                        {"fastest_seconds", fastest},
                        {"fastest_of_first_bound", bound / fastest},
                        {"over_mpi", median(over_mpi)},
                        {"over_mpi_best", median(over_best)}});
  }
}

void Bench::run() {
  double fastest[2] = {};
  std::vector<Way> all = streams();
  for (std::size_t way = 0; way < all.size(); ++way) {
    turn(all[way]);  // maps pages
    for (int round = 0; round < 7; ++round)
      fastest[way] = std::max(fastest[way], stream_traffic() / turn(all[way]));
  }
  stream_ = fastest[0];
  double load[3] = {};
  if (getloadavg(load, 3) < 0) load[0] = -1;
  if (rank_ == 0) {
    fmt::print("ranks={} rounds={} stream_gb_s={:.1f} window_stream_gb_s={:.1f} load={:.2f} {}\n", ranks_,
               settings_.rounds, stream_ / 1e9, fastest[1] / 1e9, load[0], mpi_version());
  }
  for (const Kind kind : {Kind::reduce_scatter, Kind::all_gather, Kind::all_reduce}) {
    for (const std::int64_t size : settings_.sizes)
      measure(kind, std::max<std::int64_t>(size / (1024 * ranks_), 1) * (1024 * ranks_));
  }
  if (rank_ != 0 || settings_.json.empty()) return;
  const nlohmann::json report{{"schema", "tranche-bench-collectives-1"},
                              {"ranks", ranks_},
                              {"rounds", settings_.rounds},
                              {"stream_gb_s", stream_ / 1e9},
                              {"window_stream_gb_s", fastest[1] / 1e9},
                              {"load", load[0]},
                              {"mpi", mpi_version()},
                              {"results", results_}};
  std::ofstream file(settings_.json);
  file << report.dump(1) << '\n';
  if (!file.flush()) throw ConfigurationError("cannot write " + settings_.json);
}

}  // namespace

int main(int count, char** arguments) {
  // Without this setting Open MPI ignores the choice of an algorithm for a communicator.
  setenv("OMPI_MCA_coll_tuned_use_dynamic_rules", "1", 1);
  int provided = 0, status = 0;
  MPI_Init_thread(&count, &arguments, MPI_THREAD_MULTIPLE, &provided);
  MPI_T_init_thread(MPI_THREAD_MULTIPLE, &provided);
  try {
    Bench(settings_of(count, arguments)).run();
  } catch (const std::exception& error) {
    fmt::print(stderr, "bench_collectives: {}\n", error.what());
    status = 1;
  }
  if (status != 0) MPI_Abort(MPI_COMM_WORLD, status);
  MPI_T_finalize();
  MPI_Finalize();
  return status;
}
