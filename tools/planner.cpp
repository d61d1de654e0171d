#include "tools/planner.h"

#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <vector>

#include "partition/flat_layout.h"
#include "tools/evaluation.h"
#include "tranche/comm/backends.h"
#include "tranche/core/error.h"
#include "tranche/engine/runtime.h"
#include "tranche/kernels/matmul.h"
#include "tranche/models/gpt.h"

namespace tranche::tools {

namespace {

/// The first records the order of units, the second is packed, the third is as all that follow.
constexpr int planned_steps = 3;

void check(const PlanRequest& request) {
  const auto refuse = [](const std::string& text) { throw ConfigurationError(text); };
  if (request.ranks < 1 || request.ranks > most_planned_ranks) {
    refuse(fmt::format("a plan is for 1 to {} ranks, not {}", most_planned_ranks, request.ranks));
  }
  if (request.rank < 0 || request.rank >= request.ranks) {
    refuse(fmt::format("there is no rank {} among {}; the last is {}", request.rank, request.ranks,
                       request.ranks - 1));
  }
  if (request.ranks_per_node < 0) {
    refuse(fmt::format("{} ranks on a node; there must be at least one", request.ranks_per_node));
  }
}

RuntimeOptions meta_options(const Config& config, DeviceKind device) {
  RuntimeOptions options = RuntimeOptions::from(config);
  options.device = DeviceKind::meta;
  // The whole need is wanted, not where it ends.
  options.device_memory_limit = options.host_memory_limit = options.nvme_limit = 0;
  options.poison_memory = false;
  options.log_level = LogLevel::off;
  // What concerns real transports.
  options.device_transport = "auto";
  // Sums of a host that cross to others count four bytes an element; GPUs exchange no such sums.
  if (device == DeviceKind::cuda) options.collectives = "messages";
  options.inline_progress = false;
  return options;
}

std::map<std::string, TrafficCount> counts_of(const nlohmann::json& object) {
  std::map<std::string, TrafficCount> counts;
  for (const auto& [operation, count] : object.items()) {
    if (operation == "control" || !count.is_object()) continue;
    counts[operation] = {count["calls"].get<std::int64_t>(), count["elements"].get<std::int64_t>(),
                         count["bytes"].get<std::int64_t>()};
  }
  return counts;
}

/// The model under the engine, whichever kind it is, on tokens that are nowhere.
class PlannedRun {
 public:
  PlannedRun(Engine& engine, const PlanRequest& request, std::int64_t sequence)
      : engine_(engine),
        gpt_(request.model.gpt ? std::make_unique<models::Gpt>(*request.model.gpt) : nullptr),
        samples_(static_cast<std::size_t>(gpt_ ? engine.config().micro_batch_size : 0), 0) {
    if (!gpt_) return;
    const Config& config = engine.config();
    const BatchShape shape{config.micro_batch_size, config.accumulation_steps, request.ranks};
    feeder_ = std::make_unique<BatchFeeder>(engine, gpt_->config(), shape, sequence);
    const TensorView none{nullptr, DataType::int32, {config.micro_batch_size, sequence}};
    batch_ = {none, none, samples_};
    if (request.device != DeviceKind::cuda) return;
    // As BatchFeeder keeps for memory that the host cannot reach: see there.
    const std::int64_t places = config.accumulation_steps + 1;
    staging_ = Buffer(engine.runtime().memory(Tier::host), checked_multiply(places, 2 * none.bytes()),
                      Category::other, "batches on their way");
  }

  void micro_batch() {
    if (gpt_) {
      gpt_->forward_backward(engine_, batch_);
    } else {
      pass_over_units(engine_);
    }
  }
  void evaluate() {
    if (gpt_) {
      gpt_->evaluate(engine_, batch_);
    } else {
      evaluate_units(engine_);
    }
  }

