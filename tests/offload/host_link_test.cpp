// The link between device and host memory: its copies, their order, its counts and its speed. Compiled twice:
// for the CPU and the meta device, and, with TRANCHE_LINK_TESTS_ON_GPU, for a GPU or its emulation.
#include "offload/host_link.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "core/clock.h"
#include "device/cuda_probe.h"
#include "tests/core/error_text.h"
#include "tranche/core/error.h"
#include "tranche/core/trace.h"

namespace tranche {
namespace {

using detail::HostLink;
using detail::seconds_now;  // NOLINT(misc-unused-using-decls): generic lambdas use it
using test::message_of;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::int64_t bytes = 1 << 16;

// A fixture that fills both memories with a pattern; runs on every available device.
class HostLinkTest : public ::testing::TestWithParam<DeviceKind> {
 protected:
  void SetUp() override {
    if (GetParam() == DeviceKind::cuda) {
      const detail::CudaProbe probe = detail::probe_cuda();
      if (probe.devices.empty()) GTEST_SKIP() << probe.problem;
    }
    device_ = make_device({GetParam(), 0, 1});
    device_memory_ = Buffer(device_->memory(Tier::device), bytes, Category::other, "link test");
    host_memory_ = Buffer(device_->memory(Tier::host), bytes, Category::other, "link test");
    pattern_.resize(bytes);
    for (std::size_t i = 0; i < pattern_.size(); ++i)
      pattern_[i] = static_cast<unsigned char>((i * 131 + i / 251) % 253);
  }
  bool meta() const { return GetParam() == DeviceKind::meta; }
  unsigned char* on_device() { return static_cast<unsigned char*>(device_memory_.data()); }
  unsigned char* on_host() { return static_cast<unsigned char*>(host_memory_.data()); }
  void fill_host() {
    if (!meta()) std::copy(pattern_.begin(), pattern_.end(), on_host());
  }
  void clear_host() {
    if (!meta()) std::fill(on_host(), on_host() + bytes, static_cast<unsigned char>(0));
  }

