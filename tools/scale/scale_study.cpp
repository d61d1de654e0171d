#include "tools/scale/scale_study.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/json.h"
#include "core/output_file.h"
#include "core/text_file.h"
#include "pipeline/schedule/generators.h"
#include "pipeline/schedule/load.h"
#include "tools/scale/scale_nodes.h"
#include "tools/train/settings.h"
#include "tranche/comm/backends.h"
#include "tranche/core/error.h"
#include "tranche/partition/mesh.h"
#include "tranche/planner/stage_plans.h"
#include "tranche/version.h"

namespace tranche::tools {

using detail::parse_json;
using detail::read_text_file;
using detail::write_output_file;
using nlohmann::ordered_json;

namespace {

/// The sequences in a micro-batch if neither flags nor configuration set batches.
constexpr std::int64_t default_micro_batch = 4;

bool exists(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::exists(path, ignored);
}

/// The text that a study trains on if none is given; speed does not depend on it.
std::string some_text() {
  std::string text;
  for (int i = 0; text.size() < (1U << 20); ++i)
    text += fmt::format("{} squared is {}.\n", i, i * std::int64_t{i});
  return text;
}

std::string time_now() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  return fmt::format("{:04}-{:02}-{:02} {:02}:{:02} UTC", utc.tm_year + 1900, utc.tm_mon + 1, utc.tm_mday,
                     utc.tm_hour, utc.tm_min);
}

double load_average() {
  double minute = 0;
  return ::getloadavg(&minute, 1) == 1 ? minute : 0;
}

/// A line for each setting that differs between two studies.
std::vector<std::string> differing(const ordered_json& saved, const ordered_json& present) {
  std::vector<std::string> lines;
  const nlohmann::json before = nlohmann::json(saved).flatten(), now = nlohmann::json(present).flatten();
  const auto value = [](const nlohmann::json& all, const std::string& key) {
    return all.contains(key) ? all[key].dump() : std::string("not there");
  };
  for (const auto& [key, one] : before.items()) {
    if (value(now, key) != one.dump())
      lines.push_back(fmt::format("{} was {}, is {}", key.substr(1), one.dump(), value(now, key)));
  }
  for (const auto& [key, one] : now.items()) {
    if (!before.contains(key))
      lines.push_back(fmt::format("{} was not there, is {}", key.substr(1), one.dump()));
  }
  return lines;
}

/// True when the present settings ask for every run of the saved ones, under the same names, and perhaps for
/// more. A run's name has the number of its mesh and schedule.
bool asks_for_all_runs(const ordered_json& saved, const ordered_json& present) {
  const auto list = [](const ordered_json& settings, const char* key) {
    const ordered_json found = settings.value(key, ordered_json::array());
    return found.is_array() ? found : ordered_json::array();
  };
  for (const char* const key : {"ranks", "stages"}) {
    const ordered_json was = list(saved, key), is = list(present, key);
    const auto there = [&](const ordered_json& one) {
      return one.is_number_integer() && std::find(is.begin(), is.end(), one) != is.end();
    };
    if (was.empty() || !std::all_of(was.begin(), was.end(), there)) return false;
  }
  for (const char* const key : {"meshes", "pipeline_schedules"}) {
    const ordered_json was = list(saved, key), is = list(present, key);
    if (was.size() > is.size() || was.empty() != is.empty()) return false;
    if (!std::equal(was.begin(), was.end(), is.begin())) return false;
  }
  const ordered_json repeats = saved.value("repeats", ordered_json());
  return repeats.is_number_integer() && repeats <= present["repeats"];
}

/// The present settings without what they add to the runs of the saved ones.
ordered_json without_further_runs(const ordered_json& saved, ordered_json present) {
  for (const char* const key : {"ranks", "stages", "meshes", "pipeline_schedules", "repeats"}) {
    if (saved.contains(key)) present[key] = saved[key];
  }
  if (!present.contains("schedule_files")) return present;
  const ordered_json files = present["schedule_files"];
  for (const auto& [name, text] : files.items()) {
    if (!saved.value("schedule_files", ordered_json::object()).contains(name))
      present["schedule_files"].erase(name);
  }
  if (present["schedule_files"].empty()) present.erase("schedule_files");
  return present;
}

}  // namespace

