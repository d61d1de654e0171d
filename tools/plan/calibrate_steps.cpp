// Kernels as they run inside steps: a few steps of small models, with each item of work timed.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <tuple>

#include "core/clock.h"
#include "device/span_clock.h"
#include "device/work_recorder.h"
#include "tools/plan/calibrate.h"
#include "tools/plan/calibrate_kernels.h"
#include "tools/plan/calibration_statistics.h"
#include "tranche/comm/backends.h"
#include "tranche/core/error.h"
#include "tranche/engine/engine.h"
#include "tranche/engine/runtime.h"
#include "tranche/models/model_registry.h"

namespace tranche::tools {

namespace {

using detail::GemmShape;
using detail::RecordedWork;
using detail::WorkRecorder;

/// The models of the timed steps: together they run the kernels of all architectures. {} are layers, width,
/// heads and vocabulary.
constexpr const char* with_learned_positions =
    R"({{"model_type": "gpt2", "n_layer": {}, "n_embd": {}, "n_head": {}, "vocab_size": {}}})";
constexpr const char* with_rotary_positions =
    R"({{"model_type": "llama", "num_hidden_layers": {0}, "hidden_size": {1}, "intermediate_size": {1},
         "num_attention_heads": {2}, "vocab_size": {3}}})";

/// The description of a timed step.
struct Probe {
  const char* model;
  std::int64_t layers, width, heads, sequence, batch, vocabulary;
  bool micro_batch_policy;
};

constexpr std::array<Probe, 6> probes{{{with_learned_positions, 2, 64, 2, 64, 2, 256, false},
                                       {with_rotary_positions, 2, 64, 2, 64, 2, 256, true},
                                       {with_learned_positions, 2, 192, 4, 128, 2, 256, true},
                                       {with_learned_positions, 1, 384, 6, 256, 1, 2048, false},
                                       {with_rotary_positions, 1, 384, 6, 256, 1, 2048, true},
                                       {with_learned_positions, 1, 768, 12, 256, 1, 4096, true}}};
/// Probes from this index on have long steps.
constexpr std::size_t long_probe = 5;
/// Sizes within this ratio of each other are one point.
constexpr double same_size = 1.15;

/// A kernel call of a step, with its median time over steps.
struct Sample {
  RecordedWork work;
  DataType dtype;
  double seconds;
};

/// The times from one pass over a probe.
struct Visit {
  std::vector<Sample> samples;  ///< for each kernel call of the step
  double launch = 0;            ///< the step's time outside of kernels, in seconds per kernel
  SharedSteps steps;
};

constexpr OperationLabel meeting{"calibration", "calibrate", Traffic::control};

/// Waits for the other ranks; returns whether all of them request another step.
bool meet(Communicator& group, bool another) {
  double wanted = another ? 1 : 0;
  group.all_reduce(&wanted, 1, DataType::float64, ReduceOperation::minimum, meeting).wait();
  return wanted > 0;
}

