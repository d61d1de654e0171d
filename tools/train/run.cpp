#include "tools/train/run.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <ostream>
#include <random>

#include "checkpoint/folder.h"
#include "core/clock.h"
#include "offload/file_system.h"
#include "tools/checkpoint/adapters.h"
#include "tools/files.h"
#include "tools/matmul_peak.h"
#include "tools/plan/plan.h"
#include "tools/train/config_changes.h"
#include "tools/train/profiling.h"
#include "tools/train/tokenizer_match.h"
#include "tranche/comm/backends.h"
#include "tranche/core/error.h"
#include "tranche/planner/host_state.h"
#include "tranche/training/metrics.h"

namespace tranche::tools {

namespace {

/// Makes the next agree() compare the contents of files, which may differ between nodes.
void require_same(Launch& launch, const Settings& settings, const Data& data) {
  const auto require_keys = [&](std::string_view what, const std::string& text) {
    const nlohmann::json keys = nlohmann::json::parse(text).flatten();
    for (const auto& [key, value] : keys.items()) {
      std::string dotted = key.substr(1);
      std::replace(dotted.begin(), dotted.end(), '/', '.');
      launch.require_same(fmt::format("{} {}", what, dotted),
                          value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace),
                          "give all ranks the same file");
    }
  };
  require_keys("the configuration's", settings.config.to_json());
  require_keys("the model's", settings.model->to_json());
  const auto require_file = [&](const training::Windows& windows, std::string_view part) {
    launch.require_same(fmt::format("the number of {} files of", part),
                        std::to_string(windows.ranges().size()), "give all ranks the same files");
    for (const training::TokenRange& range : windows.ranges()) {
      const training::TokenFile& file = *range.file;
      const auto require = [&](std::string_view what, std::string value) {
        launch.require_same(
            fmt::format("{} data file '{}'", what, file.path()), std::move(value),
            "all ranks have to read the same data: copy rank 0's file to the other nodes, or give a "
            "path that all of them share");
      };
      require("the format of", std::string(name_of(file.format())));
      require("the number of tokens in", std::to_string(file.size()));
      require(fmt::format("the number of {} windows in", part), std::to_string(windows.count()));
      require("the digest of", file.digest());
    }
  };
  std::string weights;
  if (data.mixture != nullptr) {
    for (const training::Mixture::Source& source : data.mixture->sources())
      weights += fmt::format("{} ", source.weight);
  }
  launch.require_same("the weights of --data", weights, "give all ranks the same weights");
  require_file(*data.training, "training");
  std::string names;
  for (const ValidationSet& set : data.validation) names += fmt::format("'{}' ", set.name);
  launch.require_same("the names of --validation-data", names, "give all ranks the same sets");
  for (const ValidationSet& set : data.validation) {
    require_file(*set.windows, set.name.empty() ? "held-out" : "held-out " + set.name);
  }
}

/// Lines about weights, tokens and a learning rate that may not belong together.
std::vector<std::string> notes_on_start(const Options& options, const Config& config, const Data& data,
                                        const ResumeSource& source) {
  std::vector<std::string> notes = notes_on_tokenizers(data.files(), tokenizer_folders(options, source));
  if (config.lora.any() && source.folder.empty()) {
    notes.emplace_back(
        "tranche.lora: adapters are trained on a randomly initialised base; --resume-weights-only takes a "
        "model's weights");
  }
  const bool chosen = options.learning_rate || !options.config.empty() ||
                      std::any_of(options.set.begin(), options.set.end(), [](const std::string& set) {
                        return set.starts_with("optimizer") || set.starts_with("scheduler");
                      });
  if (options.command == Command::train && source.weights_only && !chosen) {
    notes.push_back(
        fmt::format("--lr: not given: {}, a rate for randomly initialised weights, but these were trained "
                    "(transformers: 5e-05)",
                    config.optimizer.learning_rate));
  }
  return notes;
}

}  // namespace

void Run::require_files_apart() const {
  std::vector<NamedFile> read{{"--config", options.config}, {"--model", options.model}};
  for (const auto& file : data.training_files) read.push_back({"--data", file->path()});
  for (const auto& file : data.validation_files) read.push_back({"--validation-data", file->path()});
  require_apart({{"--report", options.report}, {"--metrics", options.metrics}, {"--trace", options.trace}},
                read);
}

void Run::require_output_files() {
  require_writable(options.report, "--report");
  require_writable(options.trace, "--trace");
  if (!options.report.empty()) report.keep_for(options.report);
  if (!options.metrics.empty())
    training::MetricsFile::require(options.metrics, !options.resume.empty(), "--metrics");
}

