// Life of an engine, its micro-batches and evaluations; and the calls that only pass on.

#include "tranche/engine/engine.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "engine/engine_impl.h"
#include "engine/initial_weights.h"
#include "engine/offloaded_state.h"
#include "engine/start_notes.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/kernels/matmul.h"

namespace tranche {

using namespace detail;

namespace {

LossScalerOptions scaler_options(const Config& config) {
  if (config.loss_scaling) return config.loss_scaler;
  LossScalerOptions fixed;
  fixed.dynamic = false;
  fixed.initial_scale = 1;
  return fixed;
}

/// By its number over all units.
std::string name_of_tensor(const ModelSpec& model, int tensor) {
  for (const UnitSpec& unit : model.units()) {
    if (tensor < static_cast<int>(unit.tensors.size())) return unit.tensors[static_cast<std::size_t>(tensor)].name;
    tensor -= static_cast<int>(unit.tensors.size());
  }
  return {};
}

}  // namespace

/// With the mesh that the runtime was made with, where the configuration leaves it open.
Config Engine::Impl::checked(Config config, const Runtime& runtime) {
  if (config.mesh.empty() && (runtime.replicas() != nullptr || runtime.pipeline() != nullptr || runtime.tensor() != nullptr))
    config.mesh = runtime.mesh().to_string();
  validate_config(config, runtime.size());
  runtime.check(config);
  return config;
}

Engine::Impl::Impl(Runtime& runtime_in, ModelSpec model_in, Config config_in, EngineOptions options)
    : runtime(runtime_in),
      model(with_adapters(std::move(model_in), config_in.lora)),
      config(checked(std::move(config_in), runtime_in)),
      optimizer(options.optimizer ? std::move(options.optimizer) : make_optimizer(config)),
      own_schedule(options.schedule ? std::optional(options.schedule->describe()) : std::nullopt),
      schedule(options.schedule ? std::move(options.schedule) : make_schedule(config)),
      groups(config.group_rules, config.frozen),
      scaler(scaler_options(config)),
      world(runtime_in.all()),
      shard(runtime_in.shard()),
      replicas(runtime_in.replicas()),
      pipeline(runtime_in.pipeline()),
      tensor(runtime_in.tensor()),
      communicators{&world},
      axes{MeshAxis::shard},
      stages(divide(model, config, runtime_in.mesh().size(MeshAxis::pipeline),
                    runtime_in.mesh().size(MeshAxis::tensor))),
      compute(runtime_in.device().compute_stream()),
      memory(runtime_in.memory(Tier::device)),
      rank(world.rank()),
      ranks(world.size()),
      data_rank(runtime_in.mesh().data_rank(rank)),
      data_ranks(runtime_in.mesh().data_ranks()),
      arena(std::make_unique<StepArena>(memory, runtime_in.ledger())),
      recorder(*arena, compute, config.debug.plan_memory),
      store(config,
            lay_out(model, groups, *optimizer, runtime.mesh(), stages, world.rank(),
                    [this](const Placement& placement, int buffer) { return ranks_of(placement, buffer); }),
            {runtime.device(), memory, runtime.memory(Tier::host), runtime.trace()}),
      formulas(config, model, store, updater),
      updater(*optimizer, store.tensors(), config.precision, config.seed),
      matrices(store, config, updater, *optimizer, runtime.of_stage(),
               runtime.mesh().group({MeshAxis::replicate, MeshAxis::shard}, rank), runtime.mesh(),
               runtime.device(), *arena),
      gatherer(store, config, *arena, compute, recorder.exposed()),
      reducer(store, config, *arena, compute, runtime.ledger(), scalars),
      boundary(store, config, updater, matrices, world, runtime.mesh(), runtime.device(), scalars),
      micro_batches(store.units().size()) {
  for (const auto& [group, axis] :
       {std::pair(&shard, MeshAxis::shard), std::pair(&runtime.of_stage(), MeshAxis::shard),
        std::pair(replicas, MeshAxis::replicate), std::pair(pipeline, MeshAxis::pipeline),
        std::pair(runtime.pipeline_ends(), MeshAxis::pipeline), std::pair(runtime.tensor(), MeshAxis::tensor),
        std::pair(runtime.tensor_and_shard(), MeshAxis::tensor), std::pair(sharers.get(), MeshAxis::tensor)}) {
    if (group == nullptr || std::count(communicators.begin(), communicators.end(), group) > 0) continue;
    communicators.push_back(group);
    axes.push_back(axis);
  }
  if (config.debug.poison_memory) arena->poison_with(make_poison_fill(runtime.device()));
  if (config.workspace_bytes == 0) {
    config.workspace_bytes = kernels::default_workspace_bytes(runtime.device().kind());
  }
  set_nominal_tokens();
  set_phase("start");
  check_threads();
  describe_routing();
  agree_on_start();
  allocate_on_all([this] {
    allocate();
    session = std::make_unique<CheckpointSession>(store, config, world, runtime.device(),
                                                  runtime.memory(Tier::host), runtime.files(), runtime.log(),
                                                  runtime.trace());
    if (config.save_buffer) session->reserve();
  });
  // Once all ranks have found room, so that none looks at a disk that others fill already.
  if (store.offload() != nullptr && store.offload()->swap() != nullptr) {
    allocate_on_all([this] { store.offload()->swap()->create(); });
  }
  draw_initial_weights(store, config, runtime.device(), runtime.memory(Tier::host),
                       {workspace_buffer.data(), workspace_buffer.bytes()});
  start_notes = notes_on_overlap(store, config, runtime.ledger(), runtime.device());
  set_phase("idle");
}

BufferRanks Engine::Impl::ranks_of(const Placement& placement, int buffer) {
  const Placement::Buffer& placed = placement.buffer(buffer);
  const bool shared = placed.sharers > 1 && placed.parts() > 1;
  if (shared && !sharers) {
    const Mesh& mesh = runtime.mesh();
    const std::vector<int> group = placement.group(buffer, rank);
    sharers = world.simulated() ? world.subgroup(group)
                                : world.split(*std::min_element(group.begin(), group.end()),
                                              static_cast<int>(std::find(group.begin(), group.end(), rank) -
                                                               group.begin()));
    sharers_size = placed.sharers;
  }
  if (!placement.holds(buffer, rank)) return {};
  const bool tied = placed.stages.size() > 1;
  if (placed.sharers > 1 && (tied || (shared && placed.sharers != sharers_size))) {
    throw ConfigurationError("tranche.mesh \"" + config.mesh + "\": tensor " +
                             name_of_tensor(model, placed.tensors.front()) + " is shared by " +
                             (tied ? "two stages of a pipeline" : "another number of ranks than others") +
                             ", which tensor cannot be used with yet");
  }
  if (shared) return {sharers.get(), replicas};
  if (placed.sharers > 1) return {runtime.tensor_and_shard(), replicas};
  return {tied ? runtime.pipeline_ends() : &shard, replicas};
}

Engine::Impl::~Impl() {
  // Collectives in progress in the middle of a step would wait for peers that wait for this rank.
  if (unwinding() && state != State::idle) {
    end_by_unwinding("in the middle of " +
                     (in_evaluation() ? "an evaluation" : "step " + std::to_string(steps_done + 1)));
  }
  if (session) session->close(!broken && !unwinding() && !micro_batches.any_open() && !in_evaluation());
  store.await_collectives();
  try {
    compute.synchronize();
  } catch (...) {
  }
  if (store.offload() != nullptr) store.offload()->close();
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
    const std::string& place = runtime.place();
    world.post_failure((place.empty() ? "" : place + ": ") + message_of(error), exit_status_of(error), 2.0);
  }
}

