#include <stdexcept>

#include "tests/device/cuda_support.h"
#include "tranche/core/trace.h"

namespace tranche {
namespace {

using ::testing::HasSubstr;
using testing_support::message_of;

class CudaReplay : public testing_support::CudaTest {
 protected:
  /// Makes the order and number of runs visible without computing: copies b to c and a to b, and refills a.
  void shift(Stream& stream) {
    stream.count(100, 20, 3);
    device().copy_to_host(stream, pinned_.data(), a_.data(), 64);
    device().copy_from_host(stream, b_.data(), pinned_.data(), 64);
    stream.count(1, 2, 3);
  }
  void SetUp() override {
    CudaTest::SetUp();
    if (device_ == nullptr) return;
    a_ = memory(64);
    b_ = memory(64);
    pinned_ = memory(64, Tier::host);
  }
  void TearDown() override {
    a_.reset();
    b_.reset();
    pinned_.reset();
  }
  Buffer a_, b_, pinned_;
};

TEST_F(CudaReplay, IssuesThenCapturesThenLaunches) {
  auto replay = device().create_replay("step");
  int issued = 0;
  const WorkCount before = compute().work();
  for (int run = 0; run < 5; ++run) {
    device().fill_bytes(compute(), a_.data(), static_cast<unsigned char>(10 + run), 64);
    replay->run(compute(), [&] {
      ++issued;
      shift(compute());
    });
    EXPECT_EQ(read(b_.data(), 64), std::vector<unsigned char>(64, static_cast<unsigned char>(10 + run)))
        << run;
    EXPECT_EQ(device().counters().replays, run) << "the first run comes as it is, each later one is a launch";
    const WorkCount& work = compute().work();
    EXPECT_EQ(work.kernels - before.kernels, 2 * (run + 1));
    EXPECT_EQ(work.floating_point_operations - before.floating_point_operations, 101.0 * (run + 1));
    EXPECT_EQ(work.bytes_read - before.bytes_read, 22.0 * (run + 1));
    EXPECT_EQ(work.bytes_written - before.bytes_written, 6.0 * (run + 1));
  }
  EXPECT_EQ(issued, 2);
  EXPECT_EQ(replay->problem(), "");
}

TEST_F(CudaReplay, ForgetsAndStartsOver) {
  auto replay = device().create_replay("step");
  int issued = 0;
  const auto run = [&] {
    replay->run(compute(), [&] {
      ++issued;
      shift(compute());
    });
  };
  for (int i = 0; i < 3; ++i) run();
  replay->forget();
  for (int i = 0; i < 3; ++i) run();
  EXPECT_EQ(issued, 4);
  EXPECT_EQ(device().counters().replays, 4);
  compute().synchronize();
}

TEST_F(CudaReplay, RunsOnAnyStreamOfItsDevice) {
  auto replay = device().create_replay("step");
  auto other = device().create_stream("other");
  for (int i = 0; i < 2; ++i) replay->run(compute(), [&] { shift(compute()); });
  device().fill_bytes(compute(), a_.data(), 77, 64);
  other->wait(compute().record());
  replay->run(*other, [] { FAIL() << "is replayed"; });
  EXPECT_EQ(read(b_.data(), 64, *other)[63], 77);
  EXPECT_EQ(other->work().kernels, 2);
  auto cpu = make_device({DeviceKind::cpu, 0, 1});
  EXPECT_THAT(message_of<InvalidArgument>([&] { replay->run(cpu->compute_stream(), [] {}); }),
              HasSubstr("replay 'step' belongs to a cuda device"));
}

TEST_F(CudaReplay, WhatAGraphCannotHoldIsIssuedAndSaid) {
  auto state = std::make_shared<HostEvent>();
  state->complete();
  const Event passed(state);
  const struct {
    const char* what;
    std::function<void()> act;
  } cases[] = {
      {"run work on the host", [&] { compute().enqueue("host", [] {}); }},
      {"record an event", [&] { compute().record(); }},
      {"wait for an event", [&] { compute().wait(passed); }},
      {"synchronize", [&] { compute().synchronize(); }},
      {"copy to memory that is not pinned",
       [&] {
         static unsigned char host[64];
         device().copy_to_host(compute(), host, a_.data(), 64);
       }},
  };
  std::int64_t kernels = 0;
  for (const auto& one : cases) {
    SCOPED_TRACE(one.what);
    auto replay = device().create_replay("odd step");
    for (int run = 0; run < 4; ++run) {
      replay->run(compute(), [&] {
        shift(compute());
        one.act();
      });
      kernels += 2;
      if (run == 0) {
        EXPECT_EQ(replay->problem(), "");
      }
    }
    EXPECT_THAT(replay->problem(), HasSubstr("'odd step' is issued anew each time"));
    EXPECT_THAT(replay->problem(), HasSubstr(one.what));
    compute().synchronize();
    EXPECT_EQ(compute().work().kernels, kernels) << "what was captured in vain is not counted";
    replay->forget();
    EXPECT_EQ(replay->problem(), "");
  }
  EXPECT_EQ(device().counters().replays, 0);
}

TEST_F(CudaReplay, FailuresOfTheWorkComeThrough) {
  auto replay = device().create_replay("step");
  replay->run(compute(), [&] { shift(compute()); });
  const std::int64_t kernels = compute().work().kernels;
  EXPECT_THAT(message_of<InvalidArgument>([&] {
                replay->run(compute(), [&] {
                  shift(compute());
                  throw InvalidArgument("shape is wrong");
                });
              }),
              HasSubstr("shape is wrong"));
  EXPECT_EQ(compute().work().kernels, kernels);
  compute().synchronize();
  compute().record().wait();  // the stream is as it was
  device().fill_bytes(compute(), a_.data(), 5, 64);
  replay->run(compute(), [&] { shift(compute()); });
  EXPECT_EQ(read(b_.data(), 64)[0], 5);
  EXPECT_EQ(device().counters().replays, 1) << "captured at the next try";
}

TEST_F(CudaReplay, ReplaysShowInTheTrace) {
  TraceRecorder trace(0);
  auto replay = device().create_replay("the whole step");
  for (int i = 0; i < 2; ++i) replay->run(compute(), [&] { shift(compute()); });
  compute().set_trace(&trace);
  replay->run(compute(), [] {});
  compute().synchronize();
  compute().set_trace(nullptr);
  EXPECT_THAT(trace.to_json(), HasSubstr("the whole step"));
  EXPECT_EQ(trace.size(), 1);
}

}  // namespace
}  // namespace tranche
