// Life of an engine, its micro-batches and evaluations; and the calls that only pass on.

#include "tranche/engine/engine.h"

#include <cmath>

#include "core/clock.h"
#include "core/nearest.h"
#include "engine/gathering.h"
#include "engine/offloading.h"
#include "engine/saving.h"
#include "tranche/kernels/matmul.h"

namespace tranche {

namespace {

LossScalerOptions scaler_options(const Config& config) {
  if (config.loss_scaling) return config.loss_scaler;
  LossScalerOptions fixed;
  fixed.dynamic = false;
  fixed.initial_scale = 1;
  return fixed;
}

}  // namespace

Engine::Impl::Impl(Runtime& runtime_in, ModelSpec model_in, Config config_in, EngineOptions options)
    : runtime(runtime_in),
      model(std::move(model_in)),
      config((validate_config(config_in, runtime_in.shard().size()), runtime_in.check(config_in),
              std::move(config_in))),
      optimizer(options.optimizer ? std::move(options.optimizer) : make_optimizer(config)),
      own_schedule(options.schedule ? std::optional(options.schedule->describe()) : std::nullopt),
      schedule(options.schedule ? std::move(options.schedule) : make_schedule(config)),
      groups(config.group_rules, config.frozen),
      scaler(scaler_options(config)),
      shard(runtime_in.shard()),
      compute(runtime_in.device().compute_stream()),
      memory(runtime_in.memory(Tier::device)),
      rank(shard.rank()),
      ranks(shard.size()),
      stage(config.stage),
      policy(config.effective_reduction(ranks)),
      residency(config, rank, ranks),
      arena(std::make_unique<StepArena>(memory, runtime_in.ledger())),
      exposed(compute),
      pass_times(compute),
      formulas(config, model, units, state_tensors, residency, rank, ranks) {
  gathering = std::make_unique<Gathering>(*this);
  if (config.debug.poison_memory) arena->poison_with(make_poison_fill(runtime.device()));
  if (config.workspace_bytes == 0) {
    config.workspace_bytes = kernels::default_workspace_bytes(runtime.device().kind());
  }
  set_phase("start");
  lay_out();
  choose_tiers();
  agree_on_start();
  allocate_on_all([this] {
    allocate();
    saving = std::make_unique<Saving>(*this, runtime.files());
    saving->prepare();
  });
  // Once all ranks have found room, so that none looks at a disk that others fill already.
  if (offload && offload->swap) allocate_on_all([this] { offload->swap->create(); });
  initialize_weights();
  start_notes = notes_on_overlap();
  set_phase("idle");
  step_started = step_ended = seconds_now();
}

Engine::Impl::~Impl() {
  // Collectives under way in the middle of a step would wait for peers that wait for this rank.
  if (unwinding() && (in_step || in_micro_batch || in_evaluation)) {
    end_by_unwinding("in the middle of " +
                     (in_evaluation ? "an evaluation" : "step " + std::to_string(steps_done + 1)));
  }
  if (saving) saving->close();
  // Collectives and kernels under way still touch the buffers; a failed communicator has let go of them.
  for (UnitState& unit : units) {
    for (const Event& event : {unit.trainable.filled, unit.frozen.filled, unit.reduced}) {
      try {
        event.wait();
      } catch (...) {
      }
    }
  }
  try {
    compute.synchronize();
  } catch (...) {
  }
  if (offload) offload->close();
}

void Engine::Impl::require(bool condition, const std::string& message, std::source_location where) const {
  if (!condition) throw LogicError(message, where);
}

void Engine::Impl::break_down(std::exception_ptr error) noexcept {
  if (broken) return;
  broken = error;
  try {
    std::rethrow_exception(error);
  } catch (const CommunicationError&) {
    // The peers learn of it by their own failed calls and from the program (Runtime::fail).
  } catch (...) {
    shard.post_failure(message_of(error), exit_status_of(error), 2.0);
  }
}

void Engine::Impl::end_by_unwinding(const std::string& where) noexcept {
  if (broken || ranks == 1) return;
  try {
    const std::string what = "an exception unwound it " + where;
    broken = std::make_exception_ptr(LogicError("the engine has ended: " + what));
    shard.post_unwinding(what, 2.0);
  } catch (...) {
    shard.post_unwinding("an exception unwound it", 2.0);
  }
}

bool Engine::Impl::stays_usable(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const LogicError&) {
    return true;
  } catch (const InvalidArgument&) {
    return true;
  } catch (const NumericalError&) {
    return true;
  } catch (const CheckpointError&) {
    return true;  // all ranks have agreed on it
  } catch (...) {
    return false;
  }
}

void Engine::Impl::set_phase(std::string_view phase, std::string_view unit) {
  runtime.ledger().set_phase(phase, unit);
}

int Engine::Impl::find_tensor(std::string_view name) const {
  const auto found = tensor_index.find(std::string(name));
  if (found != tensor_index.end()) return found->second;
  std::vector<std::string> names;
  for (const TensorState& tensor : tensors) names.push_back(tensor.name);
  const std::string near = nearest(name, names);
  throw InvalidArgument(
      "the model has no tensor '" + std::string(name) + "'" +
      (near.empty() ? "; the first is '" + names.front() + "'" : "; the nearest is '" + near + "'"));
}

