// Step memory that is copied to host memory and back: first with only a link and two arenas, then through the
// engine.
#include "engine/host_copies.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "offload/host_link.h"
#include "on_ranks.h"
#include "tranche/device/ledger.h"

namespace tranche::test {
namespace {

using ::testing::HasSubstr;

constexpr std::int64_t bytes = 4096;

class HostCopiesTest : public ::testing::TestWithParam<DeviceKind> {
 protected:
  bool meta() const { return GetParam() == DeviceKind::meta; }
  Stream& compute() { return device_->compute_stream(); }

  /// A new step buffer into which compute writes `value`.
  StepBuffer made(unsigned char value) {
    StepBuffer buffer = arena_.acquire(bytes, Category::activations, "made");
    for (const Event& event : buffer.ready()) compute().wait(event);
    buffer.used_on(compute());
    device_->fill_bytes(compute(), buffer.data(), value, bytes);
    return buffer;
  }
  void expect_holds(const StepBuffer& buffer, unsigned char value) {
    if (meta()) return;
    const auto* data = static_cast<const unsigned char*>(buffer.data());
    EXPECT_EQ(std::count(data, data + bytes, value), bytes);
  }
  /// Runs a pass: the first is dynamic, the second recorded, later ones use its plan.
  void pass(const std::function<void()>& body) {
    const bool record = passes_++ == 1;
    copies_.begin_pass("train", record, {});
    arena_.begin("train", record);
    body();
    copies_.end_pass();
    arena_.end();
  }
  std::int64_t held(Tier tier) { return ledger_.account(tier).current[Category::activations]; }
  std::int64_t peak(Tier tier) { return ledger_.account(tier).category_peak[Category::activations]; }

