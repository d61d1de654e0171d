// Device-side operations that need the other threads of a warp or block, or memory that becomes visible
// later.
#include <fmt/format.h>

#include <cstdint>
#include <cstdlib>

#include "tranche/tests/cuda_emulation/grid.h"

namespace cuda_emulation {
namespace {

BlockRunner& runner() {
  BlockRunner* active = BlockRunner::active();
  // Device code called from the host has no block to speak of; there is nobody to return an error to.
  if (active == nullptr) {
    fmt::print(stderr, "cuda_emulation: a device function was called outside of a kernel\n");
    std::abort();
  }
  return *active;
}

bool aligned_16(const void* address) {
  return reinterpret_cast<std::uintptr_t>(address) % 16 == 0;
}

struct LoadMatrix {
  const unsigned char* row;
  std::uint32_t* fragment;
};

// Lane 8i + j gives row j of matrix i; lane l receives row l / 4, columns 2 (l % 4) and the next.
template <bool transposed>
void exchange_matrices(void* const (&payloads)[32], unsigned) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      std::uint16_t pair[2];
      for (int k = 0; k < 2; ++k) {
        const int row = transposed ? 2 * (lane % 4) + k : lane / 4;
        const int column = transposed ? lane / 4 : 2 * (lane % 4) + k;
        const unsigned char* source = static_cast<const LoadMatrix*>(payloads[8 * matrix + row])->row;
        std::memcpy(&pair[k], source + 2 * column, 2);
      }
      static_cast<const LoadMatrix*>(payloads[lane])->fragment[matrix] =
          pair[0] | static_cast<std::uint32_t>(pair[1]) << 16;
    }
  }
}

struct Multiply {
  float* d;
  const std::uint32_t* a;
  std::uint32_t b[2];
  float (*widen)(std::uint16_t);
};

void exchange_products(void* const (&payloads)[32], unsigned) {
  float a[16][16], b[16][8];
  const auto low = [](std::uint32_t pair) { return static_cast<std::uint16_t>(pair & 0xffff); };
  const auto high = [](std::uint32_t pair) { return static_cast<std::uint16_t>(pair >> 16); };
  for (int lane = 0; lane < 32; ++lane) {
    const auto& mine = *static_cast<const Multiply*>(payloads[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int part = 0; part < 4; ++part) {
      const int row = g + 8 * (part & 1), column = 2 * t + 8 * (part >> 1);
      a[row][column] = mine.widen(low(mine.a[part]));
      a[row][column + 1] = mine.widen(high(mine.a[part]));
    }
    for (int part = 0; part < 2; ++part) {
      b[2 * t + 8 * part][g] = mine.widen(low(mine.b[part]));
      b[2 * t + 8 * part + 1][g] = mine.widen(high(mine.b[part]));
    }
  }
  float d[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& mine = *static_cast<const Multiply*>(payloads[lane]);
    for (int i = 0; i < 4; ++i) d[lane / 4 + 8 * (i >> 1)][2 * (lane % 4) + (i & 1)] = mine.d[i];
  }
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 16; ++k) {
      for (int column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    const auto& mine = *static_cast<const Multiply*>(payloads[lane]);
    for (int i = 0; i < 4; ++i) mine.d[i] = d[lane / 4 + 8 * (i >> 1)][2 * (lane % 4) + (i & 1)];
  }
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
  // Copies not yet committed are the newest of all; pending counts committed groups only.
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

// The bytes arrive only when they are waited for: until then the destination holds NaNs.
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
    warp_collective("ldmatrix.trans", 0xffffffffu, &exchange_matrices<true>, &mine, where);
  } else {
    warp_collective("ldmatrix", 0xffffffffu, &exchange_matrices<false>, &mine, where);
  }
}

void multiply_accumulate(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1,
                         float (*widen)(std::uint16_t bits), Where where) {
  Multiply mine{d, a, {b0, b1}, widen};
  warp_collective("mma", 0xffffffffu, &exchange_products, &mine, where);
}

}  // namespace cuda_emulation

void __trap() {
  cuda_emulation::fail_thread("__trap() was called", cuda_emulation::Where::current());
}
