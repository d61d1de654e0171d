#pragma once
/// Control of the emulation by tests: lets calls fail, counts calls, clears errors. Needs no CUDA header.

#include <cstdint>
#include <string>

namespace cuda_emulation {

/// The `nth` call of `function` from now on (1: the next) does nothing and returns `error`, the number of a
/// cudaError_t, CUresult, cublasStatus_t or ncclResult_t. Only one failure per function can be pending.
void fail_call(const std::string& function, int nth, int error);
void forget_failures();

struct Counters {
  std::int64_t launches = 0;        ///< enqueued kernels, except those of graphs
  std::int64_t graph_launches = 0;  ///< cudaGraphLaunch
  std::int64_t host_waits = 0;      ///< calls in which the host waits for the device
  std::int64_t spinning_waits = 0;  ///< those of them that keep a core busy by default
  std::int64_t allocations = 0;     ///< allocations of device and pinned memory
  std::int64_t copies = 0;          ///< copies and fills that were enqueued or done
  std::int64_t most_pending = 0;    ///< most operations that one stream had pending at a time
};
Counters counters();
/// The number of calls of a function of the emulated libraries ("cudaMalloc", "cuMemMap", "ncclGroupEnd",
/// "cublasLtMatmul").
std::int64_t calls(const std::string& function);
void reset_counters();

/// cuBLASLt finds no algorithm if a matrix's alignment is less than `bytes` (default 1: it always finds one).
void set_least_alignment(std::uint32_t bytes);

/// Rank `rank` of every NCCL communicator stops responding: its operations wait until they are aborted.
void silence_rank(int rank);
/// Makes ncclCommGetAsyncError return `nccl_error` on that rank from now on.
void fail_rank(int rank, int nccl_error);
void heal_ranks();

/// The text of the last failure in a kernel or copy, or of the last misuse of the interface; empty if there
/// was none.
std::string last_diagnostic();
/// Clears sticky errors of all devices and the last diagnostic, as a new process would.
void recover();

/// Seed of the order of threads, warps and blocks in later launches (initially TRANCHE_EMULATION_SEED).
void set_seed(std::uint64_t seed);
/// Streams wait up to so many microseconds before each operation (initially TRANCHE_EMULATION_DELAY).
void set_delay(int microseconds);
/// Selects whether the first launch of each kernel from now on waits for the whole device (initially
/// TRANCHE_EMULATION_LAZY).
void set_lazy_loading(bool lazy);
/// The memory of each emulated GPU (initially TRANCHE_EMULATED_MEMORY; default 4 GiB).
void set_total_memory(std::int64_t bytes);
/// The CUDA version that the driver supports: 12040 for 12.4, 0 for no driver (initially
/// TRANCHE_EMULATED_DRIVER; default the runtime's version). With a driver of an older major version every
/// call fails.
void set_driver_version(int version);

struct LiveMemory {
  std::int64_t allocations = 0;
  std::int64_t bytes = 0;
};
/// Device memory that is allocated now.
LiveMemory live_device_memory(int device = 0);

/// True if host code that accesses device memory is stopped (TRANCHE_EMULATION_PROTECT, default 1).
bool protects_device_memory();

/// Reads and writes device memory from the host, for the emulation's own tests.
void peek(void* to, const void* device, std::int64_t bytes);

}  // namespace cuda_emulation
