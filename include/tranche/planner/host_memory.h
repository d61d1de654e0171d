#pragma once
/// The host memory that a plan may use, and the source of that limit.

#include <cstdint>
#include <string>

namespace tranche::planner {

struct HostMemory {
  enum class Source {
    unlimited,      ///< no limit is known
    configuration,  ///< tranche.host_memory, or --host-memory
    this_machine,   ///< memory available on this machine, divided by the ranks of a node
    control_group,  ///< memory left under the limit of the control group (a container, a job), divided in the
                    ///< same way
  };
  Source source = Source::unlimited;
  std::int64_t bytes = 0;      ///< for one rank; 0: no limit
  std::int64_t available = 0;  ///< for this_machine and control_group: bytes that the ranks of this machine
                               ///< share
  int sharing = 1;             ///< the number of these ranks
  bool found_here() const { return source == Source::this_machine || source == Source::control_group; }
};

/// The memory of each of `ranks_per_node` ranks: `configured` bytes if the configuration has a limit (0:
/// none), else an equal share of available_memory(root).
HostMemory host_memory_of(std::int64_t configured, int ranks_per_node, const std::string& root = "/");

/// For example "11.70 GiB a rank, half of this machine's 23.40 GiB available; --host-memory sets it". For a
/// control group the middle is "half of the 23.40 GiB that the limit of its control group leaves".
std::string describe(const HostMemory& memory);
/// Compares the memory with the `taken` bytes of a rank and warns if it is too little. `device` bytes count
/// too if the device's memory is host memory (a CPU). Returns whole lines; empty if nothing is taken.
std::string beside_what_is_taken(const HostMemory& memory, std::int64_t taken, std::int64_t device);
/// "none", "configuration", "this machine" or "control group".
std::string name_of(HostMemory::Source source);

}  // namespace tranche::planner
