#pragma once
/// The sizes from which ranks read each other's memory. Private to comm/.

#include <cstdint>

#include "tranche/comm/backends.h"

namespace tranche::comm {

/// Calls in which a rank receives at least this many bytes from all others together read the peers' memory.
/// On one node with two ranks on two cores, reading is faster from this size on, and at half of it neither is
/// for certain; with four ranks on two cores, sums of up to 64 KiB would be slightly faster by messages
/// (bench/results/archive/superseded.md). The limit for several nodes is a rougher
/// figure, chosen for fp32 sums.
inline constexpr std::int64_t least_bytes_on_one_node = 4 << 10;
inline constexpr std::int64_t least_summed_bytes = 64 << 10, least_gathered_bytes = 64 << 10;
/// True when a call of that size reads the peers' memory, where it can be read.
constexpr bool goes_by_window(NodeCollectives collectives, std::int64_t bytes, std::int64_t least) {
  if (bytes == 0 || collectives == NodeCollectives::messages) return false;
  return collectives == NodeCollectives::shared || bytes >= least;
}

}  // namespace tranche::comm
