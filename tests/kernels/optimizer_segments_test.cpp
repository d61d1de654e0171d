// Ranges with several groups: each segment equals a separate update, and elements between segments do not
// change.
#include "tranche/kernels/optimizer_update.h"

#include <algorithm>
#include <vector>

#include "optimizer_spec.h"

namespace tranche::kernels::testing {
namespace {

TEST(OptimizerUpdate, SegmentsAreTheirOwnUpdatesAndPaddingIsUntouched) {
  std::vector<AdamArguments> adam(3, adam_arguments(true));
  adam[1].weight_decay = 0;
  adam[1].step_size *= 0.25f;
  adam[2].apply = false;
  auto sgd = sgd_arguments();
  sgd.erase(sgd.begin(), sgd.begin() + 4);
  sgd[2].apply = false;
  TestGroups<AdamArguments> adam_groups(adam);
  TestGroups<SgdArguments> sgd_groups(sgd);
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
            adam_update(stream, adam_groups, segments, got.gradient.view(), got.master.view(),
                        got.first.view(), got.second.view(), got.weight.view());
            ASSERT_TRUE(got.bits() == wanted.bits())
                << set << ", gap " << gap << ", gradient " << name_of(gradient) << ", moments "
                << name_of(moment) << ", weight " << name_of(weight);
            segments_spec(sgd, segments, sgd_wanted,
                          [](const SgdArguments& a, State& s) { sgd_spec(a, s, true); });
            sgd_update(stream, sgd_groups, segments, sgd_got.gradient.view(), sgd_got.master.view(),
                       sgd_got.first.view(), sgd_got.weight.view());
            ASSERT_TRUE(sgd_got.bits() == sgd_wanted.bits()) << "sgd, " << set << ", gap " << gap;
          }
        }
      }
    }
  }
}

TEST(OptimizerUpdate, ThreadsShareARangeNotItsSegments) {
  std::vector<AdamArguments> groups(3, adam_arguments(true));
  groups[1].weight_decay = 0;
  groups[2].step_size *= 2;
  auto segments = some_segments(large_size, 64, 9);
  // One segment is longer than a thread's range and crosses the border of two.
  segments.erase(std::remove_if(segments.begin(), segments.end(),
                                [](const UpdateSegment& s) { return s.first >= 20000; }),
                 segments.end());
  segments.push_back({20100, 40000, 1});
  segments.push_back({60200, large_size - 60200, 2});
  State wanted(DataType::bfloat16, DataType::float32, DataType::bfloat16, large_size, 1);
  const State start = wanted;
  segments_spec(groups, segments, wanted, [](const AdamArguments& a, State& s) { adam_spec(a, s, true); });
  TestGroups<AdamArguments> held(groups);
  for (const int threads : thread_counts()) {
    State got = start;
    TestStream stream(threads);
    adam_update(stream, held, segments, got.gradient.view(), got.master.view(), got.first.view(),
                got.second.view(), got.weight.view());
    EXPECT_TRUE(got.bits() == wanted.bits()) << threads << " threads";
  }
}

TEST(OptimizerUpdate, SegmentsAreCopiedAndCountedAsOneKernel) {
  State wanted(DataType::bfloat16, DataType::float32, DataType::bfloat16, 77, 5);
  State got = wanted;
  std::vector<UpdateSegment> segments{{3, 20, 0}, {30, 47, 0}};
  std::vector<AdamArguments> groups{adam_arguments(true)};
  segments_spec(groups, segments, wanted, [](const AdamArguments& a, State& s) { adam_spec(a, s, true); });
  TestStream stream(1, test_device_kind, true);
  TestGroups<AdamArguments> held(groups);
  adam_update(stream, held, segments, got.gradient.view(), got.master.view(), got.first.view(),
              got.second.view(), got.weight.view());
  segments.assign(2, UpdateSegment{0, 1, 0});
  stream.run();
  EXPECT_TRUE(got.bits() == wanted.bits());
  TestStream meta(1, DeviceKind::meta);
  segments = {{3, 20, 0}, {30, 47, 0}};
  adam_update(meta, held, segments, got.gradient.view(), got.master.view(), got.first.view(),
              got.second.view(), got.weight.view());
  EXPECT_EQ(meta.work(), stream.work());
  EXPECT_EQ(meta.work().kernels, 1);
  EXPECT_EQ(meta.work().bytes_read, 67 * (2 + 12));
  EXPECT_EQ(meta.work().bytes_written, 67 * (12 + 2));
  TestStream sgd(1, DeviceKind::meta);
  const SgdArguments plain;
  sgd_update(sgd, {&plain}, segments, got.gradient.view(), got.master.view(), {}, got.weight.view());
  EXPECT_EQ(sgd.work().bytes_read, 67 * (2 + 4));
  EXPECT_EQ(sgd.work().bytes_written, 67 * (4 + 2));
  EXPECT_TRUE(got.bits() == wanted.bits());
}

TEST(OptimizerUpdate, SegmentsThatCannotBeAreRefusedByNumber) {
  State s(DataType::float32, DataType::float32, DataType::bfloat16, 40, 5);
  const auto adam = [&](std::vector<UpdateSegment> segments) {
    return refusal([&] {
      TestStream stream(1, DeviceKind::meta);
      const AdamArguments groups[2];
      adam_update(stream, {groups, 2}, segments, s.gradient.view(), s.master.view(), s.first.view(),
                  s.second.view(), s.weight.view());
    });
  };
  EXPECT_EQ(adam({}), "nothing was thrown");
  EXPECT_EQ(adam({{0, 8, 0}, {8, 32, 1}}), "nothing was thrown");
  EXPECT_EQ(adam({{0, 8, 0}, {7, 1, 0}}),
            "adam_update: segment 1 is [7, 7 + 1); it must lie between 8, the end of the one before it, "
            "and 40, the elements of the range");
  EXPECT_EQ(adam({{33, 8, 0}}),
            "adam_update: segment 0 is [33, 33 + 8); it must lie between 0, the end of the one before "
            "it, and 40, the elements of the range");
  EXPECT_EQ(adam({{0, -1, 0}}),
            "adam_update: segment 0 is [0, 0 + -1); it must lie between 0, the end of the one before "
            "it, and 40, the elements of the range");
  EXPECT_EQ(adam({{0, 8, 0}, {8, 8, 2}}), "adam_update: segment 1 is of group 2, but there are 2 groups");
  EXPECT_EQ(adam({{0, 8, -1}}), "adam_update: segment 0 is of group -1, but there are 2 groups");
  EXPECT_EQ(refusal([&] {
              TestStream stream(1, DeviceKind::meta);
              const SgdArguments group;
              const UpdateSegment of_other{0, 8, 1};
              sgd_update(stream, {&group}, {&of_other, 1}, s.gradient.view(), s.master.view(), {}, {});
            }),
            "sgd_update: segment 0 is of group 1, but there are 1 groups");
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
  TestGroups<AdamArguments> held(groups);
  for (const auto& set : tested_instruction_sets()) {
    const cpu::InstructionSetForTest use(set);
    State got = start;
    TestStream stream(thread_counts().back());
    adam_update(stream, held, segments, got.gradient.view(), got.master.view(), got.first.view(),
                got.second.view(), got.weight.view());
    EXPECT_TRUE(got.bits() == wanted.bits()) << set;
  }
}

}  // namespace
}  // namespace tranche::kernels::testing
