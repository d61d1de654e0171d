#include "tranche/engine/runtime.h"

#include <algorithm>
#include <exception>

#include "tranche/comm/device_communicator.h"
#include "tranche/comm/window_memory.h"
#include "tranche/core/error.h"
#include "tranche/engine/config.h"
#include "tranche/kernels/matmul.h"
#include "tranche/kernels/revision.h"
#include "tranche/offload/file_system.h"
#include "tranche/version.h"

namespace tranche {

struct Runtime::Impl {
  // Order matters: what comes later is destroyed first and may use what comes earlier.
  RuntimeOptions options;
  CollectiveChoice choice;
  Ledger ledger;
  std::unique_ptr<Device> device;
  /// Where ranks of a host read each other's memory: what they exchange is allocated here.
  std::unique_ptr<WindowMemory> window;
  std::unique_ptr<PoisonResource> poison;
  std::unique_ptr<LimitResource> limit, host_limit;
  std::unique_ptr<TrackingResource> tracking;
  std::unique_ptr<TrackingResource> host_tracking;
  /// Numbered devices: where the host communicator's slab lies, which is there before the device is.
  std::unique_ptr<MemoryResource> slab_memory;
  std::unique_ptr<LimitResource> slab_limit;
  std::unique_ptr<TrackingResource> slab_tracking;
  std::unique_ptr<TraceRecorder> trace;
  std::unique_ptr<Communicator> world;
  Logger log;

  /// The device and its memory with its books.
  void make_device(int index);
  /// Makes the window where several processes share the host.
  void make_window(Tier tier);
  CommunicatorOptions communicator_options(MemoryResource& memory);
  void start_on_one_of_several(const CommunicatorFactory& factory, int devices);
};

RuntimeOptions RuntimeOptions::from(const Config& config) {
  RuntimeOptions options;
  options.threads = config.threads;
  options.device_memory_limit = config.device_memory_limit;
  options.host_memory_limit = config.offload.host_memory_limit;
  options.nvme_limit = config.offload.nvme_limit;
  options.poison_memory = config.debug.poison_memory;
  options.ranks_per_host = config.debug.ranks_per_host;
  options.communication_timeout = config.communication_timeout;
  // 0: a Config that was not validated yet.
  if (config.communication_slab_bytes > 0) options.communication_slab_bytes = config.communication_slab_bytes;
  options.inline_progress = config.inline_progress;
  options.device_transport = config.device_transport;
  options.collectives = config.collectives;
  return options;
}

Runtime Runtime::from_environment(const RuntimeOptions& options) {
  if (started_by_mpi_launcher()) {
    return Runtime(options, [](const CommunicatorOptions& o) { return make_mpi_communicator(o); });
  }
  return Runtime(options, [](const CommunicatorOptions& o) { return make_self_communicator(o); });
}

void Runtime::Impl::make_window(Tier tier) {
  if (choice.host == HostCollectives::messages) return;
  if (!started_by_mpi_launcher() || ranks_of_host_by_launcher() == 1) return;
  window = std::make_unique<WindowMemory>(tier);
}

void Runtime::Impl::make_device(int index) {
  DeviceOptions device_options;
  device_options.kind = options.device;
  device_options.index = index;
  device_options.threads = options.threads;
  device_options.recorder = options.recorder;
  device = tranche::make_device(device_options);
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
    // What the ranks met through was taken before there was a device.
    host_limit->hold(ledger.total(Tier::host));
    host = host_limit.get();
  }
  host_tracking = std::make_unique<TrackingResource>(*host, ledger);
}

CommunicatorOptions Runtime::Impl::communicator_options(MemoryResource& memory) {
  CommunicatorOptions communicator;
  communicator.timeout_seconds = options.communication_timeout;
  communicator.slab_bytes = options.communication_slab_bytes;
  communicator.memory = &memory;
  communicator.window = window.get();
  communicator.collectives = choice.host;
  communicator.inline_progress = options.inline_progress;
  communicator.local_size = options.ranks_per_host;
  communicator.recorder = options.recorder;
  if (options.trace) {
    // The recorder wants the rank, which only the communicator knows: it is made once that is there.
    trace = std::make_unique<TraceRecorder>(0);
    trace->set_capacity(options.trace_events);
    communicator.trace = trace.get();
  }
  return communicator;
}

// The rank on its host chooses the device, so the ranks meet first.
void Runtime::Impl::start_on_one_of_several(const CommunicatorFactory& factory, int devices) {
  make_window(Tier::host);
  if (!window) slab_memory = make_host_resource(Tier::host);
  MemoryResource* slab = window ? window.get() : slab_memory.get();
  if (options.host_memory_limit > 0) {
    slab_limit = std::make_unique<LimitResource>(*slab, options.host_memory_limit, &ledger);
    slab = slab_limit.get();
  }
  slab_tracking = std::make_unique<TrackingResource>(*slab, ledger);
  std::unique_ptr<Communicator> host = factory(communicator_options(*slab_tracking));
  make_device(host->local_rank() % devices);
  DeviceCommunicatorOptions communicator;
  communicator.transport = choice.transport;
  communicator.library_collectives = choice.by_library;
  communicator.timeout_seconds = options.communication_timeout;
  communicator.slab_bytes = options.communication_slab_bytes;
  communicator.device_memory = tracking.get();
  communicator.host_memory = host_tracking.get();
  communicator.trace = trace.get();
  communicator.inline_progress = options.inline_progress;
  world = make_device_communicator(*device, std::move(host), communicator);
}

Runtime::Runtime(const RuntimeOptions& options, const CommunicatorFactory& factory)
    : impl_(std::make_unique<Impl>()) {
  Impl& impl = *impl_;
  impl.options = options;
  impl.choice = collective_choice(options.device_transport, options.collectives);
  require_library_collectives(impl.choice, options.device);
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
  impl.log = Logger(impl.world->rank(), options.log_level);
  if (options.threads == 0) {
    // The ranks of a host share its cores.
    impl.device->set_threads(std::max(1, impl.device->threads() / std::max(1, impl.world->local_size())));
  }
}

Runtime::~Runtime() = default;
Runtime::Runtime(Runtime&&) noexcept = default;
Runtime& Runtime::operator=(Runtime&&) noexcept = default;

Communicator& Runtime::all() const {
  return *impl_->world;
}
Communicator& Runtime::shard() const {
  return *impl_->world;
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
  return std::max(1, usable_cores() / std::max(1, impl_->world->local_size()));
}
Ledger& Runtime::ledger() const {
  return impl_->ledger;
}
FileSystem& Runtime::files() const {
  return impl_->options.files != nullptr ? *impl_->options.files : posix_file_system();
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
  if (tier == Tier::nvme) return 0;  // files are no memory resource
  return (tier == Tier::host ? impl_->host_tracking : impl_->tracking)->calls();
}

MemoryResource& Runtime::memory(Tier tier) const {
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
         reductions_of(impl_->choice);
}

int Runtime::fail(std::exception_ptr error) noexcept {
  std::string text = message_of(error);
  try {
    std::rethrow_exception(error);
  } catch (Error& known) {
    known.attach_rank(rank());
    // The log puts this rank in front of every line.
    text = known.rank() == rank() ? known.message() + " (" + known.position() + ")" : known.what();
  } catch (...) {
  }
  const ExitStatus status = exit_status_of(error);
  log().error(text);
  all().post_failure(message_of(error), status, 2.0);
  return static_cast<int>(status);
}

}  // namespace tranche
