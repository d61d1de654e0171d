// The arithmetic that CPU and GPU share, run on the CPU and compared with the CPU's own loops.

#include <cmath>

#include "kernels/dropout_draws.h"
#include "kernels/gelu_arithmetic.h"
#include "kernels/rules/adam.h"
#include "kernels/rules/sgd.h"
#include "optimizer_spec.h"
#include "tranche/kernels/elementwise.h"
#include "vector_test_support.h"

namespace tranche::kernels::testing {
namespace {

static_assert(detail::unchecked_random_block({}, 0) ==
              detail::unchecked_random_block({}, 0));  // it is constexpr

TEST(Arithmetic, AdamOfOneElementIsTheLoops) {
  for (const bool decoupled : {true, false}) {
    Guarded gradient(DataType::float32, 999), master(DataType::float32, 999), m(DataType::float32, 999),
        v(DataType::float32, 999);
    fill_random(gradient, 1);
    fill_random(master, 2);
    fill_random(m, 3);
    fill_random(v, 4, true);
    Guarded w_wanted = master, m_wanted = m, v_wanted = v;
    AdamArguments arguments;
    arguments.learning_rate = arguments.step_size = 3e-4f;
    arguments.weight_decay = 0.1f;
    arguments.gradient_scale = 0.7f;
    arguments.corrected_epsilon = 0.3f;
    arguments.decoupled = decoupled;
    TestStream stream;
    adam_update_all(stream, arguments, gradient.view(), master.view(), m.view(), v.view(), {});
    for (std::int64_t i = 0; i < 999; ++i) {
      float weight = w_wanted.get(i), moments[] = {m_wanted.get(i), v_wanted.get(i), 0};
      rules::adam::Adam::element<0b011>(arguments, gradient.get(i), weight, moments);
      w_wanted.set(i, weight);
      m_wanted.set(i, moments[0]);
      v_wanted.set(i, moments[1]);
    }
    EXPECT_TRUE(master.bits() == w_wanted.bits() && m.bits() == m_wanted.bits() &&
                v.bits() == v_wanted.bits());
  }
}

TEST(Arithmetic, SgdOfOneElementIsTheLoops) {
  for (int variant = 0; variant < 8; ++variant) {
    SgdArguments arguments{
        0.01f, variant & 1 ? 0.9f : 0.0f, 0.1f, 0.05f, (variant & 2) != 0, (variant & 4) != 0, 1.7f, true};
    Guarded gradient(DataType::float32, 99), master(DataType::float32, 99), buffer(DataType::float32, 99);
    fill_random(gradient, 1);
    fill_random(master, 2);
    fill_random(buffer, 3);
    Guarded w_wanted = master, b_wanted = buffer;
    TestStream stream;
    sgd_update_all(stream, arguments, gradient.view(), master.view(), buffer.view(), {});
    for (std::int64_t i = 0; i < 99; ++i) {
      float weight = w_wanted.get(i), held[] = {b_wanted.get(i)};
      rules::sgd::Sgd::element<0b1>(arguments, gradient.get(i), weight, held);
      w_wanted.set(i, weight);
      b_wanted.set(i, held[0]);
    }
    EXPECT_TRUE(master.bits() == w_wanted.bits() && buffer.bits() == b_wanted.bits()) << variant;
  }
}

TEST(Arithmetic, GeluOfOneElementIsTheLoops) {
  Guarded x(DataType::float32, 4001), ones(DataType::float32, 4001);
  for (std::int64_t i = 0; i < 4001; ++i) {
    x.set(i, static_cast<float>(i - 2000) * 0.0101f);
    ones.set(i, 1.0f);
  }
  Guarded y(DataType::float32, 4001), dx(DataType::float32, 4001);
  TestStream stream;
  gelu_forward(stream, x.view(), y.view());
  gelu_backward(stream, x.view(), ones.view(), dx.view());
  for (std::int64_t i = 0; i < 4001; ++i) {
    ASSERT_EQ(y.get(i), gelu_element(x.get(i))) << x.get(i);
    ASSERT_EQ(dx.get(i), gelu_derivative_element(x.get(i))) << x.get(i);
  }
}

TEST(Arithmetic, DrawsAreTheMasks) {
  DropoutOptions options;
  options.probability = 0.3f;
  options.seed = 5;
  options.step = 6;
  options.site = 7;
  const std::vector<std::int64_t> samples{41};
  options.samples = samples;
  Guarded x(DataType::float32, 203), y(DataType::float32, 203);
  for (std::int64_t i = 0; i < 203; ++i) x.set(i, 1.0f);
  TestStream stream;
  dropout(stream, options, x.view(), y.view());
  const DropoutDraws draws = dropout_draws(options);
  for (std::int64_t i = 0; i < 203; ++i) {
    const bool kept = draws.keeps(draws.block(41, i / 4)[static_cast<std::size_t>(i % 4)]);
    ASSERT_EQ(y.get(i), kept ? draws.scale : 0.0f) << i;
  }
}

}  // namespace
}  // namespace tranche::kernels::testing
