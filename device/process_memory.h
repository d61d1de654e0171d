#pragma once
/// The memory that this process holds, and may still take, according to the operating system.

#include <cstdint>
#include <string>
#include <string_view>

namespace tranche::detail {

/// Resident bytes, the pages that were accessed: anonymous memory (heap, stacks, buffers), files (code,
/// mapped data), and memory shared with other processes (the windows through which ranks of a node exchange
/// data).
struct ProcessMemory {
  std::int64_t anonymous = 0, file = 0, shared = 0;
};

/// Reads /proc/self/status, in some 20 microseconds; all 0 where it does not exist. The kernel counts in
/// batches, so up to 64 pages of each thread may be missing.
ProcessMemory process_memory();
/// Reads RssAnon, RssFile and RssShmem from the text of such a file.
ProcessMemory parse_process_status(std::string_view text);

struct AvailableMemory {
  std::int64_t bytes = 0;  ///< the largest int64 where it is unknown
  bool of_group = false;   ///< true when a control group's limit determines `bytes`
};
/// The bytes that the processes of this node can still take together without swapping: the lesser of
/// MemAvailable and the bytes left by the process's control group and its ancestors (version 2, or the memory
/// controller of version 1). File pages that the kernel can drop count as free. Every rank of a node gets the
/// same figure. `root` replaces "/" in tests.
AvailableMemory available_memory(const std::string& root = "/");
/// The available bytes in the text of /proc/meminfo; the largest int64 when it lacks them. For kernels before
/// 3.14, which lack MemAvailable, it adds free, buffers and cached.
std::int64_t parse_available_memory(std::string_view meminfo);
/// The bytes that a control group leaves, computed from the texts of its files: the limit ("max", or a
/// number), the bytes used, and its memory.stat. The largest int64 when there is no limit.
std::int64_t parse_group_memory(std::string_view limit, std::string_view used, std::string_view statistics);

}  // namespace tranche::detail
