// Results of 32 MiB and more are stored past the caches (is_streamed() in kernels/cpu/parallel.h). Their bits
// must equal those of small results.

#include <gmock/gmock.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "tests/kernels/kernel_testing.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/kernels/embedding.h"
#include "tranche/kernels/rms_norm.h"
#include "tranche/kernels/swiglu.h"

namespace tranche::kernels {
namespace {

using namespace testing;

constexpr std::int64_t streamed_bytes = std::int64_t{32} << 20;

/// A tensor that repeats another one's bytes, from an aligned address on; its first dimension is larger.
class Repeated {
 public:
  Repeated(const HostTensor& one, const Shape& shape, std::int64_t copies)
      : piece_(static_cast<std::size_t>(shape.elements() * size_of(one.dtype()))), copies_(copies) {
    dtype_ = one.dtype();
    sizes_.assign(shape.extents().begin(), shape.extents().end());
    sizes_[0] *= copies;
    const std::size_t bytes = piece_ * static_cast<std::size_t>(copies);
    data_.reset(static_cast<std::byte*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64)));
    for (std::int64_t copy = 0; copy < copies; ++copy) std::memcpy(at(copy), one.bytes().data(), piece_);
  }
  TensorView view() const { return {data_.get(), dtype_, Shape(sizes_)}; }
  /// The first copy that differs from the tensor's bytes, or -1.
  std::int64_t first_difference(const HostTensor& from) const {
    for (std::int64_t copy = 0; copy < copies_; ++copy) {
      if (std::memcmp(at(copy), from.bytes().data(), piece_) != 0) return copy;
    }
    return -1;
  }

 private:
  struct Free {
    void operator()(std::byte* data) const { std::free(data); }
  };
  std::byte* at(std::int64_t copy) const { return data_.get() + static_cast<std::size_t>(copy) * piece_; }
  std::size_t piece_;
  std::int64_t copies_;
  DataType dtype_{};
  std::vector<std::int64_t> sizes_;
  std::unique_ptr<std::byte, Free> data_;
};

std::int64_t copies_beyond_caches(DataType dtype, const Shape& shape) {
  return streamed_bytes / (shape.elements() * size_of(dtype)) + 1;
}

TEST(StreamedResults, OfSwigluAreTheBitsOfSmallOnes) {
  Machine machine(2);
  Random random(171);
  const Shape shape{24593};  // blocks of the loops cross the copies, and the last is short
  for (const DataType dtype : floating_dtypes) {
    const std::int64_t copies = copies_beyond_caches(dtype, shape);
    HostTensor gate = random.tensor(dtype, shape, -6, 6), up = random.tensor(dtype, shape),
               d_out = random.tensor(dtype, shape), out(dtype, shape), d_gate(dtype, shape),
               d_up(dtype, shape);
    const Repeated gates(gate, shape, copies), ups(up, shape, copies), d_outs(d_out, shape, copies),
        forward(out, shape, copies), outs(out, shape, copies), d_gates(d_gate, shape, copies),
        d_ups(d_up, shape, copies);
    swiglu_forward_backward(machine.stream(), gate.view(), up.view(), d_out.view(), out.view(), d_gate.view(),
                            d_up.view());
    swiglu_forward(machine.stream(), gates.view(), ups.view(), forward.view());
    swiglu_forward_backward(machine.stream(), gates.view(), ups.view(), d_outs.view(), outs.view(),
                            d_gates.view(), d_ups.view());
    machine.stream().synchronize();
    EXPECT_EQ(forward.first_difference(out), -1) << name_of(dtype) << repeat_line();
    EXPECT_EQ(outs.first_difference(out), -1) << name_of(dtype) << repeat_line();
    EXPECT_EQ(d_gates.first_difference(d_gate), -1) << name_of(dtype) << repeat_line();
    EXPECT_EQ(d_ups.first_difference(d_up), -1) << name_of(dtype) << repeat_line();
  }
}

