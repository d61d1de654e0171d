// The disk's busy time and the reasons of its idle time, by a clock and transfers that the test moves.
#include "offload/disk_meter.h"

#include <gmock/gmock.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "offload/tile_flow.h"
#include "tests/offload/test_folder.h"
#include "tranche/core/error.h"

namespace tranche {
namespace {

using detail::DiskMeter;
using detail::IoTicket;
using detail::TileFlow;
using ::testing::HasSubstr;
using testing::TestFolder;

/// Transfers that end when the test says so.
class HeldIo : public detail::BlockIo {
 public:
  IoTicket read(detail::File&, std::int64_t, void*, std::int64_t) override { return {++submitted_}; }
  IoTicket write(detail::File&, std::int64_t, const void*, std::int64_t) override { return {++submitted_}; }
  void wait(IoTicket ticket) override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return ended_.count(ticket.id) > 0; });
    if (ticket.id == failing_) throw IoError("the disk is gone", 5);
  }
  bool done(IoTicket) override { return false; }
  void drain() override {}
  void cancel() override {}
  std::unique_ptr<detail::RegisteredMemory> register_memory(void*, std::int64_t) override { return nullptr; }
  detail::BlockIoEngine engine() const override { return detail::BlockIoEngine::threads; }
  const std::string& fallback_reason() const override { return reason_; }
  detail::BlockIoStatistics statistics() const override { return {}; }

  /// Ends the transfer that was submitted as number `id`, from 1 on.
  void end(std::uint64_t id, bool fails = false) {
    const std::lock_guard lock(mutex_);
    if (fails) failing_ = id;
    ended_.insert(id);
    changed_.notify_all();
  }

 private:
  const std::string reason_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<std::uint64_t> submitted_{0};
  std::uint64_t failing_ = 0;
  std::set<std::uint64_t> ended_;
};

struct Time {
  std::atomic<double> now{100};
  DiskMeter::Clock clock() {
    return [this] { return now.load(); };
  }
  void pass(double seconds) { now = now + seconds; }
};

void expect_seconds(const DiskMeter::Seconds& seconds, double busy, double norm, double no_buffer,
                    double nothing_asked) {
  EXPECT_DOUBLE_EQ(seconds.busy, busy);
  EXPECT_DOUBLE_EQ(seconds.norm, norm);
  EXPECT_DOUBLE_EQ(seconds.no_buffer, no_buffer);
  EXPECT_DOUBLE_EQ(seconds.nothing_asked, nothing_asked);
}

TEST(DiskMeter, GivesEachMomentToOneState) {
  Time time;
  TraceRecorder trace(0);
  DiskMeter meter(&trace, time.clock());
  time.pass(1);  // idle: no transfer is requested
  meter.ask();
  time.pass(2);  // idle: a read waits for a buffer
  {
    const DiskMeter::Transfer read(meter, /*asked=*/true);
    time.pass(4);  // busy, once for two transfers
    const DiskMeter::Transfer write(meter);
    meter.set_tiles(true, true);
    time.pass(8);
  }
  time.pass(16);  // idle: an update waits for the norm, which counts before the buffer
  meter.set_tiles(false, true);
  time.pass(32);
  meter.set_tiles(false, false);
  time.pass(64);
  expect_seconds(meter.take(), 12, 16, 34, 65);
  time.pass(128);
  expect_seconds(meter.take(), 0, 0, 0, 128);
  meter.begin();  // writes the last idle span
  const std::string json = trace.to_json();
  for (const char* span :
       {R"("name":"nothing asked for","pid":0,"tid":1,"ts":100000000.000,"dur":1000000.000)",
        R"("name":"no buffer free","pid":0,"tid":1,"ts":101000000.000,"dur":2000000.000)",
        R"("name":"waiting for the norm","pid":0,"tid":1,"ts":115000000.000,"dur":16000000.000)",
        R"("name":"nothing asked for","pid":0,"tid":1,"ts":163000000.000,"dur":192000000.000)"}) {
    EXPECT_THAT(json, HasSubstr(span));
  }
  EXPECT_THAT(json, HasSubstr(R"("args":{"name":"disk idle"})"));
}

/// A flow of two buffers whose transfers the test ends.
struct FlowBench {
  explicit FlowBench(TraceRecorder* trace = nullptr, std::size_t at_once = 2)
      : meter(std::make_shared<DiskMeter>(trace, time.clock())),
        file(
            detail::posix_file_system().open(folder.path() + "/tiles", detail::OpenMode::create_or_truncate)),
        flow(io, at_once, meter) {}
  ~FlowBench() { flow.finish(); }
  std::vector<TileFlow::Tile> tiles(std::int64_t count) {
    std::vector<TileFlow::Tile> result;
    for (std::int64_t i = 0; i < count; ++i) result.push_back({4096 * i, 16, memory[i % 2]});
    return result;
  }

