#pragma once
/// The environment of a rank: its device, its memory and the ledger of it, its groups of ranks.

#include <memory>
#include <string>

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
  int ranks_per_host = 0;         ///< declares nodes of so many consecutive ranks; 0: none
  bool trace = false;             ///< record spans
  std::int64_t trace_events = 0;  ///< most that are kept, the first and the latest; 0: all
  LogLevel log_level = LogLevel::info;
  std::shared_ptr<detail::WorkRecorder> recorder =
      nullptr;                          ///< of device meta: keeps work and operations; null: nobody does
  detail::FileSystem* files = nullptr;  ///< of checkpoints; outlives the Runtime; null: the system's
  /// `beside` with the fields of a Config that concern the runtime, where the Config does not leave them at
  /// their default.
  static RuntimeOptions from(const Config& config, const RuntimeOptions& beside);
  static RuntimeOptions from(const Config& config) { return from(config, RuntimeOptions()); }
};

/// Move-only. Destroyed after every Engine made on it. Making one is collective over the factory's ranks. Its
/// calls are made one at a time, with those of its engines, but for memory(), whose resources any thread may
/// use.
class Runtime {
 public:
  /// Empty: to be assigned to. Of its calls only fail() is possible, so that one catch does for what making a
  /// Runtime throws and for what happens on it.
  Runtime();
  /// One rank without a launcher; the world of mpirun under one (needs TRANCHE_MPI).
  static Runtime from_environment(const RuntimeOptions& options = {});
  /// The same, as a configuration wants it: DeepSpeed's JSON (text with a '{' in it) or the path of a file of
  /// it. Read once, for the ranks that there are; config() is for the engine. Options that the configuration
  /// leaves open (device, trace, log_level, recorder, files; keys at their default) are as in `beside`.
  /// Throws ConfigurationError on all ranks when any of them cannot read it.
  static Runtime from_config(const std::string& path_or_json, const RuntimeOptions& beside = {});
  /// Ranks as the factory makes them: make_mpi_communicator, adopting(comm) of <tranche/comm/mpi.h>, a
  /// ThreadGroup's ...
  Runtime(const RuntimeOptions& options, const CommunicatorFactory& factory);
  ~Runtime();
  Runtime(Runtime&&) noexcept;
  Runtime& operator=(Runtime&&) noexcept;

  /// The configuration that from_config() read; LogicError for a Runtime that was made otherwise.
  const Config& config() const;
  /// Every Engine calls this first. Throws ConfigurationError, a line for each, when keys of `config` that
  /// concern the runtime (`tranche.threads`, device_memory, host_memory, nvme_space, communication_timeout,
  /// communication_slab, mesh, progress, collectives, device_transport, debug.poison_memory,
  /// debug.ranks_per_host) are neither at their default nor what this runtime was made with. A key at its
  /// default asks for nothing: RuntimeOptions given in C++ stand. On the meta device, which predicts what a
  /// run would take, only communication_slab and mesh are compared.
  void check(const Config& config) const;

  const Mesh& mesh() const;
  /// Groups of ranks: all of them, those of this rank's axes `shard` and `context`, which partition state,
  /// and those of its `replicate` axis, which hold the same part of it (null where there is one copy).
  Communicator& all() const;
  Communicator& shard() const;
  Communicator* replicas() const;
  /// The stages of this rank's data rank, in order; null without a pipeline.
  Communicator* pipeline() const;
  /// The ranks that see the other parts of this rank's sequences, by coordinate on the axis `context`; null
  /// where that is 1. Messages of a model's computation go through it.
  Communicator* context() const;
  /// The ranks that hold the other parts of this rank's tensors and see the same samples, by coordinate on
  /// the axis `tensor`; null where that is 1. Messages of a model's computation go through it.
  Communicator* tensor() const;
  /// The ranks that hold equal values of tensors that `tensor` does not cut: shard x context x tensor, by
  /// Mesh::state_rank() and then by coordinate on `tensor`; null where `tensor` is 1. Gradients of such
  /// tensors are summed over it.
  Communicator* tensor_and_shard() const;
  /// The ranks that compute the same part of the model as this one, for different tokens: replicate x shard x
  /// context; all() where these are all ranks, and shard() where there is one replica.
  Communicator& of_stage() const;
  /// The ranks of the first and the last stage that share tensors which both read, by Mesh::state_rank() and
  /// then by stage; null without a pipeline, and on the stages between.
  Communicator* pipeline_ends() const;
  int rank() const;
  int size() const;
  Device& device() const;
  /// Threads that this rank's work on host memory may use: its share of the cores of its node.
  int host_threads() const;
  /// Tracked and limited memory of a tier; from any thread. TrackingResource::free() is for allocators of
  /// other libraries, which free by address.
  TrackingResource& memory(Tier tier) const;
  /// Touched bytes of memory that other ranks of the node can read, which the system counts apart.
  std::int64_t window_bytes() const;
  /// Most bytes that the rank's swap file may have; 0: none but the disk's free space.
  std::int64_t nvme_limit() const;
  /// Calls of a tier's memory resource so far.
  std::int64_t memory_calls(Tier tier = Tier::device) const;
  Ledger& ledger() const;
  detail::FileSystem& files() const;
  const Logger& log() const;
  /// nullptr unless options.trace.
  TraceRecorder* trace() const;
  /// Device kind, instruction set or compute capability, library versions, threads a rank, as one line; what
  /// must be equal for equal bits.
  std::string numerics_fingerprint() const;
  /// For a program's last catch: attaches the rank, logs the error, posts the cause to the peers (2 s at
  /// most; an empty Runtime has none) and returns the exit status, which is the same on the rank that failed
  /// and on those it ended. Of the same error once; collectives fail from then on.
  int fail(std::exception_ptr error) noexcept;
  /// Sets what this rank is doing, such as "backward of micro-batch 5": fail(), and an engine that ends, put
  /// it in front of the error, here and for the peers. fail() empties it: nothing to say. Used by one thread.
  void set_place(std::string place);
  const std::string& place() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tranche
