#include "tranche/report/memory_profile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "report/memory_profile_impl.h"
#include "tests/engine/odd_model.h"
#include "tests/engine/on_ranks.h"

namespace tranche::test {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr std::size_t device_tier = static_cast<std::size_t>(Tier::device);

OddRun stage_three() {
  OddRun run;
  run.ranks = 2;
  run.stage = 3;
  run.accumulation = 2;
  run.dtype = DataType::bfloat16;
  run.steps = 4;
  return run;
}

struct Outcome {
  kernels::Digest weights, state;
  std::vector<TierAccount> accounts;
  std::vector<MemoryRecord> records;
  std::string summary;
};

/// Trains the odd model on thread ranks, with or without a profile, which is written to `directory` if one is
/// given.
Outcome train(const OddRun& run, bool profiled, const std::string& directory = {},
              const MemoryFigures* predicted = nullptr, const MemoryTimelineOptions& kept = {}) {
  Outcome outcome;
  outcome.accounts.resize(static_cast<std::size_t>(run.ranks));
  outcome.records.resize(static_cast<std::size_t>(run.ranks));
  std::mutex mutex;
  const auto rank_part = [&](const CommunicatorFactory& factory) {
    const Config config = odd_config(run);
    RuntimeOptions options = RuntimeOptions::from(config);
    options.device = run.device;
    options.log_level = LogLevel::off;
    options.trace = profiled;
    options.trace_events = 4096;
    Runtime runtime(options, factory);
    std::unique_ptr<MemoryProfile> profile;
    if (profiled) profile = std::make_unique<MemoryProfile>(runtime, kept);
    Engine engine(runtime, odd_model(), config);
    for (int step = 0; step < run.steps; ++step) {
      whole_step(engine, runtime, step);
      const StepResult result = engine.step();
      if (profile) profile->end_step(result.step);
    }
    const auto rank = static_cast<std::size_t>(runtime.rank());
    const TierAccount account = runtime.ledger().account(Tier::device);
    MemoryRecord record;
    if (profile) {
      profile->end();
      record = profile->timeline().record();
    }
    std::string summary;
    if (!directory.empty()) summary = profile->write(directory, predicted);
    const kernels::Digest weights = engine.weights_digest(), state = engine.state_digest();
    const std::lock_guard lock(mutex);
    outcome.accounts[rank] = account;
    outcome.records[rank] = std::move(record);
    if (rank == 0) {
      outcome.weights = weights;
      outcome.state = state;
      outcome.summary = summary;
    } else {
      EXPECT_EQ(summary, "");
    }
  };
  if (run.device == DeviceKind::meta) {
    rank_part([&](const CommunicatorOptions& options) {
      return make_meta_communicator(0, run.ranks, run.ranks, options);
    });
  } else {
    run_thread_ranks(run.ranks, [&](int, const CommunicatorFactory& factory) { rank_part(factory); });
  }
  return outcome;
}

MemoryFigures prediction_of(OddRun run) {
  run.device = DeviceKind::meta;
  const TierAccount account = train(run, false).accounts[0];
  MemoryFigures figures;
  figures.peak[device_tier] = account.peak;
  figures.at_peak[device_tier] = account.at_peak;
  figures.highest[device_tier] = account.category_peak;
  return figures;
}

/// A folder for one test, removed at its end.
class Folder {
 public:
  Folder()
      : path_(std::filesystem::temp_directory_path() /
              ("tranche_profile_" +
               std::string(::testing::UnitTest::GetInstance()->current_test_info()->name()) + "_" +
               std::to_string(::getpid()))) {
    std::filesystem::create_directories(path_);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

std::string text_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file) << path;
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::vector<std::map<std::string, std::string>> rows_of(const std::string& csv) {
  const auto cells = [](const std::string& line) {
    std::vector<std::string> result(1);
    for (const char c : line) {
      if (c == ',') {
        result.emplace_back();
      } else {
        result.back() += c;
      }
    }
    return result;
  };
  std::istringstream lines(csv);
  std::string line;
  std::getline(lines, line);
  const std::vector<std::string> header = cells(line);
  std::vector<std::map<std::string, std::string>> rows;
  while (std::getline(lines, line)) {
    const std::vector<std::string> values = cells(line);
    EXPECT_EQ(values.size(), header.size()) << line;
    for (std::size_t i = 0; i < std::min(values.size(), header.size()); ++i) {
      if (i == 0) rows.emplace_back();
      rows.back()[header[i]] = values[i];
    }
  }
  return rows;
}

TEST(MemoryProfile, ChangesNeitherBitsNorPeaksAndRecordsThePeakToTheByte) {
  for (const int stage : {0, 2, 3}) {
    OddRun run = stage_three();
    run.stage = stage;
    const Outcome plain = train(run, false), profiled = train(run, true);
    EXPECT_EQ(plain.weights, profiled.weights) << run.to_string();
    EXPECT_EQ(plain.state, profiled.state) << run.to_string();
    for (std::size_t r = 0; r < plain.accounts.size(); ++r) {
      const TierAccount &without = plain.accounts[r], &with = profiled.accounts[r];
      EXPECT_EQ(without.peak, with.peak);
      EXPECT_EQ(without.at_peak.bytes, with.at_peak.bytes);
      EXPECT_EQ(without.category_peak.bytes, with.category_peak.bytes);
      EXPECT_EQ(without.peak_phase, with.peak_phase);
      const MemoryRecord& record = profiled.records[r];
      const MemoryRecord::Peak& peak = record.peaks[device_tier];
      EXPECT_EQ(peak.bytes, with.peak) << run.to_string();
      EXPECT_EQ(peak.categories.bytes, with.at_peak.bytes) << run.to_string();
      std::int64_t live = 0;
      for (const BornItem& item : record.live_behind(Tier::device, peak.event))
        live += item.bytes * item.count;
      EXPECT_EQ(live, with.peak) << run.to_string();
    }
  }
}

TEST(MemoryProfile, PhasesOfAStageThreeStepHaveTheirNamesAndUnits) {
  OddRun run = stage_three();
  run.accumulation = 1;
  const MemoryRecord record = train(run, true).records[0];
  std::vector<std::string> last, now;
  record.replay([&](const MemoryEvent& event, std::int64_t, const MemoryState&) {
    if (event.kind == MemoryEvent::Kind::step) {
      last = std::move(now);
      now.clear();
    }
    if (event.kind != MemoryEvent::Kind::phase) return;
    now.push_back(record.phases[event.phase] + (event.unit > 0 ? " " : "") + record.units[event.unit]);
  });
  // The last gather of the tied unit precedes the first gradients; until then the phase is forward.
  EXPECT_THAT(last, ::testing::ElementsAre(
                        "forward", "forward tied", "forward prime", "forward tiny", "forward mixed",
                        "forward tied", "backward tied", "backward mixed", "reduce mixed", "backward mixed",
                        "backward tiny", "reduce tiny", "backward tiny", "backward prime", "reduce prime",
                        "backward prime", "backward tied", "reduce tied", "backward tied", "step", "idle"));
  // Memory that a unit allocates at the start is attributed to it.
  for (const BornItem& item : record.live_behind(Tier::device, record.peaks[device_tier].event)) {
    if (item.tag == "prime master") {
      EXPECT_EQ(item.unit, "prime");
      EXPECT_EQ(item.phase, "start");
    }
  }
}

TEST(MemoryProfile, WritesWhatItPromises) {
  const Folder folder;
  const std::string directory = folder / "deep/profile";
  const OddRun run = stage_three();
  const MemoryFigures predicted = prediction_of(run);
  const Outcome outcome = train(run, true, directory, &predicted);
  for (const char* name : {"summary.txt", "summary.json", "ranks_device.svg"}) {
    EXPECT_FALSE(text_of(folder / ("deep/profile/" + std::string(name))).empty()) << name;
  }
  EXPECT_FALSE(std::filesystem::exists(folder / "deep/profile/predicted_device.svg"))
      << "all bars would be equal";
  for (const char* text : {"at the peak of rank 0", "predicted", "measured", "difference",
                           "device  optimizer", "device  total", "process unaccounted"}) {
    EXPECT_THAT(outcome.summary, HasSubstr(text));
  }
  EXPECT_THAT(outcome.summary, StartsWith("memory: predicted = measured on all 2 ranks; device peak "));
  const std::string whole = text_of(folder / "deep/profile/summary.txt");
  EXPECT_THAT(whole, StartsWith(outcome.summary.substr(0, outcome.summary.find('\n'))));
  for (const char* explanation : {"    at its highest, ", "before the engine (program, MPI, libraries)"}) {
    EXPECT_THAT(whole, HasSubstr(explanation));
    EXPECT_THAT(outcome.summary, Not(HasSubstr(explanation)));
  }
  const json summary = json::parse(text_of(folder / "deep/profile/summary.json"));
  ASSERT_EQ(summary.at("ranks").size(), 2u);

  for (int rank = 0; rank < run.ranks; ++rank) {
    const TierAccount& account = outcome.accounts[static_cast<std::size_t>(rank)];
    const auto own = [&](const std::string& name) {
      return text_of(folder / ("deep/profile/rank" + std::to_string(rank) + "/" + name));
    };
    const json& figures = summary.at("ranks").at(static_cast<std::size_t>(rank)).at("measured").at("device");
    EXPECT_EQ(figures.at("peak_bytes"), account.peak);
    EXPECT_EQ(figures.at("by_category").at("gathered"), account.category_peak[Category::gathered]);

    // The changes in the table add up to the ledger's figures, and their highest total is the peak.
    std::map<std::string, std::int64_t> held;
    std::int64_t highest = 0;
    std::set<std::string> phases;
    for (auto& row : rows_of(own("timeline.csv"))) {
      ASSERT_EQ(row.size(), 12u);
      phases.insert(row["phase"]);
      if (row["tier"] != "device") continue;
      if (row["event"] == "held") {
        held[row["category"]] = std::stoll(row["category_bytes"]);
        continue;
      }
      const std::int64_t change = std::stoll(row["change_bytes"]);
      held[row["category"]] += change;
      if (row["event"] == "occupied" || row["event"] == "vacated") held["other"] -= change;
      EXPECT_EQ(held[row["category"]], std::stoll(row["category_bytes"]));
      highest = std::max<std::int64_t>(highest, std::stoll(row["tier_bytes"]));
    }
    EXPECT_EQ(highest, account.peak);
    for (const Category category : all_categories) {
      EXPECT_EQ(held[std::string(name_of(category))], account.current[category]) << name_of(category);
    }
    for (const char* phase : {"start", "forward", "backward", "reduce", "step"}) {
      EXPECT_EQ(phases.count(phase), 1u) << phase << " (step: the arena takes its block there)";
    }
    std::map<std::string, std::int64_t> phase_peaks;
    for (auto& row : rows_of(own("phases.csv"))) {
      if (row["tier"] == "device" && row["category"] == "total") {
        phase_peaks[row["phase"]] = std::stoll(row["peak_bytes"]);
      }
    }
    for (const char* phase : {"start", "forward", "backward", "reduce", "step", "idle"}) {
      EXPECT_GT(phase_peaks[phase], 0) << phase;
      EXPECT_LE(phase_peaks[phase], account.peak) << phase;
    }

    const json timeline = json::parse(own("timeline.json"));
    EXPECT_EQ(timeline.at("schema"), "tranche-memory-timeline-1");
    EXPECT_EQ(timeline.at("rows").size(), timeline.at("events"));
    EXPECT_EQ(timeline.at("rank"), rank);
    const json peak = json::parse(own("peak.json")).at("tiers").at("device");
    EXPECT_EQ(peak.at("peak_bytes"), account.peak);
    std::int64_t sum = 0, before = INT64_MAX;
    for (const json& item : peak.at("live")) {
      const std::int64_t bytes = item.at("bytes").get<std::int64_t>() * item.at("count").get<std::int64_t>();
      EXPECT_LE(bytes, before) << "largest first";
      before = bytes;
      sum += bytes;
    }
    EXPECT_EQ(sum, account.peak);
    EXPECT_THAT(own("peak.txt"), HasSubstr("tied"));

    // Counters of each category, and spans of phases, units, steps, kernels and collectives.
    const json trace = json::parse(own("trace.json"));
    std::map<int, std::string> tracks;
    std::set<std::string> counters, names;
    for (const json& event : trace.at("traceEvents")) {
      if (event.at("name") == "thread_name") tracks[event.at("tid")] = event.at("args").at("name");
      if (event.at("ph") == "C" && event.at("name") == "device memory") {
        for (const auto& [name, value] : event.at("args").items()) counters.insert(name);
      }
    }
    for (const json& event : trace.at("traceEvents")) {
      if (event.at("ph") == "X")
        names.insert(tracks[event.at("tid")] + ": " + event.at("name").get<std::string>());
    }
    for (const Category category : all_categories) {
      EXPECT_EQ(counters.count(std::string(name_of(category))), 1u) << name_of(category);
    }
    for (const char* name : {"phase: forward", "phase: backward", "phase: reduce", "phase: step",
                             "step: step 4", "unit at work: prime", "compute: gradient"}) {
      EXPECT_EQ(names.count(name), 1u) << name;
    }
    EXPECT_TRUE(std::any_of(names.begin(), names.end(), [](const std::string& name) {
      return name.starts_with("communication: ") && name.find("all_gather") != std::string::npos;
    }));

    const std::string plot = own("step_device.svg");
    for (const char* text : {"of 2: step 4", "activations", "gathered", "optimizer", ">phase<",
                             "milliseconds", "most in use: "}) {
      EXPECT_THAT(plot, HasSubstr(text));
    }
    EXPECT_THAT(own("run_device.svg"), HasSubstr("the whole run"));
  }
}

TEST(MemoryProfile, SavingIsAPhaseAndItsDiskWorkIsInTheTrace) {
  const Folder folder;
  OddRun run = stage_three();
  run.ranks = 1;
  const Config config = odd_config(run);
  RuntimeOptions options = RuntimeOptions::from(config);
  options.log_level = LogLevel::off;
  options.trace = true;
  Runtime runtime(options, [](const CommunicatorOptions& o) { return make_self_communicator(o); });
  MemoryProfile profile(runtime);
  Engine engine(runtime, odd_model(), config);
  for (int step = 0; step < 3; ++step) {
    whole_step(engine, runtime, step);
    profile.end_step(engine.step().step);
    if (step == 1) engine.save(folder / "checkpoints", {.wait = true});
  }
  const MemoryRecord record = profile.timeline().record();
  EXPECT_NE(std::find(record.phases.begin(), record.phases.end(), "save"), record.phases.end());
  const std::string trace = runtime.trace()->to_json();
  EXPECT_THAT(trace, HasSubstr("\"name\":\"disk\""));
  EXPECT_THAT(trace, HasSubstr("write shard of step 2"));
  EXPECT_THAT(trace, HasSubstr("commit checkpoint of step 2"));
}

TEST(MemoryProfile, TellsByHowMuchAPredictionIsOff) {
  const Folder folder;
  const OddRun run = stage_three();
  MemoryFigures predicted = prediction_of(run);
  predicted.at_peak[device_tier][Category::gradients] -= 2048;
  predicted.peak[device_tier] -= 2048;
  const std::string summary = train(run, true, folder / "off", &predicted).summary;
  EXPECT_THAT(summary,
              StartsWith("memory: NOT AS PREDICTED, +2.00 KiB of device gradients on rank 0; device peak "));
  EXPECT_THAT(text_of(folder / "off/predicted_device.svg"), HasSubstr("+2.00 KiB"));
  const std::string unpredicted = train(run, true, folder / "none").summary;
  EXPECT_THAT(unpredicted, StartsWith("memory: device peak "));
  EXPECT_FALSE(std::filesystem::exists(folder / "none/predicted_device.svg"));
}

TEST(MemoryProfile, WhatWasNotKeptIsSaidAndTheRestStillAddsUp) {
  const Folder folder;
  OddRun run = stage_three();
  run.ranks = 1;
  run.steps = 8;
  const Outcome outcome = train(run, true, folder / "short", nullptr, {200});
  EXPECT_GT(outcome.records[0].dropped, 0);
  EXPECT_EQ(outcome.records[0].peaks[device_tier].bytes, outcome.accounts[0].peak);
  const std::string plot = text_of(folder / "short/rank0/run_device.svg");
  EXPECT_THAT(plot, HasSubstr("changes in the middle were not kept"));
  const std::string last = text_of(folder / "short/rank0/step_device.svg");
  EXPECT_THAT(last, HasSubstr("of 1: step 8")) << "the last step is whole, however little is kept";
}

TEST(MemoryProfile, WhatIsNotBookedIsExplainedLessThanNothingToo) {
  using namespace memory_profile;
  constexpr std::int64_t mebibyte = 1 << 20;
  Summary summary;
  summary.ranks.resize(1);
  summary.ranks.reserve(2);  // keeps `rank` valid
  RankFigures& rank = summary.ranks[0];
  rank.measured.peak[device_tier] = 100 * mebibyte;
  rank.measured.at_peak[device_tier][Category::parameters] = 60 * mebibyte;
  rank.measured.at_peak[device_tier][Category::other] = 40 * mebibyte;
  rank.block_free[device_tier] = 39 * mebibyte;
  rank.before.process.anonymous = 10 * mebibyte;
  rank.highest = {{70 * mebibyte, 0, 0}, 100 * mebibyte, 5};
  rank.own_bytes = mebibyte;
  summary.device_in_process = true;
  summary.peak_moment = "backward h.5 of step 2";
  std::string text = summary_text(summary, true);
  EXPECT_THAT(text,
              StartsWith("memory: device peak 100.00 MiB, backward h.5 of step 2; process -30.00 MiB\n"));
  summary.predicted = true;
  rank.predicted = rank.measured;
  summary.ranks.push_back(rank);
  summary.ranks[1].measured.peak[device_tier] = summary.ranks[1].predicted.peak[device_tier] = 90 * mebibyte;
  EXPECT_THAT(
      summary_text(summary, false),
      StartsWith("memory: predicted = measured on all 2 ranks; device peak 90.00 MiB to 100.00 MiB, "));
  summary.ranks.pop_back();
  summary.predicted = false;
  EXPECT_THAT(text, HasSubstr("process unaccounted                       -     -30.00 MiB"));
  EXPECT_THAT(
      text,
      HasSubstr("the end of step 5: unaccounted = 10.00 MiB before the engine (program, MPI, libraries) + "
                "1.00 MiB this profile - 41.00 MiB tracked but not touched yet"));
  EXPECT_THAT(text, HasSubstr("of `other` 39.00 MiB are the step's block: reserved, idle at that moment"));
  EXPECT_THAT(text, Not(HasSubstr("pinned")));

  rank.highest.process.anonymous = 120 * mebibyte;
  EXPECT_THAT(summary_text(summary, true),
              HasSubstr("+ 9.00 MiB since (heap of the code, MPI and libraries, allocator slack)"));

  // A device with memory of its own: the driver's figures complete the accounting.
  summary.device_in_process = false;
  rank.device.total = 1000 * mebibyte;
  rank.device.free = 300 * mebibyte;
  rank.device.mapped = 92 * mebibyte;
  rank.device.placed = rank.device_tracked = 90 * mebibyte;
  text = summary_text(summary, true);
  EXPECT_THAT(text, HasSubstr("device  unaccounted                       -     610.00 MiB"));
  EXPECT_THAT(text, HasSubstr("300.00 MiB of the device's 1000.00 MiB were free and 90.00 MiB tracked"));
  EXPECT_THAT(text, HasSubstr("2.00 MiB of rounding to pages"));
  EXPECT_THAT(text, HasSubstr("pinned host memory may not count as RssAnon"));
}

TEST(MemoryProfile, ADirectoryThatCannotBeWrittenIsToldWithItsName) {
  const Folder folder;
  std::ofstream(folder / "file") << "a file stands where a directory should";
  try {
    MemoryProfile::require_directory(folder / "file", 3);
    FAIL();
  } catch (const ConfigurationError& error) {
    EXPECT_THAT(error.message(), HasSubstr("the memory profile cannot be written to '"));
    EXPECT_THAT(error.message(), HasSubstr("file/rank3"));
    EXPECT_THAT(error.message(), HasSubstr("Not a directory"));
  }
  MemoryProfile::require_directory(folder / "new/one", 0);
  EXPECT_TRUE(std::filesystem::is_directory(folder / "new/one/rank0"));
  // The problem is found late, on all ranks.
  EXPECT_THAT(message_of<IoError>([&] { train(stage_three(), true, folder / "file"); }),
              HasSubstr("Not a directory"));
  // A problem of one rank is an error on all.
  std::filesystem::create_directories(folder / "half");
  std::ofstream(folder / "half/rank1") << "in the way";
  EXPECT_THAT(message_of<IoError>([&] { train(stage_three(), true, folder / "half"); }),
              ::testing::AnyOf(HasSubstr("Not a directory"),
                               HasSubstr("rank 1 could not write its part of the memory profile")));
}

TEST(MemoryProfile, EqualRanksAreOneBarAndEqualPairsNone) {
  using namespace memory_profile;
  Summary summary;
  summary.ranks.resize(3);
  for (RankFigures& rank : summary.ranks) {
    rank.measured.peak[device_tier] = 5 << 20;
    rank.measured.at_peak[device_tier][Category::parameters] = 5 << 20;
  }
  const auto plots_of = [&] {
    std::map<std::string, std::string> plots;
    for (const NamedPlot& plot : job_plots(summary)) plots[plot.name] = plot.svg;
    return plots;
  };
  std::map<std::string, std::string> plots = plots_of();
  EXPECT_THAT(plots["ranks_device.svg"], HasSubstr(">each of 3 ranks<"));
  EXPECT_THAT(plots["ranks_device.svg"], HasSubstr("all 3 ranks held the same: one bar stands for each"));
  summary.ranks[2].measured.at_peak[device_tier][Category::parameters] = 4 << 20;
  summary.ranks[2].measured.peak[device_tier] = 4 << 20;
  plots = plots_of();
  EXPECT_THAT(plots["ranks_device.svg"], HasSubstr(">2</text>"));
  EXPECT_THAT(plots["ranks_device.svg"], HasSubstr("2: 4.00 MiB.</desc>"));

  summary.predicted = true;
  summary.ranks[0].predicted = summary.ranks[0].measured;
  EXPECT_EQ(plots_of().count("predicted_device.svg"), 0U);
  summary.ranks[0].predicted.at_peak[device_tier][Category::parameters] = 6 << 20;
  EXPECT_EQ(plots_of().count("predicted_device.svg"), 1U);
}

}  // namespace
}  // namespace tranche::test