  std::unique_ptr<Device> device_;
  Buffer device_memory_;
  Buffer host_memory_;
  std::vector<unsigned char> pattern_;
};

TEST_P(HostLinkTest, BytesArriveBothWaysAndAreCounted) {
  HostLink link(*device_);
  fill_host();
  const Event there = link.copy_from_host(on_device(), on_host(), bytes, {});
  there.wait();
  clear_host();
  const Event back = link.copy_to_host(on_host(), on_device(), bytes, std::span(&there, 1));
  back.wait();
  if (!meta()) {
    EXPECT_TRUE(std::equal(pattern_.begin(), pattern_.end(), on_host()));
  }
  // A part of a buffer, and an empty range.
  link.copy_to_host(on_host() + 256, on_device() + 512, 100, {}).wait();
  link.copy_to_host(nullptr, nullptr, 0, {}).wait();
  const detail::HostLinkCounts counts = link.counts();
  EXPECT_EQ(counts.bytes_from_host, bytes);
  EXPECT_EQ(counts.bytes_to_host, bytes + 100);
  EXPECT_EQ(counts.copies, 3);
  const HostLink::Busy busy = link.take_busy_seconds();
  EXPECT_EQ(busy.to_host > 0, !meta());
  EXPECT_EQ(busy.from_host > 0, !meta());
  const HostLink::Busy after = link.take_busy_seconds();
  EXPECT_EQ(after.to_host, 0);
  EXPECT_EQ(after.from_host, 0);
}

TEST_P(HostLinkTest, CopiesAreOrderedByEventsAlone) {
  if (meta()) return;  // work is dropped, and nothing waits
  HostLink link(*device_);
  fill_host();
  link.copy_from_host(on_device(), on_host(), bytes, {}).wait();
  clear_host();
  auto gate = std::make_shared<HostEvent>();
  auto second_gate = std::make_shared<HostEvent>();
  const std::vector<Event> gates{Event(gate), Event(second_gate)};
  const Event held = link.copy_to_host(on_host(), on_device(), bytes / 2, gates);
  const Event behind = link.copy_to_host(on_host() + bytes / 2, on_device() + bytes / 2, bytes / 2, {});
  // The opposite direction has a stream of its own.
  Buffer other(device_->memory(Tier::host), 256, Category::other, "link test");
  link.copy_from_host(on_device(), other.data(), 0, {}).wait();
  link.copy_from_host(on_device(), on_host(), 0, {}).wait();
  second_gate->complete();
  EXPECT_FALSE(held.wait_for(0.01));
  EXPECT_FALSE(behind.query()) << "each way in the order of issue";
  EXPECT_EQ(on_host()[1], 0);
  gate->complete();
  behind.wait();
  EXPECT_TRUE(held.query());
  EXPECT_TRUE(std::equal(pattern_.begin(), pattern_.end(), on_host()));
}

TEST_P(HostLinkTest, ThereAndBackInManyPieces) {
  if (meta()) return;  // there is nothing to compare
  HostLink link(*device_);
  fill_host();
  Buffer copy(device_->memory(Tier::host), bytes, Category::other, "link test");
  constexpr std::int64_t piece = 512;
  Event last;
  for (int round = 0; round < 3; ++round) {
    for (std::int64_t at = 0; at < bytes; at += piece) {
      const Event there =
          link.copy_from_host(on_device() + at, on_host() + at, piece, std::span(&last, at == 0 ? 1 : 0));
      last = link.copy_to_host(static_cast<std::byte*>(copy.data()) + at, on_device() + at, piece,
                               std::span(&there, 1));
    }
    if (round == 0) {
      last.wait();
      EXPECT_TRUE(std::equal(pattern_.begin(), pattern_.end(), static_cast<unsigned char*>(copy.data())));
    }
  }
  last.wait();
  EXPECT_TRUE(std::equal(pattern_.begin(), pattern_.end(), static_cast<unsigned char*>(copy.data())));
  EXPECT_EQ(link.counts().bytes_to_host, 3 * bytes);
  EXPECT_EQ(link.counts().bytes_from_host, 3 * bytes);
  EXPECT_EQ(link.counts().copies, 6 * bytes / piece);
}

TEST_P(HostLinkTest, AFailedEventFailsWhatFollows) {
  HostLink link(*device_);
  auto failed = std::make_shared<HostEvent>();
  failed->fail(std::make_exception_ptr(CommunicationError("rank 2 is missing")));
  const Event bad(failed);
  const auto copy = [&] { return link.copy_to_host(on_host(), on_device(), 256, std::span(&bad, 1)); };
  if (meta()) {  // it cannot wait, but a known failure is reported at once
    EXPECT_THAT(message_of<CommunicationError>(copy), HasSubstr("rank 2 is missing"));
    return;
  }
  clear_host();
  const Event done = copy();
  EXPECT_THAT(message_of<CommunicationError>([&] { done.wait(); }), HasSubstr("rank 2 is missing"));
  const Event later = link.copy_to_host(on_host(), on_device(), 256, {});
  EXPECT_THAT(message_of<CommunicationError>([&] { later.wait(); }), HasSubstr("rank 2 is missing"));
  EXPECT_THAT(message_of<CommunicationError>([&] {
                const Event next = link.copy_from_host(on_device(), on_host(), 256, std::span(&done, 1));
                next.wait();
              }),
              HasSubstr("rank 2 is missing"));
}

TEST_P(HostLinkTest, WorkMayGoWithACopyOnItsStream) {
  HostLink link(*device_);
  EXPECT_EQ(link.to_host_stream().name(), "to host");
  EXPECT_EQ(link.from_host_stream().name(), "from host");
  if (meta()) return;
  clear_host();
  device_->fill_bytes(link.to_host_stream(), on_device(), 7, 256);
  link.copy_to_host(on_host(), on_device(), 256, {}).wait();
  EXPECT_EQ(on_host()[0], 7);
  EXPECT_EQ(on_host()[255], 7);
}

TEST_P(HostLinkTest, CopiesAreTraced) {
  TraceRecorder trace(0);
  {
    HostLink link(*device_, {.trace = &trace});
    const Event there = link.copy_from_host(on_device(), on_host(), 256, {});
    link.copy_to_host(on_host(), on_device(), 256, std::span(&there, 1));
    link.to_host_stream().synchronize();
    link.from_host_stream().synchronize();
  }
  EXPECT_EQ(trace.size(), meta() ? 0 : 2) << "bookkeeping is not shown: " << trace.to_json();
  if (!meta()) {
    EXPECT_THAT(trace.to_json(), AllOf(HasSubstr("copy to host"), HasSubstr("copy from host")));
    EXPECT_THAT(trace.to_json(), AllOf(HasSubstr("\"to host\""), HasSubstr("\"from host\"")));
  }
}

TEST_P(HostLinkTest, ItsEndWaitsForWhatWasIssued) {
  if (meta()) return;  // there is nothing to wait for
  fill_host();
  Buffer copy(device_->memory(Tier::host), bytes, Category::other, "link test");
  Event done;
  {
    HostLink link(*device_);
    const Event there = link.copy_from_host(on_device(), on_host(), bytes, {});
    done = link.copy_to_host(copy.data(), on_device(), bytes, std::span(&there, 1));
  }
  EXPECT_TRUE(done.query());
  EXPECT_TRUE(std::equal(pattern_.begin(), pattern_.end(), static_cast<unsigned char*>(copy.data())));
}

TEST_P(HostLinkTest, RefusesWhatCannotBe) {
  HostLink link(*device_);
  EXPECT_THAT(message_of<InvalidArgument>([&] { link.copy_to_host(on_host(), on_device(), -1, {}); }),
              HasSubstr("HostLink::copy_to_host was asked for -1 bytes"));
  EXPECT_THAT(message_of<InvalidArgument>([&] { link.copy_from_host(on_device(), on_host(), -7, {}); }),
              HasSubstr("HostLink::copy_from_host was asked for -7 bytes"));
  EXPECT_EQ(link.counts().copies, 0);
  for (const double speed : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    EXPECT_THAT(message_of<InvalidArgument>([&] { HostLink(*device_, {.bytes_per_second = speed}); }),
                AllOf(HasSubstr("speed of a host link"), HasSubstr("0 for as fast as the device copies")));
  }
  const auto throttled = [&] { HostLink(*device_, {.bytes_per_second = 1e9}); };
  if (GetParam() == DeviceKind::cuda) {
    EXPECT_THAT(message_of<InvalidArgument>(throttled),
                HasSubstr("only where device memory is the host's own"));
  } else {
    throttled();
  }
}

#if defined(TRANCHE_LINK_TESTS_ON_GPU)
INSTANTIATE_TEST_SUITE_P(Devices, HostLinkTest, ::testing::Values(DeviceKind::cuda),
                         [](const auto& info) { return std::string(name_of(info.param)); });
#else
INSTANTIATE_TEST_SUITE_P(Devices, HostLinkTest, ::testing::Values(DeviceKind::cpu, DeviceKind::meta),
                         [](const auto& info) { return std::string(name_of(info.param)); });

class ThrottledLinkTest : public ::testing::Test {
 protected:
  std::unique_ptr<Device> device_ = make_device({DeviceKind::cpu, 0, 1});
  std::vector<unsigned char> host_ = std::vector<unsigned char>(bytes);
  std::vector<unsigned char> on_device_ = std::vector<unsigned char>(bytes);
};

TEST_F(ThrottledLinkTest, IsNoFasterThanToldEitherWay) {
  constexpr double speed = 20.0 * bytes;  // 50 ms per copy
  TraceRecorder trace(0);
  HostLink link(*device_, {.bytes_per_second = speed, .trace = &trace});
  const auto gate = std::make_shared<HostEvent>();
  const Event opened(gate);
  double to_host_began = 0, from_host_began = 0;  // on a busy machine a stream may begin late
  const auto note = [&](Stream& stream, double& began) {
    stream.wait(opened);
    stream.enqueue("note", [&began] { began = seconds_now(); });
  };
  note(link.to_host_stream(), to_host_began);
  note(link.from_host_stream(), from_host_began);
  Event last;
  std::vector<unsigned char> wanted(bytes), arrived(bytes);
  for (int i = 0; i < 3; ++i) {
    link.copy_from_host(arrived.data(), wanted.data(), bytes, std::span(&opened, 1));
    last = link.copy_to_host(host_.data(), on_device_.data(), bytes, std::span(&opened, 1));
  }
  // The issuing thread has waited for no copy, because none of them could begin.
  const double begin = seconds_now();
  gate->complete();
  link.from_host_stream().synchronize();
  last.wait();
  const double end = seconds_now();
  EXPECT_GE(end - begin, 3 * bytes / speed);
  const HostLink::Busy busy = link.take_busy_seconds();
  for (const auto& [seconds, began] :
       {std::pair(busy.to_host, to_host_began), std::pair(busy.from_host, from_host_began)}) {
    EXPECT_GE(seconds, 2.5 * bytes / speed - (began - begin)) << "what began late is made up for";
    EXPECT_LE(seconds, end - begin);
  }
  EXPECT_THAT(trace.to_json(), HasSubstr("held to the link's speed"));
}

TEST_F(ThrottledLinkTest, WaitsForEventsAreNoCopying) {
  constexpr double speed = 100.0 * bytes;
  HostLink link(*device_, {.bytes_per_second = speed});
  auto gate = std::make_shared<HostEvent>();
  const Event opened(gate);
  const Event done = link.copy_to_host(host_.data(), on_device_.data(), bytes, std::span(&opened, 1));
  EXPECT_FALSE(done.wait_for(0.2));
  EXPECT_EQ(link.take_busy_seconds().to_host, 0);
  const double begin = seconds_now();
  gate->complete();
  done.wait();
  EXPECT_GE(seconds_now() - begin, bytes / speed)
      << "from where it could begin, not from where it was issued";
  const double busy = link.take_busy_seconds().to_host;
  EXPECT_GT(busy, 0);
  EXPECT_LE(busy, seconds_now() - begin);
}

// If each copy of 10 us slept separately, this would take seven times as long.
TEST_F(ThrottledLinkTest, ManySmallCopiesAverageRight) {
  constexpr int copies = 4000;
  constexpr double speed = 64 / 10e-6;
  constexpr double told = copies * 64 / speed;  // 40 ms
  double best = 1e9;
  for (int attempt = 0; attempt < 100 && best > 4 * told; ++attempt) {
    HostLink link(*device_, {.bytes_per_second = speed});
    auto gate = std::make_shared<HostEvent>();
    const Event opened(gate);
    link.copy_to_host(host_.data(), on_device_.data(), 0, std::span(&opened, 1));
    for (int i = 0; i + 1 < copies; ++i) {
      link.copy_to_host(host_.data() + i, on_device_.data() + i, 64, std::span(&opened, 1));
    }
    const Event last = link.copy_to_host(host_.data(), on_device_.data(), 64, std::span(&opened, 1));
    const double begin = seconds_now();
    gate->complete();
    last.wait();
    const double taken = seconds_now() - begin;
    EXPECT_GE(taken, told * 0.999);
    best = std::min(best, taken);
  }
  EXPECT_LE(best, 4 * told);
}

// One thread copies while another waits for the copies; both directions use the same memory.
TEST(HostLinkThreads, OrderIsSeenByWhoeverWaits) {
  auto device = make_device({DeviceKind::cpu, 0, 1});
  HostLink link(*device);
  std::vector<std::int64_t> there(512), back(512);
  Event last;
  for (std::int64_t round = 0; round < 200; ++round) {
    const Event read = last;
    read.wait();
    std::iota(there.begin(), there.end(), round);
    const Event out = link.copy_to_host(back.data(), there.data(), 4096, std::span(&last, 1));
    const Event in = link.copy_from_host(there.data(), back.data(), 4096, std::span(&out, 1));
    bool right = false;
    std::thread reader([&] {
      in.wait();
      right = back.front() == round && there.back() == round + 511;
    });
    last = in;
    (void)link.take_busy_seconds();
    reader.join();
    ASSERT_TRUE(right) << round;
  }
  EXPECT_EQ(link.counts().copies, 400);
}

// The link's destructor does not wait for a copy whose event never passes; it fails that copy.
TEST(HostLinkThreads, ItsEndDoesNotHangOnAnEventThatNeverPasses) {
  auto device = make_device({DeviceKind::cpu, 0, 1});
  std::vector<unsigned char> a(64), b(64);
  Event done;
  {
    HostLink link(*device);
    const Event never(std::make_shared<HostEvent>());
    done = link.copy_to_host(a.data(), b.data(), 64, std::span(&never, 1));
  }
  EXPECT_THAT(message_of<LogicError>([&] { done.wait(); }),
              HasSubstr("stream 'to host' was destroyed while it waited for an event that never passed"));
}
#endif

}  // namespace
}  // namespace tranche
