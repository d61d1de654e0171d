// Construction and destruction of an engine, micro-batches and evaluations, and calls that only forward.

#include "tranche/engine/engine.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "engine/chain_checks.h"
#include "engine/context_checks.h"
#include "engine/engine_impl.h"
#include "engine/exchange.h"
#include "engine/initial_weights.h"
#include "engine/offloaded_state.h"
#include "engine/pipeline_order.h"
#include "engine/run_reports.h"
#include "engine/start_agreement.h"
#include "engine/start_checks.h"
#include "engine/start_notes.h"
#include "engine/start_table.h"
#include "pipeline/schedule/lower.h"
#include "tranche/engine/lora.h"
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

/// Returns the stages with the configured schedule.
Stages scheduled(Stages stages, const Config& config) {
  if (stages.count > 1) stages.schedule = schedule_of(config, stages);
  return stages;
}

/// The options for gathering; a schedule that gathers whole chunks needs a depth of a chunk's units.
GatherOptions gather_options(const Config& config, const Stages& stages, const ModelSpec& model) {
  GatherOptions options(config);
  options.depth = std::max(options.depth, units_held(stages, model));
  return options;
}

}  // namespace

/// Sets the runtime's mesh if the configuration leaves it open.
Config Engine::Impl::checked(Config config, const Runtime& runtime) {
  if (config.mesh.empty() && (runtime.replicas() != nullptr || runtime.pipeline() != nullptr ||
                              runtime.context() != nullptr || runtime.tensor() != nullptr))
    config.mesh = runtime.mesh().to_string();
  validate_config(config, runtime.size());
  runtime.check(config);
  return config;
}

Engine::Impl::Impl(Runtime runtime_in, ModelSpec model_in, Config config_in, EngineOptions options)
    : runtime(std::move(runtime_in)),
      model(with_adapters(std::move(model_in), config_in.lora)),
      config(checked(std::move(config_in), runtime)),
      optimizer(options.optimizer ? std::move(options.optimizer) : make_optimizer(config)),
      scaler(scaler_options(config)),
      world(runtime.all()),
      stages(scheduled(divide(model, config, runtime.mesh().size(MeshAxis::pipeline),
                              runtime.mesh().size(MeshAxis::tensor)),
                       config)),
      compute(runtime.device().compute_stream()),
      breakdown(runtime),
      rule(runtime, config, std::move(options.schedule), breakdown),
      arena(std::make_unique<StepArena>(runtime.memory(Tier::device), runtime.ledger())),
      recorder(*arena, compute, config.debug.plan_memory),
      data_groups(runtime, config, model),
      store(Residency(config),
            with_exchanges(lay_out(model, ParameterGroups(config.group_rules, config.frozen), *optimizer,
                                   runtime.mesh(), stages, runtime.rank(),
                                   [&](const Placement& placement, int buffer) {
                                     return data_groups.of(placement, buffer);
                                   }),
                           config, runtime.device(), *arena, runtime.trace()),
            {runtime.device(), runtime.memory(Tier::device), runtime.memory(Tier::host)}),
      formulas(config, model, store, updater, &stages,
               runtime.pipeline() == nullptr ? 0 : runtime.pipeline()->rank()),
      updater(*optimizer, store.tensors(), config.precision, config.seed),
      matrices(
          store, config, updater, *optimizer,
          [&](const Placement& placement, int buffer) { return data_groups.of_matrices(placement, buffer); },
          runtime.device(), *arena),
      gatherer(store, gather_options(config, stages, model), *arena, compute, recorder.exposed()),
      reducer(store, *arena, compute, runtime.ledger(), scalars, runtime.tensor(), config.overlap),
      traffic(runtime, config, model, stages, store, formulas, matrices, reducer),
      boundary(store, config, updater, matrices, world, runtime.mesh(), runtime.device(), scalars,
               reducer.pieces()),
      session(store, config, world, runtime.device(), runtime.memory(Tier::host), runtime.files(),
              runtime.log(), runtime.trace()),
      progress(config, session),
      base(runtime, config, model, store, workspace_buffer),
      run_record(runtime, config, *optimizer, progress, rule, scaler, reducer),
      loader(runtime, config, store, optimizer->name(), session, progress, base, run_record),
      sequence(runtime, config, model,
               {store, *arena, recorder, gatherer, reducer, scalars, data_groups, boundary}, breakdown) {
  reducer.on_complete([this](FlatBuffer& flat) { sequence.early().complete(flat); });
  if (config.debug.poison_memory) arena->poison_with(make_poison_fill(runtime.device()));
  if (config.workspace_bytes == 0) {
    config.workspace_bytes = kernels::default_workspace_bytes(runtime.device().kind());
  }
  set_phase("start");
  check_threads(config, runtime.device());
  check_context(model, config, runtime.mesh());
  check_neighbours(config, stages.count, runtime.device().kind());
  check_chains(model, config, stages.cuts, runtime.mesh().size(MeshAxis::tensor), runtime.device().kind());
  (void)routing_of(*optimizer, store.tensors());
  check_update(config, *optimizer, store, updater.has_sums());
  check_storable(*optimizer, store);
  reducer.set_reduction_group(agree_on_start(runtime, config, model, stages, *optimizer, rule.schedule()));
  store.set_engine_number(runtime.next_engine_number());
  if (stages.joins_ends()) runtime.pipeline()->join_ends();
  on_all([this] {
    allocate();
    if (config.save_buffer) session.reserve();
  });
  // After all ranks have allocated, so that no rank measures the disk's free space while others fill it.
  if (store.offload() != nullptr && store.offload()->swap() != nullptr) {
    on_all([this] { store.offload()->swap()->create(); });
  }
  draw_initial_weights(store, config, runtime.device(), runtime.memory(Tier::host),
                       {workspace_buffer.data(), workspace_buffer.bytes()});
  start_notes = notes_on_overlap(store, config, runtime.ledger(), runtime.device());
  note_update(config, need_of_all_gradients(*optimizer, store, updater.has_sums()), start_notes);
  set_phase("idle");
}

