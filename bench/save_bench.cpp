// The cost of an asynchronous save to the training: the pause of Engine::save() relative to one memcpy of the
// shard, and the duration of steps while the checkpoint is written relative to other steps. It runs alone or
// under mpirun; the slowest rank of each round counts.
//   bench_save [--dir DIR] [--mib N] [--repeats N] [--threads N] [--rows N]
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bench/figures.h"
#include "bench/flags.h"
#include "offload/aligned_buffer.h"
#include "offload/file_system.h"
#include "tranche/core/error.h"
#include "tranche/kernels/matmul.h"
#include "tranche/tranche.h"

namespace {

using namespace tranche;
using bench::median;

struct Settings {
  std::string directory = ".";
  std::int64_t bytes = std::int64_t{384} << 20;  ///< state of all ranks together: weights and Adam's two
                                                 ///< moments
  int repeats = 9;
  int threads = 1;
  std::int64_t rows = 256;  ///< rows of activations on a rank, by which a step's work for each weight grows
};

constexpr OperationLabel label{"bench", "save", Traffic::control, Tier::host};

/// A chain of square matrices, x_{u+1} = x_u W_u; the loss is the mean square of the last output.
class Chain {
 public:
  Chain(Runtime& runtime, const Settings& settings);

  StepResult step();
  Engine& engine() { return *engine_; }

 private:
  std::int64_t width_ = 0;
  std::int64_t rows_;
  ModelSpec model_;
  std::vector<std::vector<float>> activations_;
  std::vector<float> gradient_, next_gradient_;
  std::unique_ptr<Engine> engine_;
};

Chain::Chain(Runtime& runtime, const Settings& settings) : rows_(settings.rows) {
  constexpr std::int64_t units = 8;
  width_ = 64;
  while (units * (width_ + 64) * (width_ + 64) * 12 <= settings.bytes) width_ += 64;
  for (std::int64_t u = 0; u < units; ++u) {
    const std::string name = "w." + std::to_string(u);
    const auto deviation = static_cast<float>(1 / std::sqrt(static_cast<double>(width_)));
    model_.add_unit({name, {{name, {width_, width_}, Initializer::normal(deviation)}}});
  }
  const auto elements = static_cast<std::size_t>(rows_ * width_);
  activations_.assign(static_cast<std::size_t>(units) + 1, std::vector<float>(elements));
  for (std::size_t i = 0; i < elements; ++i) activations_[0][i] = static_cast<float>(i % 17) / 8 - 1;
  gradient_.resize(elements);
  next_gradient_.resize(elements);
  const Config config = parse_config(
      fmt::format(R"({{"train_batch_size": {}, "bf16": {{"enabled": false}}, "gradient_clipping": 1.0,
                   "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-4}}}},
                   "zero_optimization": {{"stage": 2}}, "tranche": {{"save_buffer": true}}}})",
                  rows_ * runtime.size()),
      runtime.size());
  engine_ = std::make_unique<Engine>(runtime, model_, config);
}

StepResult Chain::step() {
  Stream& stream = engine_->compute_stream();
  const auto view = [&](std::vector<float>& values) {
    return TensorView{values.data(), DataType::float32, {rows_, width_}};
  };
  const auto count = static_cast<int>(model_.units().size());
  engine_->begin_micro_batch();
  for (int u = 0; u < count; ++u) {
    const auto at = static_cast<std::size_t>(u);
    kernels::matmul(stream, {}, view(activations_[at]), engine_->gather({u}).tensor(0),
                    view(activations_[at + 1]), engine_->workspace());
  }
  double loss = 0;
  for (std::size_t i = 0; i < gradient_.size(); ++i) {
    const float value = activations_.back()[i];
    loss += 0.5 * static_cast<double>(value) * value / static_cast<double>(width_);
    gradient_[i] = value * engine_->loss_gradient_scale() / static_cast<float>(width_);
  }
  for (int u = count - 1; u >= 0; --u) {
    const GatheredUnit weights = engine_->gather({u});
    UnitGradients gradients = engine_->gradients({u});
    kernels::matmul(stream, {.transpose_a = true, .accumulate = true},
                    view(activations_[static_cast<std::size_t>(u)]), view(gradient_), gradients.tensor(0),
                    engine_->workspace());
    kernels::matmul(stream, {.transpose_b = true}, view(gradient_), weights.tensor(0), view(next_gradient_),
                    engine_->workspace());
    std::swap(gradient_, next_gradient_);
    std::move(gradients).reduce();
  }
  const std::int64_t tokens = rows_;
  engine_->end_micro_batch({&loss, DataType::float64, {}}, {&tokens, DataType::int64, {}});
  return engine_->step();
}

