// The life of a memory profile, and its summary.

#include "tranche/report/memory_profile.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <type_traits>

#include "core/clock.h"
#include "core/output_file.h"
#include "report/memory_profile_impl.h"
#include "tranche/core/error.h"

namespace tranche {

using detail::write_output_file;
using namespace memory_profile;
using nlohmann::ordered_json;

namespace {

std::size_t index_of(Tier tier) {
  return static_cast<std::size_t>(tier);
}

std::string rank_directory(const std::string& directory, int rank) {
  return (std::filesystem::path(directory) / fmt::format("rank{}", rank)).string();
}

/// The least time between samples after the first steps, because a sample costs some 20 microseconds.
constexpr double seconds_between_looks = 0.1;
constexpr std::int64_t steps_always_seen = 4;

}  // namespace

MemoryFigures MemoryFigures::of(const Ledger& ledger) {
  std::array<TierAccount, tier_count> tiers;
  for (const Tier tier : all_tiers) tiers[index_of(tier)] = ledger.account(tier);
  return of(tiers);
}

MemoryFigures MemoryFigures::of(const std::array<TierAccount, tier_count>& tiers) {
  MemoryFigures figures;
  for (const Tier tier : all_tiers) {
    const TierAccount& account = tiers[index_of(tier)];
    figures.peak[index_of(tier)] = account.peak;
    figures.at_peak[index_of(tier)] = account.at_peak;
    figures.highest[index_of(tier)] = account.category_peak;
  }
  return figures;
}

struct MemoryProfile::Impl {
  Impl(Runtime& runtime_in, const MemoryTimelineOptions& options)
      : runtime(runtime_in), timeline(runtime_in.ledger(), options) {}

  /// Samples the memory that the process holds, and the part of it that is tracked.
  ProcessSample look(std::int64_t step) const {
    ProcessSample sample;
    sample.process = detail::process_memory();
    // This is this rank's own memory, although others map it.
    sample.process.anonymous += runtime.window_bytes();
    sample.tracked = runtime.ledger().total(Tier::host);
    if (runtime.device().host_accessible()) sample.tracked += runtime.ledger().total(Tier::device);
    sample.step = step;
    return sample;
  }

