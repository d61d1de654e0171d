#include "tools/train/report.h"

#include <fmt/format.h>

#include <cstdlib>
#include <deque>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/output_file.h"
#include "tools/plan/mesh_json.h"
#include "tools/train/spool.h"
#include "training/metrics_json.h"
#include "tranche/version.h"

namespace tranche::tools {

using nlohmann::ordered_json;
using training::json_number;

namespace {

// Bytes that are not UTF-8 (a sample may hold any) are replaced instead of causing an error.
std::string dumped(const ordered_json& value) {
  return value.dump(1, ' ', false, ordered_json::error_handler_t::replace);
}

/// An array of the report.
class Entries {
 public:
  explicit Entries(const std::string& path) : spool_(path) {}
  void add(const ordered_json& entry) {
    std::string text = spool_.empty() ? "" : ",";
    for (const char c : "\n" + dumped(entry)) {
      text += c;
      if (c == '\n') text += "  ";  // indentation
    }
    spool_.add(text);
  }
  void write(detail::OutputFile& file, std::string_view name) {
    file.write(fmt::format(",\n \"{}\": [", name));
    spool_.read([&file](std::string_view piece) { file.write(piece); });
    file.write(spool_.empty() ? "]" : "\n ]");
  }

 private:
  Spool spool_;
};

}  // namespace

struct Report::Impl {
  ordered_json document = ordered_json::object();
  /// The report's path, and its pending parts.
  struct Kept {
    explicit Kept(const std::string& to) : path(to), checkpoints(to), validation(to), steps(to) {}
    std::string path;
    Entries checkpoints, validation, steps;
    std::deque<ordered_json> open_steps;  ///< steps without processor seconds yet
    void close_step() {
      steps.add(open_steps.front());
      open_steps.pop_front();
    }
  };
  std::optional<Kept> kept;
};

Report::Report() : impl_(std::make_unique<Impl>()) {
  impl_->document["schema"] = report_schema;
  impl_->document["version"] = version;
}
Report::~Report() = default;

std::string format_digest(const kernels::Digest& digest) {
  return fmt::format("{:016x}{:016x}", digest.lanes[0], digest.lanes[1]);
}

void Report::keep_for(const std::string& path) {
  impl_->kept.emplace(path);
}

void Report::set_start(int world, int stage, const std::string& config_json, const std::string& fingerprint,
                       const std::string& model_name, const std::string& data_path) {
  ordered_json& document = impl_->document;
  document["world"] = world;
  document["stage"] = stage;
  document["numerics_fingerprint"] = fingerprint;
  document["model_name"] = model_name;
  document["data"] = data_path;
  document["config"] = ordered_json::parse(config_json);
}

void Report::add_step(const StepResult& result) {
  if (impl_->kept) impl_->kept->open_steps.push_back(training::step_json(result));
}

void Report::add_step_digest(const kernels::Digest& weights, const kernels::Digest& state) {
  if (!impl_->kept) return;
  ordered_json& step = impl_->kept->open_steps.back();
  step["weights_digest"] = format_digest(weights);
  step["state_digest"] = format_digest(state);
}

void Report::add_validation(std::int64_t step, const EvaluationResult& result, const std::string& set) {
  if (impl_->kept) {
    ordered_json entry{{"step", step}, {"loss", training::loss_json(result)}, {"tokens", result.tokens}};
    if (!set.empty()) entry["set"] = set;
    impl_->kept->validation.add(entry);
  }
  ordered_json& document = impl_->document;
  if (!set.empty()) document["validation_losses"][set] = training::loss_json(result);
  // The curve is that of the first of several sets.
  if (set.empty() || document["validation_losses"].begin().key() == set) {
    document["validation_loss"] = training::loss_json(result);
  }
}

void Report::set_best(const training::BestCheckpoint& best) {
  impl_->document["best"] = {
      {"path", best.path}, {"step", best.step}, {"set", best.set}, {"loss", json_number(best.loss)}};
}

void Report::set_ngrams(const NgramEntropies& entropies) {
  impl_->document["unigram_entropy"] = json_number(entropies.unigram);
  impl_->document["bigram_entropy"] = json_number(entropies.bigram);
  impl_->document["trigram_entropy"] = json_number(entropies.trigram);
}

void Report::set_engine(const std::string& memory, const std::string& traffic, const std::string& model) {
  impl_->document["memory"] = ordered_json::parse(memory);
  impl_->document["traffic"] = ordered_json::parse(traffic);
  impl_->document["model"] = ordered_json::parse(model);
}

bool Report::has_state_of(const std::string& path) const {
  std::error_code none;
  if (!std::filesystem::is_regular_file(path, none)) return false;
  std::ifstream file(path);
  const auto other = nlohmann::json::parse(file, nullptr, false);
  return other.is_object() && other.contains("state_digest") &&
         other["state_digest"] == impl_->document["state_digest"];
}

void Report::set_digests(const kernels::Digest& weights, const kernels::Digest& state) {
  impl_->document["weights_digest"] = format_digest(weights);
  impl_->document["state_digest"] = format_digest(state);
}

void Report::set_speed(const TokenRate& rate, double peak_flops, double peak_share) {
  impl_->document["tokens_per_second"] = json_number(rate.positions);
  impl_->document["learned_tokens_per_second"] = json_number(rate.learned);
  impl_->document["matmul_peak_flops"] = json_number(peak_flops);
  impl_->document["matmul_peak_share"] = json_number(peak_share);
}

void Report::add_processor_seconds(const std::vector<double>& steps) {
  if (!impl_->kept) return;
  for (const double seconds : steps) {
    if (impl_->kept->open_steps.empty()) return;
    impl_->kept->open_steps.front()["cpu_seconds"] = json_number(seconds);
    impl_->kept->close_step();
  }
}

void Report::set_mesh(const Mesh& mesh) {
  impl_->document["mesh"] = mesh_json(mesh);
}

void Report::set_placement(const Placement& placement) {
  impl_->document["placement"] = {{"ranks_on_host", placement.ranks_on_node},
                                  {"threads", placement.threads},
                                  {"cores", placement.cores},
                                  {"host_cores", placement.node_cores}};
}

void Report::set_nodes(const std::vector<RanksOfNode>& nodes) {
  ordered_json& list = impl_->document["placement"]["nodes"] = ordered_json::array();
  for (const RanksOfNode& node : nodes) {
    list.push_back({{"name", node.name}, {"ranks", node.ranks}});
    if (node.bytes_to_other_nodes) list.back()["bytes_to_other_nodes"] = *node.bytes_to_other_nodes;
  }
}

void Report::set_stages(const std::vector<StageTime>& stages) {
  for (std::size_t s = 0; s < stages.size(); ++s) {
    impl_->document["pipeline"]["stages"].push_back({{"stage", s},
                                                     {"idle_share", json_number(stages[s].idle_share())},
                                                     {"waited_seconds", json_number(stages[s].waited)},
                                                     {"step_seconds", json_number(stages[s].seconds)}});
  }
}

void Report::set_sample(const std::string& text) {
  impl_->document["sample"] = text;
}

void Report::add_checkpoint(const training::CompletedCheckpoint& record) {
  if (!impl_->kept) return;
  impl_->kept->checkpoints.add({{"step", record.step},
                                {"path", record.path},
                                {"pause_seconds", json_number(record.pause_seconds)},
                                {"seconds", json_number(record.seconds)}});
}

void Report::set_resumed(const LoadResult& loaded, bool weights_only, const kernels::Digest& weights,
                         const kernels::Digest& state, const std::vector<std::string>& changes) {
  impl_->document["resumed"] = {{"path", loaded.folder},
                                {"weights_only", weights_only},
                                {"step", loaded.step},
                                {"samples", loaded.samples},
                                {"world", loaded.world},
                                {"stage", loaded.stage},
                                {"weights_digest", format_digest(weights)},
                                {"state_digest", format_digest(state)},
                                {"changes", changes},
                                {"differences", loaded.differences}};
}

void Report::set_stopped(const std::string& signal) {
  impl_->document["stopped_by"] = signal;
}

void Report::write() {
  if (!impl_->kept) return;
  Impl::Kept& kept = *impl_->kept;
  while (!kept.open_steps.empty()) kept.close_step();
  std::string text = dumped(impl_->document);
  text.resize(text.size() - 2);  // without the object's closing brace
  detail::OutputFile file(kept.path);
  file.write(text);
  kept.checkpoints.write(file, "checkpoints");
  kept.validation.write(file, "validation");
  kept.steps.write(file, "steps");
  file.write("\n}\n");
  file.commit();
}

std::string note_on_openmp(const char* given, int threads) {
  const int asked = given == nullptr ? 0 : std::atoi(given);
  if (asked < 2 || asked == threads) return {};
  return fmt::format("OMP_NUM_THREADS={} is not read: a rank has {} thread{}; --threads {} sets them", given,
                     threads, threads == 1 ? "" : "s", asked);
}

std::string note_on_tasks(const char* tasks, bool launched) {
  if (launched || tasks == nullptr || std::atoi(tasks) < 2) return {};
  return fmt::format(
      "Slurm's allocation has {} tasks (SLURM_NTASKS), and this run is one rank; srun --mpi=pmix, or mpirun, "
      "starts a rank for each",
      tasks);
}

std::string note_on_cores(const Placement& placement) {
  const auto counted = [](int count, const char* of) {
    return fmt::format("{} {}{}", count, of, count == 1 ? "" : "s");
  };
  const int threads = placement.ranks_on_node * placement.threads;
  if (threads > placement.node_cores) {
    return fmt::format("{} of {} share {} of this node: fewer of either would be as fast",
                       counted(placement.ranks_on_node, "rank"), counted(placement.threads, "thread"),
                       counted(placement.node_cores, "core"));
  }
  if (placement.cores >= placement.node_cores) return {};
  const std::string bound = fmt::format("this rank may run on {} of the node's {}", placement.cores,
                                        counted(placement.node_cores, "core"));
  if (placement.threads > placement.cores) {
    return fmt::format(
        "{}, which its {} share; where it was mpirun that bound it, mpirun --bind-to none lifts that", bound,
        counted(placement.threads, "thread"));
  }
  if (placement.ranks_on_node > 1 && placement.ranks_on_node * placement.cores < placement.node_cores) {
    return bound + "; where it was mpirun that bound it, mpirun --bind-to none lifts that";
  }
  return {};
}

}  // namespace tranche::tools
