#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <vector>

#include "device/cpu/cpu_streams.h"
#include "device/cuda_probe.h"
#include "tests/core/error_text.h"
#include "tranche/core/error.h"
#include "tranche/core/trace.h"
#include "tranche/device/device.h"

namespace tranche {
namespace {

using test::message_of;
using ::testing::HasSubstr;

std::exception_ptr failure(const char* text) {
  return std::make_exception_ptr(CommunicationError(text));
}

std::unique_ptr<Device> cpu(int threads = 1) {
  return make_device({DeviceKind::cpu, 0, threads});
}

TEST(HostEvent, DefaultEventHasPassed) {
  const Event event;
  EXPECT_TRUE(event.query());
  event.wait();
  EXPECT_TRUE(event.wait_for(0));
}

TEST(HostEvent, WaitEndsWhenCompletedElsewhere) {
  auto state = std::make_shared<HostEvent>();
  const Event event(state);
  EXPECT_FALSE(event.query());
  EXPECT_FALSE(event.wait_for(0));
  EXPECT_FALSE(event.wait_for(0.001));
  int data = 0;  // ordered only by the event
  std::thread other([&] {
    data = 42;
    state->complete();
  });
  event.wait();
  EXPECT_EQ(data, 42);
  EXPECT_TRUE(event.query());
  EXPECT_TRUE(event.wait_for(0));
  other.join();
}

TEST(HostEvent, FirstOutcomeStays) {
  HostEvent passed;
  passed.complete();
  passed.complete();
  passed.fail(failure("late"));
  EXPECT_TRUE(passed.wait(-1));

  HostEvent failed;
  failed.fail(failure("peer 3 is gone"));
  failed.complete();
  EXPECT_TRUE(failed.query());
  EXPECT_THAT(message_of<CommunicationError>([&] { failed.wait(-1); }), HasSubstr("peer 3 is gone"));
  EXPECT_THAT(message_of<CommunicationError>([&] { failed.wait(0); }), HasSubstr("peer 3 is gone"));
}

TEST(HostEvent, WaiterMakesProgress) {
  auto state = std::make_shared<HostEvent>();
  int calls = 0;
  state->set_progress([&calls, raw = state.get()] {
    if (++calls == 100) raw->complete();
    return false;
  });
  EXPECT_FALSE(state->query());
  EXPECT_EQ(calls, 0) << "query must not move the work";
  EXPECT_TRUE(state->wait(-1));
  EXPECT_EQ(calls, 100);
  EXPECT_TRUE(state->wait(-1));
  EXPECT_EQ(calls, 100) << "a passed event needs no progress";
}

TEST(HostEvent, WaitWithUnproductiveProgressEndsInTime) {
  HostEvent event;
  int calls = 0;
  event.set_progress([&] {
    ++calls;
    return false;
  });
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_FALSE(event.wait(0.02));
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
  EXPECT_GE(taken.count(), 0.02);
  EXPECT_GE(calls, 1);
  // 32 immediate calls, then pauses of up to 100 us; a spinning waiter would make thousands of calls.
  EXPECT_LE(calls, 32 + 20 + 20000 / 100);
}

TEST(HostEvent, WorkThatMovesIsNotPausedFor) {
  // With pauses after every 32 tries this wait would take seconds; the test only checks that it progresses.
  auto state = std::make_shared<HostEvent>();
  int calls = 0, attending = 0, attended = 0;
  state->set_progress(
      [&, raw = state.get()] {
        attended += attending;
        if (++calls == 100000) raw->complete();
        return true;
      },
      [&]() -> std::shared_ptr<void> {
        ++attending;
        return {nullptr, [&](void*) { --attending; }};
      });
  EXPECT_TRUE(state->wait(-1));
  EXPECT_EQ(calls, 100000);
  EXPECT_EQ(attended, 100000) << "the waiter was there all the while";
  EXPECT_EQ(attending, 0);
}

TEST(HostEvent, ProgressFailureReachesTheWaiter) {
  HostEvent event;
  event.set_progress([]() -> bool { throw CommunicationError("progress broke"); });
  EXPECT_THAT(message_of<CommunicationError>([&] { event.wait(-1); }), HasSubstr("progress broke"));
  EXPECT_FALSE(event.query());
}

TEST(HostEvent, WaiterPausesOnItsWakeEvent) {
  struct CountingEvent : WakeEvent {
    std::uint32_t notifications = 0;
    std::vector<std::uint32_t> seen;
    std::chrono::microseconds longest{0};
    std::uint32_t count() const override { return notifications; }
    void wait(std::uint32_t since, std::chrono::microseconds until) override {
      seen.push_back(since);
      longest = std::max(longest, until);
    }
  };
  const auto wake_event = std::make_shared<CountingEvent>();
  auto state = std::make_shared<HostEvent>();
  int calls = 0;
  state->set_progress(
      [&, raw = state.get()] {
        // A notification while the work is polled must end the following pause.
        if (++calls == 40) wake_event->notifications = 7;
        if (calls == 60) raw->complete();
        return false;
      },
      {}, wake_event);
  EXPECT_TRUE(state->wait(-1));
  EXPECT_EQ(calls, 60);
  // 33 tries in a row, then a pause after each one except the last.
  ASSERT_EQ(wake_event->seen.size(), 27U);
  EXPECT_EQ(wake_event->seen[7], 0U) << "the 40th try: a notification during it has not been seen";
  EXPECT_EQ(wake_event->seen[8], 7U);
  EXPECT_GT(wake_event->longest.count(), 0);
  EXPECT_LE(wake_event->longest.count(), 5000);
}

TEST(HostEvent, CompletionElsewhereEndsWaitWithProgress) {
  auto state = std::make_shared<HostEvent>();
  state->set_progress([] { return false; });
  std::thread other([state] { state->complete(); });
  Event(state).wait();
  other.join();
}

TEST(InlineStream, RunsAtOnceAndThrowsFromEnqueue) {
  auto device = cpu();
  Stream& stream = device->compute_stream();
  EXPECT_EQ(stream.kind(), DeviceKind::cpu);
  std::thread::id ran_on;
  stream.enqueue("work", [&] { ran_on = std::this_thread::get_id(); });
  EXPECT_EQ(ran_on, std::this_thread::get_id());
  EXPECT_TRUE(stream.record().query());
  EXPECT_THAT(message_of<InvalidArgument>(
                  [&] { stream.enqueue("bad", [] { throw InvalidArgument("shape is wrong"); }); }),
              HasSubstr("shape is wrong"));
  auto failed = std::make_shared<HostEvent>();
  failed->fail(failure("gather failed"));
  EXPECT_THAT(message_of<CommunicationError>([&] { stream.wait(Event(failed)); }),
              HasSubstr("gather failed"));
  EXPECT_THAT(message_of<InvalidArgument>([&] { stream.enqueue("nothing", {}); }), HasSubstr("'nothing'"));
  stream.synchronize();
}

TEST(InlineStream, SpansAreTakenByTheClockThatIsKeptWithIt) {
  const auto device = cpu();
  Stream& stream = device->compute_stream();
  TraceRecorder trace(0);
  stream.set_trace(&trace);
  stream.attachment<detail::SpanClock>().now = [] {
    static double time = 100;
    return time += 0.25;
  };
  stream.enqueue("work", [] {});
  const std::string json = trace.to_json();
  EXPECT_THAT(json, HasSubstr(R"("name":"work")"));
  EXPECT_THAT(json, HasSubstr(R"("ts":100250000.000,"dur":250000.000)"));
  stream.set_trace(nullptr);
}

TEST(WorkerStream, RunsInOrderOnItsOwnThread) {
  auto device = cpu();
  auto stream = device->create_stream("gather");
  EXPECT_EQ(stream->name(), "gather");
  EXPECT_EQ(stream->threads(), 1);
  std::vector<int> order;
  std::thread::id ran_on;
  for (int i = 0; i < 1000; ++i) {
    stream->enqueue("step", [&order, &ran_on, i] {
      order.push_back(i);
      ran_on = std::this_thread::get_id();
    });
  }
  stream->synchronize();
  ASSERT_EQ(order.size(), 1000u);
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(order[static_cast<std::size_t>(i)], i);
  EXPECT_NE(ran_on, std::this_thread::get_id());
  EXPECT_THAT(message_of<InvalidArgument>([&] { stream->enqueue("nothing", {}); }), HasSubstr("'nothing'"));
}

TEST(WorkerStream, WaitsForEventsOfOtherStreams) {
  auto device = cpu();
  auto first = device->create_stream("first");
  auto second = device->create_stream("second");
  // The streams alternate: each increment must see the other stream's last one.
  int value = 0;
  Event last;
  for (int round = 0; round < 200; ++round) {
    first->wait(last);
    first->enqueue("add", [&value, round] { value = value == 2 * round ? value + 1 : -1000000; });
    second->wait(first->record());
    second->enqueue("add", [&value, round] { value = value == 2 * round + 1 ? value + 1 : -1000000; });
    last = second->record();
  }
  last.wait();
  EXPECT_EQ(value, 400);
}

TEST(WorkerStream, HoldsWorkUntilTheEventPasses) {
  auto device = cpu();
  auto stream = device->create_stream("held");
  auto gate = std::make_shared<HostEvent>();
  std::atomic<bool> ran{false};
  stream->wait(Event(gate));
  stream->enqueue("after the gate", [&] { ran = true; });
  const Event done = stream->record();
  EXPECT_FALSE(done.wait_for(0.01));
  EXPECT_FALSE(ran);
  gate->complete();
  done.wait();
  EXPECT_TRUE(ran);
}

TEST(WorkerStream, FailureSurfacesAtLaterEventsAndSkipsLaterWork) {
  auto device = cpu();
  auto stream = device->create_stream("reduce");
  bool ran = false;
  const Event before = stream->record();
  stream->enqueue("bad", [] { throw InvalidArgument("counts differ"); });
  const Event after = stream->record();
  stream->enqueue("skipped", [&] { ran = true; });
  before.wait();
  EXPECT_THAT(message_of<InvalidArgument>([&] { after.wait(); }), HasSubstr("counts differ"));
  EXPECT_TRUE(after.query());
  EXPECT_THAT(message_of<InvalidArgument>([&] { stream->synchronize(); }), HasSubstr("counts differ"));
  EXPECT_THAT(message_of<InvalidArgument>([&] { stream->record().wait(); }), HasSubstr("counts differ"));
  EXPECT_FALSE(ran);
}

TEST(WorkerStream, FailureTravelsAlongEvents) {
  auto device = cpu();
  auto first = device->create_stream("first");
  auto second = device->create_stream("second");
  bool ran = false;
  first->enqueue("bad", [] { throw CommunicationError("rank 2 is missing"); });
  second->wait(first->record());
  second->enqueue("skipped", [&] { ran = true; });
  const Event done = second->record();
  EXPECT_THAT(message_of<CommunicationError>([&] { done.wait(); }), HasSubstr("rank 2 is missing"));
  EXPECT_THAT(message_of<CommunicationError>([&] { device->compute_stream().wait(done); }),
              HasSubstr("rank 2 is missing"));
  EXPECT_FALSE(ran);
}

TEST(WorkerStream, DestructionRunsWhatIsQueued) {
  auto device = cpu();
  int count = 0;
  {
    auto stream = device->create_stream("short-lived");
    for (int i = 0; i < 50; ++i) stream->enqueue("count", [&] { ++count; });
  }
  EXPECT_EQ(count, 50);
}

TEST(WorkerStream, DestructionDoesNotHangOnAnEventThatNeverPasses) {
  auto device = cpu();
  Event done;
  {
    auto stream = device->create_stream("orphan");
    stream->wait(Event(std::make_shared<HostEvent>()));
    done = stream->record();
  }
  EXPECT_THAT(message_of<LogicError>([&] { done.wait(); }),
              HasSubstr("stream 'orphan' was destroyed while it waited for an event that never passed"));
}

TEST(WorkerStream, WorkIsTracedUnderItsName) {
  TraceRecorder trace(0);
  auto device = cpu();
  auto stream = device->create_stream("gather");
  stream->set_trace(&trace);
  device->compute_stream().set_trace(&trace);
  stream->enqueue("cast h.0", [] {});
  stream->synchronize();
  device->compute_stream().enqueue("matmul", [] {});
  EXPECT_EQ(trace.size(), 2);
  EXPECT_THAT(trace.to_json(), HasSubstr("cast h.0"));
  EXPECT_THAT(trace.to_json(), HasSubstr("matmul"));
}

TEST(HostStream, OfTheCpuIsAWorkerWithThreads) {
  auto device = cpu();
  auto stream = device->create_host_stream("host optimizer", 3);
  EXPECT_EQ(stream->name(), "host optimizer");
  EXPECT_EQ(stream->kind(), DeviceKind::cpu);
  EXPECT_EQ(stream->threads(), 3);
  EXPECT_EQ(stream->native_handle(), nullptr);
  auto gate = std::make_shared<HostEvent>();
  stream->wait(Event(gate));
  std::thread::id ran_on;
  stream->enqueue("update", [&] { ran_on = std::this_thread::get_id(); });
  const Event done = stream->record();
  EXPECT_FALSE(done.wait_for(0.01));
  gate->complete();
  done.wait();
  EXPECT_NE(ran_on, std::this_thread::get_id());
  auto other = device->create_stream("to host");
  stream->enqueue("bad", [] { throw InvalidArgument("master weights have no gradient"); });
  other->wait(stream->record());
  EXPECT_THAT(message_of<InvalidArgument>([&] { other->synchronize(); }),
              HasSubstr("master weights have no gradient"));
  EXPECT_THAT(message_of<InvalidArgument>([&] { device->create_host_stream("nobody", 0); }),
              HasSubstr("stream 'nobody' needs at least one thread"));
}

TEST(HostStream, OfThePlanDropsWork) {
  auto device = make_device({DeviceKind::meta, 0, 0});
  auto stream = device->create_host_stream("host optimizer", 2);
  EXPECT_EQ(stream->kind(), DeviceKind::meta);
  EXPECT_EQ(stream->name(), "host optimizer");
  bool ran = false;
  stream->wait(Event(std::make_shared<HostEvent>()));
  stream->enqueue("update", [&] { ran = true; });
  EXPECT_TRUE(stream->record().query());
  stream->synchronize();
  EXPECT_FALSE(ran);
  stream->count(10, 20, 30);
  EXPECT_EQ(stream->work().bytes_read, 20);
}

TEST(CpuDevice, DescribesItself) {
  EXPECT_EQ(cpu(1)->description(), "cpu (1 thread)");
  EXPECT_EQ(cpu(3)->description(), "cpu (3 threads)");
  EXPECT_EQ(cpu(3)->compute_stream().threads(), 3);
  EXPECT_GE(cpu(0)->threads(), 1);
  auto device = cpu(1);
  device->set_threads(2);
  EXPECT_EQ(device->threads(), 2);
  EXPECT_EQ(device->compute_stream().threads(), 2);
  device->set_threads(0);
  EXPECT_EQ(device->threads(), cpu(0)->threads());
  EXPECT_THAT(message_of<ConfigurationError>([&] { device->set_threads(-2); }), HasSubstr("threads is -2"));
  EXPECT_EQ(cpu(2)->create_inline_stream("comm", 5)->threads(), 5);
  EXPECT_THAT(message_of<ConfigurationError>([] { cpu(-1); }), HasSubstr("threads is -1"));
  EXPECT_THAT(message_of<InvalidArgument>([] { cpu()->create_inline_stream("comm", 0); }),
              HasSubstr("'comm'"));
  EXPECT_THAT(message_of<InvalidArgument>([] { cpu()->memory(Tier::nvme); }), HasSubstr("nvme"));
  EXPECT_EQ(cpu()->memory(Tier::host).tier(), Tier::host);
}

TEST(CpuDevice, CopiesInOrderOnTheStream) {
  auto device = cpu();
  auto stream = device->create_stream("copy");
  std::vector<int> host{1, 2, 3, 5, 7}, back(5, 0);
  Buffer buffer(device->memory(Tier::device), 20, Category::other, "copy");
  device->copy_from_host(*stream, buffer.data(), host.data(), 20);
  device->copy_to_host(*stream, back.data(), buffer.data(), 20);
  device->copy_to_host(*stream, nullptr, nullptr, 0);
  stream->synchronize();
  EXPECT_EQ(back, host);
  EXPECT_THAT(message_of<InvalidArgument>([&] { device->copy_to_host(*stream, nullptr, nullptr, -1); }),
              HasSubstr("-1 bytes"));
}

TEST(MetaDevice, DropsWorkAndNeverBlocks) {
  auto device = make_device({DeviceKind::meta, 0, 0});
  EXPECT_EQ(device->description(), "meta");
  EXPECT_EQ(device->threads(), 1);
  auto stream = device->create_stream("gather");
  for (Stream* each : {&device->compute_stream(), stream.get()}) {
    bool ran = false;
    each->enqueue("dropped", [&] { ran = true; });
    each->wait(Event(std::make_shared<HostEvent>()));  // never passes; must not block
    EXPECT_TRUE(each->record().query());
    each->synchronize();
    EXPECT_FALSE(ran);
    each->count(10, 20, 30);
    EXPECT_EQ(each->work().kernels, 1);
    EXPECT_EQ(each->work().floating_point_operations, 10);
  }
  auto failed = std::make_shared<HostEvent>();
  failed->fail(failure("known failure"));
  EXPECT_THAT(message_of<CommunicationError>([&] { stream->wait(Event(failed)); }),
              HasSubstr("known failure"));
  Buffer buffer(device->memory(Tier::device), 1 << 20, Category::other, "meta");
  device->copy_from_host(*stream, buffer.data(), nullptr, 1 << 20);
  device->copy_to_host(*stream, nullptr, buffer.data(), 1 << 20);
  EXPECT_THAT(message_of<InvalidArgument>([&] { device->memory(Tier::nvme); }), HasSubstr("nvme"));
}

TEST(CudaDevice, SaysWhyItCannotBeUsed) {
  const detail::CudaProbe probe = detail::probe_cuda();
  const DeviceOptions options{DeviceKind::cuda, 0, 1};
  if (!probe.compiled) {
    EXPECT_THAT(message_of<NotCompiled>([&] { make_device(options); }), HasSubstr("-DTRANCHE_CUDA=ON"));
    EXPECT_THAT(probe.problem, HasSubstr("not part of this build"));
    return;
  }
  EXPECT_GT(probe.runtime_version, 0);
  if (probe.devices.empty()) {
    EXPECT_THAT(message_of<ConfigurationError>([&] { make_device(options); }), HasSubstr("was found"));
  } else {
    EXPECT_EQ(make_device(options)->kind(), DeviceKind::cuda);
    EXPECT_THAT(message_of<ConfigurationError>([&] {
                  make_device({DeviceKind::cuda, -1, 1});
                }),
                HasSubstr("device cuda -1"));
  }
}

TEST(DeviceKind, HasNames) {
  EXPECT_EQ(name_of(DeviceKind::cpu), "cpu");
  EXPECT_EQ(name_of(DeviceKind::cuda), "cuda");
  EXPECT_EQ(name_of(DeviceKind::meta), "meta");
}

}  // namespace
}  // namespace tranche