TEST(StreamedResults, OfGeluAreTheBitsOfSmallOnes) {
  Machine machine(2);
  Random random(174);
  const Shape shape{24593};
  for (const DataType dtype : floating_dtypes) {
    const std::int64_t copies = copies_beyond_caches(dtype, shape);
    HostTensor x = random.tensor(dtype, shape, -6, 6), dy = random.tensor(dtype, shape), y(dtype, shape),
               dx(dtype, shape);
    const Repeated xs(x, shape, copies), dys(dy, shape, copies), forward(y, shape, copies),
        backward(dx, shape, copies), ys(y, shape, copies), dxs(dx, shape, copies);
    gelu_forward_backward(machine.stream(), x.view(), dy.view(), y.view(), dx.view());
    gelu_forward(machine.stream(), xs.view(), forward.view());
    gelu_backward(machine.stream(), xs.view(), dys.view(), backward.view());
    gelu_forward_backward(machine.stream(), xs.view(), dys.view(), ys.view(), dxs.view());
    machine.stream().synchronize();
    EXPECT_EQ(forward.first_difference(y), -1) << name_of(dtype) << repeat_line();
    EXPECT_EQ(backward.first_difference(dx), -1) << name_of(dtype) << repeat_line();
    EXPECT_EQ(ys.first_difference(y), -1) << name_of(dtype) << repeat_line();
    EXPECT_EQ(dxs.first_difference(dx), -1) << name_of(dtype) << repeat_line();
  }
}

TEST(StreamedResults, OfRmsNormAreTheBitsOfSmallOnes) {
  Machine machine(2);
  Random random(172);
  const Shape shape{7, 96};
  for (const DataType dtype : floating_dtypes) {
    const std::int64_t copies = copies_beyond_caches(dtype, shape);
    HostTensor x = random.tensor(dtype, shape), addend = random.tensor(dtype, shape),
               weight = random.tensor(dtype, {96}), out(dtype, shape), sum(dtype, shape),
               normed(dtype, shape), rstd(DataType::float32, {7});
    const Repeated xs(x, shape, copies), addends(addend, shape, copies), outs(out, shape, copies),
        sums(sum, shape, copies), rstds(rstd, {7}, copies);
    rms_norm_forward(machine.stream(), x.view(), weight.view(), 1e-5f, normed.view(), rstd.view());
    rms_norm_forward(machine.stream(), xs.view(), weight.view(), 1e-5f, outs.view(), rstds.view());
    machine.stream().synchronize();
    EXPECT_EQ(outs.first_difference(normed), -1) << name_of(dtype) << repeat_line();
    EXPECT_EQ(rstds.first_difference(rstd), -1) << name_of(dtype) << repeat_line();
    residual_rms_norm_forward(machine.stream(), x.view(), addend.view(), weight.view(), 1e-5f, sum.view(),
                              out.view(), rstd.view());
    residual_rms_norm_forward(machine.stream(), xs.view(), addends.view(), weight.view(), 1e-5f, sums.view(),
                              outs.view(), rstds.view());
    machine.stream().synchronize();
    EXPECT_EQ(sums.first_difference(sum), -1) << name_of(dtype) << repeat_line();
    EXPECT_EQ(outs.first_difference(out), -1) << name_of(dtype) << repeat_line();
  }
}

TEST(StreamedResults, OfAnEmbeddingAreRowsOfTheTable) {
  Machine machine(2);
  Random random(173);
  for (const DataType dtype : floating_dtypes) {
    const Shape shape{13, 96};
    const std::int64_t copies = copies_beyond_caches(dtype, shape);
    HostTensor table = random.tensor(dtype, {5, 96}), rows(dtype, shape);
    const std::vector<double> ids{4, 0, 3, 3, 1, 2, 4, 4, 0, 1, 2, 0, 3};
    HostTensor tokens(DataType::int32, {13, 1}, ids);
    const Repeated all(tokens, {13, 1}, copies), outs(rows, shape, copies);
    embedding_forward(machine.stream(), tokens.view(), table.view(), {}, rows.view());
    embedding_forward(machine.stream(), all.view(), table.view(), {}, outs.view());
    machine.stream().synchronize();
    for (std::size_t row = 0; row < ids.size(); ++row) {
      EXPECT_EQ(rows.values()[row * 96 + 95], table.values()[static_cast<std::size_t>(ids[row]) * 96 + 95]);
    }
    EXPECT_EQ(outs.first_difference(rows), -1) << name_of(dtype) << repeat_line();
  }
}

}  // namespace
}  // namespace tranche::kernels
