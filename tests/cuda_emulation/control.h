#pragma once
/// The tests' control of the emulation: to fail a call, to count calls, to forget a failure. Needs no CUDA
/// header.

#include <cstdint>
#include <string>

namespace cuda_emulation {

/// The `nth` call of `function` from now (1: the next) returns `error` (a cudaError_t, CUresult,
/// cublasStatus_t or ncclResult_t as a number) and does nothing. One failure per function waits at a time.
void fail_call(const std::string& function, int nth, int error);
void forget_failures();

struct Counters {
  std::int64_t launches = 0;        ///< kernels enqueued, not counting those of graphs
  std::int64_t graph_launches = 0;  ///< cudaGraphLaunch
  std::int64_t host_waits = 0;      ///< calls that stop the host until the device has got somewhere
  std::int64_t spinning_waits = 0;  ///< of these, calls that keep a core busy by default
  std::int64_t allocations = 0;     ///< of device and pinned memory
  std::int64_t copies = 0;          ///< copies and fills enqueued or done
  std::int64_t most_pending = 0;    ///< operations that one stream had before it at a time
};
Counters counters();
/// Calls of one function of the emulated libraries ("cudaMalloc", "cuMemMap", "ncclGroupEnd",
/// "cublasLtMatmul").
std::int64_t calls(const std::string& function);
void reset_counters();

/// cuBLASLt finds no algorithm where a matrix may lie at multiples of fewer bytes than these (1 by default:
/// it finds one for all).
void set_least_alignment(std::uint32_t bytes);

/// NCCL's rank `rank`, in every communicator, answers no more: what it issues waits until it is aborted.
void silence_rank(int rank);
/// ncclCommGetAsyncError of that rank tells `nccl_error` from now on.
void fail_rank(int rank, int nccl_error);
void heal_ranks();

/// The text of the last failure inside a kernel, copy or misuse of the interface; empty if there was none.
std::string last_diagnostic();
/// Forgets sticky errors of all devices and the last diagnostic, as a new process would.
void recover();

/// The order of threads, warps and blocks in later launches (TRANCHE_EMULATION_SEED at the start).
void set_seed(std::uint64_t seed);
/// Streams rest up to so many microseconds before each operation (TRANCHE_EMULATION_DELAY at the start).
void set_delay(int microseconds);
/// From now on the first launch of each kernel waits for the whole device, or none does
/// (TRANCHE_EMULATION_LAZY at the start).
void set_lazy_loading(bool lazy);
/// Memory of each emulated GPU (TRANCHE_EMULATED_MEMORY at the start; 4 GiB by default).
void set_total_memory(std::int64_t bytes);
/// The CUDA version that the driver serves, 12040 for 12.4, 0 for no driver (TRANCHE_EMULATED_DRIVER at the
/// start; the runtime's own by default). Drivers of an older major version serve no call.
void set_driver_version(int version);

struct LiveMemory {
  std::int64_t allocations = 0;
  std::int64_t bytes = 0;
};
/// Device memory allocated and not freed.
LiveMemory live_device_memory(int device = 0);

/// True when host code that touches device memory is stopped (TRANCHE_EMULATION_PROTECT, 1 by default).
bool protects_device_memory();

/// Reads and writes device memory from the host, for tests of the emulation itself.
void peek(void* to, const void* device, std::int64_t bytes);

}  // namespace cuda_emulation
