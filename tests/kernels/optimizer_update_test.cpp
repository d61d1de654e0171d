#include "tranche/kernels/optimizer_update.h"

#include <bit>
#include <cmath>
#include <random>
#include <vector>

#include "kernels/reference/optimizer_update.h"
#include "optimizer_spec.h"

namespace tranche::kernels::testing {
namespace {

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
              adam_update_all(stream, arguments, got.gradient.view(), got.master.view(), got.first.view(),
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
          sgd_update_all(stream, arguments, got.gradient.view(), got.master.view(),
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

/// Compares twenty steps with the fp64 reference: fp32 moments and weights of order one differ by a few
/// roundings per step, 20 * 4 * 2^-24 = 5e-6.
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
          adam_update_all(stream, arguments, gradient.view(), master.view(), first.view(), second.view(), {});
        } else {
          const reference::SgdOptions options{1e-2, 0.9, decoupled ? 0.0 : 0.1, 0.1, decoupled, 0.5};
          reference::sgd_update(options, step, g, weight, m);
          SgdArguments arguments{1e-2f, 0.9f, decoupled ? 0.0f : 0.1f, 0.1f, decoupled, step == 1,
                                 0.5f,  true};
          sgd_update_all(stream, arguments, gradient.view(), master.view(), first.view(), {});
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
    adam_update_all(stream, adam_arguments(true), got.gradient.view(), got.master.view(), got.first.view(),
                    got.second.view(), got.weight.view());
    EXPECT_TRUE(got.bits() == adam.bits()) << threads << " threads";
    State other = start;
    sgd_update_all(stream, sgd_options, other.gradient.view(), other.master.view(), other.first.view(),
                   other.weight.view());
    EXPECT_TRUE(other.bits() == sgd.bits()) << threads << " threads";
  }
}

TEST(OptimizerUpdate, StreamedWeightsAreTheSameBitsFromAnyElementOn) {
  const DataType moments[] = {DataType::float32, DataType::bfloat16};
  int point = 0;
  for (const DataType weight : floating_types()) {
    for (const DataType gradient : floating_types()) {
      if (!test::swept(point++, 2)) continue;
      State adam(gradient, moments[point / 2 % 2], weight, streamed_size, 11);
      State sgd = adam;
      const State start = adam;
      adam_spec(adam_arguments(true), adam, true);
      sgd_spec(sgd_arguments().back(), sgd, true);
      std::int64_t offset = point % 3;
      for (const auto& set : tested_instruction_sets()) {
        const cpu::InstructionSetForTest use(set);
        offset += 5;
        const int threads = thread_counts()[static_cast<std::size_t>(offset) % thread_counts().size()];
        TestStream stream(threads);
        State got = start;
        Guarded moved(weight, streamed_size, offset);
        adam_update_all(stream, adam_arguments(true), got.gradient.view(), got.master.view(),
                        got.first.view(), got.second.view(), moved.view());
        ASSERT_TRUE(moved.bits() == adam.weight.bits() && got.master.bits() == adam.master.bits() &&
                    got.second.bits() == adam.second.bits())
            << described(set, streamed_size, threads) << ", offset " << offset << ", gradient "
            << name_of(gradient) << ", weight " << name_of(weight);
        State other = start;
        sgd_update_all(stream, sgd_arguments().back(), other.gradient.view(), other.master.view(),
                       other.first.view(), moved.view());
        ASSERT_TRUE(moved.bits() == sgd.weight.bits() && other.master.bits() == sgd.master.bits())
            << "sgd, " << described(set, streamed_size, threads) << ", offset " << offset;
      }
    }
  }
}

/// Square roots of subnormals, zeros of either sign and infinities, with an epsilon that is negligible or
/// dominant.
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
        cpu::adam_update(1, {&arguments}, {&all, 1}, got.gradient.view(), got.master.view(), got.first.view(),
                         got.second.view(), got.weight.view());
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
    adam_update_all(stream, arguments, state.gradient.view(), state.master.view(), state.first.view(),
                    state.second.view(), state.weight.view());
    for (std::int64_t i = 0; i < 21; ++i) {
      EXPECT_EQ(state.first.get(i), 0.9f * 0x1.8p-130f);
      EXPECT_EQ(state.second.get(i), 0.999f * 0x1.8p-140f);
      EXPECT_GT(state.second.get(i), 0);
      EXPECT_EQ(state.weight.get(i), 0x1p-15f);
    }
  }
}

}  // namespace
}  // namespace tranche::kernels::testing
