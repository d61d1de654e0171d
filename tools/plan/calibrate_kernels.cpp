#include "tools/plan/calibrate_kernels.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <ctime>
#include <utility>

#include "core/clock.h"
#include "tools/plan/calibration_statistics.h"
#include "tranche/device/memory_resources.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/kernels/matmul.h"
#include "tranche/kernels/optimizer_update.h"
#include "tranche/kernels/quantization.h"
#include "tranche/kernels/reduction.h"

namespace tranche::tools {

namespace {

double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/// The operands of successive calls cover this many bytes, so that none is in a cache from the previous call.
constexpr std::int64_t pool_bytes = std::int64_t{48} << 20;
constexpr std::int64_t streamed_bytes = std::int64_t{32} << 20;

/// Memory from which successive operands are taken.
class Pool {
 public:
  Pool(Device& device, bool drawn, float low = -1)
      : buffer_(device.memory(Tier::device), pool_bytes, Category::workspace, "calibration") {
    Stream& stream = device.compute_stream();
    kernels::fill_zero(stream, {buffer_.data(), DataType::float32, {pool_bytes / 4}});
    if (!drawn) return;
    const TensorView first{buffer_.data(), DataType::float32, {drawn_bytes / 4}};
    kernels::fill_uniform(stream, first, {0, RandomPurpose::test, 1}, 0, low, 1);
    repeat();
  }
  void* take(std::int64_t bytes) {
    bytes = aligned_bytes(bytes);
    if (next_ + bytes > pool_bytes) next_ = 0;
    void* at = static_cast<std::byte*>(buffer_.data()) + next_;
    next_ += bytes;
    return at;
  }
  void round_to(Stream& stream, DataType dtype) {
    if (dtype == DataType::float32) return;
    const std::int64_t elements = drawn_bytes / 4;
    auto* second = static_cast<std::byte*>(buffer_.data()) + drawn_bytes;
    kernels::cast(stream, {buffer_.data(), DataType::float32, {elements}}, {second, dtype, {elements}});
    for (int half = 0; half < 2; ++half) {
      std::memcpy(static_cast<std::byte*>(buffer_.data()) + half * drawn_bytes / 2, second, drawn_bytes / 2);
    }
    repeat();
  }

 private:
  static constexpr std::int64_t drawn_bytes = std::int64_t{2} << 20;
  /// Repeats the first random values through all of the pool.
  void repeat() {
    auto* bytes = static_cast<std::byte*>(buffer_.data());
    for (std::int64_t at = drawn_bytes; at < pool_bytes; at += drawn_bytes) {
      std::memcpy(bytes + at, bytes, static_cast<std::size_t>(drawn_bytes));
    }
  }

  Buffer buffer_;
  std::int64_t next_ = 0;
};

planner::ProductTable measure_products(Device& device, Pool& pool, Pool& results, DataType dtype,
                                       const std::string& layout, const std::vector<std::int64_t>& sizes,
                                       double seconds) {
  planner::ProductTable table{dtype, layout, sizes, {}};
  Stream& stream = device.compute_stream();
  const Buffer scratch(device.memory(Tier::device), kernels::minimum_workspace_bytes, Category::workspace,
                       "calibration");
  kernels::MatmulOptions options;
  options.transpose_a = options.accumulate = layout == "tn";
  options.transpose_b = layout == "nt";
  const DataType c_dtype = layout == "tn" ? DataType::float32 : dtype;
  const double each = seconds / static_cast<double>(sizes.size() * sizes.size() * sizes.size());
  for (const std::int64_t m : sizes) {
    for (const std::int64_t n : sizes) {
      for (const std::int64_t k : sizes) {
        const double taken = time_calls(
            each,
            [&] {
              const ConstTensorView a{pool.take(m * k * size_of(dtype)), dtype,
                                      options.transpose_a ? Shape{k, m} : Shape{m, k}};
              const ConstTensorView b{pool.take(k * n * size_of(dtype)), dtype,
                                      options.transpose_b ? Shape{n, k} : Shape{k, n}};
              const TensorView c{results.take(m * n * size_of(c_dtype)), c_dtype, {m, n}};
              kernels::matmul(stream, options, a, b, c, {scratch.data(), scratch.bytes()});
            },
            clock_of(device.threads()));
        const double operations =
            2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
        table.rates.push_back(operations / taken);
      }
    }
  }
  return table;
}

/// A single kernel on so many elements, with operands from `pool`.
struct SingleKernel {
  const char* name;
  std::function<void(Pool& pool, std::int64_t elements)> call;
};

}  // namespace

double (*clock_of(int threads))() {
  return threads == 1 ? &thread_seconds : &detail::seconds_now;
}

double time_calls(double seconds, const std::function<void()>& call, double (*now)()) {
  std::vector<double> taken;
  const detail::Stopwatch all;
  do {
    const double begin = now();
    call();
    taken.push_back(now() - begin);
  } while (taken.size() < 40 && all.seconds() + taken.back() < seconds);
  if (taken.size() > 1) taken.erase(taken.begin());
  return std::max(1e-9, median(std::move(taken)));
}

std::vector<planner::ProductTable> measure_products(Device& device, double all, double seconds) {
  std::vector<std::int64_t> sizes{64, 192};
  if (all >= 1) sizes.push_back(576);
  if (all >= 5) sizes.push_back(1152);
  Pool operands(device, true), results(device, false);
  std::vector<planner::ProductTable> tables;
  for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
    operands.round_to(device.compute_stream(), dtype);
    for (const char* layout : {"nn", "nt", "tn"}) {
      tables.push_back(measure_products(device, operands, results, dtype, layout, sizes, seconds / 6));
    }
  }
  return tables;
}

