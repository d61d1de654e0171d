#pragma once
/// A scaling study: which runs it has, what each is made with, and its folder.
///
///     OUT/study.json     what the study is: settings, machine, commit; written once
///     OUT/text.txt       the data, where none was given
///     OUT/runs/          of each run its report, n2-stage3-r1.json, and its output, n2-stage3-r1.log
///     OUT/results.json, results.csv, table.md, *.svg

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tools/child.h"
#include "tools/scale/scale_nodes.h"
#include "tools/scale/scale_results.h"
#include "tools/train/run.h"
#include "tranche/planner/planner.h"

namespace tranche::tools {

struct ScaleRun {
  int ranks = 1, stage = 0, repeat = 1;
  std::string mesh = {};      ///< as ScaleOptions has it
  int mesh_number = 0;        ///< from 1 on; 0: the study names none
  std::string schedule = {};  ///< as ScaleOptions has it
  int schedule_number = 0;    ///< like mesh_number
  std::string name() const;   ///< "n2-stage3-r1", "n2-stage3-mesh1-r1", "n2-stage3-schedule2-r1"
  PointKey point() const { return {ranks, stage, mesh, schedule}; }
};

class ScaleStudy {
 public:
  /// Resolves configurations and plans every point. Throws ConfigurationError for whatever a run would
  /// refuse, for a launcher that is not there, and where batches do not fit the kind of scaling.
  explicit ScaleStudy(const Options& options);

  /// Repeat by repeat: all points of the first, then of the second ...
  std::vector<ScaleRun> runs() const;
  /// The command that runs it, for mpirun or srun.
  ChildCommand command(const ScaleRun& run) const;
  std::string report_path(const ScaleRun& run) const;
  std::string log_path(const ScaleRun& run) const;
  std::string path(const std::string& name) const;

  /// Takes the folder: makes it, or goes on with the study that is there, and keeps others out while this
  /// process lives. Returns true when it was there. Throws ConfigurationError where it is another study (both
  /// sides named), no study, or one at work.
  bool open_folder();
  /// The figures that are kept of a run; throws Error where there is no report, or none of this run.
  RunFigures read(const ScaleRun& run) const;
  bool has(const ScaleRun& run) const;

  /// The facts that are known before any run: settings, machine, plans.
  const StudyFacts& facts() const { return facts_; }
  const ScaleOptions& options() const { return options_.scale; }
  /// Settings that make a study the same, as JSON.
  const std::string& settings() const { return settings_; }

 private:
  Options at(const PointKey& point) const;
  /// With the first of the study's meshes and schedules.
  Options at(int ranks, int stage) const {
    return at({ranks, stage, facts_.meshes.front(), facts_.schedules.front()});
  }
  /// The configuration keys that a point's schedule sets, as --set has them.
  std::vector<std::string> schedule_keys(const std::string& schedule) const;
  PointPlan plan_point(const PointKey& key);
  void choose_threads();
  void choose_batches();
  void plan_points();
  void find_programs();
  std::string settings_json() const;

  Options options_;  ///< with what the study adds for all of its runs
  std::vector<std::string> added_flags_;
  std::string program_, launcher_;
  Allocation allocation_ = Allocation::of_environment();
  StudyFacts facts_;
  bool has_pipeline_ = false;  ///< a point has
  std::string settings_;
  int lock_ = -1;
};

}  // namespace tranche::tools
