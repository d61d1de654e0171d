// Life of an engine: layout, agreement at the start, allocation, initial weights; and the calls that only
// pass on.

#include "tranche/engine/engine.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "tranche/core/clock.h"
#include "tranche/engine/offloading.h"
#include "tranche/engine/saving.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/kernels/matmul.h"
#include "tranche/version.h"

namespace tranche {

namespace {

std::uint64_t hash_text(std::string_view text) {
  std::uint64_t hash = 14695981039346656037ull;  // FNV-1a
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return hash;
}

LossScalerOptions scaler_options(const Config& config) {
  if (config.loss_scaling) return config.loss_scaler;
  LossScalerOptions fixed;
  fixed.dynamic = false;
  fixed.initial_scale = 1;
  return fixed;
}

}  // namespace

Engine::Impl::Impl(Runtime& runtime_in, ModelSpec model_in, Config config_in,
                   std::unique_ptr<Optimizer> optimizer_in)
    : runtime(runtime_in),
      model(std::move(model_in)),
      config((validate_config(config_in, runtime_in.shard().size()), std::move(config_in))),
      optimizer(optimizer_in ? std::move(optimizer_in) : make_optimizer(config)),
      schedule(make_schedule(config)),
      groups(config.group_rules, config.frozen),
      scaler(scaler_options(config)),
      shard(runtime_in.shard()),
      compute(runtime_in.device().compute_stream()),
      memory(runtime_in.memory(Tier::device)),
      rank(shard.rank()),
      ranks(shard.size()),
      stage(config.stage),
      policy(config.effective_reduction(ranks)),
      arena(std::make_unique<StepArena>(memory, runtime_in.ledger())),
      state_tensors(optimizer->state()) {
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
    prepare_saving();
  });
  // Once all ranks have found room, so that none looks at a disk that others fill already.
  if (offload && offload->swap) allocate_on_all([this] { offload->swap->create(); });
  initialize_weights();
  set_phase("idle");
  step_started = step_ended = seconds_now();
}

Engine::Impl::~Impl() {
  close_saving();
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
  close_offloading();
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
  } catch (const Error& known) {
    shard.post_failure(known.message(), 2.0);
  } catch (const std::exception& known) {
    shard.post_failure(known.what(), 2.0);
  } catch (...) {
    shard.post_failure("unknown error", 2.0);
  }
}

void Engine::Impl::set_phase(std::string_view phase, std::string_view unit) {
  runtime.ledger().set_phase(phase, unit);
}

void Engine::Impl::lay_out() {
  if (model.units().empty()) throw ConfigurationError("the model has no units");
  const double nominal =
      static_cast<double>(config.train_batch_size) * static_cast<double>(model.tokens_per_sample);
  loss_exponent = static_cast<int>(std::lround(std::log2(std::max(nominal, 1.0))));
  std::vector<std::string> names;
  for (const UnitSpec& spec : model.units()) {
    std::vector<std::int64_t> trainable_sizes, frozen_sizes;
    std::vector<int> trainable_tensors, frozen_tensors, all;
    for (const TensorSpec& tensor : spec.tensors) {
      TensorState state;
      state.name = tensor.name;
      state.aliases = tensor.aliases;
      state.shape = tensor.shape;
      state.initializer = tensor.initializer;
      state.model_index = tensors.size();
      state.unit = static_cast<int>(units.size());
      state.frozen = groups.frozen(tensor.name);
      state.group = groups.resolve(tensor.name, tensor.shape.rank());
      const auto known = std::find_if(group_table.begin(), group_table.end(), [&](const GroupOptions& group) {
        return group.learning_rate_factor == state.group.learning_rate_factor &&
               group.decay == state.group.decay;
      });
      state.group_index = static_cast<std::size_t>(known - group_table.begin());
      if (known == group_table.end()) group_table.push_back(state.group);
      auto& sizes = state.frozen ? frozen_sizes : trainable_sizes;
      state.flat_index = static_cast<int>(sizes.size());
      sizes.push_back(tensor.shape.elements());
      const int index = static_cast<int>(tensors.size());
      (state.frozen ? frozen_tensors : trainable_tensors).push_back(index);
      all.push_back(index);
      tensor_index.emplace(tensor.name, index);
      names.push_back(tensor.name);
      tensors.push_back(std::move(state));
    }
    units.emplace_back(spec.name, spec.uses_per_pass, FlatState(trainable_sizes, ranks),
                       FlatState(frozen_sizes, ranks));
    units.back().trainable.tensors = std::move(trainable_tensors);
    units.back().frozen.tensors = std::move(frozen_tensors);
    units.back().tensors = std::move(all);
  }
  const std::vector<std::string> unmatched = groups.unmatched(names);
  if (!unmatched.empty()) {
    std::string plain = unmatched.front();
    std::erase(plain, '*');
    const std::string near = nearest(plain, names);
    throw ConfigurationError("pattern '" + unmatched.front() +
                             "' in tranche.frozen or tranche.parameter_groups matches no tensor" +
                             (near.empty() ? "; the first tensor is '" + names.front() + "'"
                                           : "; the nearest name is '" + near + "'"));
  }
  if (std::all_of(tensors.begin(), tensors.end(), [](const TensorState& t) { return t.frozen; })) {
    throw ConfigurationError("tranche.frozen leaves no tensor to train");
  }
}