  TestFolder folder;
  Time time;
  HeldIo io;
  char memory[2][16] = {};
  std::shared_ptr<DiskMeter> meter;
  std::unique_ptr<detail::File> file;
  TileFlow flow;
};

TEST(DiskMeter, KnowsWhyTheTilesOfAFlowWait) {
  TraceRecorder trace(0);
  FlowBench bench(&trace);
  bench.time.pass(1);  // idle: no transfer is requested
  const std::int64_t first = bench.flow.add(*bench.file, bench.tiles(3), true);
  bench.time.pass(2);  // busy: reads 1 and 2
  bench.io.end(1);
  bench.flow.await_tile(first);
  bench.time.pass(4);  // busy: read 2
  bench.io.end(2);
  bench.flow.await_tile(first + 1);
  bench.time.pass(8);  // idle: both tiles are in memory, and their updates wait for the norm
  bench.flow.issued(first);
  bench.time.pass(16);  // idle: the second tile's update still waits for the norm
  bench.flow.issued(first + 1);
  bench.time.pass(32);  // idle: both buffers are being updated, and the third tile's read waits for one
  bench.flow.leave(first, true);
  bench.time.pass(64);  // busy: write 3
  bench.io.end(3);
  bench.io.end(4);  // the read of the third tile
  bench.flow.await_tile(first + 2);
  bench.flow.leave(first + 1, false);
  bench.flow.issued(first + 2);
  bench.time.pass(128);  // idle: no transfer is requested while the last tile is updated
  bench.flow.leave(first + 2, true);
  bench.time.pass(256);  // busy: write 5
  bench.io.end(5);
  bench.flow.await_left(first + 3);
  bench.time.pass(512);  // idle: no transfer is requested
  expect_seconds(bench.meter->take(), 2 + 4 + 64 + 256, 8 + 16, 32, 1 + 128 + 512);

  const std::string json = trace.to_json();
  EXPECT_THAT(json, HasSubstr(R"("args":{"name":"tile reads"})"));
  EXPECT_THAT(json, HasSubstr(R"("args":{"name":"tile writes"})"));
  // The second read's span begins where the first one ended.
  EXPECT_THAT(json, HasSubstr(R"("ts":101000000.000,"dur":2000000.000)"));
  EXPECT_THAT(json, HasSubstr(R"("ts":103000000.000,"dur":4000000.000)"));
}

TEST(DiskMeter, CountsATransferAtATimeAsBusyThroughout) {
  FlowBench bench(nullptr, 1);
  const std::int64_t first = bench.flow.add(*bench.file, bench.tiles(2), true);
  bench.time.pass(1);  // busy: read 1; the other read has a buffer but must wait its turn
  bench.io.end(1);
  bench.flow.await_tile(first);
  bench.flow.issued(first);
  bench.time.pass(2);  // busy: read 2
  bench.io.end(2);
  bench.flow.await_tile(first + 1);
  bench.flow.issued(first + 1);
  bench.time.pass(4);  // idle: no transfer is requested while both tiles are updated
  bench.flow.leave(first, true);
  bench.flow.leave(first + 1, true);
  bench.time.pass(8);  // busy: write 3
  bench.io.end(3);
  bench.flow.await_left(first + 1);
  bench.time.pass(16);  // busy: write 4
  bench.io.end(4);
  bench.flow.await_left(first + 2);
  bench.time.pass(32);
  expect_seconds(bench.meter->take(), 1 + 2 + 8 + 16, 0, 0, 4 + 32);
}

TEST(DiskMeter, CountsNoWaitOfAFlowThatHasFailedOrWasGivenUp) {
  FlowBench bench;
  const std::int64_t first = bench.flow.add(*bench.file, bench.tiles(3), true);
  bench.io.end(1);
  bench.io.end(2);
  bench.flow.await_tile(first);
  bench.flow.await_tile(first + 1);
  bench.flow.issued(first);
  bench.flow.cut(first + 1);
  bench.flow.reset();
  bench.time.pass(1);
  expect_seconds(bench.meter->take(), 0, 0, 0, 1);

  const std::int64_t again = bench.flow.add(*bench.file, bench.tiles(2), true);
  bench.time.pass(2);
  bench.io.end(3);
  bench.io.end(4, /*fails=*/true);
  EXPECT_THROW(bench.flow.await_left(again + 2), IoError);
  bench.flow.reset();
  bench.time.pass(4);
  expect_seconds(bench.meter->take(), 2, 0, 0, 4);
}

}  // namespace
}  // namespace tranche
