#include "tools/scale/scale.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <ostream>
#include <set>

#include "core/output_file.h"
#include "tools/child.h"
#include "tools/launch.h"
#include "tools/terminal.h"
#include "tools/train/progress.h"
#include "tranche/core/error.h"

namespace tranche::tools {

namespace {

using detail::write_output_file;

/// Open MPI prints many lines.
constexpr int tail_lines = 30;
/// After so many failures before any run has succeeded, the launcher, a node or the program is at fault: the
/// other runs would fail the same way, each perhaps after its own time-out.
constexpr int failures_before_giving_up = 3;

class StudyRunner {
 public:
  StudyRunner(const Options& options, const Output& output)
      : output_(output),
        // With --json, standard output is for programs.
        lines_(options.json ? output.errors : output.out),
        json_(options.json),
        terminal_(output.terminal && !options.json),
        study_(options) {}

  int operator()() {
    training::StopSignals signals({SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGHUP});
    const bool there = study_.open_folder();
    const std::vector<ScaleRun> runs = study_.runs();
    introduce(there, runs);
    int stopped_by = 0;
    for (const ScaleRun& run : runs) {
      if (kept_.count(run.name()) > 0) continue;
      stopped_by = signals.poll();
      if (stopped_by == 0) stopped_by = conduct(run, runs, signals);
      if (stopped_by != 0 || (kept_.empty() && failed_runs_ == failures_before_giving_up)) break;
    }
    if (stopped_by != 0 && output_.exits) signals.keep_until_exit();
    return conclude(runs, stopped_by);
  }

 private:
  void introduce(bool there, const std::vector<ScaleRun>& runs) {
    for (const ScaleRun& run : runs) {
      if (study_.has(run)) kept_.insert(run.name());
    }
    const StudyFacts& facts = study_.facts();
    std::string points;
    lines_ << fmt::format(
        "{} scaling of {}: {} x {}{} points, {} repeats: {} runs of {} + {} steps, {} thread{} a rank, into "
        "{}\n",
        facts.strong ? "strong" : "weak", facts.model, facts.ranks.size(), facts.stages.size(),
        facts.variants().size() > 1 ? fmt::format(" x {}", facts.variants().size()) : "", facts.repeats,
        runs.size(), facts.warmup, facts.steps, facts.threads, facts.threads == 1 ? "" : "s",
        study_.options().out);
    if (there) {
      lines_ << fmt::format("going on with the study that is there: {} of {} runs are kept\n", kept_.size(),
                            runs.size());
    }
    if (std::any_of(facts.plans.begin(), facts.plans.end(),
                    [](const auto& plan) { return !plan.second.placed; })) {
      lines_
          << "note: how many ranks a node has is not clear from the launcher's arguments: planned as on one; "
             "--ranks-per-node says it\n";
    }
    for (const std::string& note : facts.notes) lines_ << "note: " << note << "\n";
    lines_ << std::flush;
  }

  /// Returns the signal that ended it, or 0.
  int conduct(const ScaleRun& run, const std::vector<ScaleRun>& all, training::StopSignals& signals) {
    const std::string name = fmt::format("repeat {}, {}", run.repeat, run.point().text());
    if (hopeless_.count(run.point()) > 0) {
      say(fmt::format("{}: left out, as it failed before", name));
      ++done_;
      return 0;
    }
    const ChildCommand command = study_.command(run);
    double shown = -1;
    const ChildResult result = run_child(command, signals, [&](double seconds) {
      if (!terminal_ || seconds - shown < 0.5) return;
      shown = seconds;
      redraw(fmt::format("{} {} ... {}", position(all), name, format_duration(seconds)));
    });
    if (result.stopped_by != 0) {
      if (study_.has(run)) kept_.insert(run.name());  // it had just ended
      return result.stopped_by;
    }
    std::string problem;
    if (result.timed_out) {
      problem = fmt::format("was ended after {}: --run-timeout {:g}", format_duration(result.seconds),
                            study_.options().run_timeout);
    } else if (result.status != 0) {
      problem = fmt::format("failed with status {} after {}", result.status, format_duration(result.seconds));
    } else {
      try {
        const RunFigures figures = study_.read(run);
        kept_.insert(run.name());
        left_.took(run, result.seconds);
        say(fmt::format("{} {}: {:.0f} tokens/s, {}; {}", position(all), name, figures.tokens_per_second,
                        format_duration(result.seconds), remaining(all)));
      } catch (const Error& error) {
        problem = fmt::format("ended well, but left {}", error.message());
      }
    }
    if (problem.empty()) return 0;
    RunFailure failure{run.ranks,
                       run.stage,
                       run.repeat,
                       result.status,
                       fmt::format("{} {}", name, problem),
                       shell_line(command.arguments),
                       tail_of(command.log, tail_lines),
                       run.mesh,
                       run.schedule};
    finish_line();
    output_.errors << fmt::format("tranche: the run of {}\n  command: {}\n  its output ends with ({}):\n",
                                  failure.what, failure.command, command.log);
    std::string_view rest = failure.tail;
    while (!rest.empty()) {
      const std::size_t end = std::min(rest.find('\n'), rest.size());
      output_.errors << "    " << rest.substr(0, end) << "\n";
      rest.remove_prefix(std::min(end + 1, rest.size()));
    }
    output_.errors << std::flush;
    // The request cannot be met, and memory does not grow, so other repeats would end the same way.
    if (result.status == static_cast<int>(ExitStatus::configuration) ||
        result.status == static_cast<int>(ExitStatus::out_of_memory)) {
      hopeless_.insert(run.point());
    } else {
      ++failed_runs_;
    }
    failures_.push_back(std::move(failure));
    ++done_;
    return 0;
  }

