#pragma once
/// Functions that make communicators. MPI types appear only in comm/mpi.h.

#include <functional>
#include <memory>
#include <vector>

#include "tranche/comm/communicator.h"
#include "tranche/device/memory.h"

namespace tranche {

class Device;
class TraceRecorder;

namespace comm {
struct ThreadHub;
class WindowMemory;
}  // namespace comm

namespace detail {
class WorkRecorder;
}  // namespace detail

/// The default size of the staging buffer for `ranks` ranks: 8 MiB, or more where two slots with 256 fp32
/// elements from each peer need it.
std::int64_t default_staging_bytes(int ranks);

/// How ranks that share a node exchange host memory: by messages, or by reading each other's memory (the bits
/// are the same). automatic: reading, where ranks can, from 4 KiB on (64 KiB over several nodes).
enum class NodeCollectives : std::uint8_t { automatic, messages, shared };
/// "auto", "messages", "shared".
std::string_view name_of(NodeCollectives collectives);

struct CommunicatorOptions {
  double timeout_seconds = 300;          ///< `tranche.communication_timeout`
  std::int64_t staging_bytes = 8 << 20;  ///< staging buffer, allocated at construction
  MemoryResource* memory = nullptr;  ///< source of the staging buffer (Category::communication); null: heap
  TraceRecorder* trace = nullptr;    ///< spans of operations, not owned
  std::string mesh;                  ///< `tranche.mesh`: error texts name ranks with their coordinates in it
  /// `tranche.progress: inline`: no communication thread. Only for adopted MPI communicators; refused
  /// elsewhere.
  bool inline_progress = false;
  int local_size = 0;  ///< 0: detect; otherwise assume that so many ranks share a node
  /// `tranche.collectives`. shared throws ConfigurationError if no rank can read another's memory.
  NodeCollectives collectives = NodeCollectives::automatic;
  /// The resource behind `memory`, so that processes of one node can read each other's buffers in place; not
  /// owned. If both are null, one is made for the staging buffer. Only for MPI communicators.
  comm::WindowMemory* window = nullptr;
  /// The device of the ranks' buffers, not owned. A group of one rank reduces with as many threads as the
  /// device's kernels have; with null, one.
  const Device* device = nullptr;
  std::shared_ptr<detail::WorkRecorder> recorder = nullptr;  ///< meta: records operations; may be null
};

/// One rank; collectives are copies.
std::unique_ptr<Communicator> make_self_communicator(const CommunicatorOptions& options = {});
/// Rank `rank` of `size`, without peers: counts elements and bytes, moves nothing; its events have already
/// passed.
std::unique_ptr<Communicator> make_meta_communicator(int rank, int size, int local_size,
                                                     const CommunicatorOptions& options = {});

/// Delays and failures for tests, drawn per operation.
struct FaultInjection {
  double maximum_delay_seconds = 0;  ///< before every operation, drawn from (seed, rank, operation number)
  std::uint64_t seed = 0;
  /// Peers read only the staging buffer of a rank, as when buffers lie outside of the window.
  bool copy_in = false;
};
/// Makes one rank's communicator; the Runtime calls it once its memory and logging exist.
using CommunicatorFactory = std::function<std::unique_ptr<Communicator>(const CommunicatorOptions&)>;

/// N ranks of one process, for tests, sanitizers and embedding. Copies share the group.
class ThreadGroup {
 public:
  explicit ThreadGroup(int size, const FaultInjection& faults = {});
  int size() const noexcept;
  /// The communicator of `rank`, used by one thread. Collective: every rank makes its communicator once
  /// before use.
  std::unique_ptr<Communicator> communicator(int rank, const CommunicatorOptions& options = {}) const;
  /// Posts a failure of `rank` to all ranks of the group.
  void post_failure(int rank, std::string_view cause, ExitStatus status) const noexcept;

 private:
  std::shared_ptr<comm::ThreadHub> hub_;
};

/// Runs body(rank, factory) on `size` threads. If one throws, its failure is posted to the others. After all
/// have ended, the first cause (not a peer's echo of it) is rethrown with its rank attached.
void run_thread_ranks(int size, const std::function<void(int rank, const CommunicatorFactory&)>& body,
                      const FaultInjection& faults = {});

/// The world of mpirun (MPI_COMM_WORLD duplicated), initialised with MPI_THREAD_SERIALIZED and finalised by
/// the last such communicator. A thread of the communicator calls MPI, so the program must not call it while
/// the communicator lives; a program that uses MPI itself adopts a communicator (comm/mpi.h). Without mpirun
/// the world has one rank. Throws NotCompiled without TRANCHE_MPI.
std::unique_ptr<Communicator> make_mpi_communicator(const CommunicatorOptions& options = {});
/// True when the environment shows that the process was started by mpirun or srun with MPI support.
bool started_by_mpi_launcher();
/// The number of ranks that the launcher started on this node; 0 when it is unknown.
int ranks_of_node_by_launcher();
/// The number of cores that the launcher gave each rank (SLURM_CPUS_PER_TASK); 0 when it is unknown.
int cores_of_rank_by_launcher();
/// Throws ConfigurationError if the environment shows that a batch system (Slurm's srun, pbsdsh, blaunch,
/// jsrun, torchrun) started this process as one of several tasks without PMI: each task would be a separate
/// run of one rank.
void require_joined_tasks();
/// Throws ConfigurationError if `size`, that of MPI_COMM_WORLD, is 1 but the launcher started more ranks: the
/// launcher belongs to another MPI than the program's.
void require_joined_world(int size);
/// "Open MPI 4.1.4" or "not compiled".
std::string mpi_version();
/// "NCCL 2.28.9" or "not compiled".
std::string nccl_version();

}  // namespace tranche