  Runtime& runtime;
  MemoryTimeline timeline;
  ProcessSample before, highest;
  std::int64_t steps = 0;
  double last_look = 0;
  std::optional<MemoryFigures> measured;
  std::optional<MemoryRecord> record;
};

MemoryProfile::MemoryProfile(Runtime& runtime, const MemoryTimelineOptions& options)
    : impl_(std::make_unique<Impl>(runtime, options)) {
  impl_->before = impl_->highest = impl_->look(0);
}
MemoryProfile::~MemoryProfile() = default;

void MemoryProfile::end_step(std::int64_t step) {
  Impl& impl = *impl_;
  impl.timeline.end_step(step);
  const double now = detail::seconds_now();
  if (++impl.steps > steps_always_seen && now - impl.last_look < seconds_between_looks) return;
  impl.last_look = now;
  const ProcessSample sample = impl.look(step);
  if (sample.process.anonymous > impl.highest.process.anonymous) impl.highest = sample;
}

void MemoryProfile::end() {
  impl_->measured = MemoryFigures::of(impl_->runtime.ledger());
  impl_->record = impl_->timeline.record();
}

const MemoryTimeline& MemoryProfile::timeline() const {
  return impl_->timeline;
}

void MemoryProfile::require_directory(const std::string& directory, int rank) {
  const std::string own = rank_directory(directory, rank);
  std::error_code error;
  std::filesystem::create_directories(own, error);
  int reason = error.value();
  if (!error) {
    try {
      detail::require_output_file((std::filesystem::path(own) / "summary.txt").string());
    } catch (const IoError& refused) {
      reason = refused.code();
    }
  }
  if (reason != 0) {
    throw ConfigurationError(
        fmt::format("the memory profile cannot be written to '{}': {}; name a directory "
                    "that this user may write to",
                    own, std::strerror(reason)));
  }
}

std::string MemoryProfile::write(const std::string& directory, const MemoryFigures* predicted) {
  Impl& impl = *impl_;
  if (!impl.measured) end();
  const MemoryRecord& record = *impl.record;
  Communicator& all = impl.runtime.all();
  const RankNumber number{all.rank(), all.size()};
  const auto agree = [&](const std::string& problem, int code) {
    // If a file could not be written on any rank, all of them throw.
    std::int64_t failed = problem.empty() ? -1 : all.rank();
    all.all_reduce(&failed, 1, DataType::int64, ReduceOperation::maximum,
                   OperationLabel{"memory profile", "write", Traffic::control, Tier::host})
        .wait();
    if (failed < 0) return;
    throw IoError(problem.empty() ? fmt::format("rank {} could not write its part of the memory profile '{}'",
                                                failed, directory)
                                  : problem,
                  code);
  };
  const auto attempt = [&](const auto& work) {
    std::string problem;
    int code = 0;
    try {
      work();
    } catch (const IoError& error) {
      problem = error.message();
      code = error.code();
    }
    agree(problem, code);
  };

  attempt([&] {
    const std::string own = rank_directory(directory, number.rank);
    std::error_code error;
    std::filesystem::create_directories(own, error);  // a failure appears again at the first file
    const auto path = [&](const std::string& name) { return (std::filesystem::path(own) / name).string(); };
    write_output_file(path("timeline.csv"), timeline_csv(record));
    write_output_file(path("timeline.json"), timeline_json(record, number));
    write_output_file(path("phases.csv"), phases_csv(record));
    write_output_file(path("peak.json"), peak_json(record, number));
    write_output_file(path("peak.txt"), peak_text(record, number));
    TraceRecorder counters(number.rank);
    add_to_trace(record, counters);
    const TraceRecorder* spans = impl.runtime.trace();
    write_output_file(path("trace.json"), spans != nullptr ? spans->to_json(&counters) : counters.to_json());
    for (const NamedPlot& plot : rank_plots(record, number)) write_output_file(path(plot.name), plot.svg);
  });

  static_assert(std::is_trivially_copyable_v<RankFigures>, "it travels as bytes");
  RankFigures mine;
  mine.measured = *impl.measured;
  if (predicted != nullptr) mine.predicted = *predicted;
  for (const Tier tier : all_tiers) mine.block_free[index_of(tier)] = record.peaks[index_of(tier)].block_free;
  mine.before = impl.before;
  mine.highest = impl.highest;
  mine.own_bytes = impl.timeline.own_bytes();
  mine.device = impl.runtime.device().memory_info();
  mine.device_tracked = impl.runtime.ledger().total(Tier::device);
  Summary summary;
  summary.ranks.resize(static_cast<std::size_t>(number.ranks), mine);
  all.all_gather(&mine, summary.ranks.data(), sizeof(RankFigures), DataType::uint8, 0, {},
                 OperationLabel{"memory profile", "write", Traffic::control, Tier::host})
      .wait();
  summary.predicted = predicted != nullptr;
  summary.device_in_process = impl.runtime.device().host_accessible();
  const MemoryRecord::Peak& peak = record.peaks[index_of(Tier::device)];
  summary.peak_moment = moment_of(record, peak);
  summary.directory = directory;
  std::string text;
  attempt([&] {
    if (number.rank != 0) return;
    text = summary_text(summary, false);
    const auto path = [&](const std::string& name) {
      return (std::filesystem::path(directory) / name).string();
    };
    write_output_file(path("summary.txt"), summary_text(summary, true));
    write_output_file(path("summary.json"), summary_json(summary));
    for (const Tier tier :
         all_tiers) {  // of an earlier run in this folder; drawn only if there are differences
      std::error_code ignored;
      std::filesystem::remove(path(fmt::format("predicted_{}.svg", name_of(tier))), ignored);
    }
    for (const NamedPlot& plot : job_plots(summary)) write_output_file(path(plot.name), plot.svg);
  });
  return text;
}

// --- the summary ----------------------------------------------------------------------------------------

namespace memory_profile {

namespace {

std::string signed_bytes(std::int64_t bytes) {
  return (bytes > 0 ? "+" : "") + format_bytes(bytes);
}

/// The process's memory that is not tracked, and its parts.
struct Unaccounted {
  std::int64_t total = 0;    ///< the process's minus the tracked
  std::int64_t before = 0;   ///< program, MPI and libraries, at the profile's beginning
  std::int64_t profile = 0;  ///< the profile itself
  std::int64_t rest = 0;     ///< since then: heap of code and libraries; negative: tracked but never accessed
  explicit Unaccounted(const RankFigures& rank)
      : total(rank.highest.process.anonymous - rank.highest.tracked),
        before(rank.before.process.anonymous - rank.before.tracked),
        profile(rank.highest.step > 0 ? rank.own_bytes : 0),
        rest(total - before - profile) {}