int Run::take_sequence() {
  const bool resumes = options.command == Command::train && !options.resume.empty();
  const bool evaluates = options.command == Command::evaluate && !options.from.empty();
  if ((!resumes && !evaluates) || options.sequence) return 0;
  std::int64_t saved = 0;
  const int status = launch.agree([&] {
    try {
      if (is_root()) saved = sequence_of_source(detail::posix_file_system(), options);
    } catch (const CheckpointError&) {
      if (!resumes) throw;  // a problem of the resumed checkpoint is reported when it is opened
    }
    // The checkpoint belongs to another model than --model; that is refused once both are known.
    const std::int64_t positions = options.models.resolve(options.model)->shape().positions;
    if (saved > positions || (resumes && saved == std::min(default_sequence, positions))) saved = 0;
  });
  if (status != 0) return status;
  saved = launch.broadcast_from_root(saved);
  if (saved > 0) options.sequence = saved;
  took_sequence = saved > 0;
  return 0;
}

int Run::prepare() {
  int status = take_sequence();
  if (status != 0) return status;
  status = launch.agree([this] {
    settings = resolve_settings(options, launch.size());
    data = open_data(options, settings);
    for (const Fault& fault : {options.fail, options.hang, options.out_of_memory}) {
      if (fault.rank >= launch.size()) {
        throw ConfigurationError(
            fmt::format("there is no rank {} to fail among {}", fault.rank, launch.size()));
      }
    }
    if (options.out_of_memory.rank >= 0 && settings.config.device_memory_limit == 0) {
      throw ConfigurationError("--debug-out-of-memory takes away what --device-memory leaves; give that too");
    }
    if (is_root()) {
      require_files_apart();
      if (options.checkpoint_dir.empty()) require_output_files();
    }
    if (!options.memory_profile.empty()) {
      MemoryProfile::require_directory(options.memory_profile, launch.rank());
    }
    identity = identity_of(options, settings, data).to_json();
    require_same(launch, settings, data);
  });
  // The folder is checked before anything is read there; from now on other runs cannot change it.
  if (status == 0 && !options.checkpoint_dir.empty()) status = require_folder();
  if (status == 0) {
    status = launch.agree([this] {
      if (!is_root()) return;
      if (!options.checkpoint_dir.empty()) require_output_files();
      resume_source =
          find_resume_source(detail::posix_file_system(), options, identity_of(options, settings, data));
      const std::vector<std::string> notes = notes_on_start(options, settings.config, data, resume_source);
      resume_source.notes.insert(resume_source.notes.end(), notes.begin(), notes.end());
    });
  }
  if (status == 0) status = keep_earlier_defaults();
  if (status == 0) status = take_adapters();
  if (status == 0) status = resolve_host_state();
  if (status == 0)
    begins_from_checkpoint = launch.broadcast_from_root(resume_source.folder.empty() ? 0 : 1) != 0;
  if (status == 0) takes_weights_only = launch.broadcast_from_root(resume_source.weights_only ? 1 : 0) != 0;
  return status;
}

int Run::keep_earlier_defaults() {
  EarlierDefaults kept;
  if (is_root() && !resume_source.weights_only)
    kept = earlier_defaults(settings.config, resume_source.config);
  kept.bf16 = launch.broadcast_from_root(kept.bf16 ? 1 : 0) != 0;
  kept.clipping = launch.broadcast_from_root(kept.clipping ? 1 : 0) != 0;
  if (!kept.any()) return 0;
  return launch.agree([&] {
    if (kept.bf16) options.of_checkpoint.insert(options.of_checkpoint.begin(), "bf16.enabled=true");
    if (kept.clipping) options.of_checkpoint.insert(options.of_checkpoint.begin(), "gradient_clipping=1.0");
    settings = resolve_settings(options, launch.size());
    const auto say = [&](std::string_view key, std::string_view value, std::string_view otherwise) {
      settings.config.notes.push_back(fmt::format(
          "{}: not given: stays {}, as the run was saved (in a new run it is {}); write it to choose", key,
          value, otherwise));
    };
    if (kept.bf16) say("bf16.enabled", "true", "false, which is fp32");
    if (kept.clipping) say("gradient_clipping", "1.0", "0, which is off");
  });
}