std::string ScaleRun::name() const {
  return fmt::format("n{}-stage{}{}{}-r{}", ranks, stage,
                     mesh_number > 0 ? fmt::format("-mesh{}", mesh_number) : "",
                     schedule_number > 0 ? fmt::format("-schedule{}", schedule_number) : "", repeat);
}

ScaleStudy::ScaleStudy(const Options& options) : options_(options) {
  find_programs();
  facts_.strong = options.scale.strong;
  facts_.model = options.model;
  facts_.version = version;
  facts_.commit = commit_at(program_);
  facts_.program = program_;
  facts_.repeats = options.scale.repeats;
  facts_.warmup = options.scale.warmup;
  facts_.steps = options.scale.steps;
  facts_.node = describe_node();
  facts_.ranks = options.scale.ranks;
  facts_.stages = options.scale.stages;
  facts_.meshes = options.scale.meshes;
  if (!facts_.meshes.front().empty() && options.mesh) {
    throw ConfigurationError("--mesh and --meshes both say how state is sharded; give one of them");
  }
  facts_.schedules = options.scale.schedules;
  const bool sets_schedule = std::any_of(options.set.begin(), options.set.end(), [](const std::string& key) {
    return key.starts_with("tranche.pipeline_schedule=");
  });
  if (!facts_.schedules.front().empty() && sets_schedule) {
    throw ConfigurationError(
        "--pipeline-schedules and --set tranche.pipeline_schedule both name schedules; give one of them");
  }
  facts_.launcher_binds = options.scale.launcher == "srun";
  for (const std::string& word : options.scale.launcher_arguments) {
    facts_.launcher_binds |= word.find("bind") != std::string::npos;
  }
  const std::string& data = options.data;
  if (data.empty()) {
    options_.data = path("text.txt");
    added_flags_.insert(added_flags_.end(), {"--data", options_.data});
  } else if (!exists(data)) {
    throw ConfigurationError(fmt::format("--data '{}' is not there", data));
  }
  if (options.eval_batches == 0) {
    options_.eval_batches = 1;
    added_flags_.insert(added_flags_.end(), {"--eval-batches", "1"});
  }
  choose_threads();
  choose_batches();
  plan_points();
  settings_ = settings_json(facts_.ranks.front(), facts_.stages.front());
}

void ScaleStudy::find_programs() {
  if (started_by_mpi_launcher()) {
    throw ConfigurationError("tranche scale starts mpirun itself, for each of its runs: start it alone");
  }
  program_ = options_.scale.program.empty() ? own_path() : options_.scale.program;
  if (mpi_version() == "not compiled")
    throw NotCompiled("MPI, which the runs of a study need,", "TRANCHE_MPI");
  launcher_ = find_command(options_.scale.launcher);
  if (launcher_.empty()) {
    throw ConfigurationError(fmt::format(
        "{0} is not found in PATH, which starts the runs of a study; {1}", options_.scale.launcher,
        options_.scale.launcher == "mpirun"
            ? "install Open MPI (Debian: openmpi-bin), or add its bin folder to PATH"
            : "it is Slurm's: without Slurm leave --launcher out"));
  }
}

ordered_json ScaleStudy::saved_settings() const {
  const std::string described = path("study.json");
  if (!exists(described)) return ordered_json::object();
  const ordered_json study = parse_json(read_text_file(described, "the study's file"));
  const ordered_json settings = study.is_object() ? study.value("settings", ordered_json()) : ordered_json();
  return settings.is_object() ? settings : ordered_json::object();
}

