#pragma once
/// The emulation of CUDA on the CPU (TRANCHE_CUDA=EMULATED). Every CUDA source of such a build includes this
/// header first; it gives the host compiler the declarations that nvcc has built in.
///
/// A kernel is compiled as an ordinary function. launch() enqueues it on a stream (stream.cpp), whose host
/// thread runs the stream's operations in order. BlockRunner (grid.h) runs the blocks of the grid one after
/// another. Each thread of a block is a fiber (fiber.h): a function with its own stack, which runs until it
/// has to wait. A seed draws the order of threads, warps and blocks:
///
///    ready --> running --> returned
///      ^          |
///      |          +--> in_warp      waits in a warp collective for all lanes of its mask
///      |          +--> at_barrier   waits in __syncthreads() for all threads of the block
///      +----------+                 the last one that arrives makes all of them ready again
///
/// If no thread is ready and some wait, the kernel ends with a diagnostic that names the missing threads.
/// `__shared__` variables are static variables of the stream's host thread (static_shared.h). Device memory
/// is reserved address space that host code cannot access (memory.cpp). The emulation has no cost model and
/// no relaxed memory order; README.md lists what it finds and what it cannot find.

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

/// The coordinates of a running thread.
struct Thread {
  uint3 index{};
  uint3 block{};
  dim3 block_size;
  dim3 grid_size;
};

/// The running thread; null outside of kernels.
extern constinit thread_local Thread* current_thread;

inline const Thread& here() {
  return *current_thread;
}

/// Enqueues one launch of `kernel` on the stream. Returns the error of a launch: a shape beyond the device's
/// limits, an invalid stream, or an earlier failure; errors inside the kernel are reported later. `function`
/// is the kernel's address: with TRANCHE_EMULATION_LAZY=1 its first launch waits for the whole device, unless
/// kernels were loaded before (cuFuncLoad) or CUDA_MODULE_LOADING is EAGER.
cudaError_t launch(const char* name, const void* function, dim3 grid, dim3 block,
                   std::size_t dynamic_shared_bytes, cudaStream_t stream, std::function<void()> kernel);

/// The same for a function that lazy loading ignores.
inline cudaError_t launch(const char* name, dim3 grid, dim3 block, std::size_t dynamic_shared_bytes,
                          cudaStream_t stream, std::function<void()> kernel) {
  return launch(name, nullptr, grid, block, dynamic_shared_bytes, stream, std::move(kernel));
}

/// The block's dynamic shared memory, aligned to 128 bytes, with exactly the requested size.
void* dynamic_shared();

using Where = std::source_location;

void cp_async_16(void* shared, const void* global, bool valid, Where where = Where::current());
void cp_async_commit();
void cp_async_wait(int pending);
void load_matrix_x4(std::uint32_t (&fragment)[4], const void* shared_row, bool transposed,
                    Where where = Where::current());
void multiply_accumulate(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1,
                         bool is_bfloat16, Where where);

/// Multiplications are exact in fp32; the sum is computed in fp32 with ascending k.
template <class T>
void multiply_accumulate_16x8x16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                 std::uint32_t b1, Where where = Where::current()) {
  static_assert(std::is_same_v<T, tranche::bfloat16> || std::is_same_v<T, tranche::float16>);
  multiply_accumulate(d, a, b0, b1, std::is_same_v<T, tranche::bfloat16>, where);
}

/// Called once, when the last lane of `mask` has arrived; payloads of lanes outside of the mask are null.
using Exchange = void (*)(void* const (&payloads)[32], unsigned mask);

/// Waits until all lanes of `mask` have called the same function with the same mask, then calls `exchange`
/// once. If a lane never arrives, that is an error that names it.
void warp_collective(const char* name, unsigned mask, Exchange exchange, void* payload, const Where& where);

/// Ends the kernel with a diagnostic that names the kernel, block, thread and source line.
[[noreturn]] void fail_thread(const char* what, const Where& where);

enum class Predicate { none, any, all, count };
/// A barrier of the whole block that also combines the `predicate` of all threads.
int block_barrier(Predicate combine, bool predicate, const Where& where);

int lane_of_current();

}  // namespace cuda_emulation

// Storage. The blocks of a stream run one after another on the stream's host thread, so a static variable of
// that thread acts as a block's shared variable.
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