void Engine::Impl::allocate() {
  check_host_memory(runtime, config, store, formulas);
  if (config.offload.any()) {
    OffloadOptions options;
    options.swap.directory = config.offload.nvme_path;
    options.swap.rank = world.rank();
    options.swap.ranks_on_node = world.local_size();
    options.swap.limit_bytes = runtime.nvme_limit();
    options.swap.simulated = simulated();
    options.link_bytes_per_second = config.debug.host_link_bytes_per_second;
    options.trace = runtime.trace();
    options.host_threads = runtime.host_threads();
    store.set_offload(std::make_unique<OffloadedState>(
        config, store.residency(),
        StateResources{runtime.device(), runtime.memory(Tier::device), runtime.memory(Tier::host)},
        runtime.files(), runtime.ledger(), options));
  }
  if (config.offload.activations) {
    host_copies = std::make_unique<HostCopies>(
        store.offload()->link(), compute, *arena, runtime.memory(Tier::host), runtime.ledger(),
        [this](const Event& event) { recorder.exposed().wait_for(event, Exposed::offload); });
    host_copies->set_poison(config.debug.poison_memory && !simulated());
    recorder.set_host_copies(host_copies.get());
  }
  for (UnitState& unit : store.units()) {
    set_phase("start", unit.name);
    store.allocate(unit);
  }
  set_phase("start");
  workspace_buffer =
      Buffer(runtime.memory(Tier::device), config.workspace_bytes, Category::workspace, "workspace");
  allocate_scalars();
  boundary.allocate(runtime.memory(Tier::device));
  matrices.allocate(runtime.memory(Tier::host));
  if (store.offload() == nullptr) return;
  const std::string fallback =
      store.offload()->prepare(store.units(), visits_of_step(store, config, updater, matrices));
  if (!fallback.empty()) runtime.log().info("offload to nvme goes through threads: " + fallback);
}

void Engine::Impl::on_all(const std::function<void()>& work) {
  allocate_on_all(runtime, work,
                  [&] { return config.offload.any() ? std::string() : formulas.stages_for_comparison(); });
}

Engine::Impl::~Impl() {
  // Collectives in progress in the middle of a step would wait for peers, which wait for this rank.
  if (breakdown.unwinding() && !sequence.idle()) {
    breakdown.end_by_unwinding("in the middle of " + (sequence.in_evaluation()
                                                          ? "an evaluation"
                                                          : "step " + std::to_string(progress.steps() + 1)));
  }
  session.close(!breakdown.ended() && !breakdown.unwinding() && !sequence.in_pass() &&
                !sequence.in_evaluation());
  store.await_collectives();
  try {
    compute.synchronize();
  } catch (...) {
  }
  if (store.offload() != nullptr) store.offload()->close();
}

void Engine::Impl::set_phase(std::string_view phase, std::string_view unit) {
  runtime.ledger().set_phase(phase, unit);
}

// --- Engine ---------------------------------------------------------------------------------------------

Engine::Engine(Runtime& runtime, ModelSpec model, Config config, EngineOptions options)
    : impl_(
          std::make_unique<Impl>(runtime.handle(), std::move(model), std::move(config), std::move(options))) {
  self_ = std::make_shared<Engine*>(this);
}
Engine::Engine(Runtime& runtime, ModelSpec model, Config config, std::unique_ptr<Optimizer> optimizer)
    : Engine(runtime, std::move(model), std::move(config), EngineOptions{.optimizer = std::move(optimizer)}) {
}
Engine::~Engine() {
  *self_ = nullptr;
}

