#include "tranche/kernels/optimizer_update.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "tranche/kernels/cpu/optimizer_streams.h"
#include "tranche/kernels/reference/optimizer_update.h"
#include "vector_test_support.h"

namespace tranche::kernels::testing {
namespace {

/// Storage that an update touches; a spec and the kernel each get a copy.
struct State {
  State(DataType gradient_type, DataType moment_type, DataType weight_type, std::int64_t n, unsigned seed)
      : gradient(gradient_type, n),
        master(DataType::float32, n),
        first(moment_type, n),
        second(moment_type, n),
        weight(weight_type, n) {
    fill_random(gradient, seed);
    fill_random(master, seed + 1);
    fill_random(first, seed + 2);
    fill_random(second, seed + 3, true);
  }
  std::string bits() const { return master.bits() + first.bits() + second.bits() + weight.bits(); }
  Guarded gradient, master, first, second, weight;
};

/// The header's formulas, one element at a time. The build forbids contraction, so each operation rounds.
void adam_spec(const AdamArguments& a, State& s, bool with_weight) {
  for (std::int64_t i = 0; i < s.master.elements(); ++i) {
    float g = s.gradient.get(i) * a.gradient_scale;
    float w = s.master.get(i);
    if (a.decoupled) {
      w = w - (a.learning_rate * a.weight_decay) * w;
    } else {
      g = g + a.weight_decay * w;
    }
    const float m = a.beta1 * s.first.get(i) + (1.0f - a.beta1) * g;
    const float v = a.beta2 * s.second.get(i) + ((1.0f - a.beta2) * g) * g;
    w = w - a.step_size * (m / (std::sqrt(v) + a.corrected_epsilon));
    s.master.set(i, w);
    s.first.set(i, m);
    s.second.set(i, v);
    if (with_weight) s.weight.set(i, w);
  }
}

void sgd_spec(const SgdArguments& a, State& s, bool with_weight) {
  for (std::int64_t i = 0; i < s.master.elements(); ++i) {
    float w = s.master.get(i);
    const float g = s.gradient.get(i) * a.gradient_scale + a.weight_decay * w;
    float d = g;
    if (a.momentum != 0) {
      const float b = a.first_step ? g : a.momentum * s.first.get(i) + (1.0f - a.dampening) * g;
      d = a.nesterov ? g + a.momentum * b : b;
      s.first.set(i, b);
    }
    w = w - a.learning_rate * d;
    s.master.set(i, w);
    if (with_weight) s.weight.set(i, w);
  }
}

AdamArguments adam_arguments(bool decoupled) {
  AdamArguments a;
  a.learning_rate = 3e-4f;
  a.weight_decay = 0.1f;
  const double correction = std::sqrt(1 - std::pow(0.999, 3));
  a.step_size = static_cast<float>(3e-4 * correction / (1 - std::pow(0.9, 3)));
  a.corrected_epsilon = static_cast<float>(1e-8 * correction);
  a.gradient_scale = 0.37f;
  a.decoupled = decoupled;
  return a;
}

std::vector<SgdArguments> sgd_arguments() {
  std::vector<SgdArguments> all;
  for (const float momentum : {0.0f, 0.9f}) {
    for (const bool nesterov : {false, true}) {
      for (const bool first_step : {false, true}) {
        SgdArguments a;
        a.learning_rate = 0.01f;
        a.momentum = momentum;
        a.dampening = nesterov ? 0.0f : 0.3f;
        a.weight_decay = 0.05f;
        a.nesterov = nesterov;
        a.first_step = first_step;
        a.gradient_scale = 1.7f;
        all.push_back(a);
      }
    }
  }
  return all;
}

TEST(OptimizerUpdate, AdamIsTheSpecBitByBit) {
  for (const auto& set : tested_instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    for (const DataType gradient : floating_types()) {
      for (const DataType moment : {DataType::float32, DataType::bfloat16}) {
        for (const DataType weight : floating_types()) {
          for (std::int64_t n = 0; n <= 130; n += (n < 36 ? 1 : 13)) {
            for (const bool decoupled : {true, false}) {
              const bool with_weight = weight != DataType::float32 || n % 2 == 0;
              State wanted(gradient, moment, weight, n, static_cast<unsigned>(n));
              State got = wanted;
              const auto arguments = adam_arguments(decoupled);
              adam_spec(arguments, wanted, with_weight);
              TestStream stream;
              adam_update(stream, arguments, got.gradient.view(), got.master.view(), got.first.view(),
                          got.second.view(), with_weight ? got.weight.view() : TensorView{});
              ASSERT_EQ(got.bits(), wanted.bits())
                  << described(set, n, 1) << ", gradient " << name_of(gradient) << ", moments "
                  << name_of(moment) << ", weight " << (with_weight ? name_of(weight) : "absent");
            }
          }
        }
      }
    }
  }
}

TEST(OptimizerUpdate, SgdIsTheSpecBitByBit) {
  for (const auto& set : tested_instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    for (const DataType gradient : floating_types()) {
      for (const auto& arguments : sgd_arguments()) {
        for (const std::int64_t n : {0, 1, 3, 4, 5, 8, 15, 16, 17, 31, 33, 64, 127, 130}) {
          const DataType weight = n % 3 == 0 ? DataType::bfloat16 : DataType::float16;
          const bool with_weight = n % 5 != 0;
          State wanted(gradient, n % 2 ? DataType::float32 : DataType::bfloat16, weight, n, 7);
          State got = wanted;
          sgd_spec(arguments, wanted, with_weight);
          TestStream stream;
          sgd_update(stream, arguments, got.gradient.view(), got.master.view(),
                     arguments.momentum == 0 ? TensorView{} : got.first.view(),
                     with_weight ? got.weight.view() : TensorView{});
          ASSERT_EQ(got.bits(), wanted.bits())
              << described(set, n, 1) << ", gradient " << name_of(gradient) << ", momentum "
              << arguments.momentum << ", nesterov " << arguments.nesterov << ", first step "
              << arguments.first_step;
        }
      }
    }
  }
}

/// Twenty steps beside the fp64 reference: fp32 moments and weights of order one stay within a few roundings
/// a step, 20 * 4 * 2^-24 = 5e-6.
TEST(OptimizerUpdate, FollowsTheReferenceOverManySteps) {
  constexpr std::int64_t n = 103;
  const auto as_double = [](Guarded& values) {
    std::vector<double> wide;
    for (std::int64_t i = 0; i < values.elements(); ++i) wide.push_back(values.get(i));
    return wide;
  };
  for (const bool decoupled : {true, false}) {
    for (const bool adam : {true, false}) {
      Guarded gradient(DataType::float32, n);
      Guarded master(DataType::float32, n);
      for (std::int64_t i = 0; i < n; ++i) master.set(i, std::sin(static_cast<float>(i)));
      Guarded first(DataType::float32, n);
      Guarded second(DataType::float32, n);
      TestStream stream;
      std::vector<double> weight = as_double(master);
      std::vector<double> m(n, 0.0);
      std::vector<double> v(n, 0.0);
      for (std::int64_t i = 0; i < n; ++i) {
        first.set(i, 0);
        second.set(i, 0);
      }
      for (int step = 1; step <= 20; ++step) {
        for (std::int64_t i = 0; i < n; ++i) gradient.set(i, std::cos(static_cast<float>(i * step)));
        const auto g = as_double(gradient);
        if (adam) {
          const reference::AdamOptions options{1e-2, 0.9, 0.999, 1e-8, 0.1, 0.5, decoupled, true};
          reference::adam_update(options, step, g, weight, m, v);
          AdamArguments arguments;
          arguments.learning_rate = 1e-2f;
          arguments.weight_decay = 0.1f;
          arguments.gradient_scale = 0.5f;
          arguments.decoupled = decoupled;
          const double correction = std::sqrt(1 - std::pow(0.999, step));
          arguments.step_size = static_cast<float>(1e-2 * correction / (1 - std::pow(0.9, step)));
          arguments.corrected_epsilon = static_cast<float>(1e-8 * correction);
          adam_update(stream, arguments, gradient.view(), master.view(), first.view(), second.view(), {});
        } else {
          const reference::SgdOptions options{1e-2, 0.9, decoupled ? 0.0 : 0.1, 0.1, decoupled, 0.5};
          reference::sgd_update(options, step, g, weight, m);
          SgdArguments arguments{1e-2f, 0.9f, decoupled ? 0.0f : 0.1f, 0.1f, decoupled, step == 1,
                                 0.5f,  true};
          sgd_update(stream, arguments, gradient.view(), master.view(), first.view(), {});
        }
      }
      for (std::int64_t i = 0; i < n; ++i) {
        ASSERT_NEAR(master.get(i), weight[static_cast<std::size_t>(i)], 5e-6) << (adam ? "adam" : "sgd") << i;
      }
    }
  }
}

TEST(OptimizerUpdate, ThreadsChangeNoBit) {
  State adam(DataType::bfloat16, DataType::float32, DataType::bfloat16, large_size, 1);
  State sgd = adam;
  const State start = adam;
  adam_spec(adam_arguments(true), adam, true);
  const SgdArguments sgd_options = sgd_arguments().back();
  sgd_spec(sgd_options, sgd, true);
  for (const int threads : thread_counts()) {
    State got = start;
    TestStream stream(threads);
    adam_update(stream, adam_arguments(true), got.gradient.view(), got.master.view(), got.first.view(),
                got.second.view(), got.weight.view());
    EXPECT_TRUE(got.bits() == adam.bits()) << threads << " threads";
    State other = start;
    sgd_update(stream, sgd_options, other.gradient.view(), other.master.view(), other.first.view(),
               other.weight.view());
    EXPECT_TRUE(other.bits() == sgd.bits()) << threads << " threads";
  }
}

TEST(OptimizerUpdate, MaskedUpdateWritesNothing) {
  State state(DataType::float32, DataType::float32, DataType::bfloat16, 77, 5);
  state.gradient.set(3, INFINITY);
  const std::string before = state.bits();
  auto adam = adam_arguments(true);
  adam.apply = false;
  auto sgd = sgd_arguments().back();
  sgd.apply = false;
  TestStream stream;
  adam_update(stream, adam, state.gradient.view(), state.master.view(), state.first.view(),
              state.second.view(), state.weight.view());
  sgd_update(stream, sgd, state.gradient.view(), state.master.view(), state.first.view(),
             state.weight.view());
  EXPECT_EQ(state.bits(), before);
}

TEST(OptimizerUpdate, ArgumentsInMemoryAreReadWhenTheUpdateRuns) {
  for (const DataType moment : {DataType::float32, DataType::bfloat16}) {
    State wanted(DataType::bfloat16, moment, DataType::bfloat16, 77, 5);
    State got = wanted;
    State sgd_wanted = wanted;
    State sgd_got = wanted;
    State plain_wanted = wanted;
    State plain_got = wanted;
    adam_spec(adam_arguments(true), wanted, true);
    sgd_spec(sgd_arguments().back(), sgd_wanted, true);
    SgdArguments no_momentum = sgd_arguments().back();
    no_momentum.momentum = 0;
    sgd_spec(no_momentum, plain_wanted, true);
    TestStream stream(1, DeviceKind::cpu, true);
    AdamArguments adam;  // would write something else
    SgdArguments sgd;
    adam_update(stream, &adam, got.gradient.view(), got.master.view(), got.first.view(), got.second.view(),
                got.weight.view());
    sgd_update(stream, &sgd, sgd_got.gradient.view(), sgd_got.master.view(), sgd_got.first.view(),
               sgd_got.weight.view());
    sgd_update(stream, &sgd, plain_got.gradient.view(), plain_got.master.view(), {}, plain_got.weight.view());
    adam = adam_arguments(true);
    sgd = sgd_arguments().back();
    stream.run();
    EXPECT_TRUE(got.bits() == wanted.bits());
    EXPECT_TRUE(sgd_got.bits() == sgd_wanted.bits());
    EXPECT_TRUE(plain_got.bits() == plain_wanted.bits());
  }
}

TEST(OptimizerUpdate, MaskedUpdateOfArgumentsInMemoryIsIssuedAndWritesNothing) {
  State state(DataType::float32, DataType::float32, DataType::bfloat16, 77, 5);
  const std::string before = state.bits();
  AdamArguments masked_adam = adam_arguments(true);
  masked_adam.apply = false;
  SgdArguments masked_sgd = sgd_arguments().back();
  masked_sgd.apply = false;
  TestValue<AdamArguments> adam(masked_adam);
  TestValue<SgdArguments> sgd(masked_sgd);
  TestStream stream;
  adam_update(stream, adam.data(), state.gradient.view(), state.master.view(), state.first.view(),
              state.second.view(), state.weight.view());
  sgd_update(stream, sgd.data(), state.gradient.view(), state.master.view(), state.first.view(),
             state.weight.view());
  EXPECT_EQ(state.bits(), before);
  if (!on_gpu) {
    EXPECT_EQ(stream.names, (std::vector<std::string>{"adam_update", "sgd_update"}));
  }
  EXPECT_EQ(stream.work().kernels, 2);
}

/// A stretch of pieces with padding between them, of lengths around vectors, and two groups in turns.
std::vector<UpdateSegment> some_segments(std::int64_t elements, std::int64_t gap, unsigned seed) {
  std::mt19937 engine(seed);
  std::vector<UpdateSegment> segments;
  for (std::int64_t at = static_cast<std::int64_t>(engine() % 5); at < elements;) {
    const auto count = std::min<std::int64_t>(elements - at, static_cast<std::int64_t>(engine() % 97));
    segments.push_back({at, count, static_cast<int>(engine() % 3)});
    at += count + (gap == 0 ? 0 : static_cast<std::int64_t>(engine()) % gap);
  }
  return segments;
}

template <class Arguments, class Spec>
void segments_spec(const std::vector<Arguments>& groups, const std::vector<UpdateSegment>& segments, State& s,
                   const Spec& spec) {
  for (const UpdateSegment& segment : segments) {
    const Arguments& arguments = groups[static_cast<std::size_t>(segment.group)];
    if (!arguments.apply) continue;
    State piece(s.gradient.dtype(), s.first.dtype(), s.weight.dtype(), segment.count, 0);
    for (std::int64_t i = 0; i < segment.count; ++i) {
      piece.gradient.set(i, s.gradient.get(segment.first + i));
      piece.master.set(i, s.master.get(segment.first + i));
      piece.first.set(i, s.first.get(segment.first + i));
      piece.second.set(i, s.second.get(segment.first + i));
    }
    spec(arguments, piece);
    for (std::int64_t i = 0; i < segment.count; ++i) {
      s.master.set(segment.first + i, piece.master.get(i));
      s.first.set(segment.first + i, piece.first.get(i));
      s.second.set(segment.first + i, piece.second.get(i));
      s.weight.set(segment.first + i, piece.weight.get(i));
    }
  }
}

TEST(OptimizerUpdate, SegmentsAreTheirOwnUpdatesAndPaddingIsUntouched) {
  std::vector<AdamArguments> adam(3, adam_arguments(true));
  adam[1].weight_decay = 0;
  adam[1].step_size *= 0.25f;
  adam[2].apply = false;
  auto sgd = sgd_arguments();
  sgd.erase(sgd.begin(), sgd.begin() + 4);
  sgd[2].apply = false;
  for (const auto& set : tested_instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    for (const DataType gradient : floating_types()) {
      for (const DataType weight : floating_types()) {
        for (const DataType moment : {DataType::float32, DataType::bfloat16}) {
          for (const std::int64_t gap : {0, 64}) {
            const auto segments = some_segments(901, gap, static_cast<unsigned>(gap) + 1);
            State wanted(gradient, moment, weight, 901, 3);
            State got = wanted;
            State sgd_wanted = wanted;
            State sgd_got = wanted;
            TestStream stream;
            segments_spec(adam, segments, wanted,
                          [](const AdamArguments& a, State& s) { adam_spec(a, s, true); });
            adam_update_segments(stream, adam, segments, got.gradient.view(), got.master.view(),
                                 got.first.view(), got.second.view(), got.weight.view());
            ASSERT_TRUE(got.bits() == wanted.bits())
                << set << ", gap " << gap << ", gradient " << name_of(gradient) << ", moments "
                << name_of(moment) << ", weight " << name_of(weight);
            segments_spec(sgd, segments, sgd_wanted,
                          [](const SgdArguments& a, State& s) { sgd_spec(a, s, true); });
            sgd_update_segments(stream, sgd, segments, sgd_got.gradient.view(), sgd_got.master.view(),
                                sgd_got.first.view(), sgd_got.weight.view());
            ASSERT_TRUE(sgd_got.bits() == sgd_wanted.bits()) << "sgd, " << set << ", gap " << gap;
          }
        }
      }
    }
  }
}

TEST(OptimizerUpdate, ThreadsShareAStretchNotItsSegments) {
  std::vector<AdamArguments> groups(3, adam_arguments(true));
  groups[1].weight_decay = 0;
  groups[2].step_size *= 2;
  auto segments = some_segments(large_size, 64, 9);
  // One segment longer than a thread's range, across the border of two.
  segments.erase(std::remove_if(segments.begin(), segments.end(),
                                [](const UpdateSegment& s) { return s.first >= 20000; }),
                 segments.end());
  segments.push_back({20100, 40000, 1});
  segments.push_back({60200, large_size - 60200, 2});
  State wanted(DataType::bfloat16, DataType::float32, DataType::bfloat16, large_size, 1);
  const State start = wanted;
  segments_spec(groups, segments, wanted, [](const AdamArguments& a, State& s) { adam_spec(a, s, true); });
  for (const int threads : thread_counts()) {
    State got = start;
    TestStream stream(threads);
    adam_update_segments(stream, groups, segments, got.gradient.view(), got.master.view(), got.first.view(),
                         got.second.view(), got.weight.view());
    EXPECT_TRUE(got.bits() == wanted.bits()) << threads << " threads";
  }
}

TEST(OptimizerUpdate, SegmentListsAreCopiedAndCountedAsOneKernel) {
  State wanted(DataType::bfloat16, DataType::float32, DataType::bfloat16, 77, 5);
  State got = wanted;
  std::vector<UpdateSegment> segments{{3, 20, 0}, {30, 47, 0}};
  std::vector<AdamArguments> groups{adam_arguments(true)};
  segments_spec(groups, segments, wanted, [](const AdamArguments& a, State& s) { adam_spec(a, s, true); });
  TestStream stream(1, test_device_kind, true);
  adam_update_segments(stream, groups, segments, got.gradient.view(), got.master.view(), got.first.view(),
                       got.second.view(), got.weight.view());
  segments.assign(2, UpdateSegment{0, 1, 0});
  groups[0].apply = false;
  stream.run();
  EXPECT_TRUE(got.bits() == wanted.bits());
  TestStream meta(1, DeviceKind::meta);
  segments = {{3, 20, 0}, {30, 47, 0}};
  adam_update_segments(meta, groups, segments, got.gradient.view(), got.master.view(), got.first.view(),
                       got.second.view(), got.weight.view());
  EXPECT_EQ(meta.work(), stream.work());
  EXPECT_EQ(meta.work().kernels, 1);
  EXPECT_EQ(meta.work().bytes_read, 67 * (2 + 12));
  EXPECT_EQ(meta.work().bytes_written, 67 * (12 + 2));
  TestStream sgd(1, DeviceKind::meta);
  sgd_update_segments(sgd, std::vector<SgdArguments>(1), segments, got.gradient.view(), got.master.view(), {},
                      got.weight.view());
  EXPECT_EQ(sgd.work().bytes_read, 67 * (2 + 4));
  EXPECT_EQ(sgd.work().bytes_written, 67 * (4 + 2));
  EXPECT_TRUE(got.bits() == wanted.bits());
}

TEST(OptimizerUpdate, SegmentsThatCannotBeAreRefusedByNumber) {
  State s(DataType::float32, DataType::float32, DataType::bfloat16, 40, 5);
  const auto adam = [&](std::vector<UpdateSegment> segments) {
    return refusal([&] {
      TestStream stream(1, DeviceKind::meta);
      adam_update_segments(stream, std::vector<AdamArguments>(2), segments, s.gradient.view(),
                           s.master.view(), s.first.view(), s.second.view(), s.weight.view());
    });
  };
  EXPECT_EQ(adam({}), "nothing was thrown");
  EXPECT_EQ(adam({{0, 8, 0}, {8, 32, 1}}), "nothing was thrown");
  EXPECT_EQ(
      adam({{0, 8, 0}, {7, 1, 0}}),
      "adam_update_segments: segment 1 is [7, 7 + 1); it must lie between 8, the end of the one before it, "
      "and 40, the elements of the stretch");
  EXPECT_EQ(
      adam({{33, 8, 0}}),
      "adam_update_segments: segment 0 is [33, 33 + 8); it must lie between 0, the end of the one before "
      "it, and 40, the elements of the stretch");
  EXPECT_EQ(
      adam({{0, -1, 0}}),
      "adam_update_segments: segment 0 is [0, 0 + -1); it must lie between 0, the end of the one before "
      "it, and 40, the elements of the stretch");
  EXPECT_EQ(adam({{0, 8, 0}, {8, 8, 2}}),
            "adam_update_segments: segment 1 is of group 2, but there are 2 groups");
  EXPECT_EQ(adam({{0, 8, -1}}), "adam_update_segments: segment 0 is of group -1, but there are 2 groups");
  const auto sgd = refusal([&] {
    TestStream stream(1, DeviceKind::meta);
    SgdArguments with_momentum;
    with_momentum.momentum = 0.9f;
    sgd_update_segments(stream, std::vector<SgdArguments>{{}, with_momentum}, {}, s.gradient.view(),
                        s.master.view(), TensorView{nullptr, DataType::float32, {40}}, s.weight.view());
  });
  EXPECT_EQ(sgd, "sgd_update_segments: momentum is not 0, but `momentum_buffer` has no data");
}

/// Long enough for weights past the caches, with a head and a tail of single elements.
// Stores past the caches are the CPU's; on a GPU, where that length means nothing, sanitized builds take a
// shorter.
constexpr std::int64_t streamed_from = on_gpu && test::sanitized ? 4096 : cpu::streaming_elements;
constexpr std::int64_t streamed_size = streamed_from + 37;

TEST(OptimizerUpdate, StreamedWeightsAreTheSameBitsFromAnyElementOn) {
  const DataType moments[] = {DataType::float32, DataType::bfloat16};
  int turn = 0, point = 0;
  for (const DataType weight : floating_types()) {
    for (const DataType gradient : floating_types()) {
      if (!test::swept(point++, 2)) continue;
      State adam(gradient, moments[turn++ % 2], weight, streamed_size, 11);
      State sgd = adam;
      const State start = adam;
      adam_spec(adam_arguments(true), adam, true);
      sgd_spec(sgd_arguments().back(), sgd, true);
      std::int64_t offset = turn % 3;
      for (const auto& set : tested_instruction_sets()) {
        const cpu::InstructionSetForTest use(set);
        offset += 5;
        const int threads = thread_counts()[static_cast<std::size_t>(offset) % thread_counts().size()];
        TestStream stream(threads);
        State got = start;
        Guarded moved(weight, streamed_size, offset);
        adam_update(stream, adam_arguments(true), got.gradient.view(), got.master.view(), got.first.view(),
                    got.second.view(), moved.view());
        ASSERT_TRUE(moved.bits() == adam.weight.bits() && got.master.bits() == adam.master.bits() &&
                    got.second.bits() == adam.second.bits())
            << described(set, streamed_size, threads) << ", offset " << offset << ", gradient "
            << name_of(gradient) << ", weight " << name_of(weight);
        State other = start;
        sgd_update(stream, sgd_arguments().back(), other.gradient.view(), other.master.view(),
                   other.first.view(), moved.view());
        ASSERT_TRUE(moved.bits() == sgd.weight.bits() && other.master.bits() == sgd.master.bits())
            << "sgd, " << described(set, streamed_size, threads) << ", offset " << offset;
      }
    }
  }
}

TEST(OptimizerUpdate, StreamedSegmentsLeavePaddingAlone) {
  std::vector<AdamArguments> groups(3, adam_arguments(true));
  groups[1].weight_decay = 0;
  groups[2].apply = false;
  auto segments = some_segments(1000, 64, 3);
  segments.push_back({1003, streamed_from, 0});
  segments.push_back({1003 + streamed_from + 1, 29, 1});
  const std::int64_t elements = segments.back().first + segments.back().count + 7;
  State wanted(DataType::bfloat16, DataType::float32, DataType::bfloat16, elements, 1);
  const State start = wanted;
  segments_spec(groups, segments, wanted, [](const AdamArguments& a, State& s) { adam_spec(a, s, true); });
  for (const auto& set : tested_instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    State got = start;
    TestStream stream(thread_counts().back());
    adam_update_segments(stream, groups, segments, got.gradient.view(), got.master.view(), got.first.view(),
                         got.second.view(), got.weight.view());
    EXPECT_TRUE(got.bits() == wanted.bits()) << set;
  }
}

/// Roots of subnormals, zeros of either sign and infinities, and an epsilon that is nothing or all.
TEST(OptimizerUpdate, SecondMomentsOfEverySize) {
  std::vector<float> seconds{0, 0x1p-149f,     0x1.8p-140f, 0x1p-126f,       0x1.fffffep-127f, 1e-20f,
                             1, 0x1.fffffep0f, 1e20f,       0x1.fffffep127f, INFINITY,         -0.0f};
  std::mt19937 engine(7);
  while (seconds.size() < 4096) {
    seconds.push_back(std::ldexp(1.0f + static_cast<float>(engine() % (1u << 23)) * 0x1p-23f,
                                 static_cast<int>(engine() % 250) - 125));
  }
  const auto n = static_cast<std::int64_t>(seconds.size());
  State start(DataType::float32, DataType::float32, DataType::float16, n, 5);
  for (std::int64_t i = 0; i < n; ++i) {
    start.second.set(i, seconds[static_cast<std::size_t>(i)]);
    if (i % 2 == 0) start.gradient.set(i, 0);
  }
  for (const float epsilon : {0.0f, 0x1p-149f, 3e-10f, 1e-8f, 1.0f, 1e30f, INFINITY}) {
    for (const float beta2 : {0.999f, 1.0f, 0.0f}) {
      AdamArguments arguments = adam_arguments(true);
      arguments.corrected_epsilon = epsilon;
      arguments.beta2 = beta2;
      State wanted = start;
      adam_spec(arguments, wanted, true);
      for (const auto& set : tested_instruction_sets()) {
        const cpu::InstructionSetForTest use(set);
        State got = start;
        const UpdateSegment all{0, n, 0};
        cpu::adam_update(1, {&arguments, 1}, {&all, 1}, got.gradient.view(), got.master.view(),
                         got.first.view(), got.second.view(), got.weight.view());
        for (std::int64_t i = 0; i < n; ++i) {
          const float is = got.master.get(i), should = wanted.master.get(i);
          ASSERT_TRUE(std::bit_cast<std::uint32_t>(is) == std::bit_cast<std::uint32_t>(should) ||
                      (std::isnan(is) && std::isnan(should)))
              << set << ": second moment " << start.second.get(i) << ", epsilon " << epsilon << ": " << is
              << " instead of " << should;
        }
      }
    }
  }
}

TEST(OptimizerUpdate, KeepsSubnormals) {
  for (const auto& set : tested_instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    State state(DataType::float32, DataType::float32, DataType::float16, 21, 5);
    for (std::int64_t i = 0; i < 21; ++i) {
      state.gradient.set(i, 0);
      state.master.set(i, 0x1p-15f);    // subnormal as fp16
      state.first.set(i, 0x1.8p-130f);  // subnormal as fp32
      state.second.set(i, 0x1.8p-140f);
    }
    AdamArguments arguments;
    arguments.step_size = 0;
    TestStream stream;
    adam_update(stream, arguments, state.gradient.view(), state.master.view(), state.first.view(),
                state.second.view(), state.weight.view());
    for (std::int64_t i = 0; i < 21; ++i) {
      EXPECT_EQ(state.first.get(i), 0.9f * 0x1.8p-130f);
      EXPECT_EQ(state.second.get(i), 0.999f * 0x1.8p-140f);
      EXPECT_GT(state.second.get(i), 0);
      EXPECT_EQ(state.weight.get(i), 0x1p-15f);
    }
  }
}

TEST(OptimizerUpdate, CountsTheSameOnMetaAndTouchesNothing) {
  State state(DataType::bfloat16, DataType::float32, DataType::bfloat16, 10, 5);
  const std::string before = state.bits();
  TestStream cpu;
  TestStream meta(1, DeviceKind::meta);
  for (TestStream* stream : {&meta, &cpu}) {
    adam_update(*stream, adam_arguments(true), state.gradient.view(), state.master.view(), state.first.view(),
                state.second.view(), state.weight.view());
    if (stream == &meta) {
      EXPECT_EQ(state.bits(), before);
    }
    EXPECT_EQ(stream->work().kernels, 1);
    EXPECT_EQ(stream->work().floating_point_operations, 160);
    EXPECT_EQ(stream->work().bytes_read, 10 * (2 + 12));
    EXPECT_EQ(stream->work().bytes_written, 10 * (12 + 2));
  }
  if (!on_gpu) {
    EXPECT_EQ(cpu.names, std::vector<std::string>{"adam_update"});
  }
  EXPECT_TRUE(meta.names.empty());
  TestStream sgd(1, DeviceKind::meta);
  sgd_update(sgd, SgdArguments{}, state.gradient.view(), state.master.view(), {}, {});
  EXPECT_EQ(sgd.work().bytes_read, 10 * (2 + 4));
  EXPECT_EQ(sgd.work().bytes_written, 10 * 4);
}

TEST(OptimizerUpdate, RefusesByName) {
  State s(DataType::float32, DataType::float32, DataType::bfloat16, 4, 5);
  Guarded three(DataType::float32, 3);
  Guarded half(DataType::float16, 4);
  Guarded integers(DataType::int32, 4);
  const auto adam = [&](TensorView g, TensorView w, TensorView m, TensorView v, TensorView copy) {
    return refusal([&] {
      TestStream stream(1, DeviceKind::meta);
      adam_update(stream, AdamArguments{}, g, w, m, v, copy);
    });
  };
  const auto g = s.gradient.view(), w = s.master.view(), m = s.first.view(), v = s.second.view();
  EXPECT_EQ(adam(g, half.view(), m, v, {}), "adam_update: `master` has dtype fp16, wanted fp32");
  EXPECT_EQ(adam(integers.view(), w, m, v, {}),
            "adam_update: `gradient` has dtype int32, wanted fp32, bf16 or fp16");
  EXPECT_EQ(adam(three.view(), w, m, v, {}), "adam_update: `gradient` has 3 elements, wanted 4");
  EXPECT_EQ(adam(g, w, half.view(), v, {}), "adam_update: `exp_avg` has dtype fp16, wanted fp32 or bf16");
  EXPECT_EQ(adam(g, w, three.view(), v, {}), "adam_update: `exp_avg` has 3 elements, wanted 4");
  EXPECT_EQ(adam(g, w, m, half.view(), {}), "adam_update: `exp_avg_sq` has dtype fp16, wanted fp32 or bf16");
  EXPECT_EQ(adam(g, w, m, three.view(), {}), "adam_update: `exp_avg_sq` has 3 elements, wanted 4");
  EXPECT_EQ(adam(g, w, m, s.weight.view(), {}), "adam_update: `exp_avg` and `exp_avg_sq` differ in dtype");
  EXPECT_EQ(adam(g, w, m, v, integers.view()),
            "adam_update: `weight` has dtype int32, wanted fp32, bf16 or fp16");
  EXPECT_EQ(adam(g, w, m, v, three.view()), "adam_update: `weight` has 3 elements, wanted 4");
  EXPECT_EQ(refusal([&] {
              TestStream stream(1, DeviceKind::meta);
              adam_update(stream, static_cast<const AdamArguments*>(nullptr), g, w, m, v, {});
            }),
            "adam_update: `device_arguments` is null");
  EXPECT_EQ(refusal([&] {
              TestStream stream(1, DeviceKind::meta);
              sgd_update(stream, static_cast<const SgdArguments*>(nullptr), g, w, m, {});
            }),
            "sgd_update: `device_arguments` is null");
  SgdArguments momentum;
  momentum.momentum = 0.9f;
  const auto sgd = [&](TensorView buffer) {
    return refusal([&] {
      TestStream stream(1, DeviceKind::meta);
      sgd_update(stream, momentum, g, w, buffer, {});
    });
  };
  EXPECT_EQ(sgd(three.view()), "sgd_update: `momentum_buffer` has 3 elements, wanted 4");
  EXPECT_EQ(sgd(half.view()), "sgd_update: `momentum_buffer` has dtype fp16, wanted fp32 or bf16");
  EXPECT_EQ(sgd({nullptr, DataType::float32, Shape{4}}),
            "sgd_update: momentum is not 0, but `momentum_buffer` has no data");
}

}  // namespace
}  // namespace tranche::kernels::testing
