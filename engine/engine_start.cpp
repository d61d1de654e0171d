// How an engine begins: agreement with the other ranks, memory.

#include <algorithm>
#include <array>
#include <cmath>

#include "device/process_memory.h"
#include "engine/engine_impl.h"
#include "engine/offloaded_state.h"
#include "offload/calibration.h"
#include "tranche/kernels/matmul.h"
#include "tranche/version.h"

namespace tranche {

using namespace detail;

namespace {

std::uint64_t hash_text(std::string_view text) {
  std::uint64_t hash = 14695981039346656037ull;  // FNV-1a
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return hash;
}

}  // namespace

bool Engine::Impl::threads_change_bits() const {
  return runtime.device().kind() == DeviceKind::cpu && config.precision.compute == DataType::bfloat16 &&
         !kernels::matmul_path(DeviceKind::cpu, DataType::bfloat16).starts_with("widened");
}

void Engine::Impl::check_threads() const {
  if (!config.world_size_invariant || config.threads > 0 || !threads_change_bits()) return;
  throw ConfigurationError(
      "tranche.world_size_invariant: on this CPU oneDNN may multiply bf16, with bits that depend on the "
      "number "
      "of threads, which is the node's cores over its ranks; give tranche.threads (--threads), the same for "
      "every number of ranks");
}

void Engine::Impl::describe_routing() {
  std::vector<TrainableTensor> tensors;
  for (const TensorState& tensor : store.tensors()) {
    if (!tensor.frozen) tensors.push_back(trainable_tensor(tensor));
  }
  try {
    routing = optimizer->routing(tensors);
  } catch (const InvalidArgument& error) {
    throw ConfigurationError("optimizer " + error.message());
  }
}

void Engine::Impl::check_host_memory() const {
  // A CPU's device memory is the host's; a limit of it has its own words.
  const bool device_counts = runtime.device().host_accessible() && config.device_memory_limit == 0;
  if (simulated() || !(config.offload.any() || device_counts)) return;
  std::int64_t needed = 0;
  const std::int64_t accumulation = size_of(config.precision.accumulation);
  std::int64_t largest = 0, largest_tile = 0;
  for (const UnitState& unit : store.units()) {
    std::int64_t shard_bytes = 0;
    for (const FlatBuffer& flat : unit.buffers) {
      if (flat.parameters_tier != OffloadTier::none) {
        shard_bytes += flat.layout.shard_elements() * size_of(config.precision.compute);
      }
      const std::int64_t kept = store.residency().optimizer_range(flat).size();
      if (flat.optimizer_tier != OffloadTier::none) needed += kept * accumulation;
      const auto bytes = [&](std::int64_t elements) {
        return bytes_of(store.residency().master_type(flat), elements) +
               detail::state_bytes(flat.states, elements);
      };
      if (flat.optimizer_tier == OffloadTier::cpu) needed += bytes(kept);
      largest_tile = std::max(largest_tile, bytes(config.offload.tile_elements));
    }
    if (config.offload.parameters == OffloadTier::cpu) needed += shard_bytes;
    largest = std::max(largest, shard_bytes);
  }
  if (config.offload.parameters == OffloadTier::nvme) needed += config.offload.parameter_buffers * largest;
  if (config.offload.optimizer == OffloadTier::nvme) {
    needed += config.offload.tile_buffers * largest_tile;
  }
  if (device_counts) {
    const StateFormulas::Bytes bytes = formulas.bytes();
    const StateFormulas::Bytes::OnTier& here = bytes.tiers[static_cast<std::size_t>(Tier::device)];
    needed += here.parameters + here.gradients + here.optimizer;
  }
  const AvailableMemory available = available_memory();
  const std::int64_t sharing = std::max(1, world.local_size());
  if (needed * sharing <= available.bytes) return;
  throw OutOfMemory(
      "model state takes " + format_bytes(needed) + " of host memory on each of " + std::to_string(sharing) +
      " ranks of this node, " + format_bytes(needed * sharing) + " together, but " +
      format_bytes(available.bytes) + " are " +
      (available.of_group ? "left by the control group's limit" : "available") +
      "; use a higher stage or more nodes, move the optimizer to nvme, or lower offload_optimizer.ratio");
}

namespace {

/// Collective. The first line of ModelSpec::describe() in which the model of `other` is not rank 0's.
std::string difference_of_models(Communicator& ranks, const ModelSpec& model, int other) {
  const OperationLabel label{"start", "models", Traffic::control, Tier::host};
  const auto text_of = [&](int root) {
    std::string text;
    if (ranks.rank() == root) {
      for (const std::string& line : model.describe()) text += line + "\n";
    }
    auto size = static_cast<std::int64_t>(text.size());
    ranks.broadcast(&size, 1, DataType::int64, root, {}, label).wait();
    text.resize(static_cast<std::size_t>(size));
    ranks.broadcast(text.data(), size, DataType::uint8, root, {}, label).wait();
    return text;
  };
  const std::string first = text_of(0), second = text_of(other);
  const auto begin = static_cast<std::size_t>(
      std::mismatch(first.begin(), first.end(), second.begin(), second.end()).first - first.begin());
  const std::size_t before = begin == 0 ? std::string::npos : first.rfind('\n', begin - 1);
  const std::size_t line = before == std::string::npos ? 0 : before + 1;
  const auto line_of = [&](const std::string& text) {
    return line >= text.size() ? std::string("nothing") : text.substr(line, text.find('\n', line) - line);
  };
  return "it has " + line_of(second) + " where rank 0 has " + line_of(first);
}

}  // namespace

void Engine::Impl::agree_on_start() {
  // The values that must be equal on all ranks, in the order in which a difference is most useful to name.
  struct Start {
    std::uint64_t version, cut, pipeline_schedule, configuration, optimizer, schedule, model_hash,
        fingerprint;
    std::int64_t local_size;
  };
  std::string cut;
  for (const int begin : stages.begins) cut += std::to_string(begin) + " ";
  const Start mine{hash_text(version),
                   hash_text(cut),
                   hash_text(std::string(name_of(config.pipeline_schedule))),
                   hash_text(config.to_json()),
                   hash_text(optimizer->name() + " " + optimizer->describe()),
                   hash_text(own_schedule.value_or("the configuration's")),
                   model.hash(),
                   hash_text(runtime.numerics_fingerprint()),
                   (pipeline == nullptr && tensor == nullptr ? world : shard).local_size()};
  std::vector<Start> starts(static_cast<std::size_t>(ranks), mine);
  world
      .all_gather(&mine, starts.data(), sizeof(Start), DataType::uint8, 0, {},
                  OperationLabel{"start", "agree", Traffic::control, Tier::host})
      .wait();
  constexpr const char* of_model = "model";
  for (std::size_t r = 0; r < starts.size(); ++r) {
    // A cut that differs under one configuration is a consequence of what differs in the model.
    const bool configured = starts[r].configuration != starts[0].configuration;
    const char* differs = starts[r].version != starts[0].version         ? "library version"
                          : configured && starts[r].cut != starts[0].cut ? "cut"
                          : starts[r].pipeline_schedule != starts[0].pipeline_schedule
                              ? "schedule of the pipeline"
                          : starts[r].configuration != starts[0].configuration ? "configuration"
                          : starts[r].optimizer != starts[0].optimizer         ? "optimizer"
                          : starts[r].schedule != starts[0].schedule           ? "schedule"
                          : starts[r].model_hash != starts[0].model_hash       ? of_model
                          : starts[r].fingerprint != starts[0].fingerprint
                              ? "numerics fingerprint (device kind, instruction set, libraries, threads)"
                              : nullptr;
    if (differs == of_model) {
      throw ConfigurationError(name_of_rank(r) + " was started with another model than rank 0: " +
                               difference_of_models(world, model, static_cast<int>(r)) +
                               "; start all ranks with the same program, files and flags");
    }
    if (differs != nullptr) {
      throw ConfigurationError(name_of_rank(r) + " was started with another " + differs +
                               " than rank 0; start all ranks with the same program, files and flags");
    }
  }
  // Nodes may hold different numbers of ranks; the order of a sum must be one for all.
  reducer.set_reduction_group(config.world_size_invariant  ? 0
                              : replicas != nullptr        ? shard.size()
                              : config.reduction_group > 0 ? config.reduction_group
                                                           : static_cast<int>(starts[0].local_size));
}

void Engine::Impl::allocate() {
  check_host_memory();
  if (config.offload.any()) {
    OffloadOptions options;
    options.swap.directory = config.offload.nvme_path;
    options.swap.rank = rank;
    options.swap.ranks_on_node = world.local_size();
    options.swap.limit_bytes = runtime.nvme_limit();
    options.swap.simulated = simulated();
    options.link_bytes_per_second = config.debug.host_link_bytes_per_second;
    options.trace = runtime.trace();
    options.host_threads = runtime.host_threads();
    store.set_offload(std::make_unique<OffloadedState>(
        config, store.residency(), StateResources{runtime.device(), memory, runtime.memory(Tier::host)},
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
  workspace_buffer = Buffer(memory, config.workspace_bytes, Category::workspace, "workspace");
  scalars = StepScalars(memory, config.accumulation_steps, store.trainable().size(),
                        config.gradient_noise_scale ? config.accumulation_steps : 0);
  boundary.allocate(memory);
  matrices.allocate(runtime.memory(Tier::host));
  if (store.offload() == nullptr) return;
  const std::string fallback = store.offload()->prepare(store.units());
  if (!fallback.empty()) runtime.log().info("offload to nvme goes through threads: " + fallback);
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
  world.all_reduce(&first, 1, DataType::int64, ReduceOperation::minimum, label).wait();
  if (first == ranks) return;
  std::array<char, 4096> text{};
  if (rank == first) problem.copy(text.data(), text.size() - 1);
  const auto bytes = static_cast<std::int64_t>(text.size());
  world.broadcast(text.data(), bytes, DataType::uint8, static_cast<int>(first), {}, label).wait();
  if (problem.empty())
    problem = name_of_rank(static_cast<std::size_t>(first)) + " ran out of memory: " + text.data();
  try {
    // Before all have the text none may end: its failure ends the sender's broadcast too, and who receives
    // after that reads what has taken the text's place.
    world.barrier(label).wait();
  } catch (const CommunicationError&) {
    // A peer that has left the barrier ended first, and this rank knows why.
  }
  throw OutOfMemory(problem, of_budget);
}

}  // namespace tranche
