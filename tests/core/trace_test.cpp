#include "tranche/core/trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "core/clock.h"
#include "tranche/core/error.h"

namespace tranche {
namespace {

using nlohmann::json;

std::vector<json> events_of(const TraceRecorder& trace, const std::string& phase) {
  const json parsed = json::parse(trace.to_json());
  std::vector<json> result;
  for (const json& event : parsed.at("traceEvents")) {
    if (event.at("ph") == phase) result.push_back(event);
  }
  return result;
}

/// The tid of every named track.
std::map<std::string, int> tracks_of(const TraceRecorder& trace) {
  std::map<std::string, int> result;
  for (const json& event : events_of(trace, "M")) {
    if (event.at("name") != "thread_name") continue;
    result[event.at("args").at("name").get<std::string>()] = event.at("tid").get<int>();
  }
  return result;
}

TEST(Trace, EmptyIsValidAndNamesTheRank) {
  const TraceRecorder trace(3);
  EXPECT_EQ(trace.size(), 0);
  const auto metadata = events_of(trace, "M");
  ASSERT_FALSE(metadata.empty());
  EXPECT_EQ(metadata[0].at("name"), "process_name");
  EXPECT_EQ(metadata[0].at("pid"), 3);
  EXPECT_EQ(metadata[0].at("args").at("name"), "rank 3");
}

TEST(Trace, ARankLearntLaterHoldsForWhatWasRecordedBefore) {
  TraceRecorder trace(0);
  trace.span("t", "s", 0, 1);
  trace.set_rank(5);
  EXPECT_EQ(events_of(trace, "X")[0].at("pid"), 5);
  EXPECT_EQ(events_of(trace, "M")[0].at("args").at("name"), "rank 5");
}

TEST(Trace, SpansAreInMicrosecondsOnTheirTrack) {
  TraceRecorder trace(1);
  trace.span("compute", "forward", 1.5, 1.75);
  trace.span("gather", "unit 0", 1.25, 1.25);
  trace.span("compute", "backward", 2.0, 1.0);
  EXPECT_EQ(trace.size(), 3);
  const auto spans = events_of(trace, "X");
  const auto tracks = tracks_of(trace);
  ASSERT_EQ(spans.size(), 3u);
  ASSERT_EQ(tracks.size(), 2u);
  EXPECT_NE(tracks.at("compute"), tracks.at("gather"));
  EXPECT_EQ(spans[0].at("name"), "forward");
  EXPECT_EQ(spans[0].at("pid"), 1);
  EXPECT_EQ(spans[0].at("tid"), tracks.at("compute"));
  EXPECT_EQ(spans[0].at("ts"), 1.5e6);
  EXPECT_EQ(spans[0].at("dur"), 0.25e6);
  EXPECT_EQ(spans[1].at("tid"), tracks.at("gather"));
  EXPECT_EQ(spans[1].at("dur"), 0.0);
  EXPECT_EQ(spans[2].at("dur"), 0.0) << "no span is shorter than nothing";
}

TEST(Trace, NanosecondsSurviveAtTheClocksMagnitude) {
  TraceRecorder trace(0);
  const double begin = 1e6 + 0.000001;  // eleven days after the clock's origin
  trace.span("t", "s", begin, begin + 0.000001);
  EXPECT_NEAR(events_of(trace, "X")[0].at("ts").get<double>(), begin * 1e6, 1e-3);
}

TEST(Trace, CountersShareAChartByTrack) {
  TraceRecorder trace(0);
  trace.counter("memory", "gathered", 0.5, 1024);
  trace.counter("memory", "gradients", 0.5, 0.125);
  trace.counter("memory", "gathered", 1.0, 1e300);
  const auto counters = events_of(trace, "C");
  ASSERT_EQ(counters.size(), 3u);
  EXPECT_EQ(counters[0].at("name"), "memory");
  EXPECT_EQ(counters[0].at("ts"), 0.5e6);
  EXPECT_EQ(counters[0].at("args").at("gathered"), 1024);
  EXPECT_EQ(counters[1].at("args").at("gradients"), 0.125);
  EXPECT_EQ(counters[2].at("args").at("gathered"), 1e300);
  EXPECT_TRUE(tracks_of(trace).empty());
}

TEST(Trace, WhatIsNotFiniteIsLeftOut) {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  constexpr double infinity = std::numeric_limits<double>::infinity();
  TraceRecorder trace(0);
  trace.span("t", "s", nan, 1);
  trace.span("t", "s", 0, infinity);
  trace.counter("t", "c", 0, nan);
  trace.counter("t", "c", -infinity, 0);
  EXPECT_EQ(trace.size(), 0);
  EXPECT_TRUE(json::accept(trace.to_json()));
}

TEST(Trace, AnyTextIsEscaped) {
  const std::string awkward = "quote \" backslash \\ newline \n bell \a {} h\xc3\xa9";
  TraceRecorder trace(0);
  trace.span(awkward, awkward, 0, 1);
  trace.counter(awkward, awkward, 0, 1);
  trace.span("t", std::string("broken \xff utf-8"), 0, 1);
  EXPECT_EQ(tracks_of(trace).count(awkward), 1u);
  EXPECT_EQ(events_of(trace, "X")[0].at("name"), awkward);
  EXPECT_EQ(events_of(trace, "C")[0].at("args").at(awkward), 1);
  EXPECT_EQ(events_of(trace, "X")[1].at("name"), "broken \xef\xbf\xbd utf-8");
}

TEST(Trace, ThreadsRecordTogether) {
  TraceRecorder trace(0);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&trace, track = "track " + std::to_string(t)] {
      for (int i = 0; i < 200; ++i) {
        trace.span(track, i % 2 == 0 ? "even" : "odd", i, i + 1);
        trace.counter("chart", "c", i, i);
        if (i % 100 == 0) (void)trace.to_json();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(trace.size(), 1600);
  const auto tracks = tracks_of(trace);
  EXPECT_EQ(tracks.size(), 4u);
  std::map<int, int> spans_per_track;
  for (const json& span : events_of(trace, "X")) ++spans_per_track[span.at("tid").get<int>()];
  for (const auto& [name, tid] : tracks) EXPECT_EQ(spans_per_track[tid], 200) << name;
}

TEST(Trace, SavesWhatItSays) {
  TraceRecorder trace(0);
  trace.span("t", "s", 0, 1);
  const std::string path = testing::TempDir() + "tranche_trace_test." + std::to_string(::getpid()) + ".json";
  trace.save(path);
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  EXPECT_EQ(text.str(), trace.to_json());
  std::remove(path.c_str());
}

TEST(Trace, SaveSaysWhichPathFailed) {
  const TraceRecorder trace(0);
  const std::string path = testing::TempDir() + "no such folder/trace.json";
  try {
    trace.save(path);
    FAIL();
  } catch (const IoError& error) {
    EXPECT_EQ(error.message(), "'" + path + "' cannot be written: No such file or directory");
  }
}

TEST(Clock, GoesForward) {
  const double before = detail::seconds_now();
  detail::Stopwatch watch;
  EXPECT_GE(watch.seconds(), 0.0);
  watch.restart();
  EXPECT_GE(watch.seconds(), 0.0);
  EXPECT_GE(detail::seconds_now(), before);
}

TEST(Trace, ABoundKeepsTheFirstHalfAndTheLatest) {
  TraceRecorder trace(0);
  trace.set_capacity(6);
  for (int i = 0; i < 100; ++i) trace.span("t", std::to_string(i), i, i + 1);
  EXPECT_EQ(trace.size(), 6);
  std::vector<std::string> names;
  for (const json& event : events_of(trace, "X")) names.push_back(event.at("name").get<std::string>());
  EXPECT_THAT(names, ::testing::UnorderedElementsAre("0", "1", "2", "97", "98", "99"));
  EXPECT_THROW(trace.set_capacity(1), InvalidArgument);
  EXPECT_THROW(trace.set_capacity(-1), InvalidArgument);
  try {
    trace.set_capacity(4);
    FAIL();
  } catch (const LogicError& error) {
    EXPECT_THAT(error.message(), ::testing::HasSubstr("bound of 4 events for a trace that holds 6"));
  }
}

TEST(Trace, AnotherRecordersEventsStandOnTracksBesideItsOwn) {
  TraceRecorder trace(2), more(9);
  trace.span("compute", "matmul", 0, 1);
  more.span("phase", "forward", 0, 1);
  more.counter("device memory", "parameters", 0.5, 1024);
  const json parsed = json::parse(trace.to_json(&more));
  std::map<std::string, int> tid;
  std::vector<int> span_tids;
  bool counted = false;
  for (const json& event : parsed.at("traceEvents")) {
    EXPECT_EQ(event.at("pid"), 2) << "one process";
    if (event.at("name") == "thread_name") tid[event.at("args").at("name")] = event.at("tid");
    if (event.at("ph") == "X") span_tids.push_back(event.at("tid"));
    if (event.at("ph") == "C") counted = event.at("args").at("parameters") == 1024.0;
  }
  EXPECT_EQ(tid.size(), 2u);
  EXPECT_NE(tid["compute"], tid["phase"]);
  EXPECT_THAT(span_tids, ::testing::UnorderedElementsAre(tid["compute"], tid["phase"]));
  EXPECT_TRUE(counted);
}

json entries_of(const TraceRecorder& trace, double shift) {
  return json::parse("[" + trace.entries("stage \"0\"", 7, [&](double) { return shift; }) + "]");
}

TEST(Trace, ArrowsGoFromOneRankToAnother) {
  TraceRecorder from(2), to(5);
  from.span("pipeline", "F0", 1, 2);
  from.arrow("pipeline", "residual", 4, true, 1.5);
  from.arrow("pipeline", "residual", 4, true, 1.75);
  from.arrow("pipeline", "gradient", 5, false, 1.25);
  to.arrow("pipeline", "residual", 4, false, 2.5);
  to.arrow("pipeline", "residual", 4, false, 2.75);
  const json sent = entries_of(from, 0.25), received = entries_of(to, 0);
  std::vector<json> begins, ends;
  for (const json& event : sent) {
    if (event["ph"] == "s") begins.push_back(event);
  }
  for (const json& event : received) {
    if (event["ph"] == "f") ends.push_back(event);
  }
  ASSERT_EQ(begins.size(), 2u);
  ASSERT_EQ(ends.size(), 2u);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(begins[i]["id"], ends[i]["id"]) << "the n-th beginning and the n-th end are of one arrow";
    EXPECT_EQ(begins[i]["name"], ends[i]["name"]);
    EXPECT_EQ(begins[i]["cat"], ends[i]["cat"]);
    EXPECT_EQ(ends[i]["bp"], "e");
  }
  EXPECT_NE(begins[0]["id"], begins[1]["id"]);
  EXPECT_EQ(begins[0]["ts"], 1.75e6) << "1.5 s, shifted by a quarter";
  EXPECT_EQ(begins[0]["pid"], 2);
  EXPECT_EQ(ends[0]["pid"], 5);
  EXPECT_EQ(sent[0]["args"]["name"], "stage \"0\"");
  EXPECT_EQ(sent[1]["args"]["sort_index"], 7);
  EXPECT_TRUE(events_of(from, "s").empty()) << "one rank's own trace has no arrows";
  EXPECT_TRUE(events_of(from, "f").empty());
}

}  // namespace
}  // namespace tranche
