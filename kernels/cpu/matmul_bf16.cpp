#include "kernels/cpu/matmul_bf16.h"

#include <algorithm>

#include "kernels/cpu/bf16_panel.h"
#include "kernels/cpu/bf16_tile.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/tasks.h"
#include "tranche/core/shape.h"

namespace tranche::kernels::cpu {

namespace {

constexpr std::int64_t element_bytes = sizeof(bfloat16);
constexpr std::int64_t most_depth = 65536;
constexpr std::int64_t strip_rows = 6;  // rows per call of the inner loop
constexpr std::int64_t transposed_rows = 64;

/// The distance of rows in a transposed copy of the left operand. It is padded so that not all rows begin at
/// the same offset in a page.
std::int64_t transposed_stride(const MatmulCall& call) {
  return round_up(call.k, 16) + 32;
}
std::int64_t transposed_bytes(const MatmulCall& call, std::int64_t rows) {
  return round_up(rows, 16) * transposed_stride(call) * element_bytes;
}

/// Copies rows [first, first + rows) of the left operand, stored [k, m], as [rows, k].
void copy_transposed(const MatmulCall& call, std::int64_t first, std::int64_t rows, bfloat16* to) {
  transpose_rows(static_cast<const bfloat16*>(call.a) + first, call.m, call.k, rows, to,
                 transposed_stride(call));
}

/// Packs columns [column, column + columns) of the right operand as panels, for k from `depth` to `depth` +
/// `depth_block`.
void pack_panels(const MatmulCall& call, std::int64_t column, std::int64_t columns, std::int64_t depth,
                 std::int64_t depth_block, bfloat16* to) {
  const auto* b = static_cast<const bfloat16*>(call.b);
  for (std::int64_t at = 0; at < columns; at += panel_columns) {
    const std::int64_t width = std::min(panel_columns, columns - at);
    bfloat16* panel = to + at * round_up(depth_block, 2);
    if (call.transpose_b) {
      pack_transposed(b + (column + at) * call.k + depth, call.k, width, depth_block, panel, panel_columns);
    } else {
      pack_rows(b + depth * call.n + column + at, call.n, depth_block, width, panel, panel_columns);
    }
  }
}

Bf16Panels panels_of(const MatmulCall& call, const bfloat16* bias, std::int64_t row, std::int64_t rows,
                     std::int64_t column, std::int64_t columns) {
  Bf16Panels panels;
  panels.rows = rows;
  panels.columns = columns;
  panels.depth = call.k;
  panels.c = element_at(call.c_dtype, call.c, row * call.n + column);
  panels.stride_c = call.n;
  panels.wide = call.c_dtype == DataType::float32;
  panels.accumulate = call.accumulate;
  panels.continues = call.continues;
  panels.bias = bias == nullptr ? nullptr : bias + column;
  return panels;
}

/// The tiling in which a task packs panels of the right operand for itself and multiplies them with rows of
/// the left one.
struct PanelTiling {
  std::int64_t rows, columns, depth_block;