/// Seconds of `body` on the slowest rank, when all ranks begin together.
double timed(Runtime& runtime, const std::function<void()>& body) {
  runtime.all().barrier(label).wait();
  const auto begin = std::chrono::steady_clock::now();
  body();
  double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::vector<double> all(static_cast<std::size_t>(runtime.size()));
  runtime.all().all_gather(&seconds, all.data(), 8, DataType::uint8, 0, {}, label).wait();
  return *std::max_element(all.begin(), all.end());
}

std::vector<double> ratios(const std::vector<double>& of, const std::vector<double>& to) {
  std::vector<double> result;
  for (std::size_t i = 0; i < of.size(); ++i) result.push_back(of[i] / to[i]);
  return result;
}

void print(const char* name, const std::vector<double>& seconds, const char* floor,
           const std::vector<double>& floor_seconds, const char* bar) {
  const std::vector<double> all = ratios(seconds, floor_seconds);
  const auto [least, most] = std::minmax_element(all.begin(), all.end());
  fmt::print("{:<28}{:>9.2f}  {:<22}{:>9.2f}{:>9.3f}  {:.2f} to {:.2f}{:>6}\n", name, median(seconds) * 1e3,
             floor, median(floor_seconds) * 1e3, median(all), *least, *most, bar);
}

void run(Runtime& runtime, const Settings& settings) {
  const std::string folder = detail::join_path(settings.directory, "tranche-bench-save");
  detail::FileSystem& files = detail::posix_file_system();
  if (runtime.rank() == 0) files.remove_all(folder);
  Chain chain(runtime, settings);
  Engine& engine = chain.engine();
  // fp32 weights, which are their own master weights, and both moments.
  const std::int64_t shard_bytes = engine.model().parameters() / runtime.size() * 12;
  MemoryResource& host = runtime.memory(Tier::host);
  const detail::AlignedBuffer source(host, shard_bytes, Category::workspace, "source");
  const detail::AlignedBuffer target(host, shard_bytes, Category::workspace, "target");
  std::memset(source.data(), 1, static_cast<std::size_t>(shard_bytes));
  std::memset(target.data(), 2, static_cast<std::size_t>(shard_bytes));
  for (int i = 0; i < 3; ++i) chain.step();
  engine.save(folder, {.keep_last = 1});
  engine.finish_saving();

  std::vector<double> copies, pauses, alone, beside, behind;
  for (int round = 0; round < settings.repeats; ++round) {
    const auto copy = [&] {
      copies.push_back(timed(runtime, [&] {
        std::memcpy(target.data(), source.data(), static_cast<std::size_t>(shard_bytes));
      }));
    };
    alone.push_back(timed(runtime, [&] { chain.step(); }));
    if (round % 2 == 0) copy();  // the order alternates
    const auto begin = std::chrono::steady_clock::now();
    pauses.push_back(timed(runtime, [&] { engine.save(folder, {.keep_last = 1}); }));
    beside.push_back(timed(runtime, [&] { chain.step(); }));
    while (engine.saving()) chain.step();
    engine.finish_saving();
    behind.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    if (round % 2 == 1) copy();
  }
  engine.finish_saving();
  if (runtime.rank() != 0) return;
  fmt::print("{} ranks with {} threads, {} MiB a rank, {} rounds; milliseconds, medians\n", runtime.size(),
             settings.threads, shard_bytes >> 20, settings.repeats);
  fmt::print("{:<28}{:>9}  {:<22}{:>9}{:>9}  {:<12}{:>6}\n", "", "ms", "measured against", "ms", "median",
             "least, most", "bar");
  print("pause of save()", pauses, "memcpy of the shard", copies, "1.1");
  print("step while it is written", beside, "step", alone, "1.1");
  fmt::print("from save() to a complete checkpoint, in steps: {:.2f} ms\n", median(behind) * 1e3);
  fmt::print("pause_of_copy={:.3f} step_of_step={:.3f}\n", median(ratios(pauses, copies)),
             median(ratios(beside, alone)));
  files.remove_all(folder);
}

Settings parse(int argc, char** argv) {
  Settings settings;
  bench::parse_flags(
      argc, argv,
      {bench::text_flag("--dir", settings.directory), bench::number_flag("--mib", settings.bytes, 20),
       bench::number_flag("--repeats", settings.repeats), bench::number_flag("--rows", settings.rows),
       bench::number_flag("--threads", settings.threads)});
  if (settings.bytes < std::int64_t{1} << 20 || settings.repeats < 1) {
    throw ConfigurationError("--mib and --repeats must be at least 1");
  }
  return settings;
}

}  // namespace

int main(int argc, char** argv) {
  int status = 0;
  const int refused = tranche::bench::run_program("bench_save", [&] {
    const Settings settings = parse(argc, argv);
    Runtime runtime = Runtime::from_environment({.threads = settings.threads});
    try {
      run(runtime, settings);
    } catch (...) {
      status = runtime.fail(std::current_exception());
    }
  });
  return refused != 0 ? refused : status;
}
