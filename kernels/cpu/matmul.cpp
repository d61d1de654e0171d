#include "kernels/cpu/matmul.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/bf16_tile.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/elementwise.h"
#include "kernels/cpu/instruction_sets.h"
#include "kernels/cpu/matmul_bf16.h"
#include "kernels/cpu/matmul_onednn.h"
#include "kernels/cpu/sgemm.h"
#include "kernels/cpu/tasks.h"
#include "tranche/core/shape.h"

namespace tranche::kernels::cpu {

namespace {

// The tiling of c and the blocks of k depend on the shape alone, so neither the number of threads nor the
// size of the workspace changes a bit of the result.
constexpr std::int64_t fp32_columns =
    384;  // oneDNN packs 48 at a time; 768 divide into two tiles, not one and a half
constexpr std::int64_t widened_rows = 256;
constexpr std::int64_t widened_columns = 256;
constexpr std::int64_t widened_depth = 384;
constexpr std::int64_t widened_floats =
    (widened_rows + widened_columns) * widened_depth + widened_rows * widened_columns;
constexpr std::int64_t widened_bytes = widened_floats * std::int64_t{sizeof(float)};
static_assert(widened_bytes <= minimum_workspace_bytes);

struct TileSize {
  std::int64_t rows, columns;
};

/// Large tiles pack and widen less; small GEMMs use smaller tiles, so that several threads get work.
TileSize tile_size(const MatmulCall& call, TileSize size) {
  constexpr std::int64_t enough_tiles = 8, least = 128;
  const auto tiles = [&] {
    return divide_round_up(call.m, size.rows) * divide_round_up(call.n, size.columns);
  };
  if (tiles() < enough_tiles) size.columns = std::min(size.columns, widened_columns);
  if (tiles() < enough_tiles) size.rows = least;
  if (tiles() < enough_tiles) size.columns = least;
  return size;
}

void matmul_fp32(const MatmulCall& call) {
  const auto* a = static_cast<const float*>(call.a);
  const auto* b = static_cast<const float*>(call.b);
  auto* c = static_cast<float*>(call.c);
  const TileSize size = tile_size(call, {widened_rows, fp32_columns});
  const std::int64_t tiles_m = divide_round_up(call.m, size.rows);
  const std::int64_t tiles_n = divide_round_up(call.n, size.columns);
  parallel_tasks(call.threads, tiles_m * tiles_n, [&](std::int64_t tile, int) {
    const std::int64_t row = tile / tiles_n * size.rows;
    const std::int64_t column = tile % tiles_n * size.columns;
    SgemmArguments gemm;
    gemm.transpose_a = call.transpose_a;
    gemm.transpose_b = call.transpose_b;
    gemm.m = std::min(size.rows, call.m - row);
    gemm.n = std::min(size.columns, call.n - column);
    gemm.k = call.k;
    gemm.stride_a = call.transpose_a ? call.m : call.k;
    gemm.stride_b = call.transpose_b ? call.k : call.n;
    gemm.stride_c = call.n;
    gemm.a = a + (call.transpose_a ? row : row * call.k);
    gemm.b = b + (call.transpose_b ? column * call.k : column);
    gemm.c = c + row * call.n + column;
    gemm.beta = call.accumulate || call.continues ? 1.0f : 0.0f;
    sgemm(gemm);
  });
}

/// Computes one tile of c at (row, column): blocks of a and b are widened to fp32 in `scratch` and multiplied
/// there.
void widened_tile(const MatmulCall& call, const TileSize& size, std::int64_t row, std::int64_t column,
                  float* scratch) {
  float* a = scratch;
  float* b = a + widened_rows * widened_depth;
  float* tile = b + widened_columns * widened_depth;
  SgemmArguments gemm;
  gemm.transpose_a = call.transpose_a;
  gemm.transpose_b = call.transpose_b;
  gemm.m = std::min(size.rows, call.m - row);
  gemm.n = std::min(size.columns, call.n - column);
  gemm.a = a;
  gemm.b = b;
  gemm.beta = call.accumulate || call.continues ? 1.0f : 0.0f;
  const bool direct = call.c_dtype == DataType::float32;
  void* out = element_at(call.c_dtype, call.c, row * call.n + column);
  gemm.c = direct ? static_cast<float*>(out) : tile;
  gemm.stride_c = direct ? call.n : gemm.n;
  if (!direct && call.accumulate) {
    widen_tile(call.c_dtype, out, call.n, gemm.m, gemm.n, tile, gemm.n);
  }
  for (std::int64_t depth = 0; depth < call.k; depth += widened_depth) {
    gemm.k = std::min(widened_depth, call.k - depth);
    if (call.transpose_a) {
      gemm.stride_a = gemm.m;
      widen_tile(call.dtype, element_at(call.dtype, call.a, depth * call.m + row), call.m, gemm.k, gemm.m, a,
                 gemm.stride_a);
    } else {
      gemm.stride_a = gemm.k;
      widen_tile(call.dtype, element_at(call.dtype, call.a, row * call.k + depth), call.k, gemm.m, gemm.k, a,
                 gemm.stride_a);
    }
    if (call.transpose_b) {
      gemm.stride_b = gemm.k;
      widen_tile(call.dtype, element_at(call.dtype, call.b, column * call.k + depth), call.k, gemm.n, gemm.k,
                 b, gemm.stride_b);
    } else {
      gemm.stride_b = gemm.n;
      widen_tile(call.dtype, element_at(call.dtype, call.b, depth * call.n + column), call.n, gemm.k, gemm.n,
                 b, gemm.stride_b);
    }
    sgemm(gemm);
    gemm.beta = 1.0f;
  }
  if (!direct) narrow_tile(tile, gemm.n, gemm.m, gemm.n, call.c_dtype, out, call.n);
}

void matmul_widened(const MatmulCall& call) {
  const TileSize size = tile_size(call, {widened_rows, widened_columns});
  const std::int64_t tiles_m = divide_round_up(call.m, size.rows);
  const std::int64_t tiles_n = divide_round_up(call.n, size.columns);
  const int threads =
      static_cast<int>(std::min<std::int64_t>(call.threads, call.workspace.bytes / widened_bytes));
  auto* scratch = static_cast<float*>(call.workspace.data);
  parallel_tasks(threads, tiles_m * tiles_n, [&](std::int64_t tile, int slot) {
    widened_tile(call, size, tile / tiles_n * size.rows, tile % tiles_n * size.columns,
                 scratch + slot * widened_floats);
  });
}

}  // namespace

void matmul(const MatmulCall& call) {
  if (call.m == 0 || call.n == 0) return;
  if (call.k == 0) {
    const std::int64_t bytes = call.m * call.n * size_of(call.c_dtype);
    if (!call.accumulate && !call.continues) std::memset(call.c, 0, static_cast<std::size_t>(bytes));
    return;
  }
  if (call.dtype == DataType::float32) return matmul_fp32(call);
  if (bf16_gemm_takes(call)) return bf16_matmul(call);
  if (call.dtype == DataType::bfloat16 && onednn_bf16_is_fast() && onednn_matmul(call)) return;
  matmul_widened(call);
}

void matmul_bias(const MatmulCall& call, const TensorView& out, const ConstTensorView& bias) {
  if (call.m > 0 && call.n > 0 && call.c_dtype == DataType::bfloat16 && bf16_gemm_takes(call)) {
    return bf16_matmul(call, static_cast<const bfloat16*>(bias.data));
  }
  matmul(call);
  add_bias(call.threads, out, bias);
}

std::string_view matmul_path(DataType dtype) {
  if (dtype == DataType::float32) return sgemm_path();
  if (dtype == DataType::bfloat16 && bf16_tiles_are_fast()) return "own bf16 panels (avx512_bf16)";
  if (dtype == DataType::bfloat16 && onednn_bf16_is_fast()) return onednn_bf16_path();
  if (sgemm_path() == "oneDNN sgemm") return "widened to fp32, oneDNN sgemm";
  return sgemm_path() == "OpenBLAS sgemm" ? "widened to fp32, OpenBLAS sgemm"
                                          : "widened to fp32, plain loops";
}

SumOrder sum_order(DataType dtype) {
  if (dtype == DataType::bfloat16 && bf16_tiles_are_fast()) return {.ascending = true, .step = 2};
  const bool plain = sgemm_path() == "plain loops" && !(dtype == DataType::bfloat16 && onednn_bf16_is_fast());
  return {.ascending = plain, .begins_with_c = plain};
}

std::string matmul_libraries() {
  const std::string onednn = onednn_library();
  return sgemm_library() + (onednn.empty() ? "" : ", " + onednn) + ", bf16 by " +
         std::string(matmul_path(DataType::bfloat16)) + ", vector loops " + instruction_set();
}

}  // namespace tranche::kernels::cpu
