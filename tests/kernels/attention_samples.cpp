// attention_samples FOLDER: runs our attention on a GPU for a few shapes in bf16, forward and backward.
// Inputs and results are written to raw files and samples.json, and scripts/gpu/peer_torch.py computes the
// results again. Exit status: 0 written, 1 not, 2 usage.
#include <cstdio>
#include <exception>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "tranche/device/device.h"
#include "tranche/kernels/attention.h"
#include "tranche/kernels/elementwise.h"

namespace tranche {
namespace {

constexpr auto bf16 = DataType::bfloat16;

struct Sample {
  std::int64_t batch, time, heads, key_value_heads, head;
};
constexpr Sample samples[] = {{2, 130, 3, 3, 64}, {1, 192, 4, 2, 128}, {2, 64, 2, 1, 64}};

class Writer {
 public:
  Writer(std::string folder, Device& device) : folder_(std::move(folder)), device_(device) {}

  /// A tensor of random values or of zeros, which exists until the end.
  TensorView tensor(DataType dtype, const Shape& shape, bool random) {
    const std::int64_t count = shape.elements();
    memory_.emplace_back(device_.memory(Tier::device), count * size_of(dtype), Category::other, "sample");
    const TensorView view{memory_.back().data(), dtype, shape};
    Stream& stream = device_.compute_stream();
    if (!random) {
      device_.fill_bytes(stream, view.data, 0, count * size_of(dtype));
      return view;
    }
    const Buffer wide(device_.memory(Tier::device), count * 4, Category::other, "sample");
    const TensorView drawn{wide.data(), DataType::float32, shape};
    kernels::fill_uniform(stream, drawn, {.seed = 7, .subject = memory_.size()}, 0, -1.0f, 1.0f);
    kernels::cast(stream, drawn, view);
    stream.synchronize();
    return view;
  }

  void write(const std::string& name, const TensorView& view) {
    std::vector<char> bytes(static_cast<std::size_t>(view.shape.elements() * size_of(view.dtype)));
    device_.copy_to_host(device_.compute_stream(), bytes.data(), view.data,
                         static_cast<std::int64_t>(bytes.size()));
    device_.compute_stream().synchronize();
    std::ofstream file(folder_ + "/" + name, std::ios::binary);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    if (!file.flush()) throw std::runtime_error("cannot write " + folder_ + "/" + name);
  }

 private:
  std::string folder_;
  Device& device_;
  std::vector<Buffer> memory_;
};

void write_samples(const std::string& folder) {
  const auto device = make_device({.kind = DeviceKind::cuda});
  Writer writer(folder, *device);
  nlohmann::json listed = nlohmann::json::array();
  for (const Sample& of : samples) {
    const std::string name = std::to_string(of.head) + "-" + std::to_string(of.key_value_heads);
    const std::int64_t width = of.heads * of.head, key_width = of.key_value_heads * of.head;
    const Shape packed_shape{of.batch, of.time, width + 2 * key_width}, out_shape{of.batch, of.time, width};
    const TensorView packed = writer.tensor(bf16, packed_shape, true),
                     d_out = writer.tensor(bf16, out_shape, true),
                     out = writer.tensor(bf16, out_shape, false),
                     gradient = writer.tensor(bf16, packed_shape, false),
                     log_sum_exp = writer.tensor(DataType::float32, {of.batch, of.heads, of.time}, false),
                     scratch = writer.tensor(DataType::uint8, {std::int64_t{32} << 20}, false);
    kernels::AttentionOptions options;
    options.heads = of.heads;
    options.key_value_heads = of.key_value_heads;
    const kernels::Workspace workspace{scratch.data, scratch.shape.elements()};
    const kernels::ConstHeads query{packed}, key{packed, width}, value{packed, width + key_width};
    Stream& stream = device->compute_stream();
    kernels::attention_forward(stream, options, query, key, value, out, log_sum_exp, workspace);
    kernels::attention_backward(stream, options, d_out, query, key, value, out, log_sum_exp, {gradient},
                                {gradient, width}, {gradient, width + key_width}, workspace);
    const std::pair<const char*, TensorView> written[] = {
        {"packed", packed}, {"d_out", d_out}, {"out", out}, {"gradient", gradient}};
    nlohmann::json files;
    for (const auto& [what, view] : written) {
      files[what] = name + "-" + what + ".bf16";
      writer.write(files[what], view);
    }
    listed.push_back({{"batch", of.batch},
                      {"time", of.time},
                      {"heads", of.heads},
                      {"key_value_heads", of.key_value_heads},
                      {"head", of.head},
                      {"files", files}});
  }
  std::ofstream list(folder + "/samples.json");
  list << listed.dump(1) << "\n";
  if (!list.flush()) throw std::runtime_error("cannot write " + folder + "/samples.json");
}

}  // namespace
}  // namespace tranche

int main(int count, char** arguments) {
  if (count != 2) {
    std::fprintf(stderr, "usage: attention_samples FOLDER\n");
    return 2;
  }
  try {
    tranche::write_samples(arguments[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "attention_samples: %s\n", error.what());
    return 1;
  }
  return 0;
}