int Run::take_adapters() {
  const std::string saved =
      launch.broadcast_from_root(is_root() ? adapters_text(resume_source.config) : std::string());
  if (saved.empty()) return 0;
  return launch.agree([&] {
    if (settings.config.lora.any()) {
      const std::string from = resume_source.folder.empty() ? "the checkpoint" : resume_source.folder;
      return require_same_adapters(adapters_from_text(saved), settings.config.lora, from);
    }
    options.of_checkpoint.insert(options.of_checkpoint.begin(), "tranche.lora=" + saved);
    settings = resolve_settings(options, launch.size());
  });
}

planner::PlanRequest Run::plan_request(int ranks_per_node) const {
  planner::PlanRequest request;
  request.model.name = options.model;
  request.model.language = settings.model;
  request.config = settings.config;
  if (host_state_is_auto) {
    request.config.offload.host_state = -1;
    request.config.offload.host_state_reason.clear();
  }
  request.sequence = settings.sequence;
  request.ranks = launch.size();
  request.ranks_per_node = ranks_per_node;
  request.device = options.device == "cuda" ? DeviceKind::cuda : DeviceKind::cpu;
  request.documents = data.has_documents() && settings.model->takes_documents();
  return request;
}

int Run::resolve_host_state() {
  OffloadConfig& offload = settings.config.offload;
  if (!offload.uses_nvme() || offload.host_state >= 0) return 0;
  planner::PlanRequest request = plan_request(launch.local_size());
  request.rank = launch.rank();
  request.host_memory = planner::host_memory_of(offload.host_memory_limit, launch.local_size());
  const int status = launch.agree([&] {
    planner::resolve_host_state(request, [this](std::int64_t own) { return -launch.least(-own); });
  });
  if (status != 0) return status;
  host_state_is_auto = true;
  offload.host_state = request.config.offload.host_state;
  offload.host_state_reason = launch.broadcast_from_root(request.config.offload.host_state_reason);
  return 0;
}

int Run::require_folder() {
  std::random_device draw;
  const std::int64_t token = launch.broadcast_from_root(static_cast<std::int64_t>(draw()) << 16 ^ draw());
  const std::string& folder = options.checkpoint_dir;
  int status = launch.agree([&] {
    if (!is_root()) return;
    const std::string within = checkpoint::enclosing_checkpoint(detail::posix_file_system(), folder);
    if (!within.empty()) {
      throw ConfigurationError(fmt::format(
          "--checkpoint-dir '{0}': {1} is a checkpoint, and what lies in it goes when it is removed: "
          "give the folder of its run, {2}, where --resume {1} or --resume latest goes on from it",
          folder, within, detail::parent_path(within)));
    }
    place_probe(folder, "--checkpoint-dir", token);
    checkpoint::LeaseOptions lease_options;
    lease_options.say = [this](const std::string& line) {
      print_row("note", line);
      output.out.flush();
    };
    lease.emplace(checkpoint::RunLease::take(folder, lease_options));
    clear_probes(folder, token);
  });
  if (status == 0) {
    status = launch.agree([&] { require_probe(folder, "--checkpoint-dir", token, launch.rank()); });
  }
  if (is_root()) remove_probe(folder, token);
  return status;
}

void Run::print_row(std::string_view name, std::string_view value) const {
  output.out << fmt::format("  {:<22} {}\n", name, value);
}

void Run::start() {
  RuntimeOptions runtime_options = RuntimeOptions::from(settings.config);
  runtime_options.device = options.device == "cuda" ? DeviceKind::cuda : DeviceKind::cpu;
  runtime_options.trace = !options.trace.empty() || !options.memory_profile.empty();
  if (options.trace.empty()) runtime_options.trace_events = profile_trace_events;
  runtime = std::make_unique<Runtime>(Runtime::from_environment(runtime_options));
  nodes = nodes_of(runtime->all());
  peak_flops =
      measure_matmul_peak(runtime->device(), settings.config.precision.compute, options.peak_seconds);
  runtime->all()
      .all_reduce(&peak_flops, 1, DataType::float64, ReduceOperation::sum,
                  {"start", "peak", Traffic::control})
      .wait();
  if (!options.memory_profile.empty()) profile = std::make_unique<MemoryProfile>(*runtime);
  withhold_memory(0);
  engine = std::make_unique<Engine>(*runtime, settings.model->spec(settings.sequence), settings.config);
  feeder = std::make_unique<training::BatchFeeder>(*engine, settings.model->shape().vocabulary,
                                                   settings.batch, settings.sequence,
                                                   data.has_documents() && settings.model->takes_documents());
  if (is_root()) show_start();
  if (begins_from_checkpoint) load_resume_source();
}

