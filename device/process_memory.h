#pragma once
/// The memory that this process holds, and may still take, as the operating system says.

#include <cstdint>
#include <string>
#include <string_view>

namespace tranche::detail {

/// Resident bytes: pages that were touched, of memory of its own (heap, stacks, buffers), of files (code,
/// mapped data), and shared with other processes (windows that ranks of a node exchange through).
struct ProcessMemory {
  std::int64_t anonymous = 0, file = 0, shared = 0;
};

/// From /proc/self/status, in some 20 microseconds; all 0 where there is none. The kernel counts in batches,
/// so that up to 64 pages of each thread may be missing.
ProcessMemory process_memory();
/// Reads RssAnon, RssFile and RssShmem of such a file's text.
ProcessMemory parse_process_status(std::string_view text);

struct AvailableMemory {
  std::int64_t bytes = 0;  ///< the largest int64 where nothing says it
  bool of_group = false;   ///< a control group's limit is what bounds them
};
/// Bytes that the processes of this node can still take together without swapping: MemAvailable, or what the
/// process's control group and those above it leave (version 2, or the memory controller of version 1), where
/// that is less; file pages that the kernel can drop count as free. Every rank of a node gets the same
/// figure. `root` is the folder that stands for "/", for tests.
AvailableMemory available_memory(const std::string& root = "/");
/// The available bytes by the text of /proc/meminfo; the largest int64 when it does not say. Kernels before
/// 3.14 have no MemAvailable: free, buffers and cached then.
std::int64_t parse_available_memory(std::string_view meminfo);
/// The bytes that a control group leaves, from the texts of its files: the limit ("max", or a number), what
/// is used, and its memory.stat. The largest int64 when there is no limit.
std::int64_t parse_group_memory(std::string_view limit, std::string_view used, std::string_view statistics);

}  // namespace tranche::detail
