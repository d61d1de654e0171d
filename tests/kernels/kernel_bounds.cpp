// kernel_bounds --list: prints the kernels below and their numbers of tensors, a line each. kernel_bounds
// KERNEL TENSOR: runs the kernel with that tensor's allocation one byte short, or with none short for -1.
// kernel_bounds --all: runs every kernel with every tensor short, one after another, and prints each before
// it runs. With TRANCHE_PLAIN_DEVICE_MEMORY=1 each tensor is a separate CUDA allocation, so an access to its
// last byte is one beyond it. AddressSanitizer on emulated GPUs, and compute-sanitizer on real ones, must
// find that. Exit status: 0 it ran, 1 it failed, 2 usage.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "tranche/device/device.h"
#include "tranche/kernels/attention.h"
#include "tranche/kernels/cross_entropy.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/kernels/embedding.h"
#include "tranche/kernels/layer_norm.h"
#include "tranche/kernels/optimizer_update.h"
#include "tranche/kernels/quantization.h"
#include "tranche/kernels/reduction.h"
#include "tranche/kernels/rms_norm.h"
#include "tranche/kernels/rope.h"
#include "tranche/kernels/squared_error.h"
#include "tranche/kernels/swiglu.h"

namespace tranche::kernels {
namespace {

constexpr auto fp32 = DataType::float32, bf16 = DataType::bfloat16, int32 = DataType::int32;

/// Allocates tensors of zeros, one of them in an allocation that is a byte short.
class Tensors {
 public:
  Tensors(Device& device, int short_one) : device_(device), short_one_(short_one) {}

  Stream& stream() { return device_.compute_stream(); }
  TensorView operator()(DataType dtype, const Shape& shape) {
    TensorView view{nullptr, dtype, shape};
    view.data = allocate(view.bytes() - (number_ == short_one_ ? 1 : 0));
    ++number_;
    return view;
  }
  /// Memory that is not a tensor of the kernel, and is never short.
  Workspace workspace() { return {allocate(1 << 20), 1 << 20}; }
  template <class T>
  T* value(const T& initial) {
    void* const data = allocate(sizeof(T));
    device_.copy_from_host(stream(), data, &initial, sizeof(T));
    return static_cast<T*>(data);
  }
  int count() const { return number_; }