void Run::show_start() {
  report.set_start(launch.size(), settings.config.stage, engine->config().to_json(),
                   runtime->numerics_fingerprint(), options.model, options.data);
  const Placement placement{runtime->all().local_size(), runtime->device().threads(), usable_cores(),
                            static_cast<int>(std::max(1L, ::sysconf(_SC_NPROCESSORS_ONLN)))};
  report.set_placement(placement);
  report.set_mesh(runtime->mesh());
  report.set_nodes(nodes);
  output.out << engine->summary(options.verbose);
  if (launch.size() > 1) print_row("nodes", describe(nodes));
  if (const LoraConfig& lora = settings.config.lora; lora.any()) {
    std::size_t layers = 0;
    std::int64_t adapters = 0, all = 0;
    for (const UnitSpec& unit : engine->model().units()) {
      layers += unit.adapters.size();
      for (const TensorSpec& tensor : unit.tensors) {
        all += tensor.shape.elements();
        if (!tensor.frozen) adapters += tensor.shape.elements();
      }
    }
    print_row("adapters",
              fmt::format("{} ({} layers): {} parameters are trained, {:.2f}% of {}", describe(lora), layers,
                          adapters, 100 * static_cast<double>(adapters) / static_cast<double>(all), all));
  }
  print_row("matmul peak", fmt::format("{:.0f} GFLOP/s measured, all ranks together", peak_flops / 1e9));
  const auto held_out = [](const ValidationSet& set) {
    return fmt::format("{} held out, {} of them evaluated", set.windows->count(), set.numbers.size());
  };
  const bool named = !data.validation.front().name.empty();
  std::string formats;
  for (const auto& file : data.training_files) {
    const std::string_view format = training::name_of(file->format());
    if (formats.find(format) == std::string::npos)
      formats += fmt::format("{}{}", formats.empty() ? "" : ", ", format);
  }
  const std::string trained = data.training_files.empty()
                                  ? fmt::format("windows of {} tokens", settings.sequence)
                                  : fmt::format("{} ({}): {} windows of {} tokens to train", options.data,
                                                formats, data.training->count(), settings.sequence);
  print_row("data", trained + (named ? "" : fmt::format(", {}", held_out(data.validation.front()))));
  for (const ValidationSet& set : data.validation) {
    if (named) print_row("held out: " + set.name, held_out(set));
  }
  if (took_sequence) {
    print_row("note", fmt::format("--sequence: not given: {}, as {} was trained with", settings.sequence,
                                  resume_source.folder));
  }
  if (data.bytes() && settings.model->shape().vocabulary > 256) {
    print_row("note", fmt::format("text is read as bytes: {} of the model's {} tokens are used", 256,
                                  settings.model->shape().vocabulary));
  }
  if (data.has_documents() && !settings.model->takes_documents()) {
    print_row("note", fmt::format("{} attends from one document to those before it in its sequence",
                                  settings.model->architecture()));
  }
  for (const std::string& note : data.notes) print_row("note", note);
  const std::string documents = note_on_long_documents(data, settings.sequence);
  if (!documents.empty()) print_row("note", documents);
  if (options.command == Command::train) {
    const std::string cut = note_on_cut_documents(*data.training);
    if (!cut.empty()) print_row("note", cut);
  }
  const std::string cores = note_on_cores(placement);
  if (!cores.empty() && options.device == "cpu") print_row("note", cores);
  const std::string threads = note_on_openmp(std::getenv("OMP_NUM_THREADS"), placement.threads);
  if (!threads.empty() && options.device == "cpu" && settings.config.threads == 0) print_row("note", threads);
  const std::string tasks = note_on_tasks(std::getenv("SLURM_NTASKS"), started_by_mpi_launcher());
  if (!tasks.empty()) print_row("note", tasks);
  for (const std::string& note : resume_source.notes) print_row("note", note);
  output.out.flush();
}