void ScaleStudy::choose_threads() {
  std::error_code none;
  if (exists(options_.config) && !std::filesystem::is_regular_file(options_.config, none)) {
    throw ConfigurationError(fmt::format(
        "--config '{}' is no regular file, and every run of a study reads it; give a file", options_.config));
  }
  // The threads are equal at every point: if a single rank used all cores, there could be no speed-up.
  const Config config = read_config(at(facts_.ranks.front(), facts_.stages.front()), facts_.ranks.front());
  facts_.threads = config.threads;
  if (config.threads > 0) return;
  const ordered_json saved = saved_settings();
  const bool goes_on = saved.contains("threads") && saved["threads"].is_number_integer() &&
                       saved["threads"] > 0 && saved["threads"] <= 4096;
  const int cores = facts_.node.cores;
  int most = cores;
  for (const int ranks : facts_.ranks) {
    if (ranks <= cores) most = facts_.ranks.front() > cores ? cores : ranks;
  }
  // A study that is there keeps its threads if more ranks are added.
  const int by_default = goes_on ? saved["threads"].get<int>() : std::max(1, cores / most);
  facts_.threads = options_.threads.value_or(by_default);
  options_.threads = facts_.threads;
  options_.sets_before["--threads"] = options_.set.size();
  added_flags_.insert(added_flags_.end(), {"--threads", std::to_string(facts_.threads)});
}

void ScaleStudy::choose_batches() {
  const int few = facts_.ranks.front(), many = facts_.ranks.back();
  const auto config_at = [&](int ranks) { return read_config(at(ranks, facts_.stages.front()), ranks); };
  const auto set_batch = [&](std::int64_t batch) {
    options_.set.push_back(fmt::format("train_batch_size={}", batch));
    added_flags_.insert(added_flags_.end(), {"--set", options_.set.back()});
  };
  const bool said = options_.micro_batch || options_.accumulate || !options_.config.empty() ||
                    std::any_of(options_.set.begin(), options_.set.end(), [](const std::string& key) {
                      return key.starts_with("train_") || key.starts_with("gradient_accumulation");
                    });
  // A study that is there keeps the batch of a step if more ranks are added.
  const ordered_json saved =
      saved_settings().value("/configuration/train_batch_size"_json_pointer, ordered_json());
  const bool goes_on = facts_.strong && saved.is_number_integer() && saved > 0;
  if (!said) {
    if (facts_.strong) {
      set_batch(goes_on ? saved.get<std::int64_t>() : default_micro_batch * many);
    } else {
      options_.micro_batch = default_micro_batch;
      added_flags_.insert(added_flags_.end(), {"--micro-batch", std::to_string(default_micro_batch)});
    }
  }
  if (few == many) return;
  const Config less = config_at(few);
  if (facts_.strong) {
    if (options_.micro_batch && options_.accumulate) {
      throw ConfigurationError(
          fmt::format("--strong keeps the batch of a step, but --micro-batch {} and --accumulate {} fix that "
                      "of a rank: leave one of "
                      "them out and it is derived, or both and --set train_batch_size=N",
                      *options_.micro_batch, *options_.accumulate));
    }
    const std::int64_t batch = goes_on ? saved.get<std::int64_t>() : config_at(many).train_batch_size;
    if (less.train_batch_size != batch) set_batch(batch);
    return;
  }
  const Config more = config_at(many);
  const auto of_rank = [](const Config& config) {
    return config.micro_batch_size * config.accumulation_steps;
  };
  if (of_rank(less) != of_rank(more)) {
    throw ConfigurationError(
        fmt::format("weak scaling keeps the batch of a rank, but train_batch_size {} fixes that of a step: "
                    "with {} rank{} each has "
                    "{} sequences, with {} it has {}; give --strong, or leave train_batch_size out",
                    less.train_batch_size, few, few == 1 ? "" : "s", of_rank(less), many, of_rank(more)));
  }
}

Options ScaleStudy::at(const PointKey& point) const {
  Options options = options_;
  // The command of a run gives mesh and stage behind the flags of the study.
  if (!point.mesh.empty()) {
    options.mesh = point.mesh;
    options.sets_before["--mesh"] = options.set.size();
  }
  options.sets_before["--stage"] = options.set.size();
  options.ranks = point.ranks;
  options.stage = point.stage;
  options.steps = facts_.warmup + facts_.steps;
  const std::vector<std::string> keys = schedule_keys(point.schedule);
  options.set.insert(options.set.end(), keys.begin(), keys.end());
  return options;
}

