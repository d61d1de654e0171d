#include "tranche/engine/runtime.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "comm/device_communicator.h"
#include "comm/launcher.h"
#include "comm/window_memory.h"
#include "device/launch_queues.h"
#include "engine/rank_texts.h"
#include "kernels/host_threads.h"
#include "kernels/revision.h"
#include "offload/file_system.h"
#include "tranche/config/config.h"
#include "tranche/core/error.h"
#include "tranche/kernels/matmul.h"
#include "tranche/version.h"

namespace tranche {

namespace {

/// The time-out before a configuration is read.
constexpr double start_timeout_seconds = 60;
/// The staging size before a configuration is read, enough for 65,536 ranks; unused memory is not committed.
constexpr std::int64_t start_staging_bytes = 1 << 26;

std::unique_ptr<Communicator> communicator_of_environment(const CommunicatorOptions& options) {
  require_joined_tasks();
  return started_by_mpi_launcher() ? make_mpi_communicator(options) : make_self_communicator(options);
}

/// Returns the mesh of all ranks. If they were started with different meshes, `problem` gets the error that
/// all must throw. Collective, because groups of different meshes would wait for each other forever.
Mesh agreed_mesh(Communicator& world, const std::string& text, std::string& problem) {
  if (world.simulated()) return Mesh::parse(text, world.size());
  const std::vector<std::string> texts =
      detail::exchange_texts(world, text, {"start", "mesh", Traffic::control, Tier::host});
  try {
    const Mesh mesh = Mesh::parse(texts[0], world.size());
    for (std::size_t rank = 1; rank < texts.size(); ++rank) {
      if (texts[rank] == texts[0] || Mesh::parse(texts[rank], world.size()) == mesh) continue;
      problem = fmt::format(
          "rank {} was started with tranche.mesh \"{}\", rank 0 with \"{}\"; start all ranks with the same",
          rank, texts[rank], texts[0]);
      break;
    }
    return mesh;
  } catch (const ConfigurationError& error) {
    problem = error.message();
  }
  return Mesh(world.size());
}

/// The group of `ranks`, which includes this one, by ascending `order`. All ranks call it, with disjoint
/// groups.
std::unique_ptr<Communicator> subgroup_in_order(Communicator& world, std::vector<int> ranks,
                                                const std::function<int(int)>& order) {
  if (!world.simulated()) return world.split(ranks.front(), order(world.rank()));
  // A simulated group accepts ranks in any order.
  std::sort(ranks.begin(), ranks.end(), [&](int one, int other) { return order(one) < order(other); });
  return world.subgroup(ranks);
}

std::string said(const std::string& value) {
  return value;
}
/// The number of threads of a rank: the node's ranks share its cores. A task of Slurm without core binding
/// sees all cores, so the number that Slurm gave it is a limit.
int threads_of_rank(int cores, const Communicator& world) {
  const int threads = std::max(1, cores / std::max(1, world.local_size())),
            given = cores_of_rank_by_launcher();
  return given > 0 ? std::min(threads, given) : threads;
}
std::string said(bool value) {
  return value ? "true" : "false";
}
std::string said(double value) {
  return fmt::format("{}", value);
}
std::string said(std::int64_t value) {
  return std::to_string(value);
}

/// Throws InvalidArgument for numbers that a configuration could not give either.
void require_valid(const RuntimeOptions& options) {
  for (const auto& [name, value] : {std::pair("threads", std::int64_t{options.threads}),
                                    {"device_memory_limit", options.device_memory_limit},
                                    {"host_memory_limit", options.host_memory_limit},
                                    {"nvme_limit", options.nvme_limit},
                                    {"staging_bytes", options.staging_bytes},
                                    {"ranks_per_host", options.ranks_per_host},
                                    {"trace_events", options.trace_events}}) {
    if (value < 0) {
      throw InvalidArgument(fmt::format("RuntimeOptions::{} is {}; it must be at least 0", name, value));
    }
  }
  if (!(options.communication_timeout > 0)) {  // true for NaN
    throw InvalidArgument(
        fmt::format("RuntimeOptions::communication_timeout is {} seconds; it must be above 0",
                    options.communication_timeout));
  }
}

}  // namespace

struct Runtime::Impl {
  std::optional<Config> config;  ///< set by from_config()
  // The order matters: later members are destroyed first and may use earlier ones.
  RuntimeOptions options;
  comm::CollectiveChoice choice;
  Ledger ledger;
  std::unique_ptr<Device> device;
  /// Set when ranks of a node read each other's memory; buffers that they exchange are allocated in it.
  std::unique_ptr<comm::WindowMemory> window;
  std::unique_ptr<PoisonResource> poison;
  std::unique_ptr<LimitResource> limit, host_limit;
  std::unique_ptr<TrackingResource> tracking;
  std::unique_ptr<TrackingResource> host_tracking;
  /// For numbered devices: the host memory for the communicator's staging buffer, which is allocated before
  /// the device exists.
  std::unique_ptr<MemoryResource> staging_memory;
  std::unique_ptr<LimitResource> staging_limit;
  std::unique_ptr<TrackingResource> staging_tracking;
  std::unique_ptr<TraceRecorder> trace;
  std::unique_ptr<Communicator> world;
  Mesh mesh{1};
  std::unique_ptr<Communicator> shards, replicas;  ///< null where all ranks shard, or without replicas
  std::unique_ptr<Communicator> pipeline, ends;    ///< null without a pipeline
  std::unique_ptr<Communicator> of_stage;  ///< null unless there are replicas and a pipeline or a tensor axis
  std::unique_ptr<Communicator> context;   ///< null without a context axis
  std::unique_ptr<Communicator> tensor, tensor_and_shard;  ///< null without a tensor axis
  std::string place;                                       ///< set_place()
  Logger log;
  std::exception_ptr told;  ///< the last error passed to fail()
  int engines = 0;          ///< as counted by next_engine_number()

