#include "tranche/planner/host_memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "device/process_memory.h"
#include "tranche/device/ledger.h"

namespace tranche::planner {

HostMemory host_memory_of(std::int64_t configured, int ranks_per_node, const std::string& root) {
  HostMemory memory;
  if (configured > 0) {
    memory.source = HostMemory::Source::configuration;
    memory.bytes = configured;
    return memory;
  }
  const detail::AvailableMemory available = detail::available_memory(root);
  if (available.bytes == std::numeric_limits<std::int64_t>::max()) return memory;
  memory.source = available.of_group ? HostMemory::Source::control_group : HostMemory::Source::this_machine;
  memory.available = available.bytes;
  memory.sharing = std::max(1, ranks_per_node);
  memory.bytes = std::max<std::int64_t>(1, available.bytes / memory.sharing);  // at least 1, because 0 means
                                                                               // no limit
  return memory;
}

std::string describe(const HostMemory& memory) {
  switch (memory.source) {
    case HostMemory::Source::unlimited:
      return "no limit; --host-memory sets one";
    case HostMemory::Source::configuration:
      return format_bytes(memory.bytes) + " a rank, as --host-memory or tranche.host_memory has it";
    case HostMemory::Source::this_machine:
    case HostMemory::Source::control_group:
      break;
  }
  const std::string share = memory.sharing == 1   ? "all"
                            : memory.sharing == 2 ? "half"
                                                  : fmt::format("1/{}", memory.sharing);
  const std::string available = format_bytes(memory.available);
  return fmt::format("{} a rank, {} of {}; --host-memory sets it", format_bytes(memory.bytes), share,
                     memory.source == HostMemory::Source::control_group
                         ? fmt::format("the {} that the limit of its control group leaves", available)
                         : fmt::format("this machine's {} available", available));
}

std::string beside_what_is_taken(const HostMemory& memory, std::int64_t taken, std::int64_t device) {
  if (taken == 0) return {};
  std::string text = fmt::format("\nhost memory: {} taken; {}\n", format_bytes(taken), describe(memory));
  if (!memory.found_here()) return text;
  if (taken > memory.bytes) {
    text += fmt::format("  this machine has too little of it: {} a rank are missing\n",
                        format_bytes(taken - memory.bytes));
  } else if (device > memory.bytes - taken) {
    text +=
        fmt::format("  on CPUs device memory is this machine's too: with {} of it {} a rank are missing\n",
                    format_bytes(device), format_bytes(device + taken - memory.bytes));
  }
  return text;
}

std::string name_of(HostMemory::Source source) {
  switch (source) {
    case HostMemory::Source::unlimited:
      return "none";
    case HostMemory::Source::configuration:
      return "configuration";
    case HostMemory::Source::this_machine:
      return "this machine";
    case HostMemory::Source::control_group:
      return "control group";
  }
  return "?";
}

}  // namespace tranche::planner