  std::string explanation() const {
    std::string text = fmt::format("{} before the engine (program, MPI, libraries) + {} this profile",
                                   format_bytes(before), format_bytes(profile));
    if (rest >= 0) {
      return text + fmt::format(" + {} since (heap of the code, MPI and libraries, allocator slack)",
                                format_bytes(rest));
    }
    return text + fmt::format(" - {} tracked but not touched yet (pages count once they are written)",
                              format_bytes(-rest));
  }
};

bool holds(const Summary& summary, Tier tier) {
  return std::any_of(summary.ranks.begin(), summary.ranks.end(), [&](const RankFigures& rank) {
    return rank.measured.peak[index_of(tier)] > 0 || rank.predicted.peak[index_of(tier)] > 0;
  });
}

/// The largest difference between predicted and measured at the peak; over ranks, tiers and categories.
struct Difference {
  std::int64_t bytes = 0;
  std::size_t rank = 0;
  Tier tier = Tier::device;
  Category category = Category::other;
};
Difference largest_difference(const Summary& summary) {
  Difference largest;
  for (std::size_t r = 0; r < summary.ranks.size(); ++r) {
    for (const Tier tier : all_tiers) {
      for (const Category category : all_categories) {
        const std::int64_t difference = summary.ranks[r].measured.at_peak[index_of(tier)][category] -
                                        summary.ranks[r].predicted.at_peak[index_of(tier)][category];
        if (std::abs(difference) > std::abs(largest.bytes)) largest = {difference, r, tier, category};
      }
    }
  }
  return largest;
}

/// "memory: predicted = measured on 2 ranks; device peak 74.53 MiB, backward h.5 of step 2; process +5.98
/// MiB".
std::string verdict(const Summary& summary) {
  const RankFigures& rank = summary.ranks.front();
  const std::size_t count = summary.ranks.size();
  std::string text = "memory: ";
  if (summary.predicted) {
    const Difference largest = largest_difference(summary);
    text += largest.bytes == 0
                ? fmt::format("predicted = measured on {}; ",
                              count == 1 ? std::string("the one rank") : fmt::format("all {} ranks", count))
                : fmt::format("NOT AS PREDICTED, {} of {} {} on rank {}; ", signed_bytes(largest.bytes),
                              name_of(largest.tier), name_of(largest.category), largest.rank);
  }
  std::int64_t lowest = INT64_MAX, highest = 0;
  for (const RankFigures& one : summary.ranks) {
    lowest = std::min(lowest, one.measured.peak[index_of(Tier::device)]);
    highest = std::max(highest, one.measured.peak[index_of(Tier::device)]);
  }
  text += "device peak ";
  if (lowest != highest) text += format_bytes(lowest) + " to ";
  text += format_bytes(highest);
  if (!summary.peak_moment.empty()) text += ", " + summary.peak_moment;
  if (rank.highest.process.anonymous > 0) {
    text += fmt::format("; process {}", signed_bytes(Unaccounted(rank).total));
  }
  return text + "\n";
}

}  // namespace

std::string summary_text(const Summary& summary, bool explained) {
  const RankFigures& rank = summary.ranks.front();
  std::string text = verdict(summary);
  text += fmt::format("  {:<28}{:>15}{:>15}{:>14}\n", "at the peak of rank 0", "predicted", "measured",
                      "difference");
  const auto row = [&](std::string_view name, std::int64_t predicted, std::int64_t measured) {
    text +=
        fmt::format("  {:<28}{:>15}{:>15}{:>14}\n", name, summary.predicted ? format_bytes(predicted) : "-",
                    format_bytes(measured), summary.predicted ? signed_bytes(measured - predicted) : "-");
  };
  const auto lone_row = [&](std::string_view name, std::int64_t measured) {
    text += fmt::format("  {:<28}{:>15}{:>15}{:>14}\n", name, "-", format_bytes(measured), "-");
  };
  const auto explain = [&](const std::string& line) {
    if (explained) text += "    " + line + "\n";
  };
  for (const Tier tier : all_tiers) {
    if (!holds(summary, tier)) continue;
    const std::size_t t = index_of(tier);
    for (const Category category : all_categories) {
      const std::int64_t predicted = rank.predicted.at_peak[t][category];
      const std::int64_t measured = rank.measured.at_peak[t][category];
      if (predicted == 0 && measured == 0) continue;
      row(fmt::format("{:<8}{}", name_of(tier), name_of(category)), predicted, measured);
    }
    if (rank.block_free[t] > 0) {
      text += fmt::format("    of `other` {} are the step's block: reserved, idle at that moment\n",
                          format_bytes(rank.block_free[t]));
    }
    row(fmt::format("{:<8}total", name_of(tier)), rank.predicted.peak[t], rank.measured.peak[t]);
    if (tier == Tier::device && rank.device.total > 0) {
      lone_row("device  unaccounted", rank.device.total - rank.device.free - rank.device_tracked);
      explain(fmt::format(
          "at the end, when {} of the device's {} were free and {} tracked: the driver, the libraries, other "
          "processes, and {} of rounding to pages",
          format_bytes(rank.device.free), format_bytes(rank.device.total), format_bytes(rank.device_tracked),
          format_bytes(rank.device.mapped - rank.device.placed)));
    }
  }
  if (rank.highest.process.anonymous > 0) {
    const Unaccounted unaccounted(rank);
    lone_row("process tracked", rank.highest.tracked);
    lone_row("process unaccounted", unaccounted.total);
    lone_row("process total (RssAnon)", rank.highest.process.anonymous);
    explain(fmt::format("at its highest, {}: unaccounted = {}",
                        rank.highest.step > 0 ? fmt::format("the end of step {}", rank.highest.step)
                                              : std::string("before the first step"),
                        unaccounted.explanation()));
    if (!summary.device_in_process) {
      explain("device memory is not the process's own; pinned host memory may not count as RssAnon");
    }
  }
  return text + fmt::format("  files: {}\n", summary.directory);
}

std::string summary_json(const Summary& summary) {
  const auto figures = [](const MemoryFigures& from) {
    ordered_json tiers = ordered_json::object();
    for (const Tier tier : all_tiers) {
      const std::size_t t = index_of(tier);
      if (from.peak[t] == 0) continue;
      ordered_json at_peak = ordered_json::object(), highest = ordered_json::object();
      for (const Category category : all_categories) {
        at_peak[std::string(name_of(category))] = from.at_peak[t][category];
        highest[std::string(name_of(category))] = from.highest[t][category];
      }
      tiers[std::string(name_of(tier))] = {
          {"peak_bytes", from.peak[t]}, {"at_peak", at_peak}, {"by_category", highest}};
    }
    return tiers;
  };
  ordered_json ranks = ordered_json::array();
  for (const RankFigures& rank : summary.ranks) {
    const Unaccounted unaccounted(rank);
    ordered_json entry = {{"measured", figures(rank.measured)}};
    if (summary.predicted) entry["predicted"] = figures(rank.predicted);
    entry["process"] = {{"rss_anon", rank.highest.process.anonymous},
                        {"rss_file", rank.highest.process.file},
                        {"rss_shmem", rank.highest.process.shared},
                        {"step", rank.highest.step},
                        {"booked", rank.highest.tracked},
                        {"unaccounted", unaccounted.total},
                        {"before_the_engine", unaccounted.before},
                        {"profile", unaccounted.profile},
                        {"since", unaccounted.rest},
                        {"explanation", unaccounted.explanation()}};
    ranks.push_back(std::move(entry));
  }
  return ordered_json{{"schema", "tranche-memory-summary-1"}, {"ranks", ranks}}.dump(1) + "\n";
}

}  // namespace memory_profile

}  // namespace tranche