  /// Makes the device and its tracked memory.
  void make_device(int index);
  /// Makes the window if several processes share the host.
  void make_window(Tier tier);
  CommunicatorOptions communicator_options(MemoryResource& memory);
  void start_on_one_of_several(const CommunicatorFactory& factory, int devices);
};

RuntimeOptions RuntimeOptions::from(const Config& config, const RuntimeOptions& beside) {
  const RuntimeOptions unset;
  RuntimeOptions options = beside;
  const auto take = [](auto& option, const auto& asked, const auto& by_default) {
    if (asked != by_default) option = asked;
  };
  take(options.threads, config.threads, unset.threads);
  take(options.device_memory_limit, config.device_memory_limit, unset.device_memory_limit);
  take(options.host_memory_limit, config.offload.host_memory_limit, unset.host_memory_limit);
  take(options.nvme_limit, config.offload.nvme_limit, unset.nvme_limit);
  take(options.poison_memory, config.debug.poison_memory, unset.poison_memory);
  take(options.mesh, config.mesh, unset.mesh);
  take(options.ranks_per_host, config.debug.ranks_per_host, unset.ranks_per_host);
  take(options.communication_timeout, config.communication_timeout, unset.communication_timeout);
  // 0: a Config that was not validated yet.
  take(options.staging_bytes, config.staging_bytes, std::int64_t{0});
  take(options.inline_progress, config.inline_progress, unset.inline_progress);
  take(options.device_transport, config.device_transport, unset.device_transport);
  take(options.collectives, config.collectives, unset.collectives);
  return options;
}

Runtime Runtime::from_environment(const RuntimeOptions& options) {
  return Runtime(options, communicator_of_environment);
}

Runtime Runtime::from_config(const std::string& path_or_json, const RuntimeOptions& beside) {
  // Two communicators are made: the runtime's configuration may depend on the number of ranks, which only the
  // first one knows.
  CommunicatorOptions first;
  first.timeout_seconds = start_timeout_seconds;
  first.staging_bytes = start_staging_bytes;
  std::unique_ptr<Communicator> world = communicator_of_environment(first);
  Config config;
  std::string problem;
  try {
    config = path_or_json.find('{') == std::string::npos ? load_config(path_or_json, world->size())
                                                         : parse_config(path_or_json, world->size());
  } catch (const ConfigurationError& error) {
    problem = error.message();
  }
  // A file may be missing on one host only; then all ranks throw.
  const std::vector<std::string> problems =
      detail::exchange_texts(*world, problem, {"start", "configuration", Traffic::control, Tier::host});
  const auto refused =
      std::find_if(problems.begin(), problems.end(), [](const auto& one) { return !one.empty(); });
  if (refused != problems.end()) {
    const bool alike =
        std::all_of(problems.begin(), problems.end(), [&](const auto& one) { return one == *refused; });
    ConfigurationError error((alike ? "" : "rank " + std::to_string(refused - problems.begin()) + ": ") +
                             *refused);
    error.attach_rank(world->rank());
    // Destroyed before the throw, because destroying it while an exception is in flight leaves MPI open.
    world.reset();
    throw error;
  }
  Runtime runtime = from_environment(RuntimeOptions::from(config, beside));
  runtime.impl_->config = std::move(config);
  return runtime;
}

void Runtime::Impl::make_window(Tier tier) {
  if (choice.node == NodeCollectives::messages) return;
  if (!started_by_mpi_launcher() || ranks_of_node_by_launcher() == 1) return;
  window = std::make_unique<comm::WindowMemory>(tier);
}

void Runtime::Impl::make_device(int index) {
  DeviceOptions device_options;
  device_options.kind = options.device;
  device_options.index = index;
  device_options.threads = options.threads;
  device_options.recorder = options.recorder;
  device = tranche::make_device(device_options);
  ledger.mark_phases(
      [this](std::string_view phase, std::string_view unit) { device->mark_phase(phase, unit); });
  MemoryResource* memory = &device->memory(Tier::device);
  if (options.device == DeviceKind::cpu) {
    make_window(Tier::device);
    if (window) memory = window.get();
  }
  if (options.poison_memory) {
    poison = std::make_unique<PoisonResource>(*memory, make_poison_fill(*device));
    memory = poison.get();
  }
  if (options.device_memory_limit > 0) {
    limit = std::make_unique<LimitResource>(*memory, options.device_memory_limit, &ledger);
    memory = limit.get();
  }
  tracking = std::make_unique<TrackingResource>(*memory, ledger);
  MemoryResource* host = &device->memory(Tier::host);
  if (options.host_memory_limit > 0) {
    host_limit = std::make_unique<LimitResource>(*host, options.host_memory_limit, &ledger);
    // The first communicator was made before the device, so its memory is counted here.
    host_limit->hold(ledger.total(Tier::host));
    host = host_limit.get();
  }
  host_tracking = std::make_unique<TrackingResource>(*host, ledger);
}

CommunicatorOptions Runtime::Impl::communicator_options(MemoryResource& memory) {
  CommunicatorOptions communicator;
  communicator.timeout_seconds = options.communication_timeout;
  communicator.staging_bytes = options.staging_bytes;
  communicator.memory = &memory;
  communicator.window = window.get();
  communicator.collectives = choice.node;
  communicator.inline_progress = options.inline_progress;
  communicator.local_size = options.ranks_per_host;
  communicator.device = device.get();
  communicator.recorder = options.recorder;
  communicator.mesh = options.mesh;
  if (options.trace) {
    // The recorder needs the rank, which only the communicator knows, and is given it later.
    trace = std::make_unique<TraceRecorder>(0);
    trace->set_capacity(options.trace_events);
    communicator.trace = trace.get();
  }
  return communicator;
}

// The local rank chooses the device, so a communicator is made first.
void Runtime::Impl::start_on_one_of_several(const CommunicatorFactory& factory, int devices) {
  make_window(Tier::host);
  if (!window) staging_memory = make_host_resource(Tier::host);
  MemoryResource* staging = window ? window.get() : staging_memory.get();
  if (options.host_memory_limit > 0) {
    staging_limit = std::make_unique<LimitResource>(*staging, options.host_memory_limit, &ledger);
    staging = staging_limit.get();
  }
  staging_tracking = std::make_unique<TrackingResource>(*staging, ledger);
  std::unique_ptr<Communicator> host = factory(communicator_options(*staging_tracking));
  make_device(host->local_rank() % devices);
  comm::DeviceCommunicatorOptions communicator;
  communicator.transport = choice.transport;
  communicator.library_collectives = choice.by_library;
  communicator.timeout_seconds = options.communication_timeout;
  communicator.staging_bytes = options.staging_bytes;
  communicator.device_memory = tracking.get();
  communicator.host_memory = host_tracking.get();
  communicator.trace = trace.get();
  communicator.rank_names = {options.mesh, host->size()};
  communicator.inline_progress = options.inline_progress;
  world = comm::make_device_communicator(*device, std::move(host), communicator);
}

Runtime::Runtime(const RuntimeOptions& options, const CommunicatorFactory& factory)
    : impl_(std::make_shared<Impl>()) {
  Impl& impl = *impl_;
  require_valid(options);
  impl.options = options;
  impl.choice = comm::collective_choice(options.device_transport, options.collectives);
  comm::require_library_collectives(impl.choice, options.device);
  if (const int devices = numbered_devices(options.device); devices > 0) {
    impl.start_on_one_of_several(factory, devices);
  } else {
    impl.make_device(0);
    impl.world = factory(impl.communicator_options(*impl.tracking));
  }
  if (impl.trace) {
    impl.trace->set_rank(impl.world->rank());
    impl.device->compute_stream().set_trace(impl.trace.get());
  }
  std::string problem;
  impl.mesh = agreed_mesh(*impl.world, options.mesh, problem);
  if (!problem.empty()) {
    ConfigurationError error(problem);
    error.attach_rank(impl.world->rank());
    impl.world.reset();  // before the throw, as in from_config()
    throw error;
  }
  const Mesh& mesh = impl.mesh;
  const int rank = impl.world->rank(), stages = mesh.size(MeshAxis::pipeline);
  const bool replicas = mesh.size(MeshAxis::replicate) > 1;
  const int parts = mesh.size(MeshAxis::tensor), part = mesh.coordinate(MeshAxis::tensor, rank);
  if (replicas || stages > 1 || parts > 1)
    impl.shards = impl.world->subgroup(mesh.group({MeshAxis::shard, MeshAxis::context}, rank));
  if (replicas) impl.replicas = impl.world->subgroup(mesh.group({MeshAxis::replicate}, rank));
  if (replicas && (stages > 1 || parts > 1)) {
    impl.of_stage =
        impl.world->subgroup(mesh.group({MeshAxis::replicate, MeshAxis::shard, MeshAxis::context}, rank));
  }
  if (mesh.size(MeshAxis::context) > 1) {
    impl.context = impl.world->subgroup(mesh.group({MeshAxis::context}, rank));
  }
  if (parts > 1) {
    impl.tensor = impl.world->subgroup(mesh.group({MeshAxis::tensor}, rank));
    impl.tensor_and_shard = subgroup_in_order(
        *impl.world, mesh.group({MeshAxis::shard, MeshAxis::context, MeshAxis::tensor}, rank),
        [&](int one) { return mesh.state_rank(one) * parts + mesh.coordinate(MeshAxis::tensor, one); });
  }
  if (stages > 1) {
    impl.pipeline = impl.world->line(mesh.group({MeshAxis::pipeline}, rank));
    // The group is ordered by state rank, then by stage, like Placement::group().
    const int stage = mesh.coordinate(MeshAxis::pipeline, rank);
    const bool at_an_end = stage == 0 || stage == stages - 1;
    if (impl.world->simulated() && at_an_end) {
      std::vector<int> ends;
      for (const int other : mesh.group({MeshAxis::pipeline, MeshAxis::shard, MeshAxis::context}, rank)) {
        const int of = mesh.coordinate(MeshAxis::pipeline, other);
        if (of == 0 || of == stages - 1) ends.push_back(other);
      }
      // A simulated group accepts ranks in any order.
      std::stable_sort(ends.begin(), ends.end(),
                       [&](int one, int other) { return mesh.state_rank(one) < mesh.state_rank(other); });
      impl.ends = impl.world->subgroup(ends);
    } else if (!impl.world->simulated()) {
      impl.ends =
          impl.world->split(at_an_end ? mesh.coordinate(MeshAxis::replicate, rank) * parts + part : -1,
                            mesh.state_rank(rank) * 2 + (stage == 0 ? 0 : 1));
    }
  }
  impl.log = options.log ? Logger(impl.world->rank(), options.log_level, options.log)
                         : Logger(impl.world->rank(), options.log_level);
  if (impl.world->local_rank() == 0) {
    if (const std::string warning = detail::launch_queue_warning(*impl.device); !warning.empty())
      impl.log.warning(warning);
  }
  if (options.threads == 0) {
    impl.device->set_threads(threads_of_rank(impl.device->threads(), *impl.world));
  }
  if (options.device == DeviceKind::cpu) kernels::start_host_threads(impl.device->threads());
}

Runtime::Runtime() = default;
Runtime::~Runtime() = default;
Runtime::Runtime(Runtime&&) noexcept = default;
Runtime& Runtime::operator=(Runtime&&) noexcept = default;
Runtime::Runtime(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
Runtime Runtime::handle() const {
  return Runtime(impl_);
}
int Runtime::next_engine_number() {
  return ++impl_->engines;
}

const Config& Runtime::config() const {
  if (!impl_->config) {
    throw LogicError("Runtime::config() of a runtime that was not made by Runtime::from_config()");
  }
  return *impl_->config;
}

void Runtime::check(const Config& config) const {
  const RuntimeOptions& made = impl_->options;
  const RuntimeOptions wanted = RuntimeOptions::from(config), unset;
  std::string differences;
  const auto compare = [&](const char* key, const auto& asked, const auto& has, const auto& by_default) {
    if (asked == by_default || asked == has) return;
    differences += fmt::format("\n  {} is {}, the runtime has {}", key, said(asked), said(has));
  };
  const auto progress = [](const RuntimeOptions& options) {
    return std::string(options.inline_progress ? "inline" : "thread");
  };
  const Mesh wanted_mesh = Mesh::parse(wanted.mesh, size());
  compare("tranche.mesh", wanted_mesh.to_string(), mesh().to_string(),
          wanted.mesh.empty() ? wanted_mesh.to_string() : std::string());
  compare("tranche.communication_slab", wanted.staging_bytes, made.staging_bytes,
          default_staging_bytes(size()));
  if (made.device != DeviceKind::meta) {
    compare("tranche.threads", std::int64_t{wanted.threads}, std::int64_t{made.threads}, std::int64_t{0});
    compare("tranche.device_memory", wanted.device_memory_limit, made.device_memory_limit, std::int64_t{0});
    compare("tranche.host_memory", wanted.host_memory_limit, made.host_memory_limit, std::int64_t{0});
    compare("tranche.nvme_space", wanted.nvme_limit, made.nvme_limit, std::int64_t{0});
    compare("tranche.communication_timeout", wanted.communication_timeout, made.communication_timeout,
            unset.communication_timeout);
    compare("tranche.progress", progress(wanted), progress(made), progress(unset));
    compare("tranche.collectives", wanted.collectives, made.collectives, unset.collectives);
    compare("tranche.device_transport", wanted.device_transport, made.device_transport,
            unset.device_transport);
    compare("tranche.debug.poison_memory", wanted.poison_memory, made.poison_memory, unset.poison_memory);
    compare("tranche.debug.ranks_per_host", std::int64_t{wanted.ranks_per_host},
            std::int64_t{made.ranks_per_host}, std::int64_t{0});
  }
  if (differences.empty()) return;
  throw ConfigurationError("the configuration asks for what the runtime was not made with:" + differences +
                           "\nmake the runtime of the configuration, by Runtime::from_config() or with "
                           "RuntimeOptions::from(config)");
}

Communicator& Runtime::all() const {
  return *impl_->world;
}
Communicator& Runtime::shard() const {
  return impl_->shards ? *impl_->shards : *impl_->world;
}
Communicator* Runtime::replicas() const {
  return impl_->replicas.get();
}
void Runtime::set_place(std::string place) {
  impl_->place = std::move(place);
}
const std::string& Runtime::place() const {
  return impl_->place;
}
Communicator& Runtime::of_stage() const {
  if (impl_->of_stage) return *impl_->of_stage;
  return impl_->pipeline || impl_->tensor ? shard() : all();
}
Communicator* Runtime::context() const {
  return impl_->context.get();
}
Communicator* Runtime::tensor() const {
  return impl_->tensor.get();
}
Communicator* Runtime::tensor_and_shard() const {
  return impl_->tensor_and_shard.get();
}
Communicator* Runtime::pipeline() const {
  return impl_->pipeline.get();
}
Communicator* Runtime::pipeline_ends() const {
  return impl_->ends.get();
}
const Mesh& Runtime::mesh() const {
  return impl_->mesh;
}
int Runtime::rank() const {
  return impl_->world->rank();
}
int Runtime::size() const {
  return impl_->world->size();
}
Device& Runtime::device() const {
  return *impl_->device;
}
int Runtime::host_threads() const {
  if (impl_->device->kind() == DeviceKind::meta) return 1;
  if (impl_->options.threads > 0) return impl_->options.threads;
  return threads_of_rank(usable_cores(), *impl_->world);
}
Ledger& Runtime::ledger() const {
  return impl_->ledger;
}
detail::FileSystem& Runtime::files() const {
  return impl_->options.files != nullptr ? *impl_->options.files : detail::posix_file_system();
}
const Logger& Runtime::log() const {
  return impl_->log;
}
TraceRecorder* Runtime::trace() const {
  return impl_->trace.get();
}
std::int64_t Runtime::nvme_limit() const {
  return impl_->options.nvme_limit;
}
std::int64_t Runtime::memory_calls(Tier tier) const {
  if (tier == Tier::nvme) return 0;  // files are not a memory resource
  return (tier == Tier::host ? impl_->host_tracking : impl_->tracking)->calls();
}

TrackingResource& Runtime::memory(Tier tier) const {
  if (tier == Tier::device) return *impl_->tracking;
  if (tier == Tier::host) return *impl_->host_tracking;
  throw InvalidArgument("the nvme tier is reached through offload/, not as a memory resource");
}

std::int64_t Runtime::window_bytes() const {
  return impl_->window ? impl_->window->resident_bytes() : 0;
}

std::string Runtime::numerics_fingerprint() const {
  const Device& device = *impl_->device;
  return std::string("tranche ") + version + ", arithmetic " + std::to_string(kernels::arithmetic_revision) +
         "; " + std::string(name_of(device.kind())) + "; " + kernels::matmul_libraries(device.kind()) +
         "; fp32 by " + std::string(kernels::matmul_path(device.kind(), DataType::float32)) + "; bf16 by " +
         std::string(kernels::matmul_path(device.kind(), DataType::bfloat16)) + "; " +
         (device.host_accessible() ? std::to_string(device.threads()) + " threads a rank"
                                   : device.description()) +
         comm::reductions_of(impl_->choice);
}

int Runtime::fail(std::exception_ptr error) noexcept {
  if (!error) error = std::make_exception_ptr(LogicError("fail() was called without an error"));
  const ExitStatus status = exit_status_of(error);
  if (impl_ && std::exchange(impl_->told, error) == error) return static_cast<int>(status);
  std::string text = message_of(error);
  int here = impl_ ? rank() : detail::rank_by_launcher();
  try {
    std::rethrow_exception(error);
  } catch (Error& known) {
    if (impl_) {
      known.attach_rank(here);
    } else {
      if (known.rank() >= 0) here = known.rank();
    }
    // The logger puts this rank before every line.
    text = known.rank() == here ? known.message() + " (" + known.position() + ")" : known.what();
  } catch (...) {
  }
  std::string told = message_of(error);
  if (impl_ && !impl_->place.empty()) {
    text = mesh().name_of_rank(here) + ", " + impl_->place + ": " + text;
    told = impl_->place + ": " + told;
  }
  (impl_ ? log() : Logger(here)).error(text);
  if (impl_) {
    all().post_failure(told, status, 2.0);
    impl_->place.clear();  // a later error comes from another place
  }
  return static_cast<int>(status);
}

}  // namespace tranche