Event Engine::Impl::all_gather_shard(FlatState& flat, void* buffer, DataType dtype,
                                     std::span<const Event> ready, std::string_view unit, const char* phase) {
  const std::int64_t begin = flat.layout.shard_range(rank).begin * size_of(dtype);
  return shard.all_gather(static_cast<std::byte*>(buffer) + begin, buffer, flat.layout.shard_elements(),
                          dtype, config.allgather_bucket_elements, ready,
                          OperationLabel{unit, phase, Traffic::data});
}

void Engine::Impl::begin_pass(const char* program) {
  // The first pass records the order of units, the second runs with prefetch and is packed, later ones
  // replay.
  const std::int64_t passes = in_inference    ? inference_passes
                              : in_evaluation ? evaluation_passes
                                              : train_passes;
  const bool record = config.debug.plan_memory && passes == 1;
  if (host_copies) host_copies->begin_pass(program, record);
  arena->begin(program, record);
}

void Engine::Impl::end_pass() {
  if (host_copies) host_copies->end_pass();
  arena->end();
}

// --- Engine ---------------------------------------------------------------------------------------------

Engine::Engine(Runtime& runtime, ModelSpec model, Config config, EngineOptions options)
    : impl_(std::make_unique<Impl>(runtime, std::move(model), std::move(config), std::move(options))) {}
Engine::Engine(Runtime& runtime, ModelSpec model, Config config, std::unique_ptr<Optimizer> optimizer)
    : Engine(runtime, std::move(model), std::move(config), EngineOptions{.optimizer = std::move(optimizer)}) {
}
Engine::~Engine() = default;

void Engine::Impl::open_micro_batch() {
  require(!in_inference,
          "begin_micro_batch() inside an inference scope, which is one pass without micro-batches");
  require(!in_micro_batch, "begin_micro_batch() inside a micro-batch");
  if (in_evaluation) {
    // A pass ends when the next begins, so that what holds the loss may outlive end_micro_batch().
    if (arena->active()) end_pass();
    begin_pass("evaluate");
    ++evaluation_passes;
  } else {
    require(micro_batch < config.accumulation_steps, "begin_micro_batch() after the step's " +
                                                         std::to_string(config.accumulation_steps) +
                                                         " micro-batches; call step()");
    if (!in_step) {
      saving->throw_failure();
      require_whole_state("begin_micro_batch()");
      begin_pass("train");
      in_step = true;
      step_started = seconds_now();
      between_steps = step_started - step_ended;
      traffic.begin(shard.meter());
      if (offload) offload->begin_report();
    }
    if (micro_batch + 1 == config.accumulation_steps && offload) offload->read_ahead();
  }
  in_micro_batch = true;
  if (config.wall_clock_breakdown && !in_evaluation) pass_times.begin();
  set_phase(in_evaluation ? "evaluate" : "forward");
}

void Engine::begin_micro_batch() {
  impl_->guarded([&] { impl_->open_micro_batch(); });
}

GatheredUnit Engine::gather(UnitId unit) {
  impl_->model.unit(unit);  // throws on an unknown unit
  impl_->guarded([&] { impl_->gathering->acquire(unit.index); });
  GatheredUnit handle;
  handle.engine_ = this;
  handle.unit_ = unit.index;
  handle.exceptions_ = std::uncaught_exceptions();
  return handle;
}

UnitGradients Engine::gradients(UnitId unit) {
  impl_->model.unit(unit);
  impl_->guarded([&] { impl_->open_gradients(unit.index); });
  UnitGradients handle;
  handle.engine_ = this;
  handle.unit_ = unit.index;
  handle.exceptions_ = std::uncaught_exceptions();
  return handle;
}

void Engine::skip_gradients(UnitId unit) {
  const UnitSpec& spec = impl_->model.unit(unit);
  do {
    gradients(unit).reduce();
  } while (impl_->units[static_cast<std::size_t>(unit.index)].uses_submitted < spec.uses_per_pass);
}

void Engine::end_micro_batch(const ConstTensorView& loss_sum, const ConstTensorView& token_count) {
  impl_->guarded([&] { impl_->close_micro_batch(loss_sum, token_count); });
}

float Engine::loss_gradient_scale() const {
  return static_cast<float>(std::ldexp(impl_->scaler.scale(), -impl_->loss_exponent));
}

StepResult Engine::step() {
  return impl_->guarded([&] { return impl_->finish_step(); });
}

void Engine::begin_evaluation() {
  Impl& impl = *impl_;
  if (impl.broken) std::rethrow_exception(impl.broken);
  impl.require(!impl.in_step,
               "begin_evaluation() inside a step; evaluate between step() and the next micro-batch");
  impl.require(!impl.in_evaluation, "begin_evaluation() inside an evaluation");
  impl.in_evaluation = true;
  impl.evaluation_loss = 0;
  impl.evaluation_tokens = 0;
}

