#include "bench/device_bench.h"

#include <algorithm>
#include <random>
#include <string>

#include "bench/figures.h"
#include "bench/host_streams.h"
#include "device/cuda_probe.h"
#include "tranche/kernels/elementwise.h"

namespace tranche::kernels::bench {

namespace {

constexpr double least_rotation_bytes = 256e6;  // several times the cache of the largest GPU
constexpr int most_sets = 64;

double median_of(std::vector<double> seconds) {
  const auto middle = seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2);
  std::nth_element(seconds.begin(), middle, seconds.end());
  return *middle;
}

std::unique_ptr<Device> device_of(DeviceKind kind, int threads) {
  return make_device({.kind = kind, .threads = threads});
}

}  // namespace

DeviceBench::DeviceBench(DeviceKind kind, int threads, bool small)
    : device_(device_of(kind, threads)),
      small_(small || (kind == DeviceKind::cuda && detail::probe_cuda().emulated)),
      threads_(threads),
      scratch_(device_->memory(Tier::device), std::int64_t{32} << 20, Category::workspace,
               "bench workspace") {}

std::int64_t DeviceBench::sized(std::int64_t size) const {
  return small_ ? std::max<std::int64_t>(std::min<std::int64_t>(size, 256), size / 65536) : size;
}

TensorView DeviceBench::tensor(DataType dtype, const Shape& shape, float low, float high) {
  const std::int64_t elements = shape.elements();
  operands_.emplace_back(device_->memory(Tier::device), bytes_of(dtype, elements), Category::other,
                         "bench operand");
  const TensorView view{operands_.back().data(), dtype, shape};
  if (dtype == DataType::int32) {
    std::minstd_rand engine(1);
    std::uniform_int_distribution<std::int32_t> draw(0, static_cast<std::int32_t>(high) - 1);
    std::vector<std::int32_t> values(static_cast<std::size_t>(elements));
    for (auto& value : values) value = draw(engine);
    device_->copy_from_host(stream(), view.data, values.data(), view.bytes());
  } else if (dtype == DataType::float32) {
    fill_uniform(stream(), view, {1, RandomPurpose::test, operands_.size()}, 0, low, high);
  } else if (is_floating(dtype) && dtype != DataType::float64) {
    const Buffer wide(device_->memory(Tier::device), elements * 4, Category::other, "bench operand");
    const TensorView drawn{wide.data(), DataType::float32, shape};
    fill_uniform(stream(), drawn, {1, RandomPurpose::test, operands_.size()}, 0, low, high);
    cast(stream(), drawn, view);
    stream().synchronize();
  } else {
    device_->fill_bytes(stream(), view.data, 0, view.bytes());
  }
  return view;
}

const void* DeviceBench::constant(const void* value, std::int64_t bytes) {
  operands_.emplace_back(device_->memory(Tier::device), bytes, Category::other, "bench constant");
  device_->copy_from_host(stream(), operands_.back().data(), value, bytes);
  return operands_.back().data();
}

DeviceBench::Result DeviceBench::measure(const Prepare& prepare, Traffic traffic) {
  operands_.clear();
  std::vector<Call> sets{prepare(*this)};
  const WorkCount before = stream().work();
  sets[0](stream());  // the first call initialises, and shows the cost of a call
  const WorkCount after = stream().work();
  if (traffic.read + traffic.written == 0) {
    const double read = after.bytes_read - before.bytes_read,
                 written = after.bytes_written - before.bytes_written;
    traffic.updated = std::min({traffic.updated, read, written});
    traffic.read = read - traffic.updated;
    traffic.written = written - traffic.updated;
  }
  const double bytes = traffic.moved();
  const int rotation = static_cast<int>(
      std::clamp(least_rotation_bytes / std::max(bytes, 1.0) + 1.0, 1.0, small_ ? 2.0 : double{most_sets}));
  while (static_cast<int>(sets.size()) < rotation) sets.push_back(prepare(*this));
  for (const Call& call : sets) call(stream());
  const bool gpu = device_->kind() == DeviceKind::cuda;
  const int calls = small_ ? 2 : std::max(rotation, gpu ? 8 : 3);
  const int repetitions = small_ ? 2 : gpu ? 9 : 5;
  std::vector<double> seconds, streams[2];
  for (int repetition = 0; repetition < repetitions; ++repetition) {
    seconds.push_back(seconds_of(sets, calls));
    for (const bool non_temporal : {false, true}) {
      if (!gpu) streams[non_temporal].push_back(stream_seconds(traffic, non_temporal));
    }
  }
  operands_.clear();
  Result result{bytes, median_of(seconds), 0};
  if (!gpu) result.stream_seconds = std::min(median_of(streams[0]), median_of(streams[1]));
  return result;
}