double measure_memory(Device& device, double seconds) {
  MemoryResource& memory = device.memory(Tier::device);
  const Buffer from(memory, streamed_bytes, Category::workspace, "calibration");
  const Buffer to(memory, streamed_bytes, Category::workspace, "calibration");
  Stream& stream = device.compute_stream();
  const TensorView source{from.data(), DataType::float32, {streamed_bytes / 4}};
  const TensorView target{to.data(), DataType::float32, {streamed_bytes / 4}};
  // Both are written first, so that their pages exist: mapping them takes ten times as long as writing them.
  for (const TensorView& view : {source, target}) kernels::fill_constant(stream, view, 1);
  return 2.0 * static_cast<double>(streamed_bytes) /
         time_calls(
             seconds, [&] { kernels::add(stream, source, source, target); }, clock_of(device.threads()));
}

std::vector<planner::KernelTable> measure_kernels(Device& device, double seconds) {
  constexpr std::array<std::int64_t, 3> sizes{std::int64_t{1} << 14, std::int64_t{1} << 18,
                                              std::int64_t{1} << 21};
  Stream& stream = device.compute_stream();
  // The values are positive, because second moments have a square root.
  Pool pool(device, true, 0.25f);
  std::vector<planner::KernelTable> tables;
  for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
    const auto take = [](Pool& from, DataType of, std::int64_t elements) {
      return TensorView{from.take(elements * size_of(of)), of, {elements}};
    };
    const auto floats = [&](Pool& from, std::int64_t elements) {
      return take(from, DataType::float32, elements);
    };
    // In fp32 the master weight is the weight itself.
    const auto weight = [&](Pool& from, std::int64_t elements) {
      return dtype == DataType::float32 ? TensorView{} : take(from, dtype, elements);
    };
    const kernels::AdamArguments adam{.learning_rate = 1e-4f, .step_size = 1e-4f};
    const kernels::SgdArguments sgd{.learning_rate = 1e-4f, .momentum = 0.9f};
    const std::array<SingleKernel, 9> kinds{{
        {"cast",
         [&](Pool& from, std::int64_t n) {
           kernels::cast(stream, floats(from, n), take(from, DataType::bfloat16, n));
         }},
        {"accumulate",
         [&](Pool& from, std::int64_t n) { kernels::accumulate(stream, floats(from, n), floats(from, n)); }},
        {"ordered_sum",
         [&](Pool& from, std::int64_t n) {
           const void* piece = take(from, DataType::bfloat16, n).data;
           kernels::ordered_sum(stream, {&piece, 1}, DataType::bfloat16, 1, false, floats(from, n));
         }},
        {"rounded_sum",  // Only a single rank's communicator calls it, on its own stream.
         [&](Pool& from, std::int64_t n) {
           kernels::rounded_sum(stream, floats(from, n), DataType::bfloat16, false, floats(from, n));
         }},
        {"quantize",
         [&](Pool& from, std::int64_t n) {
           kernels::quantize(stream, take(from, dtype, n), from.take(kernels::quantized_bytes(n)));
         }},
        {"dequantize",
         [&](Pool& from, std::int64_t n) {
           kernels::dequantize(stream, from.take(kernels::quantized_bytes(n)), take(from, dtype, n));
         }},
        {"quantized_sum",
         [&](Pool& from, std::int64_t n) {
           const void* const pieces = from.take(2 * kernels::quantized_bytes(n));
           kernels::quantized_sum(stream, pieces, 2, 2, false, floats(from, n));
         }},
        {"adam_update",
         [&](Pool& from, std::int64_t n) {
           const kernels::UpdateSegment all{0, n, 0};
           kernels::adam_update(stream, {&adam}, {&all, 1}, floats(from, n), floats(from, n), floats(from, n),
                                floats(from, n), weight(from, n));
         }},
        {"sgd_update",
         [&](Pool& from, std::int64_t n) {
           const kernels::UpdateSegment all{0, n, 0};
           kernels::sgd_update(stream, {&sgd}, {&all, 1}, floats(from, n), floats(from, n), floats(from, n),
                               weight(from, n));
         }},
    }};
    const double each = seconds / static_cast<double>(2 * kinds.size() * sizes.size());
    for (const SingleKernel& kind : kinds) {
      planner::KernelTable table{kind.name, dtype, "bytes", {}};
      for (const std::int64_t elements : sizes) {
        const WorkCount before = stream.work();
        kind.call(pool, elements);  // counts its bytes as plans do; not timed
        const WorkCount& after = stream.work();
        const double bytes =
            after.bytes_read + after.bytes_written - before.bytes_read - before.bytes_written;
        table.time.points.emplace_back(
            bytes, time_calls(
                       each, [&] { kind.call(pool, elements); }, clock_of(device.threads())));
      }
      tables.push_back(std::move(table));
    }
  }
  return tables;
}

}  // namespace tranche::tools