std::vector<std::string> ScaleStudy::schedule_keys(const std::string& schedule) const {
  if (schedule.empty()) return {};
  std::vector<std::string> keys{"tranche.pipeline_schedule=" + ordered_json(schedule).dump()};
  const pipeline::NamedSchedule* const named = pipeline::find_schedule(schedule);
  // Each schedule with a fixed number of chunks, and each file, sets its own.
  if (named == nullptr || !named->any_chunks) keys.emplace_back("tranche.pipeline_chunks=0");
  return keys;
}

PointPlan ScaleStudy::plan_point(const PointKey& key) {
  const int ranks = key.ranks;
  planner::PlanRequest request;
  request.model.name = options_.model;
  request.model.language = options_.models.resolve(options_.model);
  const Options options = at(key);
  request.config = read_config(options, ranks);
  if (request.config.total_steps_hint == 0) request.config.total_steps_hint = *options.steps;
  request.sequence = sequence_of(options.sequence, *request.model.language, request.config.notes);
  request.ranks = ranks;
  const std::string& hostfile = options_.scale.hostfile;
  const std::optional<int> per_node = tools::ranks_per_node(
      options_.scale, hostfile.empty() ? "" : read_text_file(hostfile, "--hostfile"), ranks, allocation_);
  request.ranks_per_node = per_node.value_or(ranks);
  request.device = options.device == "cuda" ? DeviceKind::cuda : DeviceKind::cpu;
  const Config& config = request.config;
  PointPlan point;
  point.ranks = ranks;
  point.stage = key.stage;
  point.mesh = key.mesh;
  point.schedule = key.schedule;
  point.micro_batch = config.micro_batch_size;
  point.accumulation = config.accumulation_steps;
  point.batch = config.train_batch_size;
  // If nodes are declared, the runs use those.
  const int declared = config.debug.ranks_per_host;
  point.ranks_per_node = declared > 0 ? std::min(declared, ranks) : request.ranks_per_node;
  point.placed = per_node.has_value() || declared > 0;
  for (const planner::StagePlan& one : planner::plan_stages(request, 0)) {
    const planner::PlanResult& result = one.plan;
    for (const Tier tier : all_tiers) {
      const auto t = static_cast<std::size_t>(tier);
      point.peak[t] = std::max(point.peak[t], result.tier(tier).peak);
    }
    if (one.request.rank != 0) continue;
    for (const auto& [operation, count] : result.data) point.bytes += count.bytes;
    const CategoryBytes& held = result.tier(Tier::device).persistent;
    point.state = held[Category::parameters] + held[Category::gradients] + held[Category::optimizer];
    point.formula_state = formula_state(result, config);
    facts_.parameters = nlohmann::json::parse(result.model)["parameters"].get<std::int64_t>();
  }
  facts_.any_offload |= config.offload.any();
  facts_.dtype = name_of(config.precision.compute);
  facts_.sequence = request.sequence;
  return point;
}

void ScaleStudy::find_pipeline(const PointKey& key) {
  const Mesh mesh = read_config(at(key), key.ranks).mesh_of(key.ranks);
  if (mesh.size(MeshAxis::pipeline) > 1) {
    has_pipeline_ = true;
  } else if (!key.schedule.empty()) {
    facts_.without_pipeline.insert({key.ranks, key.mesh});
  }
}

