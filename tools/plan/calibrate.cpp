#include "tools/plan/calibrate.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <ostream>

#include "core/clock.h"
#include "core/output_file.h"
#include "offload/calibration.h"
#include "offload/file_system.h"
#include "offload/host_link.h"
#include "tools/files.h"
#include "tools/plan/calibrate_kernels.h"
#include "tools/plan/calibration_statistics.h"
#include "tranche/core/error.h"
#include "tranche/device/memory_resources.h"
#include "tranche/engine/runtime.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/version.h"

namespace tranche::tools {

using detail::Stopwatch;

namespace {

/// The fractions of --seconds for the parts of a measurement with one number of ranks.
constexpr double steps_share = 0.45, products_share = 0.3, collectives_share = 0.2;
/// Kernels are measured this many times, with other measurements between, and the median is used: a
/// disturbance of a second then affects only one of them.
constexpr int passes = 3;
constexpr std::int64_t copied_bytes = std::int64_t{32} << 20;

void measure_link(planner::Machine& machine, double seconds) {
  const std::unique_ptr<Device> device = make_device({DeviceKind::cpu, 0, 1});
  detail::HostLink link(*device);
  const Buffer here(device->memory(Tier::device), copied_bytes, Category::workspace, "calibration");
  const Buffer there(device->memory(Tier::host), copied_bytes, Category::workspace, "calibration");
  const auto copy = [&](std::int64_t bytes) {
    link.copy_to_host(there.data(), here.data(), bytes, {}).wait();
  };
  machine.host_link.bytes_per_second =
      static_cast<double>(copied_bytes) / time_calls(seconds / 2, [&] { copy(copied_bytes); });
  machine.host_link.latency_seconds = time_calls(seconds / 2, [&] { copy(64); });
}

void measure_disk(planner::Machine& machine, const std::string& folder, double seconds) {
  const std::unique_ptr<Device> device = make_device({DeviceKind::cpu, 0, 1});
  detail::CalibrationRequest request;
  request.directory = folder;
  request.seconds_per_candidate = seconds / 28;
  MemoryResource& memory = device->memory(Tier::host);
  const detail::BlockIoOptions fastest = detail::calibrate_block_io(request, memory).options;
  request.file_bytes = std::int64_t{256} << 20;
  const detail::DiskRates rates =
      detail::measure_both_ways(request, fastest, machine.cores, seconds / 2, memory);
  machine.disk = planner::LinkRate{rates.write_bytes_per_second, 1e-4};
  machine.disk_read_bytes_per_second = rates.read_bytes_per_second;
  machine.disk_cores = machine.cores * (rates.slowed - 1);
}

/// The processor seconds that this process has used.
double processor_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

std::string host_name() {
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) != 0) return "this machine";
  return name.data();
}

std::string taken_text() {
  std::array<char, 32> date{};
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  std::strftime(date.data(), date.size(), "%Y-%m-%d %H:%M UTC", &parts);
  std::array<double, 1> load{};
  if (getloadavg(load.data(), 1) != 1) load[0] = 0;
  return fmt::format("{}, tranche {}, load {:.1f} before", date.data(), version, load[0]);
}

/// The numbers of ranks that are measured together: 1, 2, 4 ... and all.
std::vector<int> groups_of(int ranks) {
  std::vector<int> groups;
  for (int n = 1; n < ranks; n *= 2) groups.push_back(n);
  groups.push_back(ranks);
  return groups;
}

constexpr OperationLabel calibrating{"calibration", "calibrate", Traffic::control};

}  // namespace

planner::ComputeShare measure_share(Communicator& group, int threads, double seconds) {
  planner::ComputeShare share;
  share.ranks = group.size();
  share.threads = threads;
  const double products = seconds * products_share / (products_share + steps_share);
  std::vector<double> memory;
  std::vector<std::vector<planner::ProductTable>> tables;
  std::vector<std::vector<planner::KernelTable>> kernels;
  StepProbes probes(group, threads, seconds - products);
  for (int pass = 0; pass < passes; ++pass) {
    const std::unique_ptr<Device> device = make_device({DeviceKind::cpu, 0, threads});
    memory.push_back(measure_memory(*device, seconds * 0.02 / passes));
    tables.push_back(measure_products(*device, seconds, products / passes));
    kernels.push_back(measure_kernels(*device, seconds * 0.03 / passes));
    probes.run_pass(pass, passes);
  }
  share.memory_bytes_per_second = median(std::move(memory));
  share.products = median_tables(tables);
  share.kernels = median_tables(kernels);
  probes.add_to(share);
  return share;
}