void Engine::Impl::end_by_unwinding(const std::string& where) noexcept {
  if (broken || ranks == 1) return;
  try {
    const std::string what = "an exception unwound it " + where;
    broken = std::make_exception_ptr(LogicError("the engine has ended: " + what));
    world.post_unwinding(what, 2.0);
  } catch (...) {
    world.post_unwinding("an exception unwound it", 2.0);
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

// --- Engine ---------------------------------------------------------------------------------------------

Engine::Engine(Runtime& runtime, ModelSpec model, Config config, EngineOptions options)
    : impl_(std::make_unique<Impl>(runtime, std::move(model), std::move(config), std::move(options))) {}
Engine::Engine(Runtime& runtime, ModelSpec model, Config config, std::unique_ptr<Optimizer> optimizer)
    : Engine(runtime, std::move(model), std::move(config), EngineOptions{.optimizer = std::move(optimizer)}) {
}
Engine::~Engine() = default;

std::int64_t Engine::Impl::open_micro_batch(const Shape& shape, std::span<const std::int64_t> samples,
                                            bool beside) {
  require(!in_inference(),
          "begin_micro_batch() inside an inference scope, which is one pass without micro-batches");
  require(!micro_batches.any_open() || (beside && in_step()), "begin_micro_batch() inside a micro-batch");
  if (in_evaluation()) {
    // A pass ends when the next begins, so that what holds the loss may outlive end_micro_batch().
    if (recorder.pass_open()) recorder.end_pass();
    recorder.begin_pass(Program::evaluate, shape);
    micro_batches.restart();
    gatherer.begin_sequence(Program::evaluate, false);
    set_phase("evaluate");
    return micro_batches.open(samples);
  }
  const std::int64_t number = micro_batches.begun();
  const bool last = number + 1 == config.accumulation_steps;
  require(number < config.accumulation_steps, "begin_micro_batch() after the step's " +
                                                  std::to_string(config.accumulation_steps) +
                                                  " micro-batches; call step()");
  if (!in_step()) {
    session->throw_failure();
    require_whole_state("begin_micro_batch()");
    store.set_weights_for(/*training=*/true);
    recorder.begin_pass(Program::train, shape);
    state = State::training;
    one_sequence = beside;
    recorder.begin_step(communicators);
    if (store.offload() != nullptr) store.offload()->begin_report();
  } else {
    recorder.next_micro_batch(shape);
  }
  // A rule with sums goes through its state once before the update.
  if (last && store.offload() != nullptr && !updater.has_sums()) store.offload()->read_ahead();
  reducer.begin_micro_batch(number);
  if (!gatherer.in_sequence()) gatherer.begin_sequence(Program::train, !one_sequence && !last);
  if (config.wall_clock_breakdown && !micro_batches.any_open()) recorder.pass_times().begin();
  set_phase("forward");
  return micro_batches.open(samples);
}

void Engine::Impl::select_micro_batch(std::int64_t number) {
  require(micro_batches.is_open(number),
          "select_micro_batch(" + std::to_string(number) + "), which is not open");
  micro_batches.select(number);
}

void Engine::Impl::close_micro_batch(const ConstTensorView& loss_sum, const ConstTensorView& token_count) {
  require(!in_inference(), "end_micro_batch() inside an inference scope, which has no loss");
  require(micro_batches.any_open(), "end_micro_batch() without begin_micro_batch()");
  const std::int64_t micro_batch = micro_batches.current();
  if (const int unit = micro_batches.first_held(micro_batch); unit >= 0) {
    require(false, "end_micro_batch() while unit " + store.units()[static_cast<std::size_t>(unit)].name +
                       " is still held");
  }
  if (!in_evaluation()) {
    const std::string held = reducer.held(micro_batch);
    require(held.empty(), "end_micro_batch() while gradients of unit " + held + " are still held");
    const std::string missing = failure.empty() ? reducer.missing(micro_batch) : failure;
    if (!missing.empty()) {
      // The peers wait in the reduction of this unit: they must learn of it.
      break_down(std::make_exception_ptr(LogicError(missing)));
      std::rethrow_exception(broken);
    }
  }
  if (loss_sum.dtype != DataType::float64 || token_count.dtype != DataType::int64 ||
      loss_sum.elements() != 1 || token_count.elements() != 1) {
    throw InvalidArgument("end_micro_batch() wants one fp64 loss sum and one int64 token count, got " +
                          std::string(name_of(loss_sum.dtype)) + loss_sum.shape.to_string() + " and " +
                          std::string(name_of(token_count.dtype)) + token_count.shape.to_string());
  }
  double* losses = scalars.losses();
  std::int64_t* tokens = scalars.tokens();
  kernels::copy(compute, loss_sum, {losses + micro_batch, DataType::float64, Shape{1}});
  kernels::copy(compute, token_count, {tokens + micro_batch, DataType::int64, Shape{1}});

  micro_batches.close(micro_batch);
  if (in_evaluation()) {
    gatherer.end_sequence();
    double loss = 0;
    std::int64_t count = config.train_batch_size * model.tokens_per_sample;
    runtime.device().copy_to_host(compute, &loss, losses, sizeof(loss));
    runtime.device().copy_to_host(compute, &count, tokens, sizeof(count));
    compute.synchronize();
    evaluation_loss.add(loss);
    evaluation_tokens += count;
    return;
  }
  if (!one_sequence || micro_batches.closed() == config.accumulation_steps) gatherer.end_sequence();
  if (config.wall_clock_breakdown && !micro_batches.any_open()) recorder.pass_times().end();
  reducer.end_micro_batch(micro_batch, micro_batch + 1 == config.accumulation_steps);
}

std::int64_t Engine::begin_micro_batch(const Shape& shape, std::span<const std::int64_t> samples) {
  return impl_->guarded([&] { return impl_->open_micro_batch(shape, samples, /*beside=*/false); });
}

std::int64_t Engine::begin_micro_batch_beside(const Shape& shape, std::span<const std::int64_t> samples) {
  return impl_->guarded([&] { return impl_->open_micro_batch(shape, samples, /*beside=*/true); });
}

void Engine::select_micro_batch(std::int64_t number) {
  impl_->guarded([&] { impl_->select_micro_batch(number); });
}

void Engine::break_down(const std::exception_ptr& error) noexcept {
  impl_->break_down(error);
}

GatheredUnit Engine::gather(UnitId unit) {
  impl_->model.unit(unit);  // throws on an unknown unit
  impl_->guarded([&] { impl_->acquire(unit.index); });
  GatheredUnit handle;
  handle.engine_ = this;
  handle.unit_ = unit.index;
  handle.micro_batch_ = impl_->micro_batches.current();
  handle.exceptions_ = std::uncaught_exceptions();
  return handle;
}

UnitGradients Engine::gradients(UnitId unit) {
  impl_->model.unit(unit);
  impl_->guarded([&] { impl_->open_gradients(unit.index); });
  UnitGradients handle;
  handle.engine_ = this;
  handle.unit_ = unit.index;
  handle.micro_batch_ = impl_->micro_batches.current();
  handle.exceptions_ = std::uncaught_exceptions();
  return handle;
}

void Engine::skip_gradients(UnitId unit) {
  do {
    gradients(unit).reduce();
  } while (!impl_->reducer.submitted(impl_->micro_batches.current(), unit.index));
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
  impl.require(!impl.in_step(),
               "begin_evaluation() inside a step; evaluate between step() and the next micro-batch");
  impl.require(!impl.in_evaluation(), "begin_evaluation() inside an evaluation");
  impl.guarded([&] { impl.store.set_weights_for(/*training=*/false); });
  impl.state = Impl::State::evaluating;
  impl.evaluation_loss = {};
  impl.evaluation_tokens = 0;
}

EvaluationResult Engine::end_evaluation() {
  return impl_->guarded([&] { return impl_->finish_evaluation(); });
}

EvaluationResult Engine::Impl::finish_evaluation() {
  require(state == State::evaluating && !micro_batches.any_open(),
          "end_evaluation() without begin_evaluation(), or inside a micro-batch");
  if (recorder.pass_open()) recorder.end_pass();
  struct Share {
    detail::LossTotal loss;
    std::int64_t tokens;
  };
  // The ranks of the axis `tensor` have equal sums, of which the first counts its own.
  const bool counts = simulated() || tensor == nullptr || tensor->rank() == 0;
  const Share mine = counts ? Share{evaluation_loss, evaluation_tokens} : Share{{}, 0};
  std::vector<Share> all(static_cast<std::size_t>(ranks), mine);
  world
      .all_gather(&mine, all.data(), sizeof(Share), DataType::uint8, 0, {},
                  OperationLabel{"evaluation", "agree", Traffic::control, Tier::host})
      .wait();
  EvaluationResult result;
  detail::LossTotal loss;
  for (const Share& share : all) {
    loss += share.loss;
    result.tokens += share.tokens;
  }
  result.loss = result.tokens > 0 ? loss.value() / static_cast<double>(result.tokens)
                                  : std::numeric_limits<double>::quiet_NaN();
  state = State::idle;
  micro_batches.restart();
  judge_evaluation(result);
  note_dropped_plans();
  (void)gatherer.take_gathered_elements();
  recorder.clear_times();
  set_phase("idle");
  return result;
}

void Engine::Impl::abandon_step() noexcept {
  if (!in_step() || broken) return;
  try {
    store.await_collectives();
    compute.synchronize();
    micro_batches.restart();
    reducer.abandon_step();
    gatherer.end_step();
    gatherer.abandon_sequence();
    recorder.abandon_pass(Program::train);
    recorder.clear_times();
    (void)gatherer.take_quantized_elements();
    (void)gatherer.take_gathered_elements();
    failure.clear();
    state = State::idle;
    set_phase("idle");
  } catch (...) {
    break_down(std::current_exception());
  }
}

void Engine::Impl::begin_inference(const Shape& shape) {
  require(!in_step(), "an inference scope inside a step; open it between step() and the next micro-batch");
  require(!in_inference(), "an inference scope inside another; one is one pass");
  require(!in_evaluation(), "an inference scope inside an evaluation; call end_evaluation() first");
  store.set_weights_for(/*training=*/false);
  state = State::inferring;
  recorder.begin_pass(Program::infer, shape);
  gatherer.begin_sequence(Program::infer, false);
  set_phase("inference");
}

void Engine::Impl::end_inference(bool unwinding) {
  std::string held;
  try {
    for (std::size_t u = 0; u < store.units().size(); ++u) {
      if (gatherer.holders(static_cast<int>(u)) > 0) {
        held = "unit " + store.units()[u].name + " is still held";
      }
    }
    if (!unwinding && !broken && held.empty()) {
      gatherer.end_sequence();
      recorder.end_pass();
    }
  } catch (const LogicError& error) {
    held = error.message();
  } catch (...) {
    break_down(std::current_exception());  // a destructor's caller: the next call throws it
  }
  if (recorder.pass_open()) {
    gatherer.abandon_sequence();
    recorder.abandon_pass(Program::infer);
    if (!unwinding && !broken) runtime.log().warning("an inference scope ended early: " + held);
  }
  state = State::idle;
  (void)gatherer.take_gathered_elements();
  recorder.exposed().clear();
  note_dropped_plans();
  set_phase("idle");
}

void Engine::Impl::note_dropped_plans() {
  if (arena->dropped() == 0 || std::exchange(dropped_plans_noted, true)) return;
  runtime.log().info(
      "passes of many shapes take different buffers: the plan of memory that was not used for longest was "
      "dropped, for " +
      std::to_string(StepArena::most_shapes) +
      " shapes are remembered; a pass that needs it again takes its memory anew (said once)");
}

Engine::StageUses Engine::stage() const {
  const detail::Stages& stages = impl_->stages;
  const int stage = impl_->stage();
  return {stage, stages.count, stages.begin(stage), stages.end(impl_->model, stage)};
}
Device& Engine::device() const {
  return impl_->runtime.device();
}
void Engine::wait_for_message(const Event& received) {
  impl_->recorder.exposed().wait_for(received, Exposed::message);
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
void Engine::prefetch_from_host(HostCopy& copy) {
  impl_->guarded([&] { HostCopies::prefetch(copy); });
}
StepBuffer Engine::fetch_from_host(HostCopy copy) {
  return impl_->guarded([&] { return HostCopies::fetch(std::move(copy)); });
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
std::span<const std::int64_t> Engine::micro_batch_samples() const {
  return impl_->micro_batches.samples();
}
bool Engine::evaluating() const {
  return impl_->in_evaluation();
}
std::int64_t Engine::steps() const {
  return impl_->steps_done;
}
std::int64_t Engine::applied_steps() const {
  return impl_->applied_steps;
}
std::int64_t Engine::skipped_at_end() const {
  return impl_->skipped_at_end;
}
bool Engine::in_doubt() const {
  return impl_->in_doubt;
}
std::int64_t Engine::samples() const {
  return impl_->samples_done;
}
std::int64_t Engine::micro_batch() const {
  return impl_->micro_batches.current();
}
bool Engine::frozen(std::string_view tensor) const {
  return impl_->store.tensors()[static_cast<std::size_t>(impl_->store.find_tensor(tensor))].frozen;
}

}  // namespace tranche
