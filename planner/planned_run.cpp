#include "planner/planned_run.h"

#include <fmt/format.h>

#include "tranche/comm/backends.h"
#include "tranche/core/error.h"
#include "tranche/core/shape.h"
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

}  // namespace

Config checked_config(const PlanRequest& request) {
  check(request);
  Config config = request.config;
  validate_config(config, request.ranks);
  if (config.workspace_bytes == 0) config.workspace_bytes = kernels::default_workspace_bytes(request.device);
  return config;
}

RuntimeOptions meta_options(const Config& config, DeviceKind device) {
  RuntimeOptions options = RuntimeOptions::from(config);
  options.device = DeviceKind::meta;
  // The whole need is wanted, not where it ends.
  options.device_memory_limit = options.host_memory_limit = options.nvme_limit = 0;
  options.poison_memory = false;
  options.log_level = LogLevel::off;
  // Options of real transports are reset.
  options.device_transport = "auto";
  // Sums of a host that cross to others count four bytes an element; GPUs exchange no such sums.
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
      samples_(static_cast<std::size_t>(language_ ? config.micro_batch_size : 0), 0) {
  if (!language_) return;
  const TensorView none{nullptr,
                        DataType::int32,
                        {config.micro_batch_size, request.model.sequence_or_longest(request.sequence)}};
  MemoryResource& device = runtime.memory(Tier::device);
  tokens_ = Buffer(device, none.bytes(), Category::other, "tokens of a micro-batch");
  targets_ = Buffer(device, none.bytes(), Category::other, "targets of a micro-batch");
  batch_ = {none, none, samples_};
  if (request.device != DeviceKind::cuda) return;
  staging_ =
      Buffer(runtime.memory(Tier::host), checked_multiply(config.accumulation_steps + 1, 2 * none.bytes()),
             Category::other, "batches on their way");
}

void PlannedRun::micro_batch() {
  if (language_) {
    language_->forward_backward(engine_, batch_);
  } else {
    pass_over_units(engine_);
  }
}

void PlannedRun::evaluate() {
  if (language_) {
    language_->evaluate(engine_, batch_);
  } else {
    evaluate_units(engine_);
  }
}

}  // namespace tranche::planner