  std::string position(const std::vector<ScaleRun>& all) const {
    return fmt::format("[{}/{}]", kept_.size() + done_, all.size());
  }

  std::string remaining(const std::vector<ScaleRun>& all) const {
    double seconds = 0;
    for (const ScaleRun& run : all) {
      if (kept_.count(run.name()) > 0 || hopeless_.count(run.point()) > 0) continue;
      const bool failed = std::any_of(failures_.begin(), failures_.end(), [&](const RunFailure& failure) {
        return failure.key() == run.point() && failure.repeat == run.repeat;
      });
      if (!failed) seconds += left_.of(run);
    }
    return fmt::format("about {} left", format_duration(seconds));
  }

  int conclude(const std::vector<ScaleRun>& runs, int stopped_by) {
    finish_line();
    std::vector<RunFigures> figures;
    for (const ScaleRun& run : runs) {
      if (kept_.count(run.name()) > 0) figures.push_back(study_.read(run));
    }
    StudyResults results = results_of(study_.facts(), figures);
    results.failures = failures_;
    results.stopped_by = stopped_by;
    const std::string json = results_json(study_.facts(), results, study_.settings());
    const std::string table = results_table(study_.facts(), results);
    write_output_file(study_.path("results.json"), json);
    write_output_file(study_.path("results.csv"), results_csv(study_.facts(), results));
    write_output_file(study_.path("table.md"), table);
    for (const auto& [name, svg] : results_plots(study_.facts(), results)) {
      write_output_file(study_.path(name), svg);
    }
    if (json_) {
      output_.out << json << std::flush;
    } else {
      output_.out << "\n"
                  << table << "\n"
                  << "table, plots and results: " << study_.options().out << "\n"
                  << std::flush;
    }
    if (stopped_by != 0) {
      output_.errors << fmt::format(
                            "tranche: stopped after {} of {} runs; the same command goes on with the rest\n",
                            results.runs_done, results.runs_wanted)
                     << std::flush;
    } else if (!results.whole()) {
      if (kept_.empty() && failed_runs_ == failures_before_giving_up) {
        output_.errors << fmt::format(
            "tranche: {} runs failed and none ended well, so the others were not tried; mend what their "
            "output says\n",
            failures_before_giving_up);
      }
      output_.errors
          << fmt::format(
                 "tranche: {} of {} runs are missing, as {} failed; the same command tries them again\n",
                 results.runs_wanted - results.runs_done, results.runs_wanted,
                 failures_.size() == 1 ? "one" : std::to_string(failures_.size()))
          << std::flush;
    }
    if (results.whole()) return 0;
    return stopped_by != 0 ? stopped_by_signal : study_incomplete;
  }

  void redraw(const std::string& line) {
    draw(lines_, fmt::format("\r{:<{}}", line, drawn_));
    drawn_ = line.size();
  }
  void finish_line() {
    if (drawn_ > 0) draw(lines_, fmt::format("\r{:<{}}\r", "", drawn_));
    drawn_ = 0;
  }
  void say(const std::string& line) {
    finish_line();
    lines_ << line << "\n" << std::flush;
  }

  const Output& output_;
  std::ostream& lines_;
  bool json_, terminal_;
  ScaleStudy study_;
  std::set<std::string> kept_;   ///< names of runs that have reports
  std::set<PointKey> hopeless_;  ///< points whose further repeats would fail too
  std::vector<RunFailure> failures_;
  int failed_runs_ = 0;   ///< runs that failed for another reason
  std::size_t done_ = 0;  ///< runs that failed or were skipped
  TimeLeft left_;
  std::size_t drawn_ = 0;  ///< length of the redrawn line
};

}  // namespace

void TimeLeft::took(const ScaleRun& run, double seconds) {
  Sum& sum = by_ranks_[run.ranks];
  sum.seconds += seconds;
  sum.count += 1;
  per_rank_.seconds += seconds / run.ranks;
  per_rank_.count += 1;
}

double TimeLeft::of(const ScaleRun& run) const {
  const auto known = by_ranks_.find(run.ranks);
  if (known != by_ranks_.end()) return known->second.seconds / known->second.count;
  // If ranks share cores, a run takes longer with each rank.
  return per_rank_.count > 0 ? per_rank_.seconds / per_rank_.count * run.ranks
                             : std::numeric_limits<double>::infinity();
}

int run_scale(const Options& options, const Output& output) {
  StudyRunner runner(options, output);
  return runner();
}

}  // namespace tranche::tools
