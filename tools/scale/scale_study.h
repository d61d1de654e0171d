#pragma once
/// A scaling study: its runs, their settings, and its folder.
///
///     OUT/study.json     the study's settings, machine, commit; written anew if points are added
///     OUT/text.txt       the data, if none was given
///     OUT/runs/          for each run its report, n2-stage3-r1.json, and its output, n2-stage3-r1.log
///     OUT/results.json, results.csv, table.md, *.svg

#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
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
  std::string mesh = {};      ///< as in ScaleOptions
  int mesh_number = 0;        ///< from 1 on; 0: the study has none
  std::string schedule = {};  ///< as in ScaleOptions
  int schedule_number = 0;    ///< like mesh_number
  std::string name() const;   ///< "n2-stage3-r1", "n2-stage3-mesh1-r1", "n2-stage3-schedule2-r1"
  PointKey point() const { return {ranks, stage, mesh, schedule}; }
};

class ScaleStudy {
 public:
  /// Resolves configurations and plans every point. Throws ConfigurationError for errors that a run would
  /// report, for a missing launcher, and for batches that do not suit the kind of scaling.
  explicit ScaleStudy(const Options& options);

  /// The runs, repeat by repeat: all points of the first, then of the second ...
  std::vector<ScaleRun> runs() const;
  /// The command for a run, with mpirun or srun.
  ChildCommand command(const ScaleRun& run) const;
  std::string report_path(const ScaleRun& run) const;
  std::string log_path(const ScaleRun& run) const;
  std::string path(const std::string& name) const;

  /// Opens the folder: creates it, or continues the study in it, and locks it during this process. Returns
  /// true when it existed. A study may be continued with further ranks, stages and repeats, and with meshes
  /// and schedules behind its own. Throws ConfigurationError if the folder holds another study (naming both
  /// sides), no study, or a running one.
  bool open_folder();
  /// The figures of a finished run; throws Error if there is no report, or one of another run.
  RunFigures read(const ScaleRun& run) const;
  bool has(const ScaleRun& run) const;

  /// The facts that are known before any run: settings, machine, plans.
  const StudyFacts& facts() const { return facts_; }
  const ScaleOptions& options() const { return options_.scale; }
  /// The settings that define the study, as JSON.
  const std::string& settings() const { return settings_; }

 private:
  Options at(const PointKey& point) const;
  /// The options of a point, with the study's first mesh and schedule.
  Options at(int ranks, int stage) const {
    return at({ranks, stage, facts_.meshes.front(), facts_.schedules.front()});
  }
  /// The configuration keys that a point's schedule sets, as for --set.
  std::vector<std::string> schedule_keys(const std::string& schedule) const;
  PointPlan plan_point(const PointKey& key);
  /// Notes whether those ranks of the mesh have a pipeline.
  void find_pipeline(const PointKey& key);
  /// The settings of the study in the folder; an empty object if there is none.
  nlohmann::ordered_json saved_settings() const;
  void choose_threads();
  void choose_batches();
  void plan_points();
  void find_programs();
  /// The settings, with the configuration of the point of these ranks and stage.
  std::string settings_json(int ranks, int stage) const;

  Options options_;  ///< with the study's additions for all runs
  std::vector<std::string> added_flags_;
  std::string program_, launcher_;
  Allocation allocation_ = Allocation::of_environment();
  StudyFacts facts_;
  bool has_pipeline_ = false;  ///< some point has a pipeline
  std::string settings_;
  int lock_ = -1;
};

}  // namespace tranche::tools
