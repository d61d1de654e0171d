#include "comm/launcher.h"

#include <fmt/format.h>

#include <array>
#include <cstdlib>
#include <string>

#include "tranche/comm/backends.h"
#include "tranche/core/error.h"

namespace tranche {

namespace {

/// The number in an environment variable; 0 if it is not set or not a number.
int number_in(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? 0 : std::atoi(text);
}

/// A batch system or launcher that starts tasks, and the variables by which a process recognises that it is
/// one of several.
struct Batch {
  const char* several;  ///< a variable above 1 in each of several tasks
  const char* task;     ///< a variable that is set too
  const char* command;  ///< the command that starts tasks
  const char* cure;
};
constexpr std::array<Batch, 6> batches{{
    {"SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "srun", "start it with srun --mpi=pmix, or with mpirun"},
    {"PBS_TASKNUM", "PBS_NODEFILE", "pbsdsh", "start it with mpirun"},
    {"LSB_DJOB_NUMPROC", "LSF_PM_TASKID", "blaunch", "start it with mpirun"},
    {"JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "jsrun", "start it with mpirun"},
    {"WORLD_SIZE", "TORCHELASTIC_RUN_ID", "torchrun", "start it with mpirun"},
    {"WORLD_SIZE", "RANK", "a launcher of PyTorch's or DeepSpeed's", "start it with mpirun"},
}};

}  // namespace

bool started_by_mpi_launcher() {
  // The variables of Open MPI's mpirun, PMI-1/2 (MPICH, Slurm) and PMIx (Slurm, PRRTE).
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK"}) {
    if (std::getenv(name) != nullptr) return true;
  }
  return false;
}

int detail::rank_by_launcher() {
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"}) {
    if (const char* text = std::getenv(name); text != nullptr && *text >= '0' && *text <= '9')
      return std::atoi(text);
  }
  return -1;
}

int ranks_of_node_by_launcher() {
  if (const int ranks = number_in("OMPI_COMM_WORLD_LOCAL_SIZE"); ranks > 0) return ranks;
  // In Slurm's format "4(x2),3" means two nodes with four tasks and one with three; SLURM_NODEID selects this
  // node.
  const char* list = std::getenv("SLURM_STEP_TASKS_PER_NODE");
  if (list == nullptr || std::getenv("SLURM_NODEID") == nullptr) return 0;
  int left = number_in("SLURM_NODEID");
  for (const char* at = list; *at != 0;) {
    char* end = nullptr;
    const long tasks = std::strtol(at, &end, 10);
    const long nodes = end[0] == '(' && end[1] == 'x' ? std::strtol(end + 2, &end, 10) : 1;
    if (tasks < 1 || nodes < 1) return 0;
    if (left < nodes) return static_cast<int>(tasks);
    left -= static_cast<int>(nodes);
    while (*end == ')' || *end == ',') ++end;
    at = end;
  }
  return 0;
}

int cores_of_rank_by_launcher() {
  return number_in("SLURM_CPUS_PER_TASK");
}

void require_joined_tasks() {
  if (started_by_mpi_launcher()) return;
  for (const Batch& batch : batches) {
    if (number_in(batch.several) <= 1 || std::getenv(batch.task) == nullptr) continue;
    throw ConfigurationError(fmt::format(
        "this process is one of several that {} started ({} is {}), but it was given no PMI by which they "
        "could find each other: each would be a run of one rank; {}. A run of one rank on purpose: env -u "
        "{} tranche ...",
        batch.command, batch.several, std::getenv(batch.several), batch.cure, batch.several));
  }
}

void require_joined_world(int size) {
  // Slurm counts the tasks of the step; these are mpirun's daemons if mpirun was the launcher.
  const int by_mpirun = number_in("OMPI_COMM_WORLD_SIZE"), by_pmi = number_in("PMI_SIZE");
  const int started = by_mpirun > 0 ? by_mpirun : by_pmi > 0 ? by_pmi : number_in("SLURM_STEP_NUM_TASKS");
  if (size > 1 || started <= 1) return;
  throw ConfigurationError(fmt::format(
      "the launcher started {} ranks, but MPI ({}) sees one: the launcher belongs to another MPI than the "
      "one this "
      "program was built with; use the mpirun of that MPI (under Slurm: the --mpi that it supports, see srun "
      "--mpi=list)",
      started, mpi_version()));
}

}  // namespace tranche
