#pragma once
/// Included before anything else in every CUDA source of an emulated build (TRANCHE_CUDA=EMULATED): gives the
/// host compiler what nvcc knows by itself. A kernel becomes a plain function; launch() runs it once for
/// every thread of the grid, each thread of a block on a fiber of its own (see README.md).

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <source_location>
#include <type_traits>

#include "tests/cuda_emulation/arithmetic_functions.h"
#include "tests/cuda_emulation/memory_functions.h"
#include "tranche/core/dtype.h"

namespace cuda_emulation {

/// A running thread's own coordinates.
struct Thread {
  uint3 index{};
  uint3 block{};
  dim3 block_size;
  dim3 grid_size;
};

/// The thread that runs; null outside kernels.
extern constinit thread_local Thread* current_thread;

inline const Thread& here() {
  return *current_thread;
}

/// Enqueues one launch of `kernel` on the stream. Returns what a launch returns: an error for shapes beyond
/// the device's limits, an invalid stream, or an earlier failure; what goes wrong inside the kernel comes
/// later. `function` is the kernel's address: with TRANCHE_EMULATION_LAZY=1 its first launch waits for the
/// whole device, unless kernels were loaded before (cuFuncLoad) or CUDA_MODULE_LOADING is EAGER.
cudaError_t launch(const char* name, const void* function, dim3 grid, dim3 block,
                   std::size_t dynamic_shared_bytes, cudaStream_t stream, std::function<void()> kernel);

/// The same for a function that no program would load.
inline cudaError_t launch(const char* name, dim3 grid, dim3 block, std::size_t dynamic_shared_bytes,
                          cudaStream_t stream, std::function<void()> kernel) {
  return launch(name, nullptr, grid, block, dynamic_shared_bytes, stream, std::move(kernel));
}

/// The block's dynamic shared memory; 128 bytes aligned, of exactly the size asked for.
void* dynamic_shared();

using Where = std::source_location;

void cp_async_16(void* shared, const void* global, bool valid, Where where = Where::current());
void cp_async_commit();
void cp_async_wait(int pending);
void load_matrix_x4(std::uint32_t (&fragment)[4], const void* shared_row, bool transposed,
                    Where where = Where::current());
void multiply_accumulate(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1,
                         bool is_bfloat16, Where where);

/// Products are exact in fp32; their sum is taken in fp32, k ascending.
template <class T>
void multiply_accumulate_16x8x16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                 std::uint32_t b1, Where where = Where::current()) {
  static_assert(std::is_same_v<T, tranche::bfloat16> || std::is_same_v<T, tranche::float16>);
  multiply_accumulate(d, a, b0, b1, std::is_same_v<T, tranche::bfloat16>, where);
}

/// Runs once, when the last lane of `mask` has come; payloads of lanes outside the mask are null.
using Exchange = void (*)(void* const (&payloads)[32], unsigned mask);

/// Waits for all lanes of `mask` to call the same function with the same mask, then runs `exchange` once. A
/// lane that never comes is an error naming it.
void warp_collective(const char* name, unsigned mask, Exchange exchange, void* payload, const Where& where);

/// Ends the kernel with a diagnostic that names kernel, block, thread and place.
[[noreturn]] void fail_thread(const char* what, const Where& where);

enum class Predicate { none, any, all, count };
/// A barrier of the whole block that also combines `predicate`.
int block_barrier(Predicate combine, bool predicate, const Where& where);

int lane_of_current();

}  // namespace cuda_emulation

// Storage. Blocks of a stream run one after another on the stream's thread, so a static variable of that
// thread is what a block shares.
#undef __shared__
#define __shared__ __attribute__((abi_tag("cuda_shared"))) static thread_local  // see static_shared.h
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __cluster_dims__
#define __cluster_dims__(...)

#define threadIdx (::cuda_emulation::here().index)
#define blockIdx (::cuda_emulation::here().block)
#define blockDim (::cuda_emulation::here().block_size)
#define gridDim (::cuda_emulation::here().grid_size)
#define warpSize 32

#include "tests/cuda_emulation/warp_functions.h"