double DeviceBench::host_seconds(const std::function<void()>& work) const {
  const tranche::bench::Seconds begin = tranche::bench::clocks_now();
  work();
  const tranche::bench::Seconds spent = tranche::bench::clocks_now() - begin;
  return threads_ == 1 ? spent.processor : spent.wall;
}

double DeviceBench::stream_seconds(const Traffic& traffic, bool non_temporal) {
  // One pass over the memory of several calls, which is more than a cache holds.
  const double scale = small_ ? 1 : std::max(1.0, 2 * least_rotation_bytes / traffic.moved());
  const auto scaled = [&](double bytes) {
    constexpr std::int64_t line = 128;
    return static_cast<std::int64_t>(bytes * scale) / line * line;
  };
  tranche::bench::MixedStream pass;
  pass.read_bytes = scaled(traffic.read);
  pass.written_bytes = scaled(traffic.written);
  pass.updated_bytes = scaled(traffic.updated);
  const std::int64_t bytes = pass.read_bytes + pass.written_bytes + pass.updated_bytes;
  if (stream_.bytes() < bytes) {
    stream_ = {};
    stream_ = Buffer(device_->memory(Tier::device), bytes, Category::other, "bench stream");
    device_->fill_bytes(stream(), stream_.data(), 0, bytes);
    stream().synchronize();
  }
  pass.read = static_cast<const char*>(stream_.data());
  pass.updated = static_cast<char*>(stream_.data()) + pass.read_bytes;
  pass.written = pass.updated + pass.updated_bytes;
  pass.non_temporal = non_temporal;
  return host_seconds([&] { tranche::bench::mixed_pass(pass, threads_); }) / scale;
}

double DeviceBench::seconds_of(const std::vector<Call>& sets, int calls) {
  const auto issue = [&] {
    for (int call = 0; call < calls; ++call) sets[static_cast<std::size_t>(call) % sets.size()](stream());
  };
  if (device_->kind() == DeviceKind::cpu) {
    return host_seconds([&] {
             issue();
             stream().synchronize();
           }) /
           calls;
  }
  sets[0](stream());  // keeps the GPU busy until the host has queued the calls
  const Event start = stream().record();
  issue();
  const Event end = stream().record();
  stream().synchronize();
  return (end.passed_at() - start.passed_at()) / calls;
}

double DeviceBench::copy_bandwidth() {
  if (copy_bandwidth_ > 0) return copy_bandwidth_;
  const Result result = measure([](DeviceBench& bench) -> Call {
    const bool gpu = bench.device().kind() == DeviceKind::cuda;
    const Shape shape{bench.sized(std::int64_t{1} << (gpu ? 27 : 24))};
    const TensorView from = bench.tensor(DataType::float32, shape),
                     to = bench.tensor(DataType::float32, shape);
    return [from, to](Stream& stream) { copy(stream, from, to); };
  });
  copy_bandwidth_ = result.bytes / result.seconds;
  return copy_bandwidth_;
}

void DeviceBench::run(benchmark::State& state, const Prepare& prepare, const Traffic& traffic) {
  const double copy = copy_bandwidth();
  Result result;
  for (auto _ : state) {
    result = measure(prepare, traffic);
    state.SetIterationTime(result.seconds);
  }
  state.counters["bytes"] = result.bytes;
  state.counters["GB/s"] = result.bytes / result.seconds * 1e-9;
  state.counters["of_copy"] = result.bytes / result.seconds / copy;
  if (result.stream_seconds > 0) state.counters["of_stream"] = result.stream_seconds / result.seconds;
}

}  // namespace tranche::kernels::bench
