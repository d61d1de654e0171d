#include "bench/memory_bound_kernels.h"

#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "tranche/kernels/cached_attention.h"
#include "tranche/kernels/cross_entropy.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/kernels/embedding.h"
#include "tranche/kernels/layer_norm.h"
#include "tranche/kernels/matmul_rows.h"
#include "tranche/kernels/optimizer_update.h"
#include "tranche/kernels/quantization.h"
#include "tranche/kernels/reduction.h"
#include "tranche/kernels/rms_norm.h"
#include "tranche/kernels/rope.h"
#include "tranche/kernels/swiglu.h"

namespace tranche::kernels::bench {

namespace {

using Bench = DeviceBench;

struct Entries {
  const AddBench& add;
  std::int64_t flat;  ///< elements of flat operands
  void operator()(const std::string& name, const Bench::Prepare& prepare, const Traffic& traffic = {}) const {
    add(name, prepare, traffic);
  }
};

constexpr auto fp32 = DataType::float32;
constexpr auto bf16 = DataType::bfloat16;
std::string with_elements(const std::string& kernel, std::int64_t elements) {
  return kernel + "/elements:" + std::to_string(elements);
}

void add_elementwise(const Entries& entry) {
  const std::int64_t flat = entry.flat;
  entry(with_elements("device_copy", flat), [=](Bench& b) -> Bench::Call {
    const auto from = b.tensor(fp32, {b.sized(flat)}), to = b.tensor(fp32, {b.sized(flat)});
    return [=](Stream& stream) { copy(stream, from, to); };
  });
  for (const auto& [name, from_type, to_type] : {std::tuple{"cast_fp32_bf16", fp32, bf16},
                                                 {"cast_bf16_fp32", bf16, fp32},
                                                 {"cast_fp32_fp16", fp32, DataType::float16}}) {
    entry(with_elements(name, flat),
          [flat, from_type = from_type, to_type = to_type](Bench& b) -> Bench::Call {
            const auto from = b.tensor(from_type, {b.sized(flat)}), to = b.tensor(to_type, {b.sized(flat)});
            return [=](Stream& stream) { cast(stream, from, to); };
          });
  }
  entry(with_elements("fill_zero", flat), [=](Bench& b) -> Bench::Call {
    const auto out = b.tensor(fp32, {b.sized(flat)});
    return [=](Stream& stream) { fill_zero(stream, out); };
  });
  for (const auto dtype : {fp32, bf16}) {
    const std::string suffix = "_" + std::string(name_of(dtype));
    entry(with_elements("add" + suffix, flat), [=](Bench& b) -> Bench::Call {
      const Shape shape{b.sized(flat)};
      const auto x = b.tensor(dtype, shape), y = b.tensor(dtype, shape), out = b.tensor(dtype, shape);
      return [=](Stream& stream) { add(stream, x, y, out); };
    });
    entry(with_elements("accumulate" + suffix, flat), [=](Bench& b) -> Bench::Call {
      const auto x = b.tensor(dtype, {b.sized(flat)}), sum = b.tensor(fp32, {b.sized(flat)});
      return [=](Stream& stream) { accumulate(stream, x, sum); };
    });
    entry(with_elements("gelu_forward" + suffix, flat), [=](Bench& b) -> Bench::Call {
      const auto x = b.tensor(dtype, {b.sized(flat)}), y = b.tensor(dtype, {b.sized(flat)});
      return [=](Stream& stream) { gelu_forward(stream, x, y); };
    });
    entry(with_elements("gelu_backward" + suffix, flat), [=](Bench& b) -> Bench::Call {
      const Shape shape{b.sized(flat)};
      const auto x = b.tensor(dtype, shape), dy = b.tensor(dtype, shape), dx = b.tensor(dtype, shape);
      return [=](Stream& stream) { gelu_backward(stream, x, dy, dx); };
    });
    entry(with_elements("swiglu_forward" + suffix, flat), [=](Bench& b) -> Bench::Call {
      const Shape shape{b.sized(flat)};
      const auto gate = b.tensor(dtype, shape), up = b.tensor(dtype, shape), out = b.tensor(dtype, shape);
      return [=](Stream& stream) { swiglu_forward(stream, gate, up, out); };
    });
    entry(with_elements("swiglu_forward_backward" + suffix, flat), [=](Bench& b) -> Bench::Call {
      const Shape shape{b.sized(flat)};
      const auto gate = b.tensor(dtype, shape), up = b.tensor(dtype, shape), d_out = b.tensor(dtype, shape),
                 out = b.tensor(dtype, shape), d_gate = b.tensor(dtype, shape), d_up = b.tensor(dtype, shape);
      return [=](Stream& stream) { swiglu_forward_backward(stream, gate, up, d_out, out, d_gate, d_up); };
    });
    entry(with_elements("dropout" + suffix, flat), [=](Bench& b) -> Bench::Call {
      const auto x = b.tensor(dtype, {b.sized(flat)}), y = b.tensor(dtype, {b.sized(flat)});
      return [=](Stream& stream) {
        const std::int64_t samples[] = {0, 1, 2, 3};
        dropout(stream, {0.1f, 1, 2, 3, samples}, x, y);
      };
    });
  }
}

/// `elements` rounded up to whole blocks.
std::int64_t whole_blocks(std::int64_t elements) {
  return (elements + quantized_block - 1) / quantized_block * quantized_block;
}

void add_updates(const Entries& entry) {
  const std::int64_t flat = entry.flat;
  static_assert(quantized_block == block8_elements);
  for (const auto& [name, moment] :
       {std::pair{"adamw", fp32}, {"adamw_bf16_moments", bf16}, {"adamw_block8", DataType::block8}}) {
    entry(with_elements(name, flat), [flat, moment = moment](Bench& b) -> Bench::Call {
      const Shape shape{whole_blocks(b.sized(flat))};
      const auto gradient = b.tensor(bf16, shape), master = b.tensor(fp32, shape),
                 weight = b.tensor(bf16, shape);
      const auto m = b.tensor(moment, shape),
                 v = b.tensor(is_block(moment) ? DataType::block8_unsigned : moment, shape, 0.1f);
      AdamArguments arguments;
      arguments.learning_rate = arguments.step_size = 1e-4f;
      arguments.weight_decay = 0.1f;
      const auto* held = static_cast<const AdamArguments*>(b.constant(&arguments, sizeof(arguments)));
      return [=, all = UpdateSegment{0, shape.elements(), 0}](Stream& stream) {
        adam_update(stream, {held}, {&all, 1}, gradient, master, m, v, weight);
      };
    });
  }
  entry(with_elements("sgd_momentum", flat), [=](Bench& b) -> Bench::Call {
    const Shape shape{b.sized(flat)};
    const auto gradient = b.tensor(bf16, shape), master = b.tensor(fp32, shape),
               weight = b.tensor(bf16, shape);
    const auto buffer = b.tensor(fp32, shape);
    const SgdArguments arguments{1e-3f, 0.9f, 0, 0.1f};
    const auto* held = static_cast<const SgdArguments*>(b.constant(&arguments, sizeof(arguments)));
    return [=, all = UpdateSegment{0, shape.elements(), 0}](Stream& stream) {
      sgd_update(stream, {held}, {&all, 1}, gradient, master, buffer, weight);
    };
  });
}

void add_reductions(const Entries& entry) {
  const std::int64_t flat = entry.flat;
  for (const int pieces : {2, 8}) {
    entry("ordered_sum_bf16/pieces:" + std::to_string(pieces), [=](Bench& b) -> Bench::Call {
      const Shape shape{b.sized(flat / 4)};
      std::vector<const void*> list;
      for (int i = 0; i < pieces; ++i) list.push_back(b.tensor(bf16, shape).data);
      const auto out = b.tensor(fp32, shape);
      return [=](Stream& stream) { ordered_sum(stream, list, bf16, 8, true, out); };
    });
  }
  for (const DataType dtype : {fp32, bf16}) {
    const std::string of = "_" + std::string(name_of(dtype));
    entry(with_elements("quantize" + of, flat), [=](Bench& b) -> Bench::Call {
      const Shape shape{whole_blocks(b.sized(flat))};
      const auto values = b.tensor(dtype, shape);
      void* const blocks = b.tensor(DataType::uint8, {quantized_bytes(shape.elements())}).data;
      return [=](Stream& stream) { quantize(stream, values, blocks); };
    });
    entry(with_elements("dequantize" + of, flat), [=](Bench& b) -> Bench::Call {
      const Shape shape{whole_blocks(b.sized(flat))};
      const auto values = b.tensor(dtype, shape);
      void* const blocks = b.tensor(DataType::uint8, {quantized_bytes(shape.elements())}).data;
      return [=](Stream& stream) { dequantize(stream, blocks, values); };
    });
  }
  for (const int pieces : {2, 8}) {
    entry("quantized_sum/pieces:" + std::to_string(pieces), [=](Bench& b) -> Bench::Call {
      const Shape shape{whole_blocks(b.sized(flat / 4))};
      void* const blocks = b.tensor(DataType::uint8, {pieces * quantized_bytes(shape.elements())}).data;
      const auto out = b.tensor(fp32, shape);
      return [=](Stream& stream) { quantized_sum(stream, blocks, pieces, 8, true, out); };
    });
  }
  for (const std::int64_t elements : {flat / 32, flat}) {
    entry(with_elements("gradient_statistics", elements), [=](Bench& b) -> Bench::Call {
      const auto gradient = b.tensor(fp32, {b.sized(elements)});
      auto* statistics =
          static_cast<GradientStatistics*>(b.tensor(DataType::int64, {sizeof(GradientStatistics) / 8}).data);
      return [=](Stream& stream) { gradient_statistics(stream, gradient, statistics); };
    });
  }
  entry(with_elements("add_digest", flat), [=](Bench& b) -> Bench::Call {
    const auto values = b.tensor(fp32, {b.sized(flat)});
    auto* digest = static_cast<Digest*>(b.tensor(DataType::int64, {2}).data);
    return [=](Stream& stream) { add_digest(stream, values, 0, 0, digest); };
  });
}

/// Empty for bf16, which most kernels use here.
std::string suffix_of(DataType dtype) {
  return dtype == bf16 ? "" : "_" + std::string(name_of(dtype));
}

void add_rms_norm(const Entries& entry, DataType dtype, std::int64_t rows, std::int64_t columns) {
  const std::string shape_name =
      suffix_of(dtype) + "/rows:" + std::to_string(rows) + "/columns:" + std::to_string(columns);
  const auto shape_of = [=](const Bench& b) { return Shape{b.small() ? 70 : rows, columns}; };
  entry("rms_norm_forward" + shape_name, [=](Bench& b) -> Bench::Call {
    const Shape shape = shape_of(b);
    const auto x = b.tensor(dtype, shape), out = b.tensor(dtype, shape), weight = b.tensor(dtype, {columns}),
               rstd = b.tensor(fp32, {shape[0]});
    return [=](Stream& stream) { rms_norm_forward(stream, x, weight, 1e-5f, out, rstd); };
  });
  entry("residual_rms_norm_forward" + shape_name, [=](Bench& b) -> Bench::Call {
    const Shape shape = shape_of(b);
    const auto x = b.tensor(dtype, shape), other = b.tensor(dtype, shape), out = b.tensor(dtype, shape),
               sum = b.tensor(dtype, shape), weight = b.tensor(dtype, {columns}),
               rstd = b.tensor(fp32, {shape[0]});
    return
        [=](Stream& stream) { residual_rms_norm_forward(stream, x, other, weight, 1e-5f, sum, out, rstd); };
  });
  entry("rms_norm_backward" + shape_name,
        [=](Bench& b) -> Bench::Call {
          const Shape shape = shape_of(b);
          const auto x = b.tensor(dtype, shape), d_out = b.tensor(dtype, shape), d_x = b.tensor(dtype, shape),
                     weight = b.tensor(dtype, {columns}), rstd = b.tensor(fp32, {shape[0]}),
                     d_weight = b.tensor(fp32, {columns});
          return [=, workspace = b.workspace()](Stream& stream) {
            rms_norm_backward(stream, d_out, x, weight, rstd, true, d_x, d_weight, workspace);
          };
        },
        {.updated = static_cast<double>(rows * columns * size_of(dtype))});
}

/// Shapes of the Llama family; rows of 128 elements are heads.
void add_llama_layers(const Entries& entry) {
  for (const DataType dtype : {bf16, fp32}) {
    for (const auto& [rows, columns] :
         {std::pair<std::int64_t, std::int64_t>{32768, 768}, {8192, 4096}, {262144, 128}}) {
      add_rms_norm(entry, dtype, rows, columns);
    }
    constexpr std::int64_t heads = 32;
    for (const std::int64_t head_dim : {64, 128}) {
      entry("rope" + suffix_of(dtype) + "/rows:8192/heads:32/head_dim:" + std::to_string(head_dim),
            [=](Bench& b) -> Bench::Call {
              const std::int64_t rows = b.small() ? 24 : 8192;
              const auto x = b.tensor(dtype, {rows, heads * head_dim}),
                         table = b.tensor(fp32, {rows, head_dim});
              return [=](Stream& stream) { rope(stream, false, table, heads, head_dim, x); };
            },
            {.updated = static_cast<double>(8192 * heads * head_dim * size_of(dtype))});
    }
  }
}

/// Shapes of generation: keys, values and weights are read once for a token of each text.
void add_generation(const Entries& entry) {
  struct Heads {
    std::int64_t batch, heads, shared, width, keys;
  };
  for (const Heads& h : {Heads{1, 12, 12, 64, 4096}, Heads{8, 12, 12, 64, 1024}, Heads{8, 32, 8, 128, 1024},
                         Heads{8, 8, 1, 128, 2048}}) {
    for (const auto dtype : {fp32, bf16}) {
      entry("attention_with_cache_" + std::string(name_of(dtype)) + "/batch:" + std::to_string(h.batch) +
                "/heads:" + std::to_string(h.heads) + "/shared:" + std::to_string(h.shared) +
                "/width:" + std::to_string(h.width) + "/keys:" + std::to_string(h.keys),
            [=](Bench& b) -> Bench::Call {
              const std::int64_t keys = b.small() ? 40 : h.keys;
              AttentionOptions options;
              options.heads = h.heads;
              const auto query = b.tensor(dtype, {h.batch, 1, h.heads * h.width}),
                         out = b.tensor(dtype, {h.batch, 1, h.heads * h.width});
              const Shape kept{h.batch, h.shared, keys, h.width};
              const std::vector<std::int32_t> lengths(static_cast<std::size_t>(h.batch),
                                                      static_cast<std::int32_t>(keys));  // all caches are
                                                                                         // full
              const CachedKeys cache{
                  b.tensor(dtype, kept), b.tensor(dtype, kept),
                  ConstTensorView(b.constant(lengths.data(), 4 * h.batch), DataType::int32, {h.batch}), keys};
              return [=](Stream& stream) { attention_with_cache(stream, options, {query}, cache, out); };
            });
    }
  }
  for (const std::int64_t rows : {1, 8}) {
    for (const bool transposed : {false, true}) {
      for (const auto dtype : {fp32, bf16}) {
        entry("matmul_rows_" + std::string(name_of(dtype)) + (transposed ? "_transposed" : "") +
                  "/rows:" + std::to_string(rows) + "/inner:768/columns:3072",
              [=](Bench& b) -> Bench::Call {
                const std::int64_t inner = 768, columns = b.small() ? 64 : 3072;
                const auto x = b.tensor(dtype, {rows, inner}), out = b.tensor(dtype, {rows, columns}),
                           weight =
                               b.tensor(dtype, transposed ? Shape{columns, inner} : Shape{inner, columns});
                return [=, workspace = b.workspace()](Stream& stream) {
                  matmul_rows(stream, transposed, x, weight, {}, out, workspace);
                };
              });
      }
    }
  }
}

constexpr std::int64_t vocabulary = 50257, embedding_width = 768, embedding_time = 1024;

/// The bytes are those of uniformly drawn tokens: the drawn rows, each counted once if it is added to.
void add_embedding(const Entries& entry, DataType dtype, std::int64_t batch, bool with_positions) {
  constexpr std::int64_t width = embedding_width, time = embedding_time;
  const std::string name = (with_positions ? "" : "_without_positions") + suffix_of(dtype) +
                           "/tokens:" + std::to_string(batch * time);
  const auto time_of = [](const Bench& b) { return b.small() ? 24 : time; };
  const auto rows_of = [](const Bench& b) { return b.small() ? 256 : vocabulary; };
  const auto tokens_of = [=](Bench& b) {
    return b.tensor(DataType::int32, {batch, time_of(b)}, 0, static_cast<float>(rows_of(b)));
  };
  const auto positions_of = [=](Bench& b, DataType type) {
    return with_positions ? b.tensor(type, {time_of(b), width}) : TensorView{};
  };
  const auto bytes = static_cast<double>(size_of(dtype) * batch * time * width);
  entry("embedding_forward" + name,
        [=](Bench& b) -> Bench::Call {
          const auto tokens = tokens_of(b), table = b.tensor(dtype, {rows_of(b), width}),
                     positions = positions_of(b, dtype), out = b.tensor(dtype, {batch, time_of(b), width});
          return [=](Stream& stream) { embedding_forward(stream, tokens, table, positions, out); };
        },
        {.read = bytes, .written = bytes});
  const double distinct =
      vocabulary * (1 - std::pow(1 - 1.0 / vocabulary, static_cast<double>(batch * time)));
  entry("embedding_backward" + name,
        [=](Bench& b) -> Bench::Call {
          const auto tokens = tokens_of(b), table = b.tensor(fp32, {rows_of(b), width}),
                     positions = positions_of(b, fp32), d_out = b.tensor(dtype, {batch, time_of(b), width});
          return [=](Stream& stream) { embedding_backward(stream, tokens, d_out, table, positions); };
        },
        {.read = bytes,
         .updated = 4.0 * width * (distinct + (with_positions ? static_cast<double>(time) : 0))});
}

void add_layers(const Entries& entry) {
  for (const std::int64_t columns : {768, 1600}) {
    const std::int64_t rows = 32768;
    const std::string shape_name = "/rows:" + std::to_string(rows) + "/columns:" + std::to_string(columns);
    const auto shape_of = [=](const Bench& b) { return Shape{b.small() ? 70 : rows, columns}; };
    entry("layer_norm_forward" + shape_name, [=](Bench& b) -> Bench::Call {
      const Shape shape = shape_of(b);
      const auto x = b.tensor(bf16, shape), y = b.tensor(bf16, shape), weight = b.tensor(bf16, {columns}),
                 bias = b.tensor(bf16, {columns}), mean = b.tensor(fp32, {shape[0]}),
                 rstd = b.tensor(fp32, {shape[0]});
      return [=](Stream& stream) { layer_norm_forward(stream, x, weight, bias, 1e-5f, y, mean, rstd); };
    });
    entry("residual_layer_norm_forward" + shape_name, [=](Bench& b) -> Bench::Call {
      const Shape shape = shape_of(b);
      const auto x = b.tensor(bf16, shape), other = b.tensor(bf16, shape), y = b.tensor(bf16, shape),
                 sum = b.tensor(bf16, shape), weight = b.tensor(bf16, {columns}),
                 bias = b.tensor(bf16, {columns}), mean = b.tensor(fp32, {shape[0]}),
                 rstd = b.tensor(fp32, {shape[0]});
      return [=](Stream& stream) {
        residual_layer_norm_forward(stream, x, other, weight, bias, 1e-5f, sum, y, mean, rstd);
      };
    });
    entry("layer_norm_backward" + shape_name, [=](Bench& b) -> Bench::Call {
      const Shape shape = shape_of(b);
      const auto x = b.tensor(bf16, shape), dy = b.tensor(bf16, shape), dx = b.tensor(bf16, shape),
                 weight = b.tensor(bf16, {columns}), mean = b.tensor(fp32, {shape[0]}),
                 rstd = b.tensor(fp32, {shape[0]}), d_weight = b.tensor(fp32, {columns}),
                 d_bias = b.tensor(fp32, {columns});
      return [=, workspace = b.workspace()](Stream& stream) {
        layer_norm_backward(stream, dy, x, weight, mean, rstd, true, dx, d_weight, d_bias, workspace);
      };
    });
    entry("bias_gradient" + shape_name, [=](Bench& b) -> Bench::Call {
      const auto gradient = b.tensor(bf16, shape_of(b)), out = b.tensor(fp32, {columns});
      return
          [=, workspace = b.workspace()](Stream& stream) { bias_gradient(stream, gradient, out, workspace); };
    });
    entry("add_bias" + shape_name, [=](Bench& b) -> Bench::Call {
      const auto x = b.tensor(bf16, shape_of(b)), bias = b.tensor(bf16, {columns});
      return [=](Stream& stream) { add_bias(stream, x, bias); };
    });
  }
  for (const std::int64_t batch : {8, 64}) {
    add_embedding(entry, bf16, batch, true);
    for (const DataType dtype : {bf16, fp32}) add_embedding(entry, dtype, batch, false);
  }
  for (const std::int64_t columns : {8192, 50257}) {
    const std::string shape_name = "/rows:4096/columns:" + std::to_string(columns);
    const auto operands = [columns](Bench& b) {
      const std::int64_t rows = b.small() ? 3 : 4096;
      struct Set {
        TensorView logits, targets;
        CrossEntropyState state;
      };
      return Set{b.tensor(fp32, {rows, columns}),
                 b.tensor(DataType::int32, {rows}, 0, static_cast<float>(columns)),
                 {b.tensor(fp32, {rows}, 1, 2), b.tensor(fp32, {rows}, 100, 200), b.tensor(fp32, {rows})}};
    };
    entry("cross_entropy_accumulate" + shape_name, [=](Bench& b) -> Bench::Call {
      const auto set = operands(b);
      return [=](Stream& stream) { cross_entropy_accumulate(stream, set.logits, set.targets, 0, set.state); };
    });
    entry("cross_entropy_gradient" + shape_name, [=](Bench& b) -> Bench::Call {
      const auto set = operands(b);
      const auto d_logits = b.tensor(bf16, set.logits.shape);
      return [=](Stream& stream) {
        cross_entropy_gradient(stream, set.logits, set.targets, 0, set.state, 0.5f, d_logits);
      };
    });
  }
}

}  // namespace

void add_memory_bound_kernels(std::int64_t flat, const AddBench& add) {
  const Entries entry{add, flat};
  add_elementwise(entry);
  add_updates(entry);
  add_reductions(entry);
  add_layers(entry);
  add_llama_layers(entry);
  add_generation(entry);
}

}  // namespace tranche::kernels::bench
