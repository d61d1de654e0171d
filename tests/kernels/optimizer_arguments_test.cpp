// Updates that change nothing, arguments that are read when the update runs, counted work, and refusals.
#include "tranche/kernels/optimizer_update.h"

#include <cmath>
#include <string>
#include <vector>

#include "optimizer_spec.h"

namespace tranche::kernels::testing {
namespace {

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
    AdamArguments adam;  // would write other values
    SgdArguments sgd;
    const UpdateSegment all{0, 77, 0};
    adam_update(stream, {&adam}, {&all, 1}, got.gradient.view(), got.master.view(), got.first.view(),
                got.second.view(), got.weight.view());
    sgd_update(stream, {&sgd}, {&all, 1}, sgd_got.gradient.view(), sgd_got.master.view(),
               sgd_got.first.view(), sgd_got.weight.view());
    sgd_update(stream, {&sgd}, {&all, 1}, plain_got.gradient.view(), plain_got.master.view(), {},
               plain_got.weight.view());
    adam = adam_arguments(true);
    sgd = sgd_arguments().back();
    stream.run();
    EXPECT_TRUE(got.bits() == wanted.bits());
    EXPECT_TRUE(sgd_got.bits() == sgd_wanted.bits());
    EXPECT_TRUE(plain_got.bits() == plain_wanted.bits());
  }
}

TEST(OptimizerUpdate, MaskedUpdateIsIssuedAndWritesNothing) {
  State state(DataType::float32, DataType::float32, DataType::bfloat16, 77, 5);
  state.gradient.set(3, INFINITY);
  const std::string before = state.bits();
  AdamArguments masked_adam = adam_arguments(true);
  masked_adam.apply = false;
  SgdArguments masked_sgd = sgd_arguments().back();
  masked_sgd.apply = false;
  TestStream stream;
  adam_update_all(stream, masked_adam, state.gradient.view(), state.master.view(), state.first.view(),
                  state.second.view(), state.weight.view());
  sgd_update_all(stream, masked_sgd, state.gradient.view(), state.master.view(), state.first.view(),
                 state.weight.view());
  EXPECT_EQ(state.bits(), before);
  if (!on_gpu) {
    EXPECT_EQ(stream.names, (std::vector<std::string>{"adam_update", "sgd_update"}));
  }
  EXPECT_EQ(stream.work().kernels, 2);
}

TEST(OptimizerUpdate, CountsTheSameOnMetaAndTouchesNothing) {
  State state(DataType::bfloat16, DataType::float32, DataType::bfloat16, 10, 5);
  const std::string before = state.bits();
  TestStream cpu;
  TestStream meta(1, DeviceKind::meta);
  for (TestStream* stream : {&meta, &cpu}) {
    adam_update_all(*stream, adam_arguments(true), state.gradient.view(), state.master.view(),
                    state.first.view(), state.second.view(), state.weight.view());
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
  sgd_update_all(sgd, SgdArguments{}, state.gradient.view(), state.master.view(), {}, {});
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
      adam_update_all(stream, AdamArguments{}, g, w, m, v, copy);
    });
  };
  const auto g = s.gradient.view(), w = s.master.view(), m = s.first.view(), v = s.second.view();
  EXPECT_EQ(adam(g, half.view(), m, v, {}),
            "adam_update: `master` has dtype fp16, wanted fp32, bf16 or uint16");
  EXPECT_EQ(adam(integers.view(), w, m, v, {}),
            "adam_update: `gradient` has dtype int32, wanted fp32, bf16 or fp16");
  EXPECT_EQ(adam(three.view(), w, m, v, {}), "adam_update: `gradient` has 3 elements, wanted 4");
  EXPECT_EQ(adam(g, w, half.view(), v, {}),
            "adam_update: `exp_avg` has dtype fp16, wanted fp32, bf16, block8 or block8_unsigned");
  EXPECT_EQ(adam(g, w, three.view(), v, {}), "adam_update: `exp_avg` has 3 elements, wanted 4");
  EXPECT_EQ(adam(g, w, m, half.view(), {}),
            "adam_update: `exp_avg_sq` has dtype fp16, wanted fp32, bf16, block8 or block8_unsigned");
  EXPECT_EQ(adam(g, w, m, three.view(), {}), "adam_update: `exp_avg_sq` has 3 elements, wanted 4");
  EXPECT_EQ(adam(g, w, m, s.weight.view(), {}), "adam_update: `exp_avg` and `exp_avg_sq` differ in dtype");
  EXPECT_EQ(adam(g, w, m, v, integers.view()),
            "adam_update: `weight` has dtype int32, wanted fp32, bf16 or fp16");
  EXPECT_EQ(adam(g, w, m, v, three.view()), "adam_update: `weight` has 3 elements, wanted 4");
  EXPECT_EQ(refusal([&] {
              TestStream stream(1, DeviceKind::meta);
              adam_update(stream, {}, {}, g, w, m, v, {});
            }),
            "adam_update: the address of `arguments` is null");
  EXPECT_EQ(refusal([&] {
              TestStream stream(1, DeviceKind::meta);
              sgd_update(stream, {}, {}, g, w, m, {});
            }),
            "sgd_update: the address of `arguments` is null");
  SgdArguments momentum;
  momentum.momentum = 0.9f;
  const auto sgd = [&](TensorView buffer) {
    return refusal([&] {
      TestStream stream(1, DeviceKind::meta);
      sgd_update_all(stream, momentum, g, w, buffer, {});
    });
  };
  EXPECT_EQ(sgd(three.view()), "sgd_update: `momentum_buffer` has 3 elements, wanted 4");
  EXPECT_EQ(sgd(half.view()),
            "sgd_update: `momentum_buffer` has dtype fp16, wanted fp32, bf16, block8 or block8_unsigned");
}

}  // namespace
}  // namespace tranche::kernels::testing