void Engine::Impl::agree_on_start() {
  // What must be equal on all ranks, in the order in which a difference is most useful to name.
  struct Start {
    std::uint64_t version, configuration, optimizer, model_hash, fingerprint;
    std::int64_t local_size;
  };
  const Start mine{hash_text(version),
                   hash_text(config.to_json()),
                   hash_text(optimizer->name() + " " + optimizer->describe()),
                   model.hash(),
                   hash_text(runtime.numerics_fingerprint()),
                   shard.local_size()};
  std::vector<Start> all(static_cast<std::size_t>(ranks), mine);
  shard
      .all_gather(&mine, all.data(), sizeof(Start), DataType::uint8, 0, {},
                  OperationLabel{"start", "agree", Traffic::control, Tier::host})
      .wait();
  for (std::size_t r = 0; r < all.size(); ++r) {
    const char* differs = all[r].version != all[0].version               ? "library version"
                          : all[r].configuration != all[0].configuration ? "configuration"
                          : all[r].optimizer != all[0].optimizer         ? "optimizer"
                          : all[r].model_hash != all[0].model_hash       ? "model"
                          : all[r].fingerprint != all[0].fingerprint
                              ? "numerics fingerprint (device kind, instruction set, libraries, threads)"
                              : nullptr;
    if (differs != nullptr) {
      throw ConfigurationError("rank " + std::to_string(r) + " started with another " + differs +
                               " than rank 0; start all ranks with the same program, files and flags");
    }
  }
  // Hosts may hold different numbers of ranks; the bracket of a sum must be one for all.
  reduction_group = config.reduction_group > 0 ? config.reduction_group : static_cast<int>(all[0].local_size);
}

std::byte* Engine::Impl::at(const FlatState& flat, void* memory_in, bool whole, std::int64_t position,
                            DataType dtype) const {
  const std::int64_t first = whole ? 0 : flat.layout.shard_range(rank).begin;
  return static_cast<std::byte*>(memory_in) + (position - first) * size_of(dtype);
}

std::byte* Engine::Impl::parameters_shard(const FlatState& flat) const {
  return at(flat, flat.parameters.data(), whole_parameters(), flat.layout.shard_range(rank).begin,
            config.precision.compute);
}

std::byte* Engine::Impl::gradients_shard(const FlatState& flat) const {
  return at(flat, flat.gradients_data(), whole_gradients(), flat.layout.shard_range(rank).begin,
            config.precision.accumulation);
}

TensorView Engine::Impl::master_view(const FlatState& flat, std::int64_t position,
                                     std::int64_t elements) const {
  void* data = flat.master
                   ? at(flat, flat.master.data(), whole_optimizer(), position, DataType::float32)
                   : at(flat, flat.parameters.data(), whole_parameters(), position, DataType::float32);
  return {data, DataType::float32, Shape{elements}};
}