 private:
  void* allocate(std::int64_t bytes) {
    memory_.emplace_back(device_.memory(Tier::device), bytes, Category::other, "tensor");
    device_.fill_bytes(stream(), memory_.back().data(), 0, bytes);
    return memory_.back().data();
  }
  Device& device_;
  int short_one_;
  int number_ = 0;
  std::vector<Buffer> memory_;
};

struct Kernel {
  std::string_view name;
  std::function<void(Tensors&)> run;
};

void run_attention(Tensors& of, bool backward) {
  constexpr std::int64_t time = 64, width = 64;
  AttentionOptions options;
  options.heads = 1;
  const Shape rows{1, time, width};
  const TensorView query = of(bf16, rows), key = of(bf16, rows), value = of(bf16, rows), out = of(bf16, rows),
                   sums = of(fp32, {1, 1, time});
  if (!backward) {
    return attention_forward(of.stream(), options, {query}, {key}, {value}, out, sums, of.workspace());
  }
  const TensorView d_out = of(bf16, rows), d_query = of(bf16, rows), d_key = of(bf16, rows),
                   d_value = of(bf16, rows);
  attention_backward(of.stream(), options, d_out, {query}, {key}, {value}, out, sums, {d_query}, {d_key},
                     {d_value}, of.workspace());
}

void run_adam(Tensors& of) {
  constexpr std::int64_t count = 1003;
  AdamArguments arguments;
  arguments.learning_rate = arguments.step_size = 1e-3f;
  const UpdateSegment segment{.first = 0, .count = count};
  const TensorView gradient = of(bf16, {count}), master = of(fp32, {count}), average = of(fp32, {count}),
                   squares = of(fp32, {count}), weight = of(bf16, {count});
  adam_update(of.stream(), {.first = of.value(arguments)}, {&segment, 1}, gradient, master, average, squares,
              weight);
}

CrossEntropyState cross_entropy_state(Tensors& of, std::int64_t rows) {
  return {of(fp32, {rows}), of(fp32, {rows}), of(fp32, {rows})};
}

const std::vector<Kernel>& kernels() {
  static const std::vector<Kernel> listed = {
      {"cast", [](Tensors& of) { cast(of.stream(), of(fp32, {1001}), of(bf16, {1001})); }},
      {"fill_constant", [](Tensors& of) { fill_constant(of.stream(), of(fp32, {1001}), 2); }},
      {"fill_normal", [](Tensors& of) { fill_normal(of.stream(), of(fp32, {1001}), {.seed = 1}, 0, 0, 1); }},
      {"fill_uniform",
       [](Tensors& of) { fill_uniform(of.stream(), of(fp32, {1001}), {.seed = 1}, 0, 0, 1); }},
      {"add",
       [](Tensors& of) {
         const TensorView a = of(bf16, {1001}), b = of(fp32, {1001}), out = of(fp32, {1001});
         add(of.stream(), a, b, out);
       }},
      {"accumulate",
       [](Tensors& of) {
         const TensorView x = of(bf16, {1001}), sum = of(fp32, {1001});
         accumulate(of.stream(), x, sum);
       }},
      {"scale", [](Tensors& of) { scale(of.stream(), 2, of(bf16, {1001})); }},
      {"add_bias",
       [](Tensors& of) {
         const TensorView x = of(bf16, {7, 65}), bias = of(bf16, {65});
         add_bias(of.stream(), x, bias);
       }},
      {"bias_gradient",
       [](Tensors& of) {
         const TensorView gradient = of(bf16, {9, 64}), sum = of(fp32, {64});
         bias_gradient(of.stream(), gradient, sum, of.workspace());
       }},
      {"gelu_forward",
       [](Tensors& of) {
         const TensorView x = of(bf16, {1001}), y = of(bf16, {1001});
         gelu_forward(of.stream(), x, y);
       }},
      {"gelu_backward",
       [](Tensors& of) {
         const TensorView x = of(bf16, {1001}), dy = of(bf16, {1001}), dx = of(bf16, {1001});
         gelu_backward(of.stream(), x, dy, dx);
       }},
      {"dropout",
       [](Tensors& of) {
         const TensorView x = of(bf16, {1001}), y = of(bf16, {1001});
         const std::int64_t sample = 3;
         dropout(of.stream(), {.probability = 0.5f, .seed = 1, .samples = {&sample, 1}}, x, y);
       }},
      {"embedding_forward",
       [](Tensors& of) {
         const TensorView tokens = of(int32, {2, 8}), table = of(bf16, {1, 64}),
                          positions = of(bf16, {8, 64}), out = of(bf16, {2, 8, 64});
         embedding_forward(of.stream(), tokens, table, positions, out);
       }},
      {"embedding_backward",
       [](Tensors& of) {
         const TensorView tokens = of(int32, {2, 8}), d_out = of(bf16, {2, 8, 64}), table = of(fp32, {1, 64}),
                          positions = of(fp32, {8, 64});
         embedding_backward(of.stream(), tokens, d_out, table, positions);
       }},
      {"layer_norm_forward",
       [](Tensors& of) {
         const TensorView x = of(bf16, {5, 96}), weight = of(bf16, {96}), bias = of(bf16, {96}),
                          y = of(bf16, {5, 96}), mean = of(fp32, {5}), rstd = of(fp32, {5});
         layer_norm_forward(of.stream(), x, weight, bias, 1e-5f, y, mean, rstd);
       }},
      {"layer_norm_backward",
       [](Tensors& of) {
         const TensorView dy = of(bf16, {5, 96}), x = of(bf16, {5, 96}), weight = of(bf16, {96}),
                          mean = of(fp32, {5}), rstd = of(fp32, {5}), dx = of(bf16, {5, 96}),
                          weight_gradient = of(fp32, {96}), bias_gradient = of(fp32, {96});
         layer_norm_backward(of.stream(), dy, x, weight, mean, rstd, false, dx, weight_gradient,
                             bias_gradient, of.workspace());
       }},
      {"rms_norm_forward",
       [](Tensors& of) {
         const TensorView x = of(bf16, {5, 96}), weight = of(bf16, {96}), y = of(bf16, {5, 96}),
                          rstd = of(fp32, {5});
         rms_norm_forward(of.stream(), x, weight, 1e-5f, y, rstd);
       }},
      {"rms_norm_backward",
       [](Tensors& of) {
         const TensorView dy = of(bf16, {5, 96}), x = of(bf16, {5, 96}), weight = of(bf16, {96}),
                          rstd = of(fp32, {5}), dx = of(bf16, {5, 96}), weight_gradient = of(fp32, {96});
         rms_norm_backward(of.stream(), dy, x, weight, rstd, false, dx, weight_gradient, of.workspace());
       }},
      {"cross_entropy_accumulate",
       [](Tensors& of) {
         const TensorView logits = of(fp32, {6, 33}), targets = of(int32, {6});
         cross_entropy_accumulate(of.stream(), logits, targets, 0, cross_entropy_state(of, 6));
       }},
      {"cross_entropy_gradient",
       [](Tensors& of) {
         const TensorView logits = of(fp32, {6, 33}), targets = of(int32, {6}), gradient = of(bf16, {6, 33}),
                          maximum = of(fp32, {6}), sum = of(fp32, {6});
         cross_entropy_gradient(of.stream(), logits, targets, 0, {maximum, sum, maximum}, 1, gradient);
       }},
      {"swiglu_forward",
       [](Tensors& of) {
         const TensorView gate = of(bf16, {5, 96}), up = of(bf16, {5, 96}), out = of(bf16, {5, 96});
         swiglu_forward(of.stream(), gate, up, out);
       }},
      {"swiglu_forward_backward",
       [](Tensors& of) {
         const Shape shape{5, 96};
         const TensorView gate = of(bf16, shape), up = of(bf16, shape), d_out = of(bf16, shape),
                          out = of(bf16, shape), d_gate = of(bf16, shape), d_up = of(bf16, shape);
         swiglu_forward_backward(of.stream(), gate, up, d_out, out, d_gate, d_up);
       }},
      {"squared_error_gradient",
       [](Tensors& of) {
         const TensorView y = of(fp32, {5, 96}), target = of(fp32, {5, 96}), d_y = of(fp32, {5, 96});
         squared_error_gradient(of.stream(), y, target, 1, d_y);
       }},
      {"quantize",
       [](Tensors& of) {
         const TensorView values = of(fp32, {1024}), blocks = of(DataType::uint8, {quantized_bytes(1024)});
         quantize(of.stream(), values, blocks.data);
       }},
      {"dequantize",
       [](Tensors& of) {
         const TensorView blocks = of(DataType::uint8, {quantized_bytes(1024)}), values = of(fp32, {1024});
         dequantize(of.stream(), blocks.data, values);
       }},
      {"gradient_statistics",
       [](Tensors& of) {
         const TensorView gradient = of(bf16, {1001}),
                          statistics = of(DataType::uint8, {std::int64_t{sizeof(GradientStatistics)}});
         gradient_statistics(of.stream(), gradient, static_cast<GradientStatistics*>(statistics.data));
       }},
      {"add_digest",
       [](Tensors& of) {
         const TensorView values = of(bf16, {1001}),
                          digest = of(DataType::uint8, {std::int64_t{sizeof(Digest)}});
         add_digest(of.stream(), values, 1, 0, static_cast<Digest*>(digest.data));
       }},
      {"adam_update", run_adam},
      {"attention_forward", [](Tensors& of) { run_attention(of, false); }},
      {"attention_backward", [](Tensors& of) { run_attention(of, true); }},
  };
  return listed;
}

/// Runs the kernel with tensor `short_one` short; returns its number of tensors.
int run(const Kernel& kernel, int short_one) {
  const auto device = make_device({.kind = DeviceKind::cuda});
  Tensors tensors(*device, short_one);
  kernel.run(tensors);
  device->compute_stream().synchronize();
  return tensors.count();
}

int run_all() {
  for (const Kernel& kernel : kernels()) {
    const int count = run(kernel, -1);
    for (int tensor = 0; tensor < count; ++tensor) {
      std::printf("kernel_bounds: %s, tensor %d\n", std::string(kernel.name).c_str(), tensor);
      std::fflush(stdout);
      try {
        run(kernel, tensor);
      } catch (const std::exception&) {  // the expected result
      }
    }
  }
  return 0;
}

int usage() {
  std::fprintf(stderr, "usage: kernel_bounds --list | kernel_bounds --all | kernel_bounds KERNEL TENSOR\n");
  return 2;
}

int main_of(int count, char** arguments) {
  if (count == 2 && arguments[1] == std::string_view("--all")) return run_all();
  if (count == 2 && arguments[1] == std::string_view("--list")) {
    for (const Kernel& kernel : kernels()) {
      std::printf("%s %d\n", std::string(kernel.name).c_str(), run(kernel, -1));
    }
    return 0;
  }
  if (count != 3) return usage();
  for (const Kernel& kernel : kernels()) {
    if (kernel.name != arguments[1]) continue;
    run(kernel, std::atoi(arguments[2]));
    return 0;
  }
  return usage();
}

}  // namespace
}  // namespace tranche::kernels

int main(int count, char** arguments) {
  try {
    return tranche::kernels::main_of(count, arguments);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kernel_bounds: %s\n", error.what());
    return 1;
  }
}
