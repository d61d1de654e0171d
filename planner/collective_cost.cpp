#include "planner/collective_cost.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "tranche/core/error.h"
#include "tranche/planner/projection.h"

namespace tranche::planner {

const CollectiveTable* nearest_table(const Machine& machine, const std::string& operation, int ranks,
                                     int element_bytes) {
  // An all_to_all takes about as long as an all_gather of the same number of bytes.
  if (operation == "all_to_all") return nearest_table(machine, "all_gather", ranks, element_bytes);
  const CollectiveTable* best = nullptr;
  double least = std::numeric_limits<double>::infinity();
  for (const CollectiveTable& table : machine.collectives) {
    if (table.operation != operation) continue;
    const double distance = 4 * std::abs(std::log2(static_cast<double>(table.ranks) / ranks)) +
                            std::abs(std::log2(static_cast<double>(table.element_bytes) / element_bytes));
    if (distance < least) {
      least = distance;
      best = &table;
    }
  }
  return best;
}

namespace {

/// Seconds of the part of a collective inside a node.
double node_seconds(const Machine& machine, const std::string& operation, int ranks, int element_bytes,
                    double full_bytes) {
  if (ranks < 2) return 0;
  const CollectiveTable* table = nearest_table(machine, operation, ranks, element_bytes);
  if (table == nullptr) {
    throw ConfigurationError(
        fmt::format("the machine file of {} has no times of {}, which {} ranks on a node need; calibrate "
                    "under mpirun with as many ranks",
                    machine.name, operation, ranks));
  }
  const double seconds = table->time.seconds(full_bytes);
  if (table->ranks == ranks) return seconds;
  const double share = (ranks - 1.0) / ranks, measured = (table->ranks - 1.0) / table->ranks;
  // CPU ranks move all bytes through one memory; each GPU has a link of its own.
  const double crowd = machine.device == DeviceKind::cpu ? static_cast<double>(ranks) / table->ranks : 1.0;
  return seconds * std::max(1e-3, share / measured * crowd);
}

}  // namespace

double crossing_bytes(const Machine& machine, const std::string& operation, int ranks, int ranks_per_node,
                      int element_bytes, double full_bytes, bool by_library, int groups_on_node,
                      bool by_messages) {
  const int inside = std::max(1, std::min(ranks, ranks_per_node));
  const int nodes = (ranks + inside - 1) / inside;
  double sent = full_bytes * (nodes - 1) / nodes * groups_on_node;
  if (operation == "all_reduce") sent *= 2;
  // Every rank of a node sends its own parts to every rank of other nodes, and the node forms no partial
  // sums.
  const bool by_message = by_messages && machine.device == DeviceKind::cpu;
  if (operation == "all_to_all" || by_message) return sent * inside;
  if (operation == "reduce_scatter" && inside > 1 && !by_library) {
    // CPUs of a node send partial sums in fp32. GPUs send every part, without partial sums.
    sent *= machine.device == DeviceKind::cuda ? inside : std::max(1.0, 4.0 / element_bytes);
  }
  return sent;
}

double collective_seconds(const Machine& machine, const LinkRate& network, const std::string& operation,
                          int ranks, int ranks_per_node, int element_bytes, double full_bytes,
                          bool by_library, int groups_on_node, bool by_messages) {
  const int inside = std::max(1, std::min(ranks, ranks_per_node));
  double seconds = node_seconds(machine, operation, inside, element_bytes, full_bytes);
  // The groups of CPU ranks share one memory; each GPU has a link of its own.
  if (machine.device == DeviceKind::cpu) seconds *= groups_on_node;
  const int nodes = (ranks + inside - 1) / inside;
  if (nodes > 1) {
    const double sent = crossing_bytes(machine, operation, ranks, ranks_per_node, element_bytes, full_bytes,
                                       by_library, groups_on_node, by_messages);
    seconds += network.latency_seconds * std::ceil(std::log2(nodes)) + sent / network.bytes_per_second;
  }
  return seconds;
}

}  // namespace tranche::planner
