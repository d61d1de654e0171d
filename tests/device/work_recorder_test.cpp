#include "device/work_recorder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tranche/device/device.h"

namespace tranche {
namespace {

using detail::RecordedWork;
using detail::WorkKind;
using detail::WorkRecorder;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

RecordedWork kernel(const char* name) {
  RecordedWork work;
  work.kind = WorkKind::kernel;
  work.name = name;
  return work;
}

TEST(WorkRecorder, LanesAreInOrderAndWaitForEvents) {
  const auto recorder = WorkRecorder::make(false);
  const int a = recorder->add_lane("a"), b = recorder->add_lane("b");
  recorder->add(a, kernel("first"));
  const Event second = recorder->add(a, kernel("second"));
  recorder->wait(b, second);
  recorder->add(b, kernel("third"));
  recorder->add(b, kernel("fourth"));
  ASSERT_EQ(recorder->work().size(), 4u);
  EXPECT_THAT(recorder->work()[0].after, IsEmpty());
  EXPECT_THAT(recorder->work()[1].after, ElementsAre(0));
  EXPECT_THAT(recorder->work()[2].after, ElementsAre(1));
  EXPECT_THAT(recorder->work()[3].after, ElementsAre(2)) << "a wait is for what comes next alone";
}

TEST(WorkRecorder, UnorderedLanesWaitForEventsAlone) {
  const auto recorder = WorkRecorder::make(true);
  const int lane = recorder->add_lane("communication", false);
  recorder->add(lane, kernel("first"));
  recorder->add(lane, kernel("second"));
  EXPECT_THAT(recorder->work()[1].after, IsEmpty());
}

TEST(WorkRecorder, WhatTheHostDidComesBeforeWhatItIssues) {
  const auto recorder = WorkRecorder::make(true);
  const int lane = recorder->add_lane("copies");
  recorder->add(WorkRecorder::host_lane, kernel("inline"));
  const Event copied = recorder->add(lane, kernel("copy"));
  EXPECT_THAT(recorder->work()[1].after, ElementsAre(0));
  EXPECT_FALSE(copied.query());
  copied.wait();  // a wait of the host
  EXPECT_TRUE(copied.query());
  recorder->add(WorkRecorder::host_lane, kernel("behind"));
  ASSERT_EQ(recorder->work().size(), 4u);
  EXPECT_EQ(recorder->work()[2].kind, WorkKind::join);
  EXPECT_THAT(recorder->work()[2].after, ElementsAre(0, 1));
  EXPECT_THAT(recorder->work()[3].after, ElementsAre(2));
}

TEST(WorkRecorder, APointBehindAWaitIsBehindWhatItWaitsFor) {
  const auto recorder = WorkRecorder::make(false);
  const int a = recorder->add_lane("a"), b = recorder->add_lane("b");
  recorder->wait(b, recorder->add(a, kernel("work")));
  const Event point = recorder->point(b);
  point.wait();
  EXPECT_TRUE(point.query());
  EXPECT_EQ(recorder->work()[1].kind, WorkKind::join);
  EXPECT_THAT(recorder->work()[1].after, ElementsAre(0));
  // The host has waited for everything before it.
  EXPECT_TRUE(recorder->point(a).query());
}

TEST(WorkRecorder, EventsOfOthersHavePassed) {
  const auto recorder = WorkRecorder::make(false), other = WorkRecorder::make(false);
  const int lane = recorder->add_lane("a");
  const Event foreign = other->add(other->add_lane("a"), kernel("work"));
  recorder->wait(lane, foreign);
  recorder->wait(lane, Event());
  recorder->add(lane, kernel("mine"));
  EXPECT_THAT(recorder->work()[0].after, IsEmpty());
}

TEST(WorkRecorder, StreamsOfMetaKeepCopies) {
  DeviceOptions options;
  options.kind = DeviceKind::meta;
  options.recorder = WorkRecorder::make(true);
  const auto device = make_device(options);
  const auto stream = device->create_stream("to host");
  device->copy_to_host(*stream, nullptr, nullptr, 100);
  device->fill_bytes(device->compute_stream(), nullptr, 0, 10);
  stream->synchronize();
  const auto& work = options.recorder->work();
  ASSERT_EQ(work.size(), 3u);
  EXPECT_EQ(work[0].kind, WorkKind::copy_to_host);
  EXPECT_EQ(work[0].bytes_written, 100);
  EXPECT_EQ(options.recorder->lanes()[static_cast<std::size_t>(work[0].lane)].name, "to host");
  EXPECT_EQ(work[1].lane, WorkRecorder::host_lane);
  EXPECT_EQ(work[1].bytes_read + work[1].bytes_written, 10);
  EXPECT_THAT(work[2].after, ElementsAre(0, 1));
}

}  // namespace
}  // namespace tranche