  bool whole_depth(const MatmulCall& call) const { return depth_block >= call.k; }
  std::int64_t panel_bytes() const { return columns * depth_block * element_bytes; }
  std::int64_t bytes(const MatmulCall& call) const {
    return panel_bytes() + (whole_depth(call) ? 0 : rows * columns * std::int64_t{sizeof(float)});
  }
};

PanelTiling panel_tiling(const MatmulCall& call, std::int64_t rows, std::int64_t space) {
  constexpr std::int64_t longest = 2048, shortest = 128, cache = 512 << 10;
  constexpr std::int64_t least_rows = 192, most_rows_with_sums = 512, most_panels = 4, tasks_per_thread = 6;
  PanelTiling tiling{};
  tiling.depth_block = round_up(divide_round_up(call.k, divide_round_up(call.k, longest)), 2);
  tiling.rows = tiling.whole_depth(call) ? rows : std::min(rows, most_rows_with_sums);
  const std::int64_t fitting = cache / (tiling.depth_block * element_bytes * panel_columns);
  tiling.columns = std::clamp<std::int64_t>(fitting, 1, most_panels) * panel_columns;
  tiling.columns = std::min(tiling.columns, round_up(call.n, panel_columns));
  const auto few = [&] {
    return divide_round_up(rows, tiling.rows) * divide_round_up(call.n, tiling.columns) <
           tasks_per_thread * call.threads;
  };
  while (few() && tiling.rows >= 2 * least_rows) {
    tiling.rows = round_up(divide_round_up(tiling.rows, 2), strip_rows);
  }
  while (few() && tiling.columns > panel_columns)
    tiling.columns = round_up(tiling.columns / 2, panel_columns);
  const auto fits = [&] { return space / tiling.bytes(call) >= call.threads; };
  if (!fits()) tiling.columns = panel_columns;
  if (!fits()) tiling.rows = std::min(tiling.rows, least_rows);
  while (!fits() && tiling.depth_block > shortest) tiling.depth_block = round_up(tiling.depth_block / 2, 2);
  return tiling;
}

/// Computes rows [first, first + rows) of a GEMM whose left operand is at `a` as [rows, k]. If several tasks
/// use the same columns, all panels are packed beforehand if they fit; otherwise every task packs its own.
void multiply_by_panels(const MatmulCall& call, const bfloat16* bias, std::int64_t first, std::int64_t rows,
                        const bfloat16* a, std::int64_t stride_a, const Workspace& scratch) {
  const PanelTiling tiling = panel_tiling(call, rows, scratch.bytes);
  const std::int64_t tasks_n = divide_round_up(call.n, tiling.columns);
  const std::int64_t tasks_m = divide_round_up(rows, tiling.rows);
  const std::int64_t sums_bytes = tiling.bytes(call) - tiling.panel_bytes();
  const std::int64_t all_columns = round_up(call.n, panel_columns);
  const std::int64_t all_bytes = round_up(all_columns * round_up(call.k, 2) * element_bytes, 256);
  const bool packed_once =
      tasks_m > 1 && all_bytes + call.threads * round_up(sums_bytes, 256) <= scratch.bytes;
  const std::int64_t own_bytes = round_up(packed_once ? sums_bytes : tiling.bytes(call), 256);
  auto* all = static_cast<bfloat16*>(scratch.data);
  char* own_begin = static_cast<char*>(scratch.data) + (packed_once ? all_bytes : 0);
  int threads = call.threads;
  if (packed_once) {
    const std::int64_t panels_n = all_columns / panel_columns;
    parallel_tasks(threads, panels_n * divide_round_up(call.k, tiling.depth_block),
                   [&](std::int64_t task, int) {
                     const std::int64_t column = task % panels_n * panel_columns;
                     const std::int64_t depth = task / panels_n * tiling.depth_block;
                     const std::int64_t depth_block = std::min(tiling.depth_block, call.k - depth);
                     pack_panels(call, column, std::min(panel_columns, call.n - column), depth, depth_block,
                                 all + depth * all_columns + column * round_up(depth_block, 2));
                   });
  } else {
    threads = static_cast<int>(std::min<std::int64_t>(threads, scratch.bytes / own_bytes));
  }
  parallel_tasks(threads, tasks_m * tasks_n, [&](std::int64_t task, int slot) {
    const std::int64_t column = task / tasks_m * tiling.columns;
    const std::int64_t row = task % tasks_m * tiling.rows;
    char* own = own_begin + slot * own_bytes;
    auto* packed = reinterpret_cast<bfloat16*>(own);
    Bf16Panels panels = panels_of(call, bias, first + row, std::min(tiling.rows, rows - row), column,
                                  std::min(tiling.columns, call.n - column));
    panels.stride_a = stride_a;
    panels.sums = reinterpret_cast<float*>(own + (packed_once ? 0 : tiling.panel_bytes()));
    panels.stride_sums = tiling.columns;
    for (std::int64_t depth = 0; depth < call.k; depth += tiling.depth_block) {
      panels.depth = std::min(tiling.depth_block, call.k - depth);
      panels.first = depth == 0;
      panels.last = depth + tiling.depth_block >= call.k;
      panels.a = a + row * stride_a + depth;
      panels.b = packed_once ? all + depth * all_columns + column * round_up(panels.depth, 2) : packed;
      if (!packed_once) pack_panels(call, column, panels.columns, depth, panels.depth, packed);
      multiply(panels);
    }
  });
}

/// Packs all panels beforehand, as many as fit into half of the workspace; each task copies some rows of the
/// transposed left operand for itself and multiplies them with each panel.
void multiply_by_rows(const MatmulCall& call, std::int64_t block, const bfloat16* bias) {
  const std::int64_t column_bytes = round_up(call.k, 2) * element_bytes;
  const std::int64_t most = call.workspace.bytes / 2 / (panel_columns * column_bytes) * panel_columns;
  const std::int64_t columns = std::min(round_up(call.n, panel_columns), most);
  const std::int64_t own_bytes = transposed_bytes(call, block);
  auto* packed = static_cast<bfloat16*>(call.workspace.data);
  char* scratch = static_cast<char*>(call.workspace.data) + columns * column_bytes;
  const std::int64_t space = call.workspace.bytes - columns * column_bytes;
  const int threads = static_cast<int>(std::min<std::int64_t>(call.threads, space / own_bytes));
  for (std::int64_t column = 0; column < call.n; column += columns) {
    const std::int64_t width = std::min(columns, call.n - column);
    parallel_tasks(threads, divide_round_up(width, panel_columns), [&](std::int64_t panel, int) {
      const std::int64_t at = panel * panel_columns;
      pack_panels(call, column + at, std::min(panel_columns, width - at), 0, call.k,
                  packed + at * round_up(call.k, 2));
    });
    parallel_tasks(threads, divide_round_up(call.m, block), [&](std::int64_t task, int slot) {
      const std::int64_t row = task * block;
      auto* transposed = reinterpret_cast<bfloat16*>(scratch + slot * own_bytes);
      Bf16Panels panels = panels_of(call, bias, row, std::min(block, call.m - row), column, width);
      copy_transposed(call, row, panels.rows, transposed);
      panels.a = transposed;
      panels.stride_a = transposed_stride(call);
      panels.b = packed;
      multiply(panels);
    });
  }
}

/// Copies the transposed left operand in row order, as many rows at a time as fit into half of the workspace.
void multiply_transposed(const MatmulCall& call, const bfloat16* bias) {
  constexpr std::int64_t least = 16;
  const std::int64_t fitting = call.workspace.bytes / 2 / transposed_bytes(call, least) * least;
  const std::int64_t chunk = std::min(round_up(call.m, least), fitting);
  const std::int64_t taken = transposed_bytes(call, chunk);
  auto* transposed = static_cast<bfloat16*>(call.workspace.data);
  const Workspace rest{static_cast<char*>(call.workspace.data) + taken, call.workspace.bytes - taken};
  for (std::int64_t first = 0; first < call.m; first += chunk) {
    const std::int64_t rows = std::min(chunk, call.m - first);
    parallel_tasks(call.threads, divide_round_up(rows, transposed_rows), [&](std::int64_t piece, int) {
      const std::int64_t at = piece * transposed_rows;
      copy_transposed(call, first + at, std::min(transposed_rows, rows - at),
                      transposed + at * transposed_stride(call));
    });
    multiply_by_panels(call, bias, first, rows, transposed, transposed_stride(call), rest);
  }
}

}  // namespace

bool bf16_gemm_takes(const MatmulCall& call) {
  return call.dtype == DataType::bfloat16 && call.k > 0 && call.k <= most_depth &&
         (call.k % 2 == 0 || !call.transpose_b) && bf16_tiles_are_fast();
}

void bf16_matmul(const MatmulCall& call, const bfloat16* bias) {
  if (!call.transpose_a) {
    return multiply_by_panels(call, bias, 0, call.m, static_cast<const bfloat16*>(call.a), call.k,
                              call.workspace);
  }
  // When both operands must be rearranged, the larger one is repacked block by block in a core's own cache.
  constexpr std::int64_t block_bytes = 384 << 10, least_rows = 48;
  std::int64_t block = block_bytes / (transposed_stride(call) * element_bytes) / least_rows * least_rows;
  if (call.m <= call.n || block == 0) return multiply_transposed(call, bias);
  if (call.workspace.bytes / 2 / transposed_bytes(call, block) < call.threads) block = least_rows;
  multiply_by_rows(call, block, bias);
}

}  // namespace tranche::kernels::cpu