void Engine::Impl::require_full_lengths(const Shape& shape) const {
  const std::int64_t number = sequence.micro_batches().begun();
  const Mesh& mesh = runtime.mesh();
  if (!sequence.early().on() || sequence.in_evaluation() || shape.rank() < 2) return;
  if (number >= config.micro_batches_of(mesh.data_rank(runtime.rank()), mesh.data_ranks())) return;
  const std::int64_t wanted = config.micro_batch_size * model.tokens_per_sample;
  const std::int64_t given = shape[0] * shape[1] * mesh.size(MeshAxis::context);
  if (given >= wanted) return;
  throw ConfigurationError(
      "begin_micro_batch(" + shape.to_string() + ") has " + std::to_string(given) + " tokens, not the " +
      std::to_string(wanted) + " of " + std::to_string(config.micro_batch_size) + " samples of " +
      std::to_string(model.tokens_per_sample) +
      ": tranche.update: as_reduced divides by the full number before tokens are counted; give every sample "
      "its full length, or write at_the_boundary, which counts tokens first");
}

std::int64_t Engine::Impl::open_micro_batch(const Shape& shape, std::span<const std::int64_t> samples,
                                            bool beside) {
  if (sequence.idle()) {
    session.throw_failure();
    loader.require_whole_state("begin_micro_batch()");
  }
  require_full_lengths(shape);
  const std::int64_t number = sequence.open(shape, samples, beside);
  if (sequence.early().on() && sequence.in_step() && number + 1 == config.accumulation_steps) {
    OptimizerStep update = rule.update(progress.applied() + 1);
    rule.check_rates(update, progress.steps() + 1);
    update.gradient_scale = static_cast<float>(unscale(config.train_batch_size * model.tokens_per_sample));
    sequence.early().begin(update);
  }
  return number;
}

std::int64_t Engine::begin_micro_batch(const Shape& shape, std::span<const std::int64_t> samples) {
  return impl_->guarded([&] { return impl_->open_micro_batch(shape, samples, /*beside=*/false); });
}

std::int64_t Engine::begin_micro_batch_beside(const Shape& shape, std::span<const std::int64_t> samples) {
  return impl_->guarded([&] { return impl_->open_micro_batch(shape, samples, /*beside=*/true); });
}

void Engine::select_micro_batch(std::int64_t number) {
  impl_->guarded([&] { impl_->sequence.select(number); });
}

void Engine::break_down(const std::exception_ptr& error) noexcept {
  impl_->breakdown.end(error);
}

GatheredUnit Engine::gathered(UnitId unit, bool of_micro_batch) {
  impl_->model.unit(unit);  // throws for an unknown unit
  impl_->guarded([&] { impl_->sequence.acquire(unit.index, of_micro_batch); });
  GatheredUnit handle;
  handle.engine_ = self_;
  handle.unit_ = unit.index;
  handle.micro_batch_ = of_micro_batch ? impl_->sequence.micro_batches().current() : -1;
  handle.exceptions_ = std::uncaught_exceptions();
  return handle;
}

GatheredUnit Engine::gather(UnitId unit) {
  return gathered(unit, /*of_micro_batch=*/true);
}

GatheredUnit Engine::hold(UnitId unit) {
  return gathered(unit, /*of_micro_batch=*/false);
}

UnitGradients Engine::gradients(UnitId unit) {
  impl_->model.unit(unit);
  impl_->guarded([&] { impl_->sequence.require_first(unit.index); });
  return gradients_ahead(unit);
}

UnitGradients Engine::gradients_ahead(UnitId unit) {
  impl_->model.unit(unit);
  impl_->guarded([&] { impl_->sequence.open_gradients(unit.index); });
  UnitGradients handle;
  handle.engine_ = self_;
  handle.unit_ = unit.index;
  handle.micro_batch_ = impl_->sequence.micro_batches().current();
  handle.exceptions_ = std::uncaught_exceptions();
  return handle;
}

void Engine::skip_gradients(UnitId unit) {
  do {
    gradients(unit).reduce();
  } while (!impl_->reducer.submitted(impl_->sequence.micro_batches().current(), unit.index));
}

void Engine::end_micro_batch(const ConstTensorView& loss_sum, const ConstTensorView& token_count) {
  impl_->guarded([&] { impl_->sequence.close(loss_sum, token_count); });
}

float Engine::loss_gradient_scale() const {
  return static_cast<float>(std::ldexp(impl_->scaler.scale(), -impl_->loss_exponent()));
}