ElementRange Engine::Impl::optimizer_range(const FlatState& flat) const {
  return whole_optimizer() ? ElementRange{0, flat.layout.padded_elements()} : flat.layout.shard_range(rank);
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

void Engine::Impl::allocate_flat(FlatState& flat, const std::string& name, bool trainable) {
  const std::int64_t whole = flat.layout.padded_elements();
  const std::int64_t part = flat.layout.shard_elements();
  if (whole == 0) return;
  const DataType compute_dtype = config.precision.compute;
  MemoryResource& host = runtime.memory(Tier::host);
  if (flat.parameters_tier != OffloadTier::nvme) {
    flat.parameters = Buffer(flat.parameters_tier == OffloadTier::cpu ? host : memory,
                             (whole_parameters() ? whole : part) * size_of(compute_dtype),
                             Category::parameters, name + " parameters");
  }
  if (!trainable) return;
  const std::int64_t kept = whole_optimizer() ? whole : part;
  if (!lends_gradients(flat)) {
    flat.gradients =
        Buffer(memory, (whole_gradients() ? whole : part) * size_of(config.precision.accumulation),
               Category::gradients, name + " gradients");
  }
  if (flat.optimizer_tier == OffloadTier::nvme) return;
  const bool on_host = flat.optimizer_tier == OffloadTier::cpu;
  MemoryResource& home = on_host ? host : memory;
  if (compute_dtype != DataType::float32 || flat.optimizer_tier != flat.parameters_tier) {
    flat.master = Buffer(home, kept * size_of(DataType::float32), Category::optimizer, name + " master");
  }
  for (const OptimizerStateTensor& state : state_tensors) {
    flat.state.emplace_back(home, kept * size_of(state.dtype), Category::optimizer, name + " " + state.name);
  }
}

void Engine::Impl::allocate() {
  check_host_memory();
  if (config.offload.any()) {
    link = std::make_unique<HostLink>(
        runtime.device(), HostLinkOptions{config.debug.host_link_bytes_per_second, runtime.trace()});
    offload = std::make_unique<Offloading>(*link);
  }
  if (config.offload.activations) {
    host_copies =
        std::make_unique<HostCopies>(*link, compute, *arena, runtime.memory(Tier::host), runtime.ledger(),
                                     [this](const Event& event) { wait_for_event(event, &exposed_offload); });
    host_copies->set_poison(config.debug.poison_memory && !simulated());
  }
  if (config.offload.uses_nvme()) {
    SwapFileOptions swap;
    swap.directory = config.offload.nvme_path;
    swap.rank = rank;
    swap.ranks_on_host = shard.local_size();
    swap.limit_bytes = runtime.nvme_limit();
    swap.simulated = simulated();
    offload->swap = std::make_unique<SwapFile>(std::move(swap), runtime.files(), runtime.ledger());
  }
  for (UnitState& unit : units) {
    set_phase("start", unit.name);
    allocate_flat(unit.trainable, unit.name, true);
    allocate_flat(unit.frozen, unit.name + " frozen", false);
    allocate_offloaded(unit);
  }
  set_phase("start");
  workspace_buffer = Buffer(memory, config.workspace_bytes, Category::workspace, "workspace");
  scalars = Buffer(memory,
                   config.accumulation_steps * 16 +
                       static_cast<std::int64_t>(units.size() * sizeof(kernels::GradientStatistics)),
                   Category::other, "step scalars");
  const auto sums = static_cast<std::int64_t>(tensors.size()) * optimizer->statistics_per_tensor();
  const auto arguments = static_cast<std::int64_t>(group_table.size()) * argument_stride();
  if (arguments > 0) {
    arguments_buffer = Buffer(memory, arguments, Category::other, "optimizer arguments");
    for (UnitState& unit : units) {
      if (!offloaded(unit)) unit.update = runtime.device().create_replay(unit.name + " update");
    }
  }
  prepare_offloading();
  if (sums > 0) statistics_buffer = Buffer(memory, sums * 8, Category::other, "optimizer statistics");
}

void Engine::Impl::allocate_on_all(const std::function<void()>& work) {
  std::string problem;
  bool of_budget = true;
  try {
    work();
  } catch (const OutOfMemory& error) {
    problem = error.message();
    if (!config.offload.any()) {
      if (!problem.ends_with('\n')) problem += '\n';
      problem += stages_for_comparison();
    }
    of_budget = error.of_budget();
  }
  // Ranks need not run out together; all of them end with the same kind of error, and none waits for the
  // others.
  const std::string said = " ran out of memory: ";
  try {
    std::int64_t first = problem.empty() ? ranks : rank;
    shard
        .all_reduce(&first, 1, DataType::int64, ReduceOperation::minimum,
                    OperationLabel{"start", "memory", Traffic::control, Tier::host})
        .wait();
    if (first == ranks) return;
    std::array<char, 4096> text{};
    if (rank == first) problem.copy(text.data(), text.size() - 1);
    shard
        .broadcast(text.data(), static_cast<std::int64_t>(text.size()), DataType::uint8,
                   static_cast<int>(first), {},
                   OperationLabel{"start", "memory", Traffic::control, Tier::host})
        .wait();
    if (problem.empty()) problem = "rank " + std::to_string(first) + said + text.data();
  } catch (const CommunicationError& error) {
    // A peer that had learnt of it, and has ended, was quicker than the last message of the exchange.
    const std::size_t end = error.message().find(said);
    if (problem.empty()) {
      if (end == std::string::npos) throw;
      problem = error.message().substr(error.message().rfind("rank ", end));
    }
  }
  throw OutOfMemory(problem, of_budget);
}

/// Initial weights of elements of a piece, from the `done`-th on.
void Engine::Impl::draw(const FlatState& flat, const TensorPiece& piece, std::int64_t done,
                        const TensorView& target) {
  const TensorState& tensor =
      tensors[static_cast<std::size_t>(flat.tensors[static_cast<std::size_t>(piece.tensor)])];
  const RandomKey key{config.seed, RandomPurpose::initialization, tensor.model_index};
  const std::int64_t first = piece.tensor_begin + done;
  const Initializer& how = tensor.initializer;
  switch (how.kind) {
    case Initializer::Kind::constant:
      kernels::fill_constant(compute, target, how.a);
      break;
    case Initializer::Kind::normal:
      kernels::fill_normal(compute, target, key, first, how.a, how.b);
      break;
    case Initializer::Kind::uniform:
      kernels::fill_uniform(compute, target, key, first, how.a, how.b);
      break;
  }
}

void Engine::Impl::initialize_trainable(UnitState& unit) {
  FlatState& flat = unit.trainable;
  const DataType dtype = config.precision.compute;
  const std::int64_t kept = whole_parameters() ? flat.layout.padded_elements() : flat.layout.shard_elements();
  if (flat.parameters_tier == OffloadTier::none) {
    kernels::fill_zero(compute, {flat.parameters.data(), dtype, Shape{kept}});
  } else if (flat.parameters_tier == OffloadTier::cpu) {
    kernels::fill_zero(*offload->host, {flat.parameters.data(), dtype, Shape{kept}});
    offload->host->synchronize();  // weights drawn on the device take another road
  }
  // Drawn on the device, whose bits they are, in tiles that fit the workspace; each rank draws what it keeps.
  const std::int64_t tile = config.workspace_bytes / size_of(DataType::float32);
  visit_state(unit, optimizer_range(flat), Access::replace, [&](const Stretch& stretch) {
    const std::int64_t elements = stretch.range.size();
    kernels::fill_zero(*stretch.stream, {stretch.master, DataType::float32, Shape{elements}});
    for (std::size_t s = 0; s < state_tensors.size(); ++s) {
      kernels::fill_constant(*stretch.stream, {stretch.state[s], state_tensors[s].dtype, Shape{elements}},
                             state_tensors[s].initial_value);
    }
    if (stretch.on_host) stretch.stream->synchronize();
    for (const TensorPiece& piece : flat.layout.pieces(stretch.range)) {
      for (std::int64_t done = 0; done < piece.elements; done += tile) {
        const std::int64_t count = std::min(tile, piece.elements - done);
        std::byte* home =
            stretch.master + (piece.buffer_begin + done - stretch.range.begin) * size_of(DataType::float32);
        const TensorView drawn{stretch.on_host ? workspace_buffer.data() : home, DataType::float32,
                               Shape{count}};
        draw(flat, piece, done, drawn);
        if (stretch.on_host) read_from(home, drawn.data, count * size_of(DataType::float32), false);
      }
    }
    if (offloaded(unit)) {
      (void)publish_stretch(unit, stretch);
    } else if (dtype != DataType::float32) {
      kernels::cast(compute, {stretch.master, DataType::float32, Shape{elements}},
                    {at(flat, flat.parameters.data(), whole_parameters(), stretch.range.begin, dtype), dtype,
                     Shape{elements}});
    }
  });
  if (!offloaded(unit)) unit.shard_ready = compute.record();
  if (ranks > 1 && whole_parameters() && !whole_optimizer()) {
    const std::vector<Event> ready{unit.shard_ready};
    flat.filled = all_gather_shard(flat, flat.parameters.data(), dtype, ready, unit.name, "start");
  }
}

void Engine::Impl::initialize_frozen(UnitState& unit) {
  FlatState& flat = unit.frozen;
  const DataType dtype = config.precision.compute;
  const std::int64_t held = whole_parameters() ? flat.layout.padded_elements() : flat.layout.shard_elements();
  const bool away = flat.parameters_tier != OffloadTier::none;
  if (!away) {
    kernels::fill_zero(compute, {flat.parameters.data(), dtype, Shape{held}});
  } else if (flat.parameters_tier == OffloadTier::cpu && !simulated()) {
    std::memset(flat.parameters.data(), 0, static_cast<std::size_t>(flat.parameters.bytes()));
  }
  // fp32 draws, their rounding, and for what lives elsewhere a copy on the way there.
  const std::int64_t tile = config.workspace_bytes / (2 * size_of(DataType::float32));
  auto* second = static_cast<std::byte*>(workspace_buffer.data()) + tile * size_of(DataType::float32);
  std::vector<std::byte> there;
  for (const TensorPiece& piece : flat.layout.pieces(optimizer_range(flat))) {
    for (std::int64_t done = 0; done < piece.elements; done += tile) {
      const std::int64_t count = std::min(tile, piece.elements - done);
      const std::int64_t position = piece.buffer_begin + done;
      void* target = away ? second : at(flat, flat.parameters.data(), whole_parameters(), position, dtype);
      if (dtype == DataType::float32) {
        draw(flat, piece, done, {target, dtype, Shape{count}});
      } else {
        const TensorView drawn{workspace_buffer.data(), DataType::float32, Shape{count}};
        draw(flat, piece, done, drawn);
        kernels::cast(compute, drawn, {target, dtype, Shape{count}});
      }
      if (!away) continue;
      there.resize(simulated() ? 0 : static_cast<std::size_t>(count * size_of(dtype)));
      read_from(there.data(), target, count * size_of(dtype), false);
      write_parameters(flat, {position, position + count}, there.data());
    }
  }
  if (offloaded(unit)) {
    compute.synchronize();  // shard_ready tells of the trainable ones
  } else {
    unit.shard_ready = compute.record();
  }
  if (ranks > 1 && whole_parameters() && !whole_optimizer()) {
    const std::vector<Event> ready{unit.shard_ready};
    flat.filled = all_gather_shard(flat, flat.parameters.data(), dtype, ready, unit.name, "start");
  }
}

void Engine::Impl::initialize_weights() {
  for (UnitState& unit : units) {
    if (unit.trainable.layout.padded_elements() > 0) initialize_trainable(unit);
    if (unit.frozen.layout.padded_elements() > 0) initialize_frozen(unit);
  }
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
  const bool evaluation = in_evaluation;
  const bool record = config.debug.plan_memory && (evaluation ? evaluation_passes : train_passes) == 1;
  if (host_copies) host_copies->begin_pass(program, record);
  arena->begin(program, record);
}

void Engine::Impl::end_pass() {
  if (host_copies) host_copies->end_pass();
  arena->end();
}

// --- Engine ---------------------------------------------------------------------------------------------

Engine::Engine(Runtime& runtime, ModelSpec model, Config config, std::unique_ptr<Optimizer> optimizer)
    : impl_(std::make_unique<Impl>(runtime, std::move(model), std::move(config), std::move(optimizer))) {}
Engine::~Engine() = default;

void Engine::Impl::open_micro_batch() {
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
      throw_save_failure();
      require_whole_state("begin_micro_batch()");
      begin_pass("train");
      in_step = true;
      step_started = seconds_now();
      between_steps = step_started - step_ended;
      traffic_before = shard.meter().counts(Traffic::data);
      control_before = shard.meter().counts(Traffic::control);
      begin_offload_report();
    }
    if (micro_batch + 1 == config.accumulation_steps) read_ahead();
  }
  in_micro_batch = true;
  set_phase(in_evaluation ? "evaluate" : "forward");
}

void Engine::begin_micro_batch() {
  impl_->guarded([&] { impl_->open_micro_batch(); });
}

GatheredUnit Engine::gather(UnitId unit) {
  impl_->model.unit(unit);  // throws on an unknown unit
  impl_->guarded([&] { impl_->acquire_unit(unit.index); });
  GatheredUnit handle;
  handle.engine_ = this;
  handle.unit_ = unit.index;
  return handle;
}

UnitGradients Engine::gradients(UnitId unit) {
  impl_->model.unit(unit);
  impl_->guarded([&] { impl_->open_gradients(unit.index); });
  UnitGradients handle;
  handle.engine_ = this;
  handle.unit_ = unit.index;
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
  step_gathered_elements = 0;
  exposed_waits.clear();
  exposed_gather = exposed_offload = 0;
  set_phase("idle");
  return result;
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