void Run::load_resume_source() {
  const bool latest = options.resume == "latest" && !takes_weights_only;
  LoadOptions how{.weights_only = takes_weights_only,
                  .pass_over_damaged = latest && !options.resume_strict,
                  .convert_state = options.convert_state,
                  .base = options.base};
  if (takes_weights_only || !options.resumes_own()) {
    how.partial = options.partial;
    how.renames = parse_renames(options.rename);
  }
  const LoadResult loaded = engine->load(latest ? options.checkpoint_dir : resume_source.folder, how);
  validation_due = !takes_weights_only && training::CheckpointSchedule::validation_due(loaded.user);
  const kernels::Digest weights = engine->weights_digest(), state = engine->state_digest();
  if (!is_root()) return;
  if (loaded.folder != resume_source.folder)
    hold_against(identity_of(options, settings, data), options.models, loaded.user, loaded.folder,
                 resume_source);
  std::vector<std::string> changes = resume_source.changes;
  changes.insert(changes.end(), loaded.changes.begin(), loaded.changes.end());
  report.set_resumed(loaded, resume_source.weights_only, weights, state, changes);
  if (resume_source.weights_only) {
    print_row("weights from", fmt::format("{} (step {}); all else begins anew", loaded.folder, loaded.step));
  } else {
    print_row("resumed", fmt::format("{}: step {}, {} samples, saved by {} rank{} at stage {}", loaded.folder,
                                     loaded.step, loaded.samples, loaded.world, loaded.world == 1 ? "" : "s",
                                     loaded.stage));
  }
  if (!loaded.companions.empty()) print_row("carries", fmt::format("{}", fmt::join(loaded.companions, ", ")));
  print_row("weights", format_digest(weights));
  if (!resume_source.weights_only) print_row("weights and moments", format_digest(state));
  for (const std::string& change : changes) print_row("changed", change);
  for (const std::string& difference : loaded.differences) print_row("note", difference);
  for (const std::string& note : loaded.notes) {
    const bool said =
        std::find(resume_source.notes.begin(), resume_source.notes.end(), note) != resume_source.notes.end();
    if (!said) print_row("note", note);
  }
  output.out.flush();
}

void Run::withhold_memory(std::int64_t step) {
  if (options.out_of_memory.rank != runtime->rank() || options.out_of_memory.step != step) return;
  constexpr std::int64_t left = 1024;
  const std::int64_t held = runtime->ledger().total(Tier::device);
  withheld_memory = Buffer(runtime->memory(Tier::device), settings.config.device_memory_limit - held - left,
                           Category::other, "taken away by --debug-out-of-memory");
}

std::vector<training::Evaluation> Run::validate(std::int64_t step, Progress& progress,
                                                const training::EvaluationStop& stop) {
  std::vector<training::Evaluation> evaluations;
  // A question to all ranks waits for the last stage of a pipeline, so that one is asked seldom there.
  const std::int64_t stages = runtime->mesh().size(MeshAxis::pipeline), between = stages > 1 ? 8 * stages : 1;
  bool stopped = false;
  std::int64_t rounds = 0;
  const auto stops = [&] { return stopped = stop && rounds++ % between == 0 && stop(); };
  for (const ValidationSet& set : data.validation) {
    const detail::Stopwatch clock;
    const auto show = [&](std::int64_t done, std::int64_t windows) {
      if (is_root()) progress.validating(done, windows, clock.seconds());
    };
    const EvaluationResult result =
        training::evaluate_windows(*engine, *settings.model, *feeder, *set.windows, set.numbers, show, stops);
    if (stopped) return {};
    evaluations.push_back({set.name, result});
  }
  for (const training::Evaluation& evaluation : evaluations) {
    if (is_root()) report.add_validation(step, evaluation.result, evaluation.set);
  }
  return evaluations;
}

NgramEntropies Run::ngrams() const {
  const auto text = [](const training::Windows& windows) -> TextPieces {
    return [&windows](const auto& visit) {
      for (const training::TokenRange& range : windows.ranges()) {
        range.file->read_text(range.begin, range.size, visit);
      }
    };
  };
  return NgramModel(text(*data.training)).entropies(text(*data.validation.front().windows));
}

std::string Run::advice_on(const std::exception_ptr& error, int ranks_per_node) const {
  try {
    std::rethrow_exception(error);
  } catch (const OutOfMemory& refusal) {
    if (!refusal.of_budget() || options.command != Command::train) return {};
    const planner::PlanRequest request = plan_request(ranks_per_node);
    // Waiting peers end the job themselves after a while, with their own status.
    return what_would_have_fitted(request, launch.size() > 1 ? 1.5 : 30);
  } catch (...) {
    return {};
  }
}

int Run::execute(const std::function<void()>& work) {
  if (const int status = prepare(); status != 0) return status;
  try {
    start();
    work();
  } catch (...) {
    // The failure is reported before unwinding, because an Engine waits for its collectives and peers must be
    // informed first.
    const std::exception_ptr error = std::current_exception();
    const std::string advice = advice_on(error, runtime ? runtime->all().local_size() : launch.size());
    return launch.fail(error, 2, advice, runtime.get());
  }
  return 0;
}

}  // namespace tranche::tools