EvaluationResult Engine::end_evaluation() {
  return impl_->guarded([&] { return impl_->finish_evaluation(); });
}

EvaluationResult Engine::Impl::finish_evaluation() {
  require(in_evaluation && !in_micro_batch,
          "end_evaluation() without begin_evaluation(), or inside a micro-batch");
  if (arena->active()) end_pass();
  struct Share {
    double loss;
    std::int64_t tokens;
  };
  const Share mine{evaluation_loss, evaluation_tokens};
  std::vector<Share> all(static_cast<std::size_t>(ranks), mine);
  shard
      .all_gather(&mine, all.data(), sizeof(Share), DataType::uint8, 0, {},
                  OperationLabel{"evaluation", "agree", Traffic::control, Tier::host})
      .wait();
  EvaluationResult result;
  double loss = 0;
  for (const Share& share : all) {
    loss += share.loss;
    result.tokens += share.tokens;
  }
  result.loss = result.tokens > 0 ? loss / static_cast<double>(result.tokens) : 0.0;
  in_evaluation = false;
  gathering->step_elements = 0;
  exposed.clear();
  pass_times.clear();
  set_phase("idle");
  return result;
}

void Engine::Impl::begin_inference() {
  require(!in_step, "an inference scope inside a step; open it between step() and the next micro-batch");
  require(!in_inference, "an inference scope inside another; one is one pass");
  require(!in_evaluation, "an inference scope inside an evaluation; call end_evaluation() first");
  in_inference = in_evaluation = in_micro_batch = true;
  begin_pass("infer");
  ++inference_passes;
  set_phase("inference");
}

void Engine::Impl::end_inference(bool unwinding) {
  std::string held;
  try {
    for (const UnitState& unit : units) {
      if (unit.holders > 0) held = "unit " + unit.name + " is still held";
    }
    if (!unwinding && !broken && held.empty()) {
      gathering->end_micro_batch();
      end_pass();
    }
  } catch (const LogicError& error) {
    held = error.message();
  } catch (...) {
    break_down(std::current_exception());  // a destructor's caller: the next call throws it
  }
  if (arena->active()) {
    gathering->forget_micro_batch();
    if (host_copies) host_copies->abandon_pass();
    arena->abandon();
    inference_passes = 0;
    if (!unwinding && !broken) runtime.log().warning("an inference scope ended early: " + held);
  }
  in_inference = in_evaluation = in_micro_batch = false;
  gathering->step_elements = 0;
  exposed.clear();
  set_phase("idle");
}

InferenceScope::InferenceScope(Engine& engine) : engine_(engine), exceptions_(std::uncaught_exceptions()) {
  engine.impl_->guarded([&] { engine.impl_->begin_inference(); });
}

InferenceScope::~InferenceScope() {
  engine_.impl_->end_inference(std::uncaught_exceptions() > exceptions_);
}

Device& Engine::device() const {
  return impl_->runtime.device();
}
Stream& Engine::compute_stream() const {
  return impl_->compute;
}
kernels::Workspace Engine::workspace() const {
  return {impl_->workspace_buffer.data(), impl_->workspace_buffer.bytes()};
}
StepBuffer Engine::acquire(std::int64_t bytes, Category category, std::string_view tag) {
  StepBuffer buffer = impl_->arena->acquire(bytes, category, tag);
  for (const Event& event : buffer.ready()) impl_->compute.wait(event);
  buffer.used_on(impl_->compute);
  return buffer;
}
HostCopy Engine::send_to_host(StepBuffer buffer, std::string_view tag) {
  return impl_->guarded([&] {
    return impl_->host_copies ? impl_->host_copies->send(std::move(buffer), tag)
                              : HostCopies::keep(std::move(buffer));
  });
}
void Engine::fetch_ahead(HostCopy& copy) {
  impl_->guarded([&] { HostCopies::fetch(copy); });
}
StepBuffer Engine::bring_back(HostCopy copy) {
  return impl_->guarded([&] { return HostCopies::bring_back(std::move(copy)); });
}
int Engine::fail(std::exception_ptr error) noexcept {
  impl_->broken = error;
  return impl_->runtime.fail(std::move(error));
}
Runtime& Engine::runtime() const {
  return impl_->runtime;
}
const Config& Engine::config() const {
  return impl_->config;
}
const ModelSpec& Engine::model() const {
  return impl_->model;
}
bool Engine::evaluating() const {
  return impl_->in_evaluation;
}
std::int64_t Engine::steps() const {
  return impl_->steps_done;
}
std::int64_t Engine::applied_steps() const {
  return impl_->applied_steps;
}
std::int64_t Engine::samples() const {
  return impl_->samples_done;
}
std::int64_t Engine::micro_batch() const {
  return impl_->micro_batch;
}
bool Engine::frozen(std::string_view tensor) const {
  return impl_->tensors[static_cast<std::size_t>(impl_->find_tensor(tensor))].frozen;
}

}  // namespace tranche
