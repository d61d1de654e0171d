#include "tools/train/run_trace.h"

#include <gmock/gmock.h>

#include <array>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/clock.h"
#include "tests/tools/program_fixture.h"
#include "tranche/comm/backends.h"

namespace tranche::tools {
namespace {

using detail::seconds_now;
using nlohmann::json;
using testing::HasSubstr;

/// A clock that is ahead by some seconds and fast by a fraction.
double clock_of(int rank, double time, double origin) {
  return time + 100.0 * rank + 0.25 * rank * (time - origin);
}

TEST(RunTrace, FindsClocksWithinTheErrorThatItStates) {
  run_thread_ranks(3, [](int rank, const CommunicatorFactory& factory) {
    const auto ranks = factory({});
    const ClockDifference found = compare_clocks(*ranks, [&] { return seconds_now() + 100.0 * rank; });
    EXPECT_LE(std::abs(found.ahead - 100.0 * rank), found.error + 1e-9);
    EXPECT_EQ(found.error > 0, rank > 0);
    EXPECT_LT(found.error, 1) << "of the quickest of many messages";
    EXPECT_LT(std::abs(found.at - seconds_now() - 100.0 * rank), 60);
  });
}

TEST(RunTrace, HasAllRanksOnOneClock) {
  const test::TemporaryFolder folder;
  const std::string path = folder.path("t.json");
  constexpr int world = 4;
  const Mesh mesh = Mesh::parse("shard=2, pipeline=2", world);
  const double origin = seconds_now();
  std::array<double, world> happened{};
  std::string line;
  run_thread_ranks(world, [&](int rank, const CommunicatorFactory& factory) {
    const auto ranks = factory({});
    TraceRecorder trace(rank);
    RunTrace whole(trace, *ranks, mesh, [&] { return clock_of(rank, seconds_now(), origin); });
    for (int i = 0; i < 10; ++i) ranks->barrier({"test", "", Traffic::control}).wait();
    const double now = seconds_now();
    happened[static_cast<std::size_t>(rank)] = now;
    trace.span("t", "it happened", clock_of(rank, now, origin), clock_of(rank, now, origin));
    if (rank == 3) trace.span("t", std::string(2 << 20, 'x'), 0, 1);  // needs more than one message
    const std::string said = whole.save(path);
    EXPECT_EQ(said.empty(), rank != 0);
    if (rank == 0) line = said;
  });
  EXPECT_THAT(line, HasSubstr("trace: " + path + ", of 4 ranks, whose clocks agree within "));
  const json trace = json::parse(test::read_file(path));
  const double error = std::stod(trace["otherData"]["clock_error_microseconds"].get<std::string>());
  EXPECT_EQ(trace["otherData"]["ranks"], "4");
  EXPECT_GT(error, 0);
  std::map<int, std::string> names;
  std::map<int, int> positions;
  int seen = 0;
  for (const json& event : trace["traceEvents"]) {
    const int rank = event["pid"];
    if (event["name"] == "process_name") names[rank] = event["args"]["name"];
    if (event["name"] == "process_sort_index") positions[rank] = event["args"]["sort_index"];
    if (event["name"] != "it happened") continue;
    ++seen;
    // The clocks differ in speed by a quarter, which matters little within one round trip.
    EXPECT_NEAR(event["ts"].get<double>(), happened[static_cast<std::size_t>(rank)] * 1e6, 3 * error + 1)
        << rank;
  }
  EXPECT_EQ(seen, world);
  EXPECT_EQ(names[3], "rank 3 (shard 1, pipeline 1)");
  EXPECT_EQ(names[1], "rank 1 (shard 0, pipeline 1)");
  EXPECT_EQ(positions, (std::map<int, int>{{0, 0}, {1, 1}, {2, 2}, {3, 3}}))
      << "stages of a data rank side by side";
}

TEST(RunTrace, NamesRanksOfOneAxisByTheirCoordinateToo) {
  const test::TemporaryFolder folder;
  const std::string path = folder.path("t.json");
  const Mesh mesh = Mesh::parse("pipeline=2", 2);
  run_thread_ranks(2, [&](int rank, const CommunicatorFactory& factory) {
    const auto ranks = factory({});
    const TraceRecorder trace(rank);
    (void)RunTrace(trace, *ranks, mesh).save(path);
  });
  EXPECT_THAT(test::read_file(path), HasSubstr("\"rank 1 (pipeline 1)\""));
}

}  // namespace
}  // namespace tranche::tools