void ScaleStudy::plan_points() {
  const std::string& hosts = options_.scale.hostfile;
  if (!hosts.empty()) {
    if (read_text_file(hosts, "--hostfile").empty())
      throw ConfigurationError(fmt::format("--hostfile '{}' is empty", hosts));
  }
  for (const int stage : facts_.stages) {
    std::vector<int> along = facts_.ranks;
    // A batch that ranks share cannot be divided among every number of ranks.
    for (int ranks = 1; !facts_.strong && ranks < facts_.ranks.back(); ranks *= 2) {
      if (ranks > facts_.ranks.front()) along.push_back(ranks);
    }
    std::sort(along.begin(), along.end());
    along.erase(std::unique(along.begin(), along.end()), along.end());
    for (const std::string& mesh : facts_.meshes) {
      for (const int ranks : along) {
        const bool runs = std::find(facts_.ranks.begin(), facts_.ranks.end(), ranks) != facts_.ranks.end();
        // A curve leaves out points without a run if the mesh or the model does not support that many ranks.
        const auto attempt = [&](const auto& planned) {
          try {
            planned();
          } catch (const ConfigurationError&) {
            if (runs) throw;
          }
        };
        attempt([&] { find_pipeline({ranks, stage, mesh, facts_.schedules.front()}); });
        for (const std::string& schedule : facts_.schedules_at(ranks, mesh)) {
          attempt([&] {
            const PointPlan point = plan_point({ranks, stage, mesh, schedule});
            facts_.curves[{stage, mesh, schedule}].push_back(point);
            if (runs) facts_.plans[point.key()] = point;
          });
        }
      }
    }
  }
  if (facts_.schedules.front().empty()) return;
  if (!has_pipeline_) {
    throw ConfigurationError(
        "--pipeline-schedules compares orders of a pipeline, and no point of the study has one; give --mesh "
        "pipeline=2, or leave it out");
  }
  const int chunks = read_config(at({facts_.ranks.front(), facts_.stages.front(), facts_.meshes.front()}),
                                 facts_.ranks.front())
                         .pipeline_chunks;
  for (const std::string& schedule : facts_.schedules) {
    if (chunks > 0 && schedule_keys(schedule).size() > 1) {
      facts_.notes.push_back(fmt::format("tranche.pipeline_chunks {} is not for {}, which has its own number",
                                         chunks, schedule));
    }
  }
}

std::string ScaleStudy::settings_json(int ranks, int stage) const {
  const ScaleOptions& scale = options_.scale;
  ordered_json settings = {{"ranks", scale.ranks},
                           {"stages", scale.stages},
                           {"scaling", scale.strong ? "strong" : "weak"},
                           {"repeats", scale.repeats},
                           {"warmup", scale.warmup},
                           {"steps", scale.steps},
                           {"threads", facts_.threads},
                           {"model", options_.model},
                           {"train_flags", scale.train_flags},
                           {"launcher", scale.launcher},
                           {"launcher_arguments", scale.launcher_arguments},
                           {"hostfile", scale.hostfile},
                           {"host", scale.host},
                           {"program", fingerprint_of(program_)},
                           {"cpu", facts_.node.cpu},
                           {"cores", facts_.node.cores}};
  if (!scale.meshes.front().empty()) settings["meshes"] = scale.meshes;
  if (!scale.schedules.front().empty()) settings["pipeline_schedules"] = scale.schedules;
  for (const std::string& schedule : scale.schedules) {
    if (!pipeline::names_a_file(schedule)) continue;
    settings["schedule_files"][schedule] = read_text_file(schedule, "--pipeline-schedules");
  }
  if (exists(options_.model)) {
    settings["model_file"] = parse_json(read_text_file(options_.model, "the model's file"));
  }
  if (!scale.hostfile.empty()) settings["hosts"] = read_text_file(scale.hostfile, "--hostfile");
  settings["configuration"] = ordered_json::parse(read_config(at(ranks, stage), ranks).to_json());
  return settings.dump();
}

std::vector<ScaleRun> ScaleStudy::runs() const {
  std::vector<ScaleRun> all;
  for (int repeat = 1; repeat <= facts_.repeats; ++repeat) {
    for (const int ranks : facts_.ranks) {
      for (const int stage : facts_.stages) {
        for (std::size_t m = 0; m < facts_.meshes.size(); ++m) {
          const std::string& mesh = facts_.meshes[m];
          // The run of a mesh without a pipeline is called by the first schedule, as an earlier version
          // called it, so that a study which that one began goes on.
          int number = facts_.schedules.front().empty() ? 0 : 1;
          for (const std::string& schedule : facts_.schedules_at(ranks, mesh)) {
            all.push_back({ranks, stage, repeat, mesh, mesh.empty() ? 0 : static_cast<int>(m) + 1, schedule,
                           number == 0 ? 0 : number++});
          }
        }
      }
    }
  }
  return all;
}