/// Runs steps of one probe on a rank's own engine, begun together with the other ranks' steps; the first
/// `warm_steps` are not timed.
Visit run_probe(const Probe& probe, DataType dtype, Communicator& group, int threads, double seconds,
                int warm_steps) {
  const auto model = models::ModelRegistry::with_builtin().from_json(
      fmt::format(fmt::runtime(probe.model), probe.layers, probe.width, probe.heads, probe.vocabulary),
      "a model of the calibration");
  Config config;
  config.micro_batch_size = probe.batch;
  config.accumulation_steps = 2;
  config.train_batch_size = 2 * probe.batch;
  config.threads = threads;
  config.precision.compute = dtype;
  config.precision.communication = dtype;
  config.reduction = probe.micro_batch_policy ? ReductionPolicy::micro_batch : ReductionPolicy::boundary;
  validate_config(config, 1);
  RuntimeOptions options = RuntimeOptions::from(config);
  options.log_level = LogLevel::off;
  Runtime runtime(options, [](const CommunicatorOptions& o) { return make_self_communicator(o); });
  Engine engine(runtime, model->spec(probe.sequence), config);
  const std::int64_t tokens = probe.batch * probe.sequence;
  Buffer batch(runtime.memory(Tier::device), 2 * tokens * size_of(DataType::int32), Category::other, "probe");
  auto* numbers = static_cast<std::int32_t*>(batch.data());
  for (std::int64_t i = 0; i < 2 * tokens; ++i) {
    numbers[i] = static_cast<std::int32_t>((i * 7919 + i / 31) % probe.vocabulary);
  }
  std::vector<std::int64_t> numbering(static_cast<std::size_t>(probe.batch), 0);
  const Shape shape{probe.batch, probe.sequence};
  const models::TokenBatch data{
      {numbers, DataType::int32, shape}, {numbers + tokens, DataType::int32, shape}, numbering};

  std::vector<std::shared_ptr<WorkRecorder>> recorded;
  std::vector<double> beside;
  SharedSteps steps;
  Stream& compute = engine.compute_stream();
  const auto now = clock_of(threads);
  compute.attachment<detail::SpanClock>().now = now;
  const detail::Stopwatch all;
  const int least = warm_steps + static_cast<int>(least_steps);
  for (int step = 0; meet(group, step < least || (step < 60 && all.seconds() < seconds)); ++step) {
    const std::shared_ptr<WorkRecorder> recorder = WorkRecorder::make(true);
    const bool settled = step >= warm_steps;
    if (settled) compute.set_recorder(recorder.get(), WorkRecorder::host_lane);
    const detail::Stopwatch wall;
    const double begin = now();
    for (int m = 0; m < 2; ++m) model->forward_backward(engine, data);
    (void)engine.step();
    const double whole = now() - begin;
    compute.set_recorder(nullptr, 0);
    group.barrier(meeting).wait();
    const double passed = wall.seconds();
    if (!settled) continue;
    steps.own.push_back(whole);
    steps.passed.push_back(passed);
    double inside = 0;
    for (const RecordedWork& work : recorder->work()) inside += work.seconds;
    beside.push_back((whole - inside) / static_cast<double>(recorder->work().size()));
    recorded.push_back(recorder);
  }
  Visit visit;
  visit.launch = std::max(0.0, median(beside));
  visit.steps = std::move(steps);
  for (std::size_t i = 0; i < recorded.front()->work().size(); ++i) {
    std::vector<double> taken;
    for (const auto& recorder : recorded) {
      if (i < recorder->work().size()) taken.push_back(recorder->work()[i].seconds);
    }
    visit.samples.push_back({recorded.front()->work()[i], dtype, median(taken)});
  }
  return visit;
}

const char* layout_of(const GemmShape& product) {
  return product.transpose_a ? "tn" : product.transpose_b ? "nt" : "nn";
}

double product_seconds(const planner::ComputeShare& share, const GemmShape& product) {
  for (const planner::ProductTable& table : share.products) {
    if (table.dtype != product.dtype || table.layout != layout_of(product)) continue;
    const double m = static_cast<double>(product.m), n = static_cast<double>(product.n),
                 k = static_cast<double>(product.k);
    return 2 * m * n * k / table.rate(m, n, k);
  }
  return 0;
}

/// Scales the GEMM rates measured alone to those inside steps, by the ratio of their times.
void adjust_products(planner::ComputeShare& share, const std::vector<Sample>& samples) {
  for (planner::ProductTable& table : share.products) {
    double bare = 0, inside = 0;
    for (const Sample& sample : samples) {
      const GemmShape& product = sample.work.gemm;
      if (sample.work.name != "matmul" || product.dtype != table.dtype ||
          table.layout != layout_of(product)) {
        continue;
      }
      bare += product_seconds(share, product);
      inside += sample.seconds;
    }
    if (bare <= 0 || inside <= 0) continue;
    const double ratio = std::clamp(bare / inside, 0.5, 1.5);
    for (double& rate : table.rates) rate *= ratio;
  }
}

