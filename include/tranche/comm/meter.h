#pragma once
/// Counts the calls, elements and bytes that a rank sends, by operation and kind of traffic.

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <string_view>

namespace tranche {

/// data: weights and gradients, by the traffic formula of docs/internals/arithmetic.md. control: norms,
/// flags, losses, hashes.
enum class Traffic : std::uint8_t { data, control };

struct TrafficCount {
  std::int64_t calls = 0;
  std::int64_t elements = 0;  ///< elements this rank sent to peers
  std::int64_t bytes = 0;     ///< payload bytes this rank sent to peers
  /// The bytes that this rank sends to ranks of other nodes, and the bytes that all ranks of the group on its
  /// node send together. Groups in host memory count them. They are fewer than `bytes` where data crosses
  /// once for all ranks of a node.
  std::int64_t to_other_nodes = 0, node_to_other_nodes = 0;
};

/// Thread-safe.
class ByteMeter {
 public:
  void add(std::string_view operation, Traffic traffic, const TrafficCount& call);
  /// The counts for each operation name ("all_gather", "reduce_scatter", ...).
  std::map<std::string, TrafficCount> counts(Traffic traffic) const;
  /// Sum over operations.
  TrafficCount total(Traffic traffic) const;
  void reset();

 private:
  mutable std::mutex mutex_;
  std::array<std::map<std::string, TrafficCount, std::less<>>, 2> counts_;
};

}  // namespace tranche