void measure_collectives(Communicator& group, MemoryResource& memory, double seconds,
                         std::vector<planner::CollectiveTable>& tables) {
  const int ranks = group.size();
  const std::vector<std::int64_t> sizes{std::int64_t{4} << 10, std::int64_t{32} << 10,
                                        std::int64_t{256} << 10, std::int64_t{2} << 20,
                                        std::int64_t{16} << 20};
  const std::unique_ptr<Device> device = make_device({DeviceKind::cpu, 0, 1});
  const std::int64_t most = sizes.back() + (std::int64_t{1} << 16);  // counts are rounded up
  const Buffer full(memory, most, Category::workspace, "calibration");
  const Buffer part(memory, most, Category::workspace, "calibration");
  for (const Buffer* buffer : {&full, &part}) {
    kernels::fill_zero(device->compute_stream(), {buffer->data(), DataType::uint8, {most}});
  }
  struct Kind {
    const char* name;
    DataType dtype;
    std::function<Event(std::int64_t)> call;  ///< argument: elements per rank
  };
  std::vector<Kind> kinds;
  for (const DataType dtype : {DataType::bfloat16, DataType::float32}) {
    kinds.push_back({"all_gather", dtype, [&, dtype](std::int64_t count) {
                       return group.all_gather(part.data(), full.data(), count, dtype, 0, {}, calibrating);
                     }});
    kinds.push_back({"reduce_scatter", dtype, [&, dtype](std::int64_t count) {
                       return group.reduce_scatter(full.data(), dtype, part.data(), DataType::float32, count,
                                                   {}, {}, calibrating);
                     }});
  }
  kinds.push_back({"all_reduce", DataType::float32, [&](std::int64_t count) {
                     return group.all_reduce(full.data(), count * ranks, DataType::float32,
                                             ReduceOperation::sum, calibrating);
                   }});
  kinds.push_back({"broadcast", DataType::float32, [&](std::int64_t count) {
                     return group.broadcast(full.data(), count * ranks, DataType::float32, 0, {},
                                            calibrating);
                   }});
  const double each = seconds / static_cast<double>(kinds.size() * sizes.size());
  for (const Kind& kind : kinds) {
    planner::CollectiveTable table{kind.name, ranks, static_cast<int>(size_of(kind.dtype)), 0, {}};
    double busy = 0, passed = 0;
    for (const std::int64_t bytes : sizes) {
      const std::int64_t count = std::max<std::int64_t>(1, bytes / size_of(kind.dtype) / ranks);
      kind.call(count).wait();  // faults in pages and initialises the library
      group.barrier(calibrating).wait();
      const Stopwatch one;
      kind.call(count).wait();
      // The number of calls is made equal on all ranks.
      double wanted = std::clamp(each / std::max(one.seconds(), 1e-7), 3.0, 200.0);
      group.all_reduce(&wanted, 1, DataType::float64, ReduceOperation::minimum, calibrating).wait();
      std::vector<double> taken;
      const double processor = processor_seconds();
      const Stopwatch all;
      for (int call = 0; call < static_cast<int>(wanted); ++call) {
        const Stopwatch clock;
        kind.call(count).wait();
        taken.push_back(clock.seconds());
      }
      passed += all.seconds();
      busy += processor_seconds() - processor;
      double mine = median(taken);
      group.all_reduce(&mine, 1, DataType::float64, ReduceOperation::maximum, calibrating).wait();
      const auto size = static_cast<double>(count * ranks * size_of(kind.dtype));
      table.time.points.emplace_back(size, mine);
    }
    table.cores = std::clamp(busy / std::max(passed, 1e-9), 0.0, 2.0);
    tables.push_back(std::move(table));
  }
}

int run_calibrate(const Options& options, const Output& output) {
  Launch launch(output.errors, options.flags);
  if (const int status = launch.agree([&] {
        if (launch.rank() != 0) return;
        require_writable(options.calibration, "--out");
        // The disk is measured last, and a wrong folder would be noticed only then.
        const std::string& folder = options.calibration_dir;
        if (folder.empty()) return;
        try {
          detail::require_output_file(detail::join_path(folder, ".tranche-calibration.probe"));
        } catch (const IoError& problem) {
          throw ConfigurationError(fmt::format("--dir '{}': nothing can be written there: {}", folder,
                                               std::strerror(problem.code())));
        }
      });
      status != 0) {
    return status;
  }
  RuntimeOptions runtime_options;
  runtime_options.log_level = LogLevel::warning;
  std::unique_ptr<Runtime> runtime;
  try {
    runtime = std::make_unique<Runtime>(Runtime::from_environment(runtime_options));
    Communicator& all = runtime->all();
    const bool speaks = all.rank() == 0;
    const auto say = [&](const std::string& line) {
      if (speaks) output.out << line << "\n" << std::flush;
    };
    const Stopwatch clock;
    planner::Machine machine;
    machine.name = options.machine_name.empty() ? host_name() : options.machine_name;
    machine.source = "measured";
    machine.taken = taken_text();
    machine.cores = usable_cores();
    const std::vector<int> groups = groups_of(all.size());
    const double each = options.calibration_seconds / static_cast<double>(groups.size());
    for (const int ranks : groups) {
      const int threads = static_cast<int>(options.threads.value_or(std::max(1, machine.cores / ranks)));
      all.barrier(calibrating).wait();
      const bool active = all.rank() < ranks;
      const std::unique_ptr<Communicator> group = all.split(active ? 0 : -1, all.rank());
      if (active) {
        machine.shares.push_back(measure_share(*group, threads, each * (products_share + steps_share)));
        group->barrier(calibrating).wait();
        if (ranks > 1) {
          measure_collectives(*group, runtime->memory(Tier::device), each * collectives_share,
                              machine.collectives);
        }
      }
      say(fmt::format("{:5.1f} s  {} rank{} of {} thread{}", clock.seconds(), ranks, ranks == 1 ? "" : "s",
                      threads, threads == 1 ? "" : "s"));
    }
    all.barrier(calibrating).wait();
    measure_link(machine, options.calibration_seconds * 0.02);
    machine.host_bytes_per_second =
        machine.shares.empty() ? 1 : machine.shares.back().memory_bytes_per_second;
    if (speaks && !options.calibration_dir.empty()) {
      measure_disk(machine, options.calibration_dir, options.calibration_seconds * 0.1);
    }
    all.barrier(calibrating).wait();
    if (speaks) {
      detail::write_output_file(options.calibration, planner::machine_json(machine));
      say(fmt::format("{:5.1f} s  machine: {}", clock.seconds(), options.calibration));
    }
  } catch (...) {
    return launch.fail(std::current_exception(), 2, {}, runtime.get());
  }
  return 0;
}

}  // namespace tranche::tools