void add_kernels(planner::ComputeShare& share, const std::vector<Sample>& samples) {
  std::map<std::pair<std::string, DataType>, std::vector<std::pair<double, double>>> found;
  for (const Sample& sample : samples) {
    const RecordedWork& work = sample.work;
    if (work.name == "matmul" || work.kind != detail::WorkKind::kernel) continue;
    const bool pairs = work.name.rfind("attention", 0) == 0;
    const double size = pairs ? work.operations : work.bytes_read + work.bytes_written;
    // If a kernel is a GEMM with an epilogue, only the epilogue's time is used.
    const double product = work.gemm.m > 0 ? product_seconds(share, work.gemm) : 0;
    if (size <= 0) continue;
    found[{work.name, sample.dtype}].emplace_back(size, std::max(1e-7, sample.seconds - product));
  }
  std::vector<planner::KernelTable> tables;
  for (auto& [key, points] : found) {
    std::sort(points.begin(), points.end());
    planner::KernelTable table{
        key.first, key.second, key.first.rfind("attention", 0) == 0 ? "operations" : "bytes", {}};
    for (std::size_t begin = 0, end = 0; begin < points.size(); begin = end) {
      std::vector<double> sizes, seconds;
      while (end < points.size() && points[end].first <= points[begin].first * same_size) {
        sizes.push_back(points[end].first);
        seconds.push_back(points[end++].second);
      }
      double mean_size = 0, mean_seconds = 0;
      for (std::size_t i = 0; i < sizes.size(); ++i) {
        mean_size += sizes[i] / static_cast<double>(sizes.size());
        mean_seconds += seconds[i] / static_cast<double>(sizes.size());
      }
      table.time.points.emplace_back(mean_size, mean_seconds);
    }
    tables.push_back(std::move(table));
  }
  replace_tables(share, std::move(tables));  // times from steps are more realistic
}

}  // namespace

struct StepProbes::Impl {
  Communicator& group;
  int threads;
  double seconds;
  std::map<std::pair<std::size_t, DataType>, std::vector<Visit>> visits;  ///< for each probe and dtype
};

StepProbes::StepProbes(Communicator& group, int threads, double seconds)
    : impl_(std::make_unique<Impl>(Impl{group, threads, seconds, {}})) {}
StepProbes::~StepProbes() = default;

void StepProbes::run_pass(int pass, int passes) {
  const double each = impl_->seconds / (2.0 * probes.size());
  for (std::size_t i = 0; i < probes.size(); ++i) {
    // Larger probes take long even for a single step.
    if (i > 1 && impl_->seconds < 1) break;
    if (i >= long_probe && pass != passes / 2) continue;
    const bool is_long = i >= long_probe;
    for (const DataType dtype : {DataType::float32, DataType::bfloat16}) {
      impl_->visits[{i, dtype}].push_back(run_probe(probes[i], dtype, impl_->group, impl_->threads,
                                                    is_long ? each : each / passes, is_long ? 1 : 2));
    }
  }
}

void StepProbes::add_to(planner::ComputeShare& share) const {
  std::vector<Sample> samples;
  std::vector<double> launches;
  std::vector<SharedSteps> steps;
  for (const auto& [key, visits] : impl_->visits) {
    for (std::size_t call = 0; call < visits.front().samples.size(); ++call) {
      std::vector<double> seconds;
      for (const Visit& visit : visits) seconds.push_back(visit.samples.at(call).seconds);
      samples.push_back(visits.front().samples[call]);
      samples.back().seconds = median(std::move(seconds));
    }
    for (const Visit& visit : visits) {
      launches.push_back(visit.launch);
      steps.push_back(visit.steps);
    }
  }
  share.launch_seconds = median(std::move(launches));
  adjust_products(share, samples);
  add_kernels(share, samples);
  if (impl_->group.size() > 1) slow_down(share, waiting_factor(steps));
}

}  // namespace tranche::tools
