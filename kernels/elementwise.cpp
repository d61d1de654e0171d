#include "tranche/kernels/elementwise.h"

#include <fmt/core.h>

#include <vector>

#include "kernels/check.h"
#include "kernels/cpu/dropout.h"
#include "kernels/cpu/elementwise.h"
#include "kernels/cuda/elementwise.h"
#include "kernels/dispatch.h"
#include "kernels/meta/elementwise_cost.h"

namespace tranche::kernels {

namespace {

void check_operand(std::string_view kernel, std::string_view operand, const ConstTensorView& view,
                   const ConstTensorView& like) {
  check_floating(kernel, operand, view.dtype);
  check_elements(kernel, operand, view.elements(), like.elements());
}

void check_first_element(std::string_view kernel, std::int64_t first_element) {
  if (first_element < 0) refuse(kernel, fmt::format("first_element is {}, wanted at least 0", first_element));
}

/// Refuses columns that do not lie within dropout's rows.
void check_columns(std::string_view kernel, const DropoutOptions& options, const Shape& x) {
  const std::int64_t blocks = options.column_blocks, columns = x[x.rank() - 1];
  const auto samples = static_cast<std::int64_t>(options.samples.size());
  if (options.first_element != 0 || options.sample_elements != 0) {
    refuse(kernel, "a part of the columns and a part of the samples were given; give one of the two");
  }
  if (blocks < 1 || options.row_elements % blocks != 0 || columns % blocks != 0 || options.first_column < 0 ||
      options.first_column + columns / blocks > options.row_elements / blocks) {
    refuse(kernel,
           fmt::format("{} columns from column {} on, in {} blocks, are no part of rows of {} elements",
                       columns, options.first_column, blocks, options.row_elements));
  }
  if (samples > 0 && columns > 0 && x.elements() / columns % samples != 0) {
    refuse(kernel,
           fmt::format("`x` has {} rows, which {} samples do not divide", x.elements() / columns, samples));
  }
}

}  // namespace

void cast(Stream& stream, const ConstTensorView& from, const TensorView& to) {
  constexpr std::string_view name = "cast";
  check_floating(name, "from", from.dtype);
  check_operand(name, "to", to, from);
  dispatch(
      stream, name, meta::elementwise(0, to, from),
      [threads = stream.threads(), from, to] { cpu::cast(threads, from, to); },
      [&] { cuda::cast(stream, from, to); });
}

void copy(Stream& stream, const ConstTensorView& from, const TensorView& to) {
  constexpr std::string_view name = "copy";
  check_tensor(name, "to", to, {from.dtype}, from.elements());
  dispatch(
      stream, name, meta::elementwise(0, to, from),
      [threads = stream.threads(), from, to] { cpu::copy(threads, from, to); },
      [&] { cuda::copy(stream, from, to); });
}

void fill_zero(Stream& stream, const TensorView& out) {
  dispatch(
      stream, "fill_zero", meta::elementwise(0, out),
      [threads = stream.threads(), out] { cpu::fill_zero(threads, out); },
      [&] { cuda::fill_zero(stream, out); });
}

void fill_constant(Stream& stream, const TensorView& out, float value) {
  check_floating("fill_constant", "out", out.dtype);
  dispatch(
      stream, "fill_constant", meta::elementwise(0, out),
      [threads = stream.threads(), out, value] { cpu::fill_constant(threads, out, value); },
      [&] { cuda::fill_constant(stream, out, value); });
}

void fill_normal(Stream& stream, const TensorView& out, const RandomKey& key, std::int64_t first_element,
                 float mean, float standard_deviation) {
  constexpr std::string_view name = "fill_normal";
  check_dtype(name, "out", out.dtype, {DataType::float32});
  check_first_element(name, first_element);
  dispatch(
      stream, name, meta::elementwise(meta::fill_random_operations, out),
      [threads = stream.threads(), out, key, first_element, mean, standard_deviation] {
        cpu::fill_normal(threads, out, key, first_element, mean, standard_deviation);
      },
      [&] { cuda::fill_normal(stream, out, key, first_element, mean, standard_deviation); });
}

void fill_uniform(Stream& stream, const TensorView& out, const RandomKey& key, std::int64_t first_element,
                  float low, float high) {
  constexpr std::string_view name = "fill_uniform";
  check_dtype(name, "out", out.dtype, {DataType::float32});
  check_first_element(name, first_element);
  dispatch(
      stream, name, meta::elementwise(meta::fill_random_operations, out),
      [threads = stream.threads(), out, key, first_element, low, high] {
        cpu::fill_uniform(threads, out, key, first_element, low, high);
      },
      [&] { cuda::fill_uniform(stream, out, key, first_element, low, high); });
}

void add(Stream& stream, const ConstTensorView& a, const ConstTensorView& b, const TensorView& out) {
  constexpr std::string_view name = "add";
  check_floating(name, "out", out.dtype);
  check_operand(name, "a", a, out);
  check_operand(name, "b", b, out);
  dispatch(
      stream, name, meta::elementwise(1, out, a, b),
      [threads = stream.threads(), a, b, out] { cpu::add(threads, a, b, out); },
      [&] { cuda::add(stream, a, b, out); });
}

void accumulate(Stream& stream, const ConstTensorView& x, const TensorView& accumulator) {
  constexpr std::string_view name = "accumulate";
  check_floating(name, "accumulator", accumulator.dtype);
  check_operand(name, "x", x, accumulator);
  dispatch(
      stream, name, meta::elementwise(1, accumulator, x, accumulator),
      [threads = stream.threads(), x, accumulator] { cpu::accumulate(threads, x, accumulator); },
      [&] { cuda::accumulate(stream, x, accumulator); });
}

void scale(Stream& stream, float factor, const TensorView& x) {
  constexpr std::string_view name = "scale";
  check_floating(name, "x", x.dtype);
  dispatch(
      stream, name, meta::elementwise(1, x, x),
      [threads = stream.threads(), factor, x] { cpu::scale(threads, factor, x); },
      [&] { cuda::scale(stream, factor, x); });
}

void add_bias(Stream& stream, const TensorView& x, const ConstTensorView& bias) {
  constexpr std::string_view name = "add_bias";
  check_floating(name, "x", x.dtype);
  check_rank(name, "x", x.shape, 2);
  check_floating(name, "bias", bias.dtype);
  check_shape(name, "bias", bias.shape, Shape{x.shape[1]});
  dispatch(
      stream, name, meta::elementwise(1, x, x, bias),
      [threads = stream.threads(), x, bias] { cpu::add_bias(threads, x, bias); },
      [&] { cuda::add_bias(stream, x, bias); });
}

void bias_gradient(Stream& stream, const ConstTensorView& gradient, const TensorView& bias_gradient,
                   const Workspace& workspace) {
  constexpr std::string_view name = "bias_gradient";
  check_floating(name, "gradient", gradient.dtype);
  check_rank(name, "gradient", gradient.shape, 2);
  check_dtype(name, "bias_gradient", bias_gradient.dtype, {DataType::float32});
  check_shape(name, "bias_gradient", bias_gradient.shape, Shape{gradient.shape[1]});
  dispatch(
      stream, name, meta::bias_gradient(gradient, bias_gradient),
      [threads = stream.threads(), gradient, bias_gradient] {
        cpu::bias_gradient(threads, gradient, bias_gradient);
      },
      [&] {
        check_workspace(name, workspace, 8 * bias_gradient.elements());
        cuda::bias_gradient(stream, gradient, bias_gradient, workspace);
      });
}

void gelu_forward(Stream& stream, const ConstTensorView& x, const TensorView& y) {
  constexpr std::string_view name = "gelu_forward";
  check_floating(name, "x", x.dtype);
  check_operand(name, "y", y, x);
  dispatch(
      stream, name, meta::elementwise(meta::gelu_forward_operations, y, x),
      [threads = stream.threads(), x, y] { cpu::gelu_forward(threads, x, y); },
      [&] { cuda::gelu_forward(stream, x, y); });
}

void gelu_backward(Stream& stream, const ConstTensorView& x, const ConstTensorView& dy,
                   const TensorView& dx) {
  constexpr std::string_view name = "gelu_backward";
  check_floating(name, "x", x.dtype);
  check_operand(name, "dy", dy, x);
  check_operand(name, "dx", dx, x);
  dispatch(
      stream, name, meta::elementwise(meta::gelu_backward_operations, dx, x, dy),
      [threads = stream.threads(), x, dy, dx] { cpu::gelu_backward(threads, x, dy, dx); },
      [&] { cuda::gelu_backward(stream, x, dy, dx); });
}

void gelu_forward_backward(Stream& stream, const ConstTensorView& x, const ConstTensorView& dy,
                           const TensorView& y, const TensorView& dx) {
  constexpr std::string_view name = "gelu_forward_backward";
  check_floating(name, "x", x.dtype);
  check_operand(name, "dy", dy, x);
  check_operand(name, "y", y, x);
  check_operand(name, "dx", dx, x);
  meta::Cost cost = meta::elementwise(meta::gelu_forward_backward_operations, dx, x, dy);
  cost.bytes_written += static_cast<double>(y.bytes());
  dispatch(
      stream, name, cost,
      [threads = stream.threads(), x, dy, y, dx] { cpu::gelu_forward_backward(threads, x, dy, y, dx); },
      [&] {
        cuda::gelu_forward(stream, x, y);
        cuda::gelu_backward(stream, x, dy, dx);
      });
}

void dropout(Stream& stream, const DropoutOptions& options, const ConstTensorView& x, const TensorView& y) {
  constexpr std::string_view name = "dropout";
  check_floating(name, "x", x.dtype);
  check_operand(name, "y", y, x);
  if (!(options.probability >= 0 && options.probability < 1)) {
    refuse(name, fmt::format("probability is {}, wanted a number in [0, 1)", options.probability));
  }
  const auto samples = static_cast<std::int64_t>(options.samples.size());
  cpu::DropoutPart part{options.first_element, options.sample_elements, options.sample_offset};
  if (part.first < 0 || part.per_sample < 0 || (part.first > 0 && part.per_sample == 0)) {
    refuse(name, fmt::format("first_element is {} with sample_elements {}, wanted at least 0, and "
                             "sample_elements where a part begins behind the first element",
                             part.first, part.per_sample));
  }
  if (part.offset < 0) refuse(name, fmt::format("sample_offset is {}, wanted at least 0", part.offset));
  if (part.per_sample == 0) {
    if (samples == 0 ? x.elements() != 0 : x.elements() % samples != 0) {
      refuse(name, fmt::format("`x` has {} elements, which {} samples do not divide", x.elements(), samples));
    }
    if (samples > 0) part.per_sample = x.elements() / samples;
  }
  if (options.row_elements != 0) {
    check_columns(name, options, x.shape);
    part.columns = x.shape[x.shape.rank() - 1];
    part.row_elements = options.row_elements;
    part.first_column = options.first_column;
    part.column_blocks = options.column_blocks;
  }
  dispatch(
      stream, name, meta::elementwise(1, y, x),
      [threads = stream.threads(), mask = cpu::DropoutMask(options), part, x, y,
       indices = std::vector<std::int64_t>(options.samples.begin(), options.samples.end())] {
        cpu::dropout(threads, mask, indices, part, x, y);
      },
      [&] { cuda::dropout(stream, options, x, y); });
}

}  // namespace tranche::kernels
