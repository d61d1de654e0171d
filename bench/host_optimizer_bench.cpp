// The optimizers' pass on the host, beside the same memory traffic without arithmetic and the same arithmetic
// without memory traffic, in alternation, in one process.
//   bench_host_optimizer [--sizes 1M,16M,64M] [--threads 1,all] [--rules adamw,adam,sgd,lamb,lars,lion]
//       [--gradients bf16,fp32] [--rounds 9] [--seconds 0.05] [--ahead 0,256,384,1024] [--clock
//       wall|processor]
#include <fmt/core.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "bench/figures.h"
#include "bench/flags.h"
#include "bench/host_streams.h"
#include "bench/resident_update.h"
#include "core/clock.h"
#include "kernels/cpu/instruction_sets.h"
#include "tranche/core/error.h"
#include "tranche/device/device.h"
#include "tranche/optim/optimizer.h"
#include "tranche/optim/rules.h"

using namespace tranche;
using bench::median;
using bench::quantile;

namespace {

struct Settings {
  std::vector<std::int64_t> sizes{1'000'000, 16'000'000, 64'000'000};
  std::vector<int> threads{1, static_cast<int>(std::thread::hardware_concurrency())};
  std::vector<std::string> rules{"adamw", "adam", "sgd"};
  std::vector<DataType> gradients{DataType::bfloat16, DataType::float32};
  std::vector<std::int64_t> ahead{0, 256, 384, 1024};  ///< bytes of prefetch in the loop without arithmetic
  int rounds = 9;
  double seconds = 0.05;   ///< least duration of each measurement
  bool processor = false;  ///< processor time of the process instead of wall-clock time
};

/// Memory as engines have it: page-aligned, with huge pages if the system provides them, touched once.
class Memory {
 public:
  explicit Memory(std::int64_t bytes) : bytes_(static_cast<std::size_t>(bytes)) {
    data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED) throw InvalidArgument(fmt::format("no memory for {} bytes", bytes));
    madvise(data_, bytes_, MADV_HUGEPAGE);
    std::fill_n(static_cast<char*>(data_), bytes_, char{0});
  }
  ~Memory() { munmap(data_, bytes_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  std::size_t bytes_;
  void* data_;
};

std::unique_ptr<Optimizer> optimizer_of(const std::string& rule, DataType moments = DataType::float32) {
  RuleParameters parameters{{"weight_decay", 0.1}};
  if (rule == "sgd" || rule == "lars") parameters["momentum"] = 0.9;
  for (const char* known : {"adamw", "sgd", "lamb", "lars", "lion"}) {
    if (rule == known) return make_rule_optimizer(rule, parameters, moments);
  }
  if (rule != "adam") {
    throw ConfigurationError("'" + rule + "' is not one of adamw, adam, sgd, lamb, lars, lion");
  }
  parameters["adam_w_mode"] = 0;
  return make_rule_optimizer(rule, parameters, moments);
}

/// The buffers of the largest case; smaller cases use their beginnings.
struct Buffers {
  explicit Buffers(std::int64_t n)
      : gradient(4 * n),
        master(4 * n),
        first(4 * n),
        second(4 * n),
        weight(2 * n),
        first_blocks(bytes_of(DataType::block8, n)),
        second_blocks(bytes_of(DataType::block8, n)) {}
  Memory gradient, master, first, second, weight, first_blocks, second_blocks;
};

class Case {
 public:
  Case(const Settings& settings, const Buffers& buffers, const std::string& rule, DataType gradient,
       std::int64_t elements, int threads)
      : settings_(settings),
        rule_(optimizer_of(rule)),
        adamw_(optimizer_of("adamw")),
        device_(make_device({.kind = DeviceKind::cpu, .threads = threads})),
        threads_(threads) {
    if (rule == "adamw" || rule == "adam" || rule == "sgd") resident_.emplace(rule, gradient, threads);
    streams_ = {buffers.gradient.as<void>(),
                gradient,
                buffers.master.as<float>(),
                {buffers.first.as<float>(), buffers.second.as<float>()},
                static_cast<int>(rule_->state({}).size()),
                buffers.weight.as<bfloat16>(),
                elements};
    const Shape shape{elements};
    range_.gradient = {streams_.gradient, gradient, shape};
    range_.master = {streams_.master, DataType::float32, shape};
    for (void* const state : {buffers.first.as<void>(), buffers.second.as<void>()}) {
      adamw_states_.push_back({state, DataType::float32, shape});
    }
    states_.assign(adamw_states_.begin(), adamw_states_.begin() + streams_.states);
    range_.weight = {streams_.weight, DataType::bfloat16, shape};
    if (rule == "adamw" || rule == "lamb") {
      in_blocks_ = optimizer_of(rule, DataType::block8);
      block_states_ = {{buffers.first_blocks.as<void>(), DataType::block8, shape},
                       {buffers.second_blocks.as<void>(), DataType::block8_unsigned, shape}};
    }
    for (std::int64_t i = 0; i < elements; ++i) {
      const float value = static_cast<float>(i % 1999) * 0x1p-17f - 0x1p-7f;
      if (gradient == DataType::bfloat16) buffers.gradient.as<bfloat16>()[i] = to_bfloat16(value);
      if (gradient == DataType::float32) buffers.gradient.as<float>()[i] = value;
    }
    std::fill_n(streams_.master, elements, 0.5f);
    std::fill_n(streams_.state[0], elements, 0.0f);
    std::fill_n(streams_.state[1], elements, 0.0f);
    // The tensors alternate as in a transformer: a matrix, then a bias without weight decay.
    constexpr std::int64_t matrix = 768 * 768, bias = 768;
    for (std::int64_t at = 0; at < elements;) {
      const bool decays = segments_.size() % 2 == 0;
      const std::int64_t count = std::min(elements - at, decays ? matrix : bias);
      segments_.push_back({.first = at, .count = count, .group = decays ? 0 : 1});
      at += count;
    }
  }

  void update() { update(*rule_, states_); }
  /// The same update with states in blocks.
  void update_blocks() { update(*in_blocks_, block_states_); }
  /// AdamW's update of the same tensors.
  void update_adamw() { update(*adamw_, adamw_states_); }
  void update(const Optimizer& rule, const std::vector<TensorView>& states) {
    OptimizerStep step;
    step.step = ++step_;
    step.learning_rate = 1e-4;
    step.gradient_scale = 0.5f;
    numbers_ = rule.numbers(step, {});
    range_.numbers_stride = static_cast<std::int64_t>(numbers_.size());
    const std::vector<std::byte> without_decay = rule.numbers(step, {.decay = false});
    numbers_.insert(numbers_.end(), without_decay.begin(), without_decay.end());
    range_.numbers = numbers_.data();
    range_.groups = 2;
    range_.state = states;
    range_.segments = segments_;
    if (const auto sums = static_cast<std::size_t>(rule.sums({})); sums > 0) {
      std::vector<SquareSum> partial(sums * segments_.size());
      std::vector<double> rounded(partial.size());
      for (std::size_t s = 0; s < segments_.size(); ++s) {
        segments_[s].partial = &partial[sums * s];
        segments_[s].sums = &rounded[sums * s];
      }
      rule.prepare(device_->compute_stream(), step, range_);
      for (std::size_t k = 0; k < partial.size(); ++k) rounded[k] = partial[k].value();
      rule.apply(device_->compute_stream(), step, range_);
    } else {
      rule.apply(device_->compute_stream(), step, range_);
    }
  }

  /// Seconds of one call. After one untimed call it repeats calls for the requested time, because the first
  /// call depends on the caches and memory clocks that the previous measurement left.
  template <class Call>
  double time(const Call& call) {
    const auto now = [&] {
      return settings_.processor ? bench::clocks_now().processor / threads_ : detail::seconds_now();
    };
    call();
    const double start = now();
    int calls = 0;
    double end = start;
    do {
      call();
      ++calls;
      end = now();
    } while (end - start < settings_.seconds);
    return (end - start) / calls;
  }

  void run(const std::string& rule) {
    const std::size_t loops = settings_.ahead.size();
    std::vector<double> update_times, triad_times, arithmetic_times, block_times, adamw_times;
    std::vector<std::vector<double>> loop_times(loops);
    std::vector<std::function<void()>> measurements{
        [&] { update_times.push_back(time([&] { update(); })); },
        [&] {
          triad_times.push_back(time([&] {
            bench::triad(streams_.state[1], streams_.master, streams_.state[0], streams_.elements, threads_);
          }));
          std::fill_n(streams_.state[1], streams_.elements, 0x1p-20f);
        }};
    if (resident_) {
      measurements.emplace_back([&] {
        std::int64_t updated = 0;
        const double resident = time([&] { updated = resident_->pass(streams_.elements); });
        arithmetic_times.push_back(resident * static_cast<double>(streams_.elements) /
                                   static_cast<double>(updated));
      });
    }
    if (rule != "adamw") {
      measurements.emplace_back([&] { adamw_times.push_back(time([&] { update_adamw(); })); });
    }
    if (in_blocks_) {
      measurements.emplace_back([&] { block_times.push_back(time([&] { update_blocks(); })); });
    }
    for (std::size_t k = 0; k < loops; ++k) {
      measurements.emplace_back(
          [&, k] { loop_times[k].push_back(time([&] { bench_pass(settings_.ahead[k]); })); });
    }
    // The order changes in each round, so that no way always follows the same one.
    std::mt19937 random(1);
    for (int round = 0; round < settings_.rounds; ++round) {
      std::shuffle(measurements.begin(), measurements.end(), random);
      for (const auto& measure : measurements) measure();
    }
    // The faster loop is the lower bound.
    std::size_t best = 0;
    for (std::size_t k = 1; k < loops; ++k) {
      if (median(loop_times[k]) < median(loop_times[best])) best = k;
    }
    std::vector<double> fractions, of_bound;
    for (std::size_t k = 0; k < update_times.size(); ++k) {
      fractions.push_back(loop_times[best][k] / update_times[k]);
      if (resident_) {
        of_bound.push_back(std::max(loop_times[best][k], arithmetic_times[k]) / update_times[k]);
      }
    }
    const auto n = static_cast<double>(streams_.elements);
    const double bytes = n * static_cast<double>(streams_.bytes_per_element());
    const double own = bytes / median(update_times), loop = bytes / median(loop_times[best]);
    const double floor = 12 * n / median(triad_times);
    fmt::print("rule={} gradient={} parameters={} threads={} ", rule, name_of(streams_.gradient_type),
               streams_.elements, threads_);
    if (rule_->sums({}) == 0) {  // the loop makes one pass, as these rules do
      fmt::print(
          "bytes_per_parameter={} update_gb_s={:.2f} loop_gb_s={:.2f} triad_gb_s={:.2f} "
          "update_of_loop={:.3f} "
          "quartiles={:.3f}..{:.3f} update_of_triad={:.3f} loop_ahead={} ",
          streams_.bytes_per_element(), own * 1e-9, loop * 1e-9, floor * 1e-9, median(fractions),
          quantile(fractions, 0.25), quantile(fractions, 0.75), own / floor, settings_.ahead[best]);
    }
    if (resident_) {
      fmt::print("arithmetic_gb_s={:.2f} update_of_bound={:.3f} bound_quartiles={:.3f}..{:.3f} ",
                 1e-9 * bytes / median(arithmetic_times), median(of_bound), quantile(of_bound, 0.25),
                 quantile(of_bound, 0.75));
    }
    if (rule != "adamw") print_ratio("time_of_adamw", update_times, adamw_times);
    fmt::print("ms={:.3f}\n", 1e3 * median(update_times));
    if (in_blocks_) {
      fmt::print("rule={} moments=block8 gradient={} parameters={} threads={} ", rule,
                 name_of(streams_.gradient_type), streams_.elements, threads_);
      print_ratio("time_of_fp32", block_times, update_times);
      fmt::print("ms={:.3f}\n", 1e3 * median(block_times));
    }
    std::fflush(stdout);
  }

 private:
  /// The median of the rounds' ratios and their quartiles.
  static void print_ratio(const char* name, const std::vector<double>& times, const std::vector<double>& of) {
    std::vector<double> ratios;
    for (std::size_t k = 0; k < times.size(); ++k) ratios.push_back(times[k] / of[k]);
    fmt::print("{}={:.3f} {}_quartiles={:.3f}..{:.3f} ", name, median(ratios), name, quantile(ratios, 0.25),
               quantile(ratios, 0.75));
  }
  void bench_pass(std::int64_t ahead) { bench::pass_without_arithmetic(streams_, threads_, ahead); }

  const Settings& settings_;
  std::unique_ptr<Optimizer> rule_, adamw_;
  std::optional<bench::ResidentUpdate> resident_;
  std::unique_ptr<Device> device_;
  int threads_;
  bench::HostStreams streams_;
  UpdateRange range_;
  std::unique_ptr<Optimizer> in_blocks_;
  std::vector<TensorView> states_, block_states_, adamw_states_;
  std::vector<TensorSegment> segments_;
  std::vector<std::byte> numbers_;
  std::int64_t step_ = 0;
};

/// "16M" is 16 million; K and G are used likewise.
std::int64_t count_of(const std::string& text, std::int64_t least) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  const std::string unit = end;
  const double scale = unit == "K" ? 1e3 : unit == "M" ? 1e6 : unit == "G" || unit == "B" ? 1e9 : 1;
  const double count = value * scale;
  if (text.empty() || (scale == 1 && !unit.empty()) ||
      !(count >= static_cast<double>(least) && count < 1e12)) {
    throw ConfigurationError(
        fmt::format("'{}' is no count of at least {} (K, M and G are thousands)", text, least));
  }
  return static_cast<std::int64_t>(count);
}

/// A flag that sets `into` to the results of `convert` for the items of a list.
template <class T, class F>
bench::Flag list_flag(std::string_view name, std::vector<T>& into, const F& convert) {
  return {name, [=, &into](const std::string& value) {
            into.clear();
            for (const std::string& item : bench::comma_list(value)) {
              try {
                into.push_back(convert(item));
              } catch (const Error& error) {
                throw ConfigurationError(fmt::format("{}: {}", name, error.message()));
              }
            }
          }};
}

Settings parse(int argc, char** argv) {
  Settings settings;
  const int cores = settings.threads.back();
  if (cores == 1) settings.threads.pop_back();
  std::string clock = "wall";
  bench::parse_flags(
      argc, argv,
      {list_flag("--sizes", settings.sizes, [](const std::string& item) { return count_of(item, 1); }),
       list_flag("--threads", settings.threads,
                 [cores](const std::string& item) {
                   return item == "all" ? cores : static_cast<int>(count_of(item, 1));
                 }),
       list_flag("--rules", settings.rules,
                 [](const std::string& item) {
                   optimizer_of(item);
                   return item;
                 }),
       list_flag("--gradients", settings.gradients,
                 [](const std::string& item) { return parse_data_type(item); }),
       list_flag("--ahead", settings.ahead, [](const std::string& item) { return count_of(item, 0); }),
       bench::number_flag("--rounds", settings.rounds), bench::number_flag("--seconds", settings.seconds),
       bench::choice_flag("--clock", clock, {"wall", "processor"})});
  settings.processor = clock == "processor";
  if (settings.rounds < 1) throw ConfigurationError("--rounds must be at least 1");
  return settings;
}

void run(const Settings& settings) {
  const Buffers buffers(*std::max_element(settings.sizes.begin(), settings.sizes.end()));
  fmt::print("instruction_set={} rounds={}\n", kernels::cpu::instruction_set(), settings.rounds);
  for (const std::string& rule : settings.rules) {
    for (const DataType gradient : settings.gradients) {
      for (const int threads : settings.threads) {
        for (const std::int64_t size : settings.sizes) {
          Case(settings, buffers, rule, gradient, size, threads).run(rule);
        }
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  return bench::run_program("bench_host_optimizer", [&] { run(parse(argc, argv)); });
}