  int passes_ = 0;
  std::unique_ptr<Device> device_ = make_device({GetParam(), 0, 1});
  Ledger ledger_;
  TrackingResource memory_{device_->memory(Tier::device), ledger_};
  TrackingResource host_memory_{device_->memory(Tier::host), ledger_};
  StepArena arena_{memory_, ledger_};
  detail::HostLink link_{*device_};
  HostCopies copies_{link_,        compute(), arena_,
                     host_memory_, ledger_,   [this](const Event& e) { compute().wait(e); }};
};

TEST_P(HostCopiesTest, BytesComeBackAndMemoryIsPlanned) {
  constexpr int depth = 5;
  if (!meta()) {
    arena_.set_poison(true);
    copies_.set_poison(true);
  }
  std::int64_t calls = 0, host_calls = 0;
  for (int round = 0; round < 5; ++round) {
    if (round == 2) {
      calls = memory_.calls();
      host_calls = host_memory_.calls();
    }
    pass([&] {
      std::vector<HostCopy> kept;
      for (int i = 0; i < depth; ++i) {
        kept.push_back(copies_.send(made(static_cast<unsigned char>(10 * round + i)), "block input"));
        kept.back().leave_device();
      }
      EXPECT_EQ(held(Tier::host), depth * bytes);
      EXPECT_EQ(held(Tier::device), 0);
      for (int i = depth - 1; i >= 0; --i) {
        const StepBuffer back = HostCopies::fetch(std::move(kept[static_cast<std::size_t>(i)]));
        if (i > 0) HostCopies::prefetch(kept[static_cast<std::size_t>(i) - 1]);
        expect_holds(back, static_cast<unsigned char>(10 * round + i));
        EXPECT_EQ(held(Tier::device), i > 0 ? 2 * bytes : bytes);
        EXPECT_EQ(held(Tier::host), i * bytes);
      }
    });
  }
  EXPECT_EQ(memory_.calls(), calls) << "planned memory asks no resource";
  EXPECT_EQ(host_memory_.calls(), host_calls);
  EXPECT_EQ(peak(Tier::host), depth * bytes);
  EXPECT_EQ(peak(Tier::device), 2 * bytes);
  EXPECT_EQ(copies_.arena().block_bytes(), depth * bytes);
  EXPECT_EQ(link_.counts().bytes_to_host, 5 * depth * bytes);
  EXPECT_EQ(link_.counts().bytes_from_host, 5 * depth * bytes);
  EXPECT_EQ(link_.counts().copies, 5 * 2 * depth);
}

TEST_P(HostCopiesTest, MayBeReadUntilItLeavesAndNeedNotLeave) {
  pass([&] {
    StepBuffer buffer = made(3);
    auto* data = buffer.data();
    HostCopy copy = copies_.send(std::move(buffer), "block input");
    EXPECT_EQ(copy.bytes(), bytes);
    EXPECT_TRUE(copy);
    HostCopies::prefetch(copy);  // it has not left the device
    const StepBuffer same = HostCopies::fetch(std::move(copy));
    EXPECT_EQ(same.data(), data);
    expect_holds(same, 3);
    EXPECT_EQ(held(Tier::host), 0);
  });
  EXPECT_EQ(link_.counts().bytes_to_host, bytes);
  EXPECT_EQ(link_.counts().bytes_from_host, 0);
}

TEST_P(HostCopiesTest, LetsGoInEveryState) {
  for (int round = 0; round < 4; ++round) {
    pass([&] {
      { const HostCopy sent = copies_.send(made(1), "sent"); }
      {
        HostCopy left = copies_.send(made(2), "left");
        left.leave_device();
        left.leave_device();
      }
      {
        HostCopy coming = copies_.send(made(3), "coming");
        coming.leave_device();
        HostCopies::prefetch(coming);
        HostCopies::prefetch(coming);
        coming.leave_device();  // it is needed on the device now
        EXPECT_EQ(held(Tier::device), bytes);
      }
      HostCopy moved = copies_.send(made(4), "moved");
      moved = copies_.send(made(5), "assigned");
      HostCopy target(std::move(moved));
      EXPECT_FALSE(moved);  // NOLINT(bugprone-use-after-move)
      expect_holds(HostCopies::fetch(std::move(target)), 5);
      EXPECT_EQ(held(Tier::device), 0);
      EXPECT_EQ(held(Tier::host), 0);
    });
  }
  EXPECT_EQ(link_.counts().bytes_from_host, 4 * bytes);
}

TEST_P(HostCopiesTest, KeepSendsNothing) {
  HostCopy copy = HostCopies::keep(made(9));
  EXPECT_EQ(copy.bytes(), bytes);
  copy.leave_device();
  HostCopies::prefetch(copy);
  EXPECT_TRUE(copy);
  expect_holds(HostCopies::fetch(std::move(copy)), 9);
  { const HostCopy dropped = HostCopies::keep(made(8)); }
  EXPECT_EQ(held(Tier::device), 0);
  EXPECT_EQ(link_.counts().copies, 0);
}

TEST_P(HostCopiesTest, SaysWhatIsWrong) {
  EXPECT_THAT(message_of<LogicError>([&] { HostCopies::fetch({}); }),
              HasSubstr("fetch_from_host() of an empty copy"));
  EXPECT_THAT(message_of<LogicError>([&] { copies_.send({}, "h.3 input"); }),
              HasSubstr("send_to_host() of an empty buffer 'h.3 input'"));
  pass([&] {
    HostCopy copy = copies_.send(made(1), "h.3 input");
    copy.leave_device();
    EXPECT_THAT(message_of<LogicError>([&] { copies_.end_pass(); }), HasSubstr("'h.3 input' (activations"));
  });
}

INSTANTIATE_TEST_SUITE_P(Devices, HostCopiesTest, ::testing::Values(DeviceKind::cpu, DeviceKind::meta),
                         [](const auto& info) { return std::string(name_of(info.param)); });

/// Tests that need a device that computes.
class HostCopiesOrder : public HostCopiesTest {};
INSTANTIATE_TEST_SUITE_P(Cpu, HostCopiesOrder, ::testing::Values(DeviceKind::cpu));

TEST_P(HostCopiesOrder, ComputeGoesOnWhileBytesTravel) {
  const auto round = [&](bool held_up) {
    auto out_gate = std::make_shared<HostEvent>(), in_gate = std::make_shared<HostEvent>();
    if (!held_up) {
      out_gate->complete();
      in_gate->complete();
    }
    pass([&] {
      link_.to_host_stream().wait(Event(out_gate));
      HostCopy copy = copies_.send(made(7), "block input");
      StepBuffer next = made(8);  // allocated while the copy is running; this thread has not waited
      copy.leave_device();
      // The memory may be reused, but only after the copy.
      {
        const StepBuffer reuse = arena_.acquire(bytes, Category::activations, "reuse");
        if (held_up) {
          ASSERT_EQ(reuse.ready().size(), 1u);
          EXPECT_FALSE(reuse.ready().front().query());
          out_gate->complete();
        }
        for (const Event& event : reuse.ready()) compute().wait(event);
        device_->fill_bytes(compute(), reuse.data(), 1, bytes);
      }
      link_.from_host_stream().wait(Event(in_gate));
      HostCopies::prefetch(copy);
      device_->fill_bytes(compute(), next.data(), 9, bytes);
      expect_holds(next, 9);
      std::thread opener([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        in_gate->complete();
      });
      const StepBuffer back = HostCopies::fetch(std::move(copy));
      expect_holds(back, 7);  // compute has waited for the copy
      opener.join();
    });
  };
  round(false);
  round(false);
  round(false);
  round(true);
}

TEST_P(HostCopiesOrder, AFailedCopyIsToldWhereTheBytesAreWanted) {
  pass([&] {
    auto failed = std::make_shared<HostEvent>();
    failed->fail(std::make_exception_ptr(CommunicationError("the link is down")));
    link_.to_host_stream().wait(Event(failed));
    HostCopy copy = copies_.send(made(7), "block input");
    copy.leave_device();
    EXPECT_THAT(message_of<CommunicationError>([&] { HostCopies::fetch(std::move(copy)); }),
                HasSubstr("the link is down"));
    EXPECT_EQ(held(Tier::host), 0);
    EXPECT_EQ(held(Tier::device), 0);
  });
}

// --- The engine's calls -----------------------------------------------------------------------------------

void with_activations_on_host(Config& config, RuntimeOptions&) {
  config.activation_checkpointing = true;
  config.offload.activations = true;
}

/// A user's model copies its own buffer to the host and back within a micro-batch.
void send_and_bring_back(Engine& engine, bool early) {
  StepBuffer buffer = engine.acquire(bytes, Category::activations, "kept");
  engine.device().fill_bytes(engine.compute_stream(), buffer.data(), 5, bytes);
  HostCopy copy = engine.send_to_host(std::move(buffer), "kept");
  copy.leave_device();
  if (early) engine.prefetch_from_host(copy);
  const StepBuffer back = engine.fetch_from_host(std::move(copy));
  const auto* data = static_cast<const unsigned char*>(back.data());
  EXPECT_EQ(std::count(data, data + bytes, 5), bytes);
}

TEST(EngineHostCopies, MoveOnlyWhereAsked) {
  for (const bool asked : {false, true}) {
    on_ranks(
        {},
        [&](Engine& engine, Runtime& runtime) {
          for (int step = 0; step < 4; ++step) {
            engine.begin_micro_batch();
            send_and_bring_back(engine, step % 2 == 0);
            for (int unit = 3; unit >= 0; --unit) engine.skip_gradients({unit});
            end_with(engine, 0, 1);
            const StepResult result = engine.step();
            EXPECT_EQ(result.offload_traffic.to_host, asked ? bytes : 0);
            EXPECT_EQ(result.offload_traffic.from_host, asked ? bytes : 0);
          }
          const TierAccount host = runtime.ledger().account(Tier::host);
          EXPECT_EQ(host.category_peak[Category::activations], asked ? bytes : 0);
          EXPECT_EQ(host.current[Category::activations], 0);
        },
        asked ? with_activations_on_host : std::function<void(Config&, RuntimeOptions&)>());
  }
}

TEST(EngineHostCopies, StepIsRefusedWhileOneIsHeld) {
  on_ranks(
      {},
      [&](Engine& engine, Runtime&) {
        engine.begin_micro_batch();
        StepBuffer buffer = engine.acquire(bytes, Category::activations, "kept");
        HostCopy copy = engine.send_to_host(std::move(buffer), "forgotten input");
        copy.leave_device();
        for (int unit = 3; unit >= 0; --unit) engine.skip_gradients({unit});
        end_with(engine, 0, 1);
        EXPECT_THAT(message_of<LogicError>([&] { engine.step(); }), HasSubstr("'forgotten input'"));
        EXPECT_THAT(message_of<LogicError>([&] { engine.fetch_from_host({}); }), HasSubstr("empty copy"));
        copy.release();
        StepBuffer on_device = engine.acquire(64, Category::activations, "left on the device");
        EXPECT_THAT(message_of<LogicError>([&] { engine.step(); }), HasSubstr("'left on the device'"));
        on_device.release();
        engine.step();
        EXPECT_EQ(engine.steps(), 1);
      },
      with_activations_on_host);
}

TEST(EngineHostCopies, EvaluationMaySendToo) {
  on_ranks(
      {},
      [&](Engine& engine, Runtime& runtime) {
        engine.begin_evaluation();
        for (int pass = 0; pass < 4; ++pass) {
          engine.begin_micro_batch();
          send_and_bring_back(engine, true);
          end_with(engine, 0, 1);
        }
        engine.end_evaluation();
        EXPECT_EQ(runtime.ledger().account(Tier::host).category_peak[Category::activations], bytes);
      },
      with_activations_on_host);
}

}  // namespace
}  // namespace tranche::test
