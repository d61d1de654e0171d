#include "tranche/kernels/reduction.h"

#include <fmt/core.h>

#include <vector>

#include "kernels/check.h"
#include "kernels/cpu/reduction.h"
#include "kernels/cuda/reduction.h"
#include "kernels/dispatch.h"
#include "kernels/meta/reduction_cost.h"

namespace tranche::kernels {

void ordered_sum(Stream& stream, std::span<const void* const> pieces, DataType piece_dtype, SumGroups groups,
                 bool accumulate, const TensorView& out, SumTarget target) {
  constexpr std::string_view name = "ordered_sum";
  check_floating(name, "pieces", piece_dtype);
  check_floating(name, "out", out.dtype);
  if (pieces.empty()) refuse(name, "`pieces` is empty, wanted at least one");
  if (groups.outer < 1) {
    refuse(name, fmt::format("{} groups in an outer group, wanted at least 1", groups.outer));
  }
  dispatch(
      stream, name, meta::ordered_sum(pieces.size(), piece_dtype, accumulate, out),
      [threads = stream.threads(), owned = std::vector<const void*>(pieces.begin(), pieces.end()),
       piece_dtype, groups, accumulate, out,
       target] { cpu::ordered_sum(threads, owned, piece_dtype, groups, accumulate, out, target); },
      [&] {
        if (pieces.size() > cuda::most_pieces) {
          refuse(name, fmt::format("{} pieces, where a GPU takes {} at once; sum them in groups of ranks",
                                   pieces.size(), cuda::most_pieces));
        }
        cuda::ordered_sum(stream, pieces, piece_dtype, groups, accumulate, out);
      });
}

void rounded_sum(Stream& stream, const ConstTensorView& source, DataType communication, bool accumulate,
                 const TensorView& out) {
  constexpr std::string_view name = "rounded_sum";
  check_dtype(name, "source", source.dtype, {DataType::float32});
  check_floating(name, "communication", communication);
  check_floating(name, "out", out.dtype);
  check_elements(name, "out", out.elements(), source.elements());
  dispatch(
      stream, name, meta::rounded_sum(source, accumulate, out),
      [threads = stream.threads(), source, communication, accumulate, out] {
        cpu::rounded_sum(threads, source, communication, accumulate, out);
      },
      [&] { cuda::rounded_sum(stream, source, communication, accumulate, out); });
}

void gradient_statistics(Stream& stream, const ConstTensorView& gradient, GradientStatistics* statistics) {
  constexpr std::string_view name = "gradient_statistics";
  check_floating(name, "gradient", gradient.dtype);
  if (statistics == nullptr) refuse(name, "`statistics` is null");
  dispatch(
      stream, name, meta::gradient_statistics(gradient),
      [threads = stream.threads(), gradient, statistics] {
        cpu::gradient_statistics(threads, gradient, statistics);
      },
      [&] { cuda::gradient_statistics(stream, gradient, statistics); });
}

void add_digest(Stream& stream, const ConstTensorView& values, std::uint64_t tensor,
                std::int64_t first_element, Digest* digest) {
  constexpr std::string_view name = "add_digest";
  check_floating(name, "values", values.dtype);
  if (digest == nullptr) refuse(name, "`digest` is null");
  if (first_element < 0) refuse(name, fmt::format("first_element is {}, wanted at least 0", first_element));
  dispatch(
      stream, name, meta::add_digest(values),
      [threads = stream.threads(), values, tensor, first_element, digest] {
        cpu::add_digest(threads, values, tensor, first_element, digest);
      },
      [&] { cuda::add_digest(stream, values, tensor, first_element, digest); });
}

}  // namespace tranche::kernels
