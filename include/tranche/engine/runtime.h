#pragma once
/// The environment of a rank: its device, its memory with a ledger, and its groups of ranks.

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "tranche/comm/backends.h"
#include "tranche/core/log.h"
#include "tranche/core/trace.h"
#include "tranche/device/device.h"
#include "tranche/device/ledger.h"
#include "tranche/device/memory_resources.h"
#include "tranche/partition/mesh.h"

namespace tranche {

struct Config;

namespace detail {
class FileSystem;
class WorkRecorder;
}  // namespace detail

struct RuntimeOptions {
  DeviceKind device = DeviceKind::cpu;
  int threads = 0;                       ///< per rank; 0: cores of the affinity mask / ranks on the node
  std::int64_t device_memory_limit = 0;  ///< bytes; 0: none
  std::int64_t host_memory_limit = 0;    ///< bytes of the host tier; 0: none
  std::int64_t nvme_limit = 0;           ///< bytes of the rank's swap file; 0: none
  bool poison_memory = false;
  double communication_timeout = 300;                  ///< seconds
  std::int64_t staging_bytes = std::int64_t{8} << 20;  ///< `tranche.communication_slab`
  std::string device_transport = "auto";               ///< auto, nccl, staged or shared; for cuda
  std::string collectives = "auto";                    ///< `tranche.collectives`
  bool inline_progress = false;   ///< `tranche.progress: inline`, for adopted MPI communicators
  std::string mesh = {};          ///< `tranche.mesh`; empty: all ranks shard
  int ranks_per_host = 0;         ///< declares nodes of this many consecutive ranks; 0: the actual nodes
  bool trace = false;             ///< record spans
  std::int64_t trace_events = 0;  ///< the most spans that are kept, the first and the latest; 0: all
  LogLevel log_level = LogLevel::info;
  /// Gets the messages of this rank, one at a time, from any thread; null: they go to standard error. It must
  /// not log through this Runtime. Ranks that are threads of one process may call it at the same time.
  std::function<void(LogLevel, std::string_view)> log = nullptr;
  std::shared_ptr<detail::WorkRecorder> recorder =
      nullptr;  ///< for device meta: records work and operations; null: nothing is recorded
  detail::FileSystem* files = nullptr;  ///< for checkpoints; must outlive the Runtime; null: system's
  /// Returns `beside`, with the fields that `config` sets to something other than their default.
  static RuntimeOptions from(const Config& config, const RuntimeOptions& beside);
  static RuntimeOptions from(const Config& config) { return from(config, RuntimeOptions()); }
};

/// Move-only, also while engines that were made on it live. It must be destroyed after every one of them.
/// Construction is collective over the factory's ranks. Its calls, and those of its engines, are made one at
/// a time; only memory() may be used by any thread.
class Runtime {
 public:
  /// An empty Runtime, to be assigned to. Only fail() may be called on it, so that one catch block handles
  /// errors of making a Runtime as well as later ones.
  Runtime();
  /// One rank without a launcher; under mpirun its world of ranks (needs TRANCHE_MPI).
  static Runtime from_environment(const RuntimeOptions& options = {});
  /// The same with a configuration: DeepSpeed's JSON (text with a '{' in it) or the path of such a file. It
  /// is read once, for the present number of ranks; pass config() to the engine. Options that the
  /// configuration does not set (device, trace, log_level, log, recorder, files; keys at their default) are
  /// taken from `beside`. Throws ConfigurationError on all ranks when any of them cannot read it.
  static Runtime from_config(const std::string& path_or_json, const RuntimeOptions& beside = {});
  /// Uses the ranks of the factory: make_mpi_communicator, adopting(comm) of <tranche/comm/mpi.h>, a
  /// ThreadGroup's ...
  Runtime(const RuntimeOptions& options, const CommunicatorFactory& factory);
  ~Runtime();
  Runtime(Runtime&&) noexcept;
  Runtime& operator=(Runtime&&) noexcept;