StepResult Engine::step() {
  return impl_->guarded([&] { return impl_->finish_step(); });
}

void Engine::set_gradient_hook(GradientHook hook) {
  require(
      !hook || !impl_->sequence.early().on(),
      "set_gradient_hook() with tranche.update: as_reduced, which updates units before a hook could see the "
      "step's gradients; write at_the_boundary");
  impl_->rule.set_hook(std::move(hook));
}

void Engine::set_learning_rate(std::optional<double> rate) {
  impl_->require_not_updating("set_learning_rate()");
  impl_->rule.set_rate(rate);
}

void Engine::begin_evaluation() {
  impl_->guarded([&] { impl_->sequence.begin_evaluation(); });
}

EvaluationResult Engine::end_evaluation() {
  return impl_->guarded([&] {
    const EvaluationResult result = impl_->sequence.end_evaluation();
    impl_->progress.take_evaluation(result);
    return result;
  });
}

Engine::StageUses Engine::stage() const {
  const detail::Stages& stages = impl_->stages;
  StageUses uses{impl_->traffic.stage(), stages.count, {}, stages.stage_of_chunk.back()};
  for (const int chunk : stages.chunks_of(uses.stage)) {
    uses.chunks.push_back({chunk, stages.chunks(), stages.begin(chunk), stages.end(impl_->model, chunk)});
  }
  return uses;
}
const pipeline::PipelineSchedule& Engine::pipeline_schedule() const {
  if (impl_->stages.schedule == nullptr) throw LogicError("pipeline_schedule() on a mesh without a pipeline");
  return *impl_->stages.schedule;
}
const pipeline::RankSchedule& Engine::rank_schedule(bool training) const {
  std::unique_ptr<const pipeline::RankSchedule>& kept =
      training ? impl_->step_schedule : impl_->forward_schedule;
  if (kept == nullptr) {
    const pipeline::PipelineSchedule& step = pipeline_schedule();
    kept = std::make_unique<const pipeline::RankSchedule>(
        training ? impl_->stages.schedule
                 : std::make_shared<const pipeline::PipelineSchedule>(pipeline::with_messages(
                       pipeline::forward_alone(step.rank_of_chunk, step.stages(), 1))),
        impl_->traffic.stage());
  }
  return *kept;
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
  impl_->breakdown.end_untold(error);
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
  return impl_->sequence.micro_batches().samples();
}
bool Engine::evaluating() const {
  return impl_->sequence.in_evaluation();
}
std::int64_t Engine::steps() const {
  return impl_->progress.steps();
}
std::int64_t Engine::applied_steps() const {
  return impl_->progress.applied();
}
std::int64_t Engine::skipped_at_end() const {
  return impl_->progress.skipped_at_end();
}
bool Engine::in_doubt() const {
  return impl_->progress.in_doubt();
}
std::int64_t Engine::samples() const {
  return impl_->progress.samples();
}
std::int64_t Engine::micro_batch() const {
  return impl_->sequence.micro_batches().current();
}
bool Engine::frozen(std::string_view tensor) const {
  return impl_->store.tensors()[static_cast<std::size_t>(impl_->store.find_tensor(tensor))].frozen;
}

// --- Reports --------------------------------------------------------------------------------------------

std::string Engine::memory_report() {
  return detail::memory_report(impl_->runtime);
}
std::string Engine::traffic_report() const {
  return impl_->traffic.report(impl_->recorder.traffic(), impl_->data_groups);
}
std::optional<Engine::CrossingBytes> Engine::bytes_to_other_nodes() const {
  const auto bytes = impl_->data_groups.to_other_nodes(impl_->recorder.traffic());
  return bytes ? std::optional(CrossingBytes{bytes->rank, bytes->node}) : std::nullopt;
}
std::string Engine::model_report() const {
  return detail::model_report(impl_->model);
}
Engine::StateBytes Engine::state_bytes() const {
  return impl_->formulas.bytes();
}
Engine::StepMemory Engine::step_memory() const {
  return {impl_->arena->block_bytes(), impl_->arena->live_peak("train"), impl_->arena->packings()};
}
std::int64_t Engine::formula_traffic_elements() const {
  return impl_->traffic.all().elements;
}
std::int64_t Engine::formula_traffic_bytes() const {
  return impl_->traffic.all().bytes;
}
std::string Engine::summary(bool verbose) const {
  const Impl& of = *impl_;
  return StartTable(of.runtime, of.config, of.model, of.stages, of.store, of.formulas, of.traffic,
                    of.matrices)
      .text(routing_of(*of.optimizer, of.store.tensors()), of.start_notes, verbose);
}

}  // namespace tranche