 private:
  Engine& engine_;
  std::unique_ptr<models::Gpt> gpt_;
  std::vector<std::int64_t> samples_;
  std::unique_ptr<BatchFeeder> feeder_;
  models::TokenBatch batch_;
  Buffer staging_;
};

std::int64_t sequence_of(const PlanRequest& request) {
  return request.sequence > 0 || !request.model.gpt ? request.sequence : request.model.gpt->positions;
}

/// Of Engine::summary().
std::vector<std::string> notes_of(const std::string& summary) {
  std::vector<std::string> notes;
  std::istringstream lines(summary);
  for (std::string line, word; std::getline(lines, line);) {
    std::istringstream words(line);
    if (!(words >> word) || word != "note") continue;
    std::getline(words >> std::ws, word);
    notes.push_back(word);
  }
  return notes;
}

WorkCount difference(const WorkCount& after, const WorkCount& before) {
  return {after.kernels - before.kernels, after.floating_point_operations - before.floating_point_operations,
          after.bytes_read - before.bytes_read, after.bytes_written - before.bytes_written};
}

}  // namespace

PlanResult plan_run(const PlanRequest& request) {
  check(request);
  Config config = request.config;
  validate_config(config, request.ranks);
  if (config.workspace_bytes == 0) config.workspace_bytes = kernels::default_workspace_bytes(request.device);
  PlanResult result;
  result.config = config.to_json();
  config.debug.poison_memory = false;
  const std::int64_t sequence = sequence_of(request);

  Runtime runtime(meta_options(config, request.device), [&](const CommunicatorOptions& options) {
    return make_meta_communicator(request.rank, request.ranks, request.ranks_per_node, options);
  });
  Buffer host_slab;
  if (request.device == DeviceKind::cuda && request.ranks > 1) {
    // Ranks on GPUs also have the communicator through which they met.
    host_slab = Buffer(runtime.memory(Tier::host), config.communication_slab_bytes, Category::communication,
                       "communication slab");
  }
  Engine engine(runtime, request.model.spec(sequence), config);
  PlannedRun run(engine, request, sequence);
  Stream& compute = engine.compute_stream();
  for (int step = 0; step < planned_steps; ++step) {
    const WorkCount before = compute.work();
    for (std::int64_t m = 0; m < config.accumulation_steps; ++m) run.micro_batch();
    result.offload_bytes = engine.step().offload_traffic;
    result.work = difference(compute.work(), before);
  }
  result.traffic = engine.traffic_report();
  engine.begin_evaluation();
  for (int pass = 0; pass < planned_steps; ++pass) run.evaluate();
  (void)engine.end_evaluation();
  // What `tranche train` ends with.
  (void)engine.weights_digest();
  (void)engine.state_digest();
  for (const Tier tier : all_tiers) {
    result.tiers[static_cast<std::size_t>(tier)] = runtime.ledger().account(tier);
  }
  result.memory = engine.memory_report();
  result.model = engine.model_report();
  result.state = engine.state_bytes();
  result.notes = notes_of(engine.summary());
  const auto traffic = nlohmann::json::parse(result.traffic);
  result.data = counts_of(traffic);
  result.control = counts_of(traffic["control"]);
  result.formula_elements = traffic["formula_elements"].get<std::int64_t>();
  result.tokens = config.micro_batch_size * config.accumulation_steps * engine.model().tokens_per_sample;
  result.model_operations = engine.model().flops_per_token * static_cast<double>(result.tokens);
  result.offload = step_offload_cost(request, request.rates);
  for (const UnitSpec& unit : engine.model().units()) {
    std::vector<std::int64_t> sizes;
    for (const TensorSpec& tensor : unit.tensors) sizes.push_back(tensor.shape.elements());
    result.padded_elements += FlatLayout(sizes, request.ranks).padded_elements();
  }
  return result;
}

std::shared_ptr<WorkRecorder> record_steps(const PlanRequest& request, int steps) {
  check(request);
  Config config = request.config;
  validate_config(config, request.ranks);
  if (config.workspace_bytes == 0) config.workspace_bytes = kernels::default_workspace_bytes(request.device);
  config.debug.poison_memory = false;
  const std::shared_ptr<WorkRecorder> recorder = WorkRecorder::make(request.device != DeviceKind::cuda);
  RuntimeOptions options = meta_options(config, request.device);
  options.recorder = recorder;
  Runtime runtime(options, [&](const CommunicatorOptions& communicator) {
    return make_meta_communicator(request.rank, request.ranks, request.ranks_per_node, communicator);
  });
  const std::int64_t sequence = sequence_of(request);
  Engine engine(runtime, request.model.spec(sequence), config);
  PlannedRun run(engine, request, sequence);
  for (int step = 0; step < planned_steps - 1 + steps; ++step) {
    const bool settled = step >= planned_steps - 1;
    if (settled) recorder->mark(step_mark);
    for (std::int64_t m = 0; m < config.accumulation_steps; ++m) run.micro_batch();
    if (settled) recorder->mark(boundary_mark);
    (void)engine.step();
    if (settled) recorder->mark(end_mark);
  }
  return recorder;
}

}  // namespace tranche::tools
