#include "planner/planned_run.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/pipeline_order.h"
#include "engine/state_layout.h"
#include "partition/placement.h"
#include "tranche/comm/backends.h"
#include "tranche/core/error.h"
#include "tranche/core/shape.h"
#include "tranche/engine/lora.h"
#include "tranche/kernels/matmul.h"

namespace tranche::planner {

namespace {

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

/// True if two ranks of a stage hold parts of equal sizes, so that their plans are equal.
bool alike(const detail::Placement& placement, int rank, int other) {
  for (int buffer = 0; buffer < static_cast<int>(placement.buffers().size()); ++buffer) {
    if (placement.buffer(buffer).empty() || !placement.holds(buffer, rank)) continue;
    const detail::FlatLayout &one = placement.layout(buffer, rank), &two = placement.layout(buffer, other);
    if (one.shard_elements() != two.shard_elements()) return false;
    for (int tensor = 0; tensor < one.tensors(); ++tensor) {
      if (one.tensor_elements(tensor) != two.tensor_elements(tensor)) return false;
    }
  }
  return true;
}

}  // namespace

ModelSpec planned_spec(const PlanRequest& request) {
  return with_adapters(request.model.spec(request.model.sequence_or_longest(request.sequence)),
                       request.config.lora);
}

bool in_chains(const Config& config, int ranks) {
  return config.tensor_sums == TensorSums::chain && config.mesh_of(ranks).size(MeshAxis::tensor) > 1;
}

Config checked_config(const PlanRequest& request) {
  check(request);
  Config config = request.config;
  validate_config(config, request.ranks);
  if (in_chains(config, request.ranks) && request.device == DeviceKind::cuda) {
    throw ConfigurationError(
        "tranche.tensor_sums: chain: products on GPUs do not add up in ascending order, so that no chain has "
        "the "
        "bits of one rank; write rank_order");
  }
  detail::check_neighbours(config, config.mesh_of(request.ranks).size(MeshAxis::pipeline), request.device);
  if (config.workspace_bytes == 0) config.workspace_bytes = kernels::default_workspace_bytes(request.device);
  return config;
}

std::vector<std::vector<int>> equal_ranks(const PlanRequest& request, const std::vector<int>& ranks) {
  const Config config = checked_config(request);
  std::vector<std::vector<int>> classes;
  if (ranks.size() == 1) return {{0}};
  const detail::Placement placement = detail::place(planned_spec(request), config, request.ranks);
  // If a layout leaves tensors whole, their sizes do not show how much each rank computes of them.
  const bool comparable = config.layout.empty();
  for (int coordinate = 0; coordinate < static_cast<int>(ranks.size()); ++coordinate) {
    const int rank = ranks[static_cast<std::size_t>(coordinate)];
    const auto found = std::find_if(classes.begin(), classes.end(), [&](const std::vector<int>& one) {
      return comparable && alike(placement, ranks[static_cast<std::size_t>(one.front())], rank);
    });
    if (found == classes.end()) {
      classes.push_back({coordinate});
    } else {
      found->push_back(coordinate);
    }
  }
  return classes;
}

RuntimeOptions meta_options(const Config& config, DeviceKind device) {
  RuntimeOptions options = RuntimeOptions::from(config);
  options.device = DeviceKind::meta;
  // A plan measures what the run needs, so no limit may stop it.
  options.device_memory_limit = options.host_memory_limit = options.nvme_limit = 0;
  options.poison_memory = false;
  options.log_level = LogLevel::off;
  // Options that choose a real transport do not apply to the meta communicator.
  options.device_transport = "auto";
  // CPU hosts send partial sums to other nodes in fp32, four bytes an element; GPUs send no partial sums.
  if (device == DeviceKind::cuda) options.collectives = "messages";
  options.inline_progress = false;
  return options;
}

Runtime planned_runtime(const PlanRequest& request, const RuntimeOptions& options) {
  return Runtime(options, [&](const CommunicatorOptions& communicator) {
    return make_meta_communicator(request.rank, request.ranks, request.ranks_per_node, communicator);
  });
}

PlannedRun::PlannedRun(Runtime& runtime, const PlanRequest& request, const Config& config)
    : engine_(runtime, request.model.spec(request.model.sequence_or_longest(request.sequence)), config),
      language_(request.model.language),
      samples_(static_cast<std::size_t>(language_ ? config.micro_batch_size : 0), 0),
      lengths_(request.lengths),
      documents_(request.documents && language_ && language_->takes_documents()) {
  if (!language_) return;
  const std::int64_t sequence = request.model.sequence_or_longest(request.sequence);
  for (const std::int64_t length : lengths_) {
    if (length >= 1 && length <= sequence) continue;
    throw ConfigurationError(
        fmt::format("a length of {} is planned, which is not in 1..{}, the sequence", length, sequence));
  }
  if (lengths_.empty()) lengths_ = {sequence};
  const std::int64_t bytes = 4 * checked_multiply(config.micro_batch_size, sequence);
  MemoryResource& device = runtime.memory(Tier::device);
  const std::int64_t places = engine_.stage().stages > 1 ? config.accumulation_steps : 1;
  for (std::int64_t i = 0; i < places; ++i) {
    tokens_.emplace_back(device, bytes, Category::other, "tokens of a micro-batch");
    tokens_.emplace_back(device, bytes, Category::other, "targets of a micro-batch");
    if (!documents_) continue;
    tokens_.emplace_back(device, bytes, Category::other, "documents of a micro-batch");
    tokens_.emplace_back(device, bytes, Category::other, "positions of a micro-batch");
  }
  if (request.device != DeviceKind::cuda) return;
  staging_ = Buffer(runtime.memory(Tier::host),
                    checked_multiply(config.accumulation_steps + 1, (documents_ ? 4 : 2) * bytes),
                    Category::other, "batches on their way");
}

int PlannedRun::evaluations() const {
  return std::max(settling_steps + 1, (settling_rounds + 1) * narrow<int>(lengths_.size()));
}

int PlannedRun::steps() const {
  // The lengths rotate through the steps, so that a step may begin at any of them.
  return lengths_.size() < 2 ? settling_steps + 1 : evaluations();
}

models::TokenBatch PlannedRun::batch() {
  const TensorView none{nullptr,
                        DataType::int32,
                        {engine_.config().micro_batch_size, lengths_[micro_batches_++ % lengths_.size()]}};
  models::TokenBatch batch{none, none, samples_};
  if (documents_) batch.document_begin = batch.positions = none;
  return batch;
}

void PlannedRun::micro_batches() {
  if (language_) {
    models::train_step(*language_, engine_, [this](std::int64_t) { return batch(); });
    return;
  }
  for (std::int64_t m = 0; m < engine_.config().accumulation_steps; ++m) pass_over_units(engine_);
}

void PlannedRun::evaluate() {
  if (language_) {
    language_->evaluate(engine_, batch());
  } else {
    evaluate_units(engine_);
  }
}

}  // namespace tranche::planner
