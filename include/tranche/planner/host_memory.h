#pragma once
/// The host memory that a plan may count on, and who says so.

#include <cstdint>
#include <string>

namespace tranche::planner {

struct HostMemory {
  enum class Source {
    unlimited,      ///< no limit is known
    configuration,  ///< tranche.host_memory, or --host-memory
    this_machine,   ///< the memory available on the machine that plans, shared by the ranks of a node
    control_group,  ///< the rest of its control group's limit (a container, a job), likewise
  };
  Source source = Source::unlimited;
  std::int64_t bytes = 0;      ///< of a rank; 0: no limit
  std::int64_t available = 0;  ///< of the last two: bytes that all ranks of this machine share
  int sharing = 1;             ///< ranks that do
  bool found_here() const { return source == Source::this_machine || source == Source::control_group; }
};

/// The memory of each of `ranks_per_node` ranks: the limit that the configuration has (`configured`, in
/// bytes; 0: none), else an equal share of available_memory(root).
HostMemory host_memory_of(std::int64_t configured, int ranks_per_node, const std::string& root = "/");

/// "11.70 GiB a rank, half of this machine's 23.40 GiB available; --host-memory sets it"; of a control group
/// "half of the 23.40 GiB that the limit of its control group leaves".
std::string describe(const HostMemory& memory);
/// Describes the memory beside the `taken` bytes of a rank, and says when it is too little; `device` bytes of
/// a device whose memory is the host's (a CPU) count with them. Lines of their own; empty where nothing is
/// taken.
std::string beside_what_is_taken(const HostMemory& memory, std::int64_t taken, std::int64_t device);
/// "none", "configuration", "this machine" or "control group".
std::string name_of(HostMemory::Source source);

}  // namespace tranche::planner
