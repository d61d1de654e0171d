// Device-side operations that need other threads of a warp or block, or memory that becomes visible later.
#include <fmt/format.h>

#include <cstdint>
#include <cstdlib>

#include "tests/cuda_emulation/grid.h"
#include "tests/cuda_emulation/tensor_core.h"

namespace cuda_emulation {
namespace {

BlockRunner& runner() {
  BlockRunner* active = BlockRunner::active();
  // Device code called from the host belongs to no block, and there is no caller to which an error could be
  // returned.
  if (active == nullptr) {
    fmt::print(stderr, "cuda_emulation: a device function was called outside of a kernel\n");
    std::abort();
  }
  return *active;
}

bool aligned_16(const void* address) {
  return reinterpret_cast<std::uintptr_t>(address) % 16 == 0;
}

}  // namespace

void* dynamic_shared() {
  return runner().dynamic_shared();
}

int lane_of_current() {
  return static_cast<int>(runner().current().number % 32);
}

void warp_collective(const char* name, unsigned mask, Exchange exchange, void* payload, const Where& where) {
  runner().wait_in_warp(name, mask, exchange, payload, where);
}

int block_barrier(Predicate combine, bool predicate, const Where& where) {
  return runner().wait_at_barrier(combine, predicate, where);
}

void fail_thread(const char* what, const Where& where) {
  runner().fail(what, where);
}

void complete_copies(RunningThread& thread, std::size_t pending) {
  if (thread.copies.empty()) {
    thread.groups.clear();
    return;
  }
  // Copies that are not yet committed are the newest; `pending` counts committed groups only.
  const std::size_t groups = thread.groups.size();
  if (groups <= pending) return;
  const std::size_t done = groups - pending;
  const std::size_t end = thread.groups[done - 1];
  for (std::size_t i = 0; i < end; ++i) {
    const Copy& copy = thread.copies[i];
    if (copy.from == nullptr) {
      std::memset(copy.to, 0, 16);
    } else {
      std::memcpy(copy.to, copy.from, 16);
    }
  }
  thread.copies.erase(thread.copies.begin(), thread.copies.begin() + static_cast<std::ptrdiff_t>(end));
  thread.groups.erase(thread.groups.begin(), thread.groups.begin() + static_cast<std::ptrdiff_t>(done));
  for (std::size_t& group : thread.groups) group -= end;
}

// The bytes arrive only after the wait; until then the destination contains NaNs.
void cp_async_16(void* shared, const void* global, bool valid, Where where) {
  if (!aligned_16(shared) || (valid && !aligned_16(global))) {
    runner().fail(fmt::format("cp.async of 16 bytes between misaligned addresses: shared {}, global {}",
                              shared, global),
                  where);
  }
  std::memset(shared, 0xff, 16);
  runner().current().copies.push_back({shared, valid ? global : nullptr});
}

void cp_async_commit() {
  RunningThread& thread = runner().current();
  thread.groups.push_back(thread.copies.size());
}

void cp_async_wait(int pending) {
  complete_copies(runner().current(), static_cast<std::size_t>(pending));
}

void load_matrix_x4(std::uint32_t (&fragment)[4], const void* shared_row, bool transposed, Where where) {
  if (!aligned_16(shared_row)) {
    runner().fail(fmt::format("ldmatrix from {}, which is not a multiple of 16", shared_row), where);
  }
  LoadMatrix mine{static_cast<const unsigned char*>(shared_row), fragment};
  if (transposed) {
    warp_collective("ldmatrix.trans", 0xffffffffu, &exchange_transposed_matrices, &mine, where);
  } else {
    warp_collective("ldmatrix", 0xffffffffu, &exchange_matrices, &mine, where);
  }
}

void multiply_accumulate(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1,
                         bool is_bfloat16, Where where) {
  Multiply mine{d, a, {b0, b1}};
  warp_collective("mma", 0xffffffffu, is_bfloat16 ? &exchange_products<true> : &exchange_products<false>,
                  &mine, where);
}

}  // namespace cuda_emulation

void __trap() {
  cuda_emulation::fail_thread("__trap() was called", cuda_emulation::Where::current());
}
