#include "tranche/kernels/quantization.h"

#include <fmt/core.h>

#include "kernels/check.h"
#include "kernels/cpu/quantization.h"
#include "kernels/cuda/quantization.h"
#include "kernels/dispatch.h"
#include "kernels/meta/quantization_cost.h"

namespace tranche::kernels {

namespace {

void check_blocks(std::string_view name, std::string_view operand, const ConstTensorView& values,
                  const void* blocks) {
  check_floating(name, operand, values.dtype);
  if (values.elements() % quantized_block != 0) {
    refuse(name, fmt::format("`{}` has {} elements, wanted whole blocks of {}", operand, values.elements(),
                             quantized_block));
  }
  const auto check_alignment = [&](std::string_view of, const void* data, std::uintptr_t bytes) {
    if (reinterpret_cast<std::uintptr_t>(data) % bytes == 0) return;
    refuse(name, fmt::format("`{}` is not aligned to {} bytes", of, bytes));
  };
  check_alignment("blocks", blocks, 4);
  check_alignment(operand, values.data, 16);
}

}  // namespace

void quantize(Stream& stream, const ConstTensorView& values, void* blocks) {
  constexpr std::string_view name = "quantize";
  check_blocks(name, "values", values, blocks);
  dispatch(
      stream, name, meta::quantize(values),
      [threads = stream.threads(), values, blocks] { cpu::quantize(threads, values, blocks); },
      [&] { cuda::quantize(stream, values, blocks); });
}

void dequantize(Stream& stream, const void* blocks, const TensorView& values) {
  constexpr std::string_view name = "dequantize";
  check_blocks(name, "values", values, blocks);
  dispatch(
      stream, name, meta::quantized_sum(1, false, values),
      [threads = stream.threads(), blocks, values] { cpu::dequantize(threads, blocks, values); },
      [&] { cuda::dequantize(stream, blocks, values); });
}

void quantized_sum(Stream& stream, const void* pieces, int ranks, SumGroups groups, bool accumulate,
                   const TensorView& out) {
  constexpr std::string_view name = "quantized_sum";
  check_blocks(name, "out", out, pieces);
  if (ranks < 1) refuse(name, fmt::format("ranks is {}, wanted at least 1", ranks));
  if (groups.outer < 1) {
    refuse(name, fmt::format("{} groups in an outer group, wanted at least 1", groups.outer));
  }
  dispatch(
      stream, name, meta::quantized_sum(ranks, accumulate, out),
      [threads = stream.threads(), pieces, ranks, groups, accumulate, out] {
        cpu::quantized_sum(threads, pieces, ranks, groups, accumulate, out);
      },
      [&] { cuda::quantized_sum(stream, pieces, ranks, groups, accumulate, out); });
}

}  // namespace tranche::kernels
