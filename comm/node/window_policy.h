#pragma once
/// The sizes from which ranks read each other's memory. Private to comm/.

#include <cstdint>

#include "tranche/comm/backends.h"

namespace tranche::comm {

/// From here on (bytes that a rank gets of all others together) calls are made by reading. Where all ranks
/// share a node reading is the quicker from there on with two ranks on two cores, and at half of it neither
/// for certain; with four ranks on two cores sums of up to 64 KiB would be a little quicker by messages
/// (bench/results/archive/2026-11-22-collectives-waiters.md). Over several nodes a rougher figure, with fp32
/// sums in view.
inline constexpr std::int64_t least_bytes_on_one_node = 4 << 10;
inline constexpr std::int64_t least_summed_bytes = 64 << 10, least_gathered_bytes = 64 << 10;
/// True when a call of that size goes by memory that ranks read of each other, where they can.
constexpr bool goes_by_window(NodeCollectives collectives, std::int64_t bytes, std::int64_t least) {
  if (bytes == 0 || collectives == NodeCollectives::messages) return false;
  return collectives == NodeCollectives::shared || bytes >= least;
}

}  // namespace tranche::comm