  /// The configuration that from_config() read. Throws LogicError for a Runtime that was made otherwise.
  const Config& config() const;
  /// Every Engine calls this first. Throws ConfigurationError, with a line for each, when keys of `config`
  /// that concern the runtime (`tranche.threads`, device_memory, host_memory, nvme_space,
  /// communication_timeout, communication_slab, mesh, progress, collectives, device_transport,
  /// debug.poison_memory, debug.ranks_per_host) are neither at their default nor equal to this runtime's. A
  /// key at its default accepts any RuntimeOptions given in C++. On the meta device, which predicts a run,
  /// only communication_slab and mesh are compared.
  void check(const Config& config) const;

  const Mesh& mesh() const;
  /// Groups of ranks: all of them; those of this rank's axes `shard` and `context`, which partition state;
  /// and those of its `replicate` axis, which hold the same part of it (null if there is one copy).
  Communicator& all() const;
  Communicator& shard() const;
  Communicator* replicas() const;
  /// The stages of this rank's data rank, in order; null without a pipeline.
  Communicator* pipeline() const;
  /// The ranks that compute the other parts of this rank's sequences, by coordinate on the axis `context`;
  /// null if the axis has size 1. A model's messages in its computation use it.
  Communicator* context() const;
  /// The ranks that hold the other parts of this rank's tensors and see the same samples, by coordinate on
  /// the axis `tensor`; null if the axis has size 1. A model's messages in its computation use it.
  Communicator* tensor() const;
  /// The ranks that hold equal values of tensors that `tensor` does not cut: shard x context x tensor,
  /// ordered by Mesh::state_rank() and then by coordinate on `tensor`; null if `tensor` has size 1. Gradients
  /// of such tensors are summed over it.
  Communicator* tensor_and_shard() const;
  /// The ranks that compute the same part of the model as this one, for different tokens: replicate x shard x
  /// context. Equal to all() if these are all ranks, and to shard() if there is one replica.
  Communicator& of_stage() const;
  /// The ranks of the first and the last stage that share the tensors which both read, ordered by
  /// Mesh::state_rank() and then by stage; null without a pipeline, and on the stages between.
  Communicator* pipeline_ends() const;
  int rank() const;
  int size() const;
  Device& device() const;
  /// Threads that this rank may use for work on host memory: its share of its node's cores.
  int host_threads() const;
  /// Tracked and limited memory of a tier; may be called from any thread. TrackingResource::free() is for
  /// allocators of other libraries, which free by address.
  TrackingResource& memory(Tier tier) const;
  /// Resident bytes of memory that other ranks of the node can read, which the system counts separately.
  std::int64_t window_bytes() const;
  /// The most bytes of the rank's swap file; 0: limited only by the disk's free space.
  std::int64_t nvme_limit() const;
  /// The number of calls of a tier's memory resource so far.
  std::int64_t memory_calls(Tier tier = Tier::device) const;
  Ledger& ledger() const;
  detail::FileSystem& files() const;
  const Logger& log() const;
  /// nullptr unless options.trace.
  TraceRecorder* trace() const;
  /// Device kind, instruction set or compute capability, library versions and threads a rank, as one line.
  /// Equal bits need equal fingerprints.
  std::string numerics_fingerprint() const;
  /// For a program's last catch block: attaches the rank, logs the error, sends the cause to the peers (2 s
  /// at most; an empty Runtime has none) and returns the exit status, which is the same on the rank that
  /// failed and on the ranks that it ended. It does so once for the same error; collectives fail from then
  /// on.
  int fail(std::exception_ptr error) noexcept;
  /// Sets a description of this rank's current work, such as "backward of micro-batch 5". fail(), and an
  /// engine that ends, prepend it to the error, here and for the peers. fail() clears it. Used by one thread.
  void set_place(std::string place);
  const std::string& place() const;

 private:
  friend class Engine;
  struct Impl;
  explicit Runtime(std::shared_ptr<Impl> impl);
  /// Another handle of the same runtime. Engines keep one, so that a move of this one does not concern them.
  Runtime handle() const;
  /// The number of the next engine that the ranks make together: 1, 2, 3 ...
  int next_engine_number();
  std::shared_ptr<Impl> impl_;
};

}  // namespace tranche
