// How an engine begins: layouts, agreement with the other ranks, memory.

#include <algorithm>
#include <array>
#include <cmath>

#include "core/nearest.h"
#include "engine/offloading.h"
#include "tranche/version.h"

namespace tranche {

namespace {

std::uint64_t hash_text(std::string_view text) {
  std::uint64_t hash = 14695981039346656037ull;  // FNV-1a
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return hash;
}

void check_group(const Optimizer& optimizer, const TensorState& tensor) {
  try {
    optimizer.check_group(tensor.group);
  } catch (const InvalidArgument& error) {
    throw ConfigurationError("tranche.parameter_groups, tensor " + tensor.name + ": " + error.message());
  }
}

}  // namespace

void Engine::Impl::lay_out() {
  if (model.units().empty()) throw ConfigurationError("the model has no units");
  set_nominal_tokens();
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
      if (!state.frozen) check_group(*optimizer, state);
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
  updater = std::make_unique<FlatUpdater>(*optimizer, tensors, config.precision.accumulation,
                                          config.precision.compute);
  state_tensors = updater->state();
}

void Engine::Impl::agree_on_start() {
  // The values that must be equal on all ranks, in the order in which a difference is most useful to name.
  struct Start {
    std::uint64_t version, configuration, optimizer, schedule, model_hash, fingerprint;
    std::int64_t local_size;
  };
  const Start mine{hash_text(version),
                   hash_text(config.to_json()),
                   hash_text(optimizer->name() + " " + optimizer->describe()),
                   hash_text(own_schedule.value_or("the configuration's")),
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
                          : all[r].schedule != all[0].schedule           ? "schedule"
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

void Engine::Impl::allocate_gradients(FlatState& flat, const std::string& name) {
  const std::int64_t elements =
      residency.whole_gradients() ? flat.layout.padded_elements() : flat.layout.shard_elements();
  if (flat.gradients || elements == 0) return;
  flat.gradients = Buffer(memory, elements * size_of(config.precision.accumulation), Category::gradients,
                          name + " gradients");
}

void Engine::Impl::allocate_flat(FlatState& flat, const std::string& name, bool trainable) {
  const std::int64_t whole = flat.layout.padded_elements();
  const std::int64_t part = flat.layout.shard_elements();
  if (whole == 0) return;
  const DataType compute_dtype = config.precision.compute;
  MemoryResource& host = runtime.memory(Tier::host);
  if (flat.parameters_tier != OffloadTier::nvme) {
    flat.parameters = Buffer(flat.parameters_tier == OffloadTier::cpu ? host : memory,
                             (residency.whole_parameters() ? whole : part) * size_of(compute_dtype),
                             Category::parameters, name + " parameters");
  }
  if (!trainable) return;
  const std::int64_t kept = residency.whole_optimizer() ? whole : part;
  if (!residency.lends_gradients(flat)) allocate_gradients(flat, name);
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
    offload = std::make_unique<Offloading>(*this, *link);
  }
  if (config.offload.activations) {
    host_copies = std::make_unique<HostCopies>(
        *link, compute, *arena, runtime.memory(Tier::host), runtime.ledger(),
        [this](const Event& event) { exposed.wait_for(event, Exposed::offload); });
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
    if (offload) offload->allocate(unit);
  }
  set_phase("start");
  workspace_buffer = Buffer(memory, config.workspace_bytes, Category::workspace, "workspace");
  scalars = StepScalars(memory, config.accumulation_steps, units.size());
  updater->allocate(memory, residency.whole_optimizer() && ranks > 1);
  if (updater->replayable()) {
    for (UnitState& unit : units) {
      if (!residency.offloaded(unit)) unit.update = runtime.device().create_replay(unit.name + " update");
    }
  }
  if (offload) offload->prepare();
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
      problem += formulas.stages_for_comparison();
    }
    of_budget = error.of_budget();
  }
  // Ranks need not run out together; all of them end with the same kind of error.
  const OperationLabel label{"start", "memory", Traffic::control, Tier::host};
  std::int64_t first = problem.empty() ? ranks : rank;
  shard.all_reduce(&first, 1, DataType::int64, ReduceOperation::minimum, label).wait();
  if (first == ranks) return;
  std::array<char, 4096> text{};
  if (rank == first) problem.copy(text.data(), text.size() - 1);
  const auto bytes = static_cast<std::int64_t>(text.size());
  shard.broadcast(text.data(), bytes, DataType::uint8, static_cast<int>(first), {}, label).wait();
  if (problem.empty()) problem = "rank " + std::to_string(first) + " ran out of memory: " + text.data();
  try {
    // Before all have the text none may end: its failure ends the sender's broadcast too, and who receives
    // after that reads what has taken the text's place.
    shard.barrier(label).wait();
  } catch (const CommunicationError&) {
    // A peer that has left the barrier ended first, and this rank knows why.
  }
  throw OutOfMemory(problem, of_budget);
}

}  // namespace tranche
