#include <atomic>
#include <chrono>
#include <cmath>
#include <thread>

#include "core/clock.h"
#include "tests/device/cuda_support.h"
#include "tranche/core/trace.h"

namespace tranche {
namespace {

using detail::seconds_now;
using ::testing::HasSubstr;
using testing_support::message_of;

class CudaStreams : public testing_support::CudaTest {
 protected:
  static std::exception_ptr failure(const char* text) {
    return std::make_exception_ptr(CommunicationError(text));
  }
  static void sleep(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }
};

TEST_F(CudaStreams, WaitsOrderWorkAcrossStreams) {
  auto other = device().create_stream("gather");
  auto third = device().create_inline_stream("comm", 1);
  Buffer a = memory(4096);
  auto gate = std::make_shared<HostEvent>();
  compute().wait(Event(gate));
  device().fill_bytes(compute(), a.data(), 1, 4096);
  other->wait(compute().record());
  device().fill_bytes(*other, a.data(), 2, 2048);
  third->wait(other->record());
  device().fill_bytes(*third, a.data(), 3, 1024);
  const Event last = third->record();
  EXPECT_FALSE(last.query());
  EXPECT_FALSE(last.wait_for(0.01));
  gate->complete();
  last.wait();
  EXPECT_TRUE(last.query());
  const auto all = read(a.data(), 4096, *third);
  EXPECT_EQ(all[1023], 3);
  EXPECT_EQ(all[1024], 2);
  EXPECT_EQ(all[2048], 1);
}

TEST_F(CudaStreams, HostWorkRunsInOrderAndOffTheIssuingThread) {
  Buffer pinned = memory(sizeof(int), Tier::host);
  Buffer a = memory(sizeof(int));
  auto* value = static_cast<int*>(pinned.data());
  *value = 5;
  device().copy_from_host(compute(), a.data(), pinned.data(), sizeof(int));
  std::vector<int> order;
  std::thread::id ran_on;
  compute().enqueue("first", [&] {
    order.push_back(1);
    ran_on = std::this_thread::get_id();
    *value = 6;
  });
  compute().enqueue("second", [&] { order.push_back(*value); });
  device().copy_to_host(compute(), pinned.data(), a.data(), sizeof(int));
  compute().enqueue("third", [&] { order.push_back(*value); });
  compute().synchronize();
  EXPECT_EQ(order, (std::vector<int>{1, 6, 5}));
  EXPECT_NE(ran_on, std::this_thread::get_id());
  EXPECT_THAT(message_of<InvalidArgument>([&] { compute().enqueue("nothing", {}); }), HasSubstr("'nothing'"));
}

TEST_F(CudaStreams, HostWorkOwnsWhatItHolds) {
  auto held = std::make_shared<int>(1);
  std::weak_ptr<int> watch = held;
  compute().enqueue("holds", [held] {});
  held.reset();
  compute().synchronize();
  EXPECT_TRUE(watch.expired());
}

TEST_F(CudaStreams, HostStreamsRunOnTheHostAndAreOrderedWithTheGpus) {
  auto host = device().create_host_stream("host optimizer", 2);
  EXPECT_EQ(host->kind(), DeviceKind::cpu);
  EXPECT_EQ(host->threads(), 2);
  EXPECT_EQ(host->native_handle(), nullptr);
  Buffer pinned = memory(4096, Tier::host);
  Buffer a = memory(4096);
  auto* values = static_cast<unsigned char*>(pinned.data());
  auto gate = std::make_shared<HostEvent>();
  // The GPU fills memory, the host adds to it, the GPU copies it back; each waits for the other's event.
  compute().wait(Event(gate));
  device().fill_bytes(compute(), a.data(), 40, 4096);
  device().copy_to_host(compute(), values, a.data(), 4096);
  host->wait(compute().record());
  std::thread::id ran_on;
  host->enqueue("add", [&] {
    ran_on = std::this_thread::get_id();
    for (int i = 0; i < 4096; ++i) values[i] = static_cast<unsigned char>(values[i] + 2);
  });
  compute().wait(host->record());
  device().copy_from_host(compute(), a.data(), values, 4096);
  const Event last = compute().record();
  EXPECT_FALSE(last.wait_for(0.01));
  gate->complete();
  last.wait();
  EXPECT_EQ(read(a.data(), 4096), std::vector<unsigned char>(4096, 42));
  EXPECT_NE(ran_on, std::this_thread::get_id());
}

TEST_F(CudaStreams, AFailedHostStreamFailsTheGpus) {
  auto host = device().create_host_stream("host optimizer", 1);
  auto other = device().create_stream("from host");
  auto gate = std::make_shared<HostEvent>();
  host->wait(Event(gate));
  host->enqueue("bad", [] { throw InvalidArgument("master weights have no gradient"); });
  const Event failed = host->record();
  other->wait(failed);  // the failure is not known yet; the waits below come after it
  const Event behind = other->record();
  gate->complete();
  EXPECT_THAT(message_of<InvalidArgument>([&] { behind.wait(); }), HasSubstr("have no gradient"));
  EXPECT_THAT(message_of<InvalidArgument>([&] { other->synchronize(); }), HasSubstr("have no gradient"));
  EXPECT_TRUE(failed.query());
  auto third = device().create_stream("to host");
  third->wait(failed);
  EXPECT_THAT(message_of<InvalidArgument>([&] { third->synchronize(); }), HasSubstr("have no gradient"));
  // The reverse: host work after failed work of a GPU stream does not run.
  auto second = device().create_host_stream("second", 1);
  bool ran = false;
  second->wait(behind);
  second->enqueue("skipped", [&] { ran = true; });
  EXPECT_THAT(message_of<InvalidArgument>([&] { second->synchronize(); }), HasSubstr("have no gradient"));
  EXPECT_FALSE(ran);
}

// Host work of one stream waits for host work of another, and must not prevent it from running.
TEST_F(CudaStreams, BlockedHostWorkHoldsUpNoOtherStream) {
  auto a = device().create_stream("a");
  auto b = device().create_stream("b");
  auto signal = std::make_shared<HostEvent>();
  a->enqueue("waits", [signal] { signal->wait(20.0); });
  b->enqueue("signals", [signal] { signal->complete(); });
  b->synchronize();
  EXPECT_TRUE(a->record().wait_for(20.0));
}

TEST_F(CudaStreams, FailuresOfHostWorkSurfaceLater) {
  auto stream = device().create_stream("io");
  bool skipped = true;
  auto gate = std::make_shared<HostEvent>();
  stream->wait(Event(gate));
  const Event before = stream->record();
  stream->enqueue("bad", [] { throw CommunicationError("disk is gone"); });
  const Event after = stream->record();
  stream->enqueue("later", [&] { skipped = false; });
  gate->complete();
  EXPECT_THAT(message_of<CommunicationError>([&] { stream->synchronize(); }), HasSubstr("disk is gone"));
  EXPECT_TRUE(skipped);
  before.wait();  // earlier work has not failed
  EXPECT_TRUE(after.query());
  EXPECT_THAT(message_of<CommunicationError>([&] { after.wait(); }), HasSubstr("disk is gone"));
  EXPECT_THAT(message_of<CommunicationError>([&] { after.wait_for(0); }), HasSubstr("disk is gone"));
  EXPECT_THAT(message_of<CommunicationError>([&] { stream->record().wait(); }), HasSubstr("disk is gone"));
  EXPECT_THAT(message_of<CommunicationError>([&] { stream->synchronize(); }), HasSubstr("disk is gone"))
      << "it is never cleared";
}

TEST_F(CudaStreams, FailuresGoAlongWithWaits) {
  auto first = device().create_stream("first");
  auto second = device().create_stream("second");
  auto apart = device().create_stream("apart");
  auto gate = std::make_shared<HostEvent>();
  first->wait(Event(gate));
  first->enqueue("bad", [] { throw CommunicationError("peer 3 is gone"); });
  second->wait(first->record());  // not yet failed when it is issued
  bool ran = false;
  second->enqueue("after", [&] { ran = true; });
  apart->enqueue("apart", [] {});
  gate->complete();
  EXPECT_THAT(message_of<CommunicationError>([&] { second->synchronize(); }), HasSubstr("peer 3 is gone"));
  EXPECT_FALSE(ran);
  EXPECT_THAT(message_of<CommunicationError>([&] { second->record().wait(); }), HasSubstr("peer 3 is gone"));
  apart->synchronize();
}

TEST_F(CudaStreams, FailedHostEventsFailTheStream) {
  auto late = std::make_shared<HostEvent>();
  auto stream = device().create_stream("late");
  stream->wait(Event(late));
  const Event after = stream->record();
  late->fail(failure("gather failed"));
  EXPECT_THAT(message_of<CommunicationError>([&] { after.wait(); }), HasSubstr("gather failed"));

  auto known = device().create_stream("known");
  known->wait(Event());  // a point that has passed already
  auto passed = std::make_shared<HostEvent>();
  passed->complete();
  known->wait(Event(passed));
  known->synchronize();
  auto failed = std::make_shared<HostEvent>();
  failed->fail(failure("failed before"));
  known->wait(Event(failed));
  EXPECT_THAT(message_of<CommunicationError>([&] { known->synchronize(); }), HasSubstr("failed before"));
}

TEST_F(CudaStreams, TearingDownDoesNotHang) {
  const double begin = seconds_now();
  {
    auto stream = device().create_stream("stuck");
    stream->wait(Event(std::make_shared<HostEvent>()));
  }
  EXPECT_LT(seconds_now() - begin, 60.0) << "a second of patience, and what machines under load take";
}

TEST_F(CudaStreams, HostWaitsAreCounted) {
  auto stream = device().create_stream("counted");
  stream->synchronize();
  const std::int64_t start = device().counters().host_waits;
  auto gate = std::make_shared<HostEvent>();
  stream->wait(Event(gate));
  const Event event = stream->record();
  EXPECT_FALSE(event.query());
  EXPECT_EQ(device().counters().host_waits, start) << "issuing and asking are no waits";
  EXPECT_FALSE(event.wait_for(0.005));
  EXPECT_EQ(device().counters().host_waits, start + 1);
  gate->complete();
  event.wait();
  const std::int64_t waited = device().counters().host_waits;
  event.wait();
  EXPECT_TRUE(event.wait_for(1));
  EXPECT_EQ(device().counters().host_waits, waited) << "a point already passed stops nobody";
  stream->synchronize();
  EXPECT_EQ(device().counters().host_waits, waited + 1);
}

TEST_F(CudaStreams, DeadlinesEnd) {
  auto stream = device().create_stream("slow");
  auto gate = std::make_shared<HostEvent>();
  stream->wait(Event(gate));
  const Event event = stream->record();
  const double begin = seconds_now();
  EXPECT_FALSE(event.wait_for(0.05));
  EXPECT_GE(seconds_now() - begin, 0.05);
  EXPECT_FALSE(event.wait_for(0));
  gate->complete();
  EXPECT_TRUE(event.wait_for(20));
}

TEST_F(CudaStreams, EventsKnowWhenTheyPassed) {
  const double begin = seconds_now();
  auto gate = std::make_shared<HostEvent>();
  compute().wait(Event(gate));
  const Event waiting = compute().record();
  EXPECT_TRUE(std::isnan(waiting.passed_at()));
  gate->complete();
  std::vector<Event> events;
  for (int i = 0; i < 20; ++i) {
    if (i % 5 == 0) compute().enqueue("pause", [] { sleep(0.002); });
    events.push_back(compute().record());
  }
  compute().synchronize();
  const double end = seconds_now();
  double before = waiting.passed_at();
  // The clocks of device and host agree within some 10 us; the bound of 5 ms is for busy machines.
  constexpr double slack = 0.005;
  EXPECT_GE(before, begin - slack);
  for (std::size_t i = 0; i < events.size(); ++i) {
    const double at = events[i].passed_at();
    EXPECT_GE(at, before) << i;
    if (i % 5 == 0) {
      EXPECT_GE(at, before + 0.0015) << "there was a pause";
    }
    before = at;
  }
  EXPECT_LE(before, end + slack);
  EXPECT_EQ(events[3].passed_at(), events[3].passed_at());
}

TEST_F(CudaStreams, EventsAreUsedAgain) {
  // There are thousands of points, but few exist at a time. A device that created an event for each would be
  // slow; one that reused an event too early would let these pass too early.
  auto other = device().create_stream("other");
  Buffer a = memory(256);
  for (int i = 0; i < 2000; ++i) {
    Stream& one = i % 2 == 0 ? compute() : *other;
    Stream& two = i % 2 == 0 ? *other : compute();
    device().fill_bytes(one, a.data(), static_cast<unsigned char>(i), 256);
    two.wait(one.record());
  }
  EXPECT_EQ(read(a.data(), 256, *other)[0], static_cast<unsigned char>(1999));
}

TEST_F(CudaStreams, TracesHostWorkAndDeviceWork) {
  TraceRecorder trace(0);
  auto stream = device().create_stream("traced");
  Buffer a = memory(1000);
  stream->set_trace(&trace);
  stream->enqueue("host part", [] { sleep(0.002); });
  device().fill_bytes(*stream, a.data(), 1, 1000);
  {
    const StreamSpan span(*stream, "a kernel");
    device().fill_bytes(*stream, a.data(), 2, 1000);
  }
  read(a.data(), 1000, *stream);
  const std::string json = trace.to_json();
  for (const char* name : {"host part", "fill bytes", "a kernel", "copy to host", "traced"}) {
    EXPECT_THAT(json, HasSubstr(name));
  }
  EXPECT_EQ(trace.size(), 5);
  stream->set_trace(nullptr);
  device().fill_bytes(*stream, a.data(), 2, 1000);
  stream->synchronize();
  EXPECT_EQ(trace.size(), 5);
}

TEST_F(CudaStreams, ALongTraceKeepsItsEventsBounded) {
  TraceRecorder trace(0);
  auto stream = device().create_stream("traced");
  Buffer a = memory(16);
  stream->set_trace(&trace);
  for (int i = 0; i < 5000; ++i) {
    device().fill_bytes(*stream, a.data(), 1, 16);
    if (i == 2500) stream->record().wait();
  }
  stream->synchronize();
  EXPECT_GT(trace.size(), 2500) << "spans that have passed make room";
  EXPECT_LE(trace.size(), 5000);
}

}  // namespace
}  // namespace tranche
