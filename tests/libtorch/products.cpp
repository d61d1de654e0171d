/// libtorch_products: compares GEMMs of both libraries in one process with loops in double. It is linked in
/// three orders (CMakeLists.txt), in each of which each library must find its own functions.

#include <dlfcn.h>
#include <torch/torch.h>
#include <tranche/tranche.h>

#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

namespace {

using namespace tranche;

bool good = true;

/// Compares with a b, where a is m x k and b is k x n.
void expect(const std::string& what, const at::Tensor& found, const at::Tensor& a, const at::Tensor& b,
            double tolerance) {
  const at::Tensor x = a.to(torch::kDouble).contiguous(), y = b.to(torch::kDouble).contiguous();
  const at::Tensor z = found.to(torch::kDouble).contiguous();
  const std::int64_t m = x.size(0), k = x.size(1), n = y.size(1);
  double worst = 0;
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (std::int64_t p = 0; p < k; ++p)
        sum += x.data_ptr<double>()[i * k + p] * y.data_ptr<double>()[p * n + j];
      worst = std::max(worst, std::abs(sum - z.data_ptr<double>()[i * n + j]));
    }
  }
  std::printf("%-24s off by %.1e\n", what.c_str(), worst);
  if (!(worst <= tolerance)) good = false;
}

at::Tensor of_tranche(Device& device, const at::Tensor& a, const at::Tensor& b) {
  const DataType type = a.scalar_type() == torch::kFloat ? DataType::float32 : DataType::bfloat16;
  const at::Tensor c = torch::zeros({a.size(0), b.size(1)}, a.options());
  std::vector<char> scratch(std::size_t{1} << 24);
  const auto view = [&](const at::Tensor& t) {
    return TensorView{t.data_ptr(), type, {t.size(0), t.size(1)}};
  };
  kernels::matmul(device.compute_stream(), {}, view(a), view(b), view(c),
                  {scratch.data(), std::int64_t(scratch.size())});
  return c;
}

}  // namespace

int main() {
  const auto device = make_device({.kind = DeviceKind::cpu, .threads = 1});
  torch::manual_seed(1);
  for (const auto type : {torch::kFloat, torch::kBFloat16}) {
    const std::string name = type == torch::kFloat ? "fp32" : "bf16";
    const double tolerance = type == torch::kFloat ? 2e-4 : 0.5;
    const at::Tensor a = torch::randn({96, 128}).to(type), b = torch::randn({128, 160}).to(type);
    expect("tranche " + name, of_tranche(*device, a, b), a, b, tolerance);
    expect("torch " + name, torch::matmul(a, b), a, b, tolerance);
    expect("torch linear " + name, torch::linear(a, b.t().contiguous()), a, b, tolerance);
    const at::Tensor image =
        a.view({1, 96, 128}).transpose(1, 2).contiguous();  // a convolution of length 1 is a GEMM
    const at::Tensor out = torch::conv1d(image, b.t().contiguous().unsqueeze(-1));
    expect("torch conv1d " + name, out[0].t(), a, b, tolerance);
    expect("tranche again " + name, of_tranche(*device, a, b), a, b, tolerance);
  }
  Dl_info info{};
  const void* sgemm = dlsym(RTLD_DEFAULT, "sgemm_");
  if (sgemm != nullptr && dladdr(sgemm, &info) != 0)
    std::printf("sgemm_ of the process is of %s\n", info.dli_fname);
  std::printf("%s\n", good ? "all products are right" : "a product is wrong");
  return good ? 0 : 1;
}