ChildCommand ScaleStudy::command(const ScaleRun& run) const {
  const ScaleOptions& scale = options_.scale;
  ChildCommand command;
  command.log = log_path(run);
  command.timeout = scale.run_timeout;
  std::vector<std::string>& words = command.arguments;
  words = {launcher_, "-n", std::to_string(run.ranks)};
  const auto add = [&](std::initializer_list<std::string> more) { words.insert(words.end(), more); };
  if (!scale.hostfile.empty()) add({"--hostfile", scale.hostfile});
  if (!scale.host.empty()) add({"--host", scale.host});
  words.insert(words.end(), scale.launcher_arguments.begin(), scale.launcher_arguments.end());
  if (scale.launcher == "srun") {
    const NodesOfRun nodes = nodes_of_run(scale, "", run.ranks, allocation_);
    words.insert(words.end(), nodes.arguments.begin(), nodes.arguments.end());
    const auto ends_all = [](const std::string& word) {
      return word.starts_with("-K") || word.starts_with("--kill-on-bad-exit");
    };
    // Without this flag the remaining ranks would wait for a dead rank until their time-out.
    if (std::none_of(scale.launcher_arguments.begin(), scale.launcher_arguments.end(), ends_all)) {
      add({"--kill-on-bad-exit=1"});
    }
  }
  add({program_, "train"});
  const auto& given = scale.train_flags;
  if (std::find(given.begin(), given.end(), "--model") == given.end()) add({"--model", options_.model});
  words.insert(words.end(), given.begin(), given.end());
  words.insert(words.end(), added_flags_.begin(), added_flags_.end());
  add({"--stage", std::to_string(run.stage), "--steps", std::to_string(facts_.warmup + facts_.steps),
       "--report", report_path(run)});
  if (!run.mesh.empty()) add({"--mesh", run.mesh});
  for (const std::string& key : schedule_keys(run.schedule)) add({"--set", key});
  auto& environment = command.environment;
  environment.emplace_back("OMP_NUM_THREADS", "1");
  if (scale.launcher != "mpirun") return command;
  if (::geteuid() == 0) {
    environment.emplace_back("OMPI_ALLOW_RUN_AS_ROOT", "1");
    environment.emplace_back("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
  }
  // A lost host is noticed within some 12 s instead of minutes (scripts/run_mpi.sh).
  environment.emplace_back("OMPI_MCA_oob_tcp_keepalive_time", "5");
  environment.emplace_back("OMPI_MCA_oob_tcp_keepalive_intvl", "2");
  environment.emplace_back("OMPI_MCA_oob_tcp_keepalive_probes", "3");
  if (!facts_.launcher_binds) environment.emplace_back("OMPI_MCA_hwloc_base_binding_policy", "none");
  // This is for one host; a list of hosts, or an allocation of several nodes, determines the ranks of each
  // and their network.
  if (scale.hostfile.empty() && scale.host.empty() && scale.launcher_arguments.empty() &&
      !allocation_.several()) {
    environment.emplace_back("OMPI_MCA_rmaps_base_oversubscribe", "1");
    environment.emplace_back("OMPI_MCA_btl", "self,vader");
    environment.emplace_back("OMPI_MCA_pml", "ob1");
  }
  return command;
}

std::string ScaleStudy::path(const std::string& name) const {
  return (std::filesystem::path(options_.scale.out) / name).string();
}
std::string ScaleStudy::report_path(const ScaleRun& run) const {
  return path("runs/" + run.name() + ".json");
}
std::string ScaleStudy::log_path(const ScaleRun& run) const {
  return path("runs/" + run.name() + ".log");
}

bool ScaleStudy::open_folder() {
  const std::string& out = options_.scale.out;
  const auto refuse = [&](const std::string& why) {
    throw ConfigurationError(fmt::format("--out '{}' {}", out, why));
  };
  std::error_code failed;
  const std::string described = path("study.json");
  const bool there = exists(described);
  if (!there && std::filesystem::exists(out, failed)) {
    if (!std::filesystem::is_directory(out, failed)) refuse("is a file; give a folder for the study");
    if (!std::filesystem::is_empty(out, failed)) {
      refuse(
          "is there already and is no study of tranche scale (it has no study.json); nothing was written: "
          "give a "
          "folder that is new or empty");
    }
  }
  std::filesystem::create_directories(path("runs"), failed);
  if (failed) refuse("cannot be made: " + failed.message());
  lock_ = ::open(path(".lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (lock_ < 0) refuse(fmt::format("cannot be written to: {}", std::strerror(errno)));
  if (::flock(lock_, LOCK_EX | LOCK_NB) != 0) refuse("is a study that another tranche scale is at work on");

  bool extended = false;
  const ordered_json settings = ordered_json::parse(settings_);
  ordered_json begun = {{"time", time_now()},
                        {"load_average", load_average()},
                        {"version", facts_.version},
                        {"commit", facts_.commit}};
  if (there) {
    const auto study = parse_json(read_text_file(described, "the study's file"));
    if (!study.is_object() || study.value("schema", ordered_json()) != scale_schema ||
        !study.value("settings", ordered_json()).is_object() ||
        !study.value("begun", ordered_json::object()).is_object()) {
      refuse(fmt::format("is no study that can be gone on with: its study.json is not of {}", scale_schema));
    }
    const ordered_json& saved = study["settings"];
    ordered_json compared = settings;
    if (asks_for_all_runs(saved, settings)) {
      // The configuration was recorded for the saved study's first point.
      const std::string first = settings_json(saved["ranks"][0], saved["stages"][0]);
      compared = without_further_runs(saved, ordered_json::parse(first));
    }
    const std::vector<std::string> lines = differing(saved, compared);
    if (!lines.empty()) {
      refuse(fmt::format(
          "is a study with other settings; give another folder, or the settings it was begun with, to which "
          "ranks, stages, meshes, schedules and repeats may be added:\n  {}",
          fmt::join(lines, "\n  ")));
    }
    if (study.contains("begun")) begun = study["begun"];
    extended = nlohmann::json(saved) != nlohmann::json(settings);
  }
  if (!there || extended) {
    const ordered_json study = {{"schema", scale_schema}, {"begun", begun}, {"settings", settings}};
    write_output_file(described, study.dump(1) + "\n");
  }
  try {
    facts_.begun = begun.value("time", "");
    facts_.load_average = begun.value("load_average", 0.0);
    // The version is that of the program that was run, even if commits followed.
    facts_.version = begun.value("version", "");
    facts_.commit = begun.value("commit", "");
  } catch (const ordered_json::exception&) {
    refuse("is no study that can be gone on with: `begun` in its study.json has values of other types");
  }
  const std::string text = path("text.txt");
  if (options_.data == text && !exists(text)) write_output_file(text, some_text());
  return there;
}

RunFigures ScaleStudy::read(const ScaleRun& run) const {
  RunFigures figures = figures_of(
      read_text_file(report_path(run), "the report of a run", detail::Pipes::refused, std::int64_t{1} << 30),
      facts_.warmup);
  if (figures.ranks != run.ranks || figures.stage != run.stage) {
    throw Error(fmt::format("'{}' is the report of {} ranks at stage {}", report_path(run), figures.ranks,
                            figures.stage));
  }
  if (!run.mesh.empty() && figures.mesh != Mesh::parse(run.mesh, run.ranks).to_string()) {
    throw Error(fmt::format("'{}' is the report of a run on the mesh '{}'", report_path(run), figures.mesh));
  }
  if (!run.schedule.empty() && figures.schedule != run.schedule) {
    throw Error(fmt::format("'{}' is the report of a run with the schedule '{}'", report_path(run),
                            figures.schedule));
  }
  figures.mesh = run.mesh;
  figures.schedule = run.schedule;
  figures.repeat = run.repeat;
  return figures;
}

bool ScaleStudy::has(const ScaleRun& run) const {
  try {
    (void)read(run);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace tranche::tools
