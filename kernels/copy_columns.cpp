#include "tranche/kernels/copy_columns.h"

#include <fmt/core.h>

#include "kernels/check.h"
#include "kernels/cpu/copy_columns.h"
#include "kernels/cuda/copy_columns.h"
#include "kernels/dispatch.h"
#include "kernels/meta/cost.h"

namespace tranche::kernels {

namespace {

constexpr std::string_view kernel = "copy_columns";

void check_columns(std::string_view operand, const ConstTensorView& view, std::int64_t first,
                   std::int64_t columns) {
  if (first >= 0 && columns >= 0 && first + columns <= view.shape[1]) return;
  refuse(kernel, fmt::format("`{}` has {} columns, wanted columns {} to {}", operand, view.shape[1], first,
                             first + columns));
}

}  // namespace

void copy_columns(Stream& stream, const ConstTensorView& from, std::int64_t from_column, const TensorView& to,
                  std::int64_t to_column, std::int64_t columns) {
  check_rank(kernel, "from", from.shape, 2);
  check_rank(kernel, "to", to.shape, 2);
  check_dtype(kernel, "to", to.dtype, {from.dtype});
  check_shape(kernel, "to", to.shape, {from.shape[0], to.shape[1]});
  check_columns("from", from, from_column, columns);
  check_columns("to", to, to_column, columns);
  const auto bytes = static_cast<double>(from.shape[0] * columns * size_of(from.dtype));
  dispatch(
      stream, kernel, {0, bytes, bytes},
      [threads = stream.threads(), from, from_column, to, to_column, columns] {
        cpu::copy_columns(threads, from, from_column, to, to_column, columns);
      },
      [&] { cuda::copy_columns(stream, from, from_column, to, to_column, columns); });
}

}  // namespace tranche::kernels
