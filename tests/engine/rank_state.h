#pragma once
/// The state of one rank in a group without an engine, for tests of the engine's parts.

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/exchange.h"
#include "engine/exposed_time.h"
#include "engine/flat_updater.h"
#include "engine/initial_weights.h"
#include "engine/offloaded_state.h"
#include "engine/piece_statistics.h"
#include "engine/state_store.h"
#include "engine/step_boundary.h"
#include "engine/step_scalars.h"
#include "engine/tensor_access.h"
#include "engine/whole_matrices.h"
#include "tranche/comm/backends.h"
#include "tranche/device/device.h"
#include "tranche/device/memory_resources.h"
#include "tranche/device/step_arena.h"
#include "tranche/partition/mesh.h"

namespace tranche::test {

/// Two units: `a` with two trainable tensors, `b` with a trainable and a frozen one; no size is divisible by
/// many numbers.
inline ModelSpec two_units() {
  ModelSpec model;
  model.add_unit(
      {"a", {{"a.w", {137, 41}, Initializer::normal(1)}, {"a.b", {7}, Initializer::constant(0.5f)}}, 1});
  model.add_unit(
      {"b", {{"b.w", {1009}, Initializer::uniform(-1, 1)}, {"b.frozen", {13}, Initializer::ones()}}, 2});
  model.forward = {{{0}, 0, 1}, {{1}, 0, 1}, {{1}, 1, 1}};
  return model;
}

/// fp32 throughout, SGD without momentum, no overlap except with work for which a test waits.
inline Config plain_config(int stage, std::int64_t accumulation_steps = 1) {
  Config config;
  config.stage = stage;
  config.accumulation_steps = accumulation_steps;
  config.precision = {DataType::float32, DataType::float32, DataType::float32, DataType::float32};
  config.optimizer.type = "SGD";
  config.optimizer.learning_rate = 0.25;
  config.frozen = {"b.frozen"};
  config.workspace_bytes = kernels::minimum_workspace_bytes;
  return config;
}

/// State on the given tiers, in tiles so small that a tensor has several; on nvme with little memory for I/O
/// and without calibration.
inline OffloadConfig in_tiles(std::int64_t elements, OffloadTier optimizer,
                              OffloadTier parameters = OffloadTier::none) {
  OffloadConfig offload;
  offload.optimizer = optimizer;
  offload.parameters = parameters;
  offload.tile_elements = elements;
  offload.io_engine = "threads";
  offload.io_block_bytes = 1 << 20;
  offload.io_depth = 2;
  return offload;
}

/// Units a and b on the two stages of a pipeline with equally many ranks, and the groups of their buffers.
struct Staged {
  Mesh mesh;
  detail::Stages stages;
  detail::RanksOfBuffer ranks_of;
};

/// Everything on which a rank's parts depend. `group` is the group of ranks that share the state, and
/// outlives it. `regroup` may give buffers their own groups.
struct RankState {
  RankState(Config with, Communicator& of_group, detail::FileSystem& files = detail::posix_file_system(),
            const std::string& nvme_folder = {},
            const std::function<void(detail::StateLayout&)>& regroup = {}, const Staged* staged = nullptr)
      : config(std::move(with)),
        group(of_group),
        mesh(staged == nullptr ? Mesh(of_group.size()) : staged->mesh),
        optimizer(make_optimizer(config)),
        device(make_device({.kind = DeviceKind::cpu, .threads = 1})),
        memory(device->memory(Tier::device), ledger),
        host(device->memory(Tier::host), ledger),
        arena(memory, ledger),
        compute(device->compute_stream()),
        exposed(compute),
        store(detail::Residency(config),
              detail::with_exchanges(layout(regroup, staged), config, *device, arena, nullptr),
              {*device, memory, host}),
        scalars(memory, config.accumulation_steps, store.trainable().size()),
        pieces(scalars, nullptr, arena, compute),
        workspace(memory, config.workspace_bytes, Category::workspace, "workspace"),
        updater(*optimizer, store.tensors(), config.precision, config.seed),
        matrices(
            store, config, updater, *optimizer,
            [this](const detail::Placement& placement, int buffer) {
              return detail::DataGroups::MatrixRanks{&group, placement.group(buffer, group.rank()),
                                                     MeshAxis::shard};
            },
            *device, arena) {
    if (config.offload.any()) {
      detail::OffloadOptions options;
      options.swap.directory = nvme_folder;
      options.swap.rank = group.rank();
      store.set_offload(std::make_unique<detail::OffloadedState>(
          config, store.residency(), detail::StateResources{*device, memory, host}, files, ledger, options));
    }
    for (detail::UnitState& unit : store.units()) store.allocate(unit);
    if (store.offload() != nullptr) {
      (void)store.offload()->prepare(store.units(), visits_of_step(store, config, updater, matrices));
      if (store.offload()->swap() != nullptr) store.offload()->swap()->create();
    }
    draw_initial_weights(store, config, *device, host, kernel_workspace());
    compute.synchronize();
  }
  ~RankState() {
    if (store.offload() != nullptr) store.offload()->close();
  }

  detail::StateLayout layout(const std::function<void(detail::StateLayout&)>& regroup, const Staged* staged) {
    const ParameterGroups groups(config.group_rules, config.frozen);
    detail::StateLayout laid = staged == nullptr
                                   ? detail::lay_out(two_units(), groups, *optimizer, mesh, group)
                                   : detail::lay_out(two_units(), groups, *optimizer, mesh, staged->stages,
                                                     group.rank(), staged->ranks_of);
    if (regroup) regroup(laid);
    return laid;
  }
  kernels::Workspace kernel_workspace() const { return {workspace.data(), workspace.bytes()}; }
  detail::TensorAccess access() { return {store, config, group, mesh, *device, memory, kernel_workspace()}; }
  std::vector<float> weight(std::string_view tensor) { return access().weight(store.find_tensor(tensor)); }
  /// Adds `value` to every element of a view on the compute stream.
  void add(const TensorView& view, float value) {
    auto* values = view.as<float>();
    compute.enqueue("add", [values, count = view.elements(), value] {
      for (std::int64_t i = 0; i < count; ++i) values[i] += value;
    });
  }

  Config config;
  Communicator& group;
  Mesh mesh;
  std::unique_ptr<Optimizer> optimizer;
  Ledger ledger;
  std::unique_ptr<Device> device;
  TrackingResource memory, host;
  StepArena arena;
  Stream& compute;
  detail::ExposedTime exposed;
  detail::StateStore store;
  detail::StepScalars scalars;
  detail::PieceStatistics pieces;
  Buffer workspace;
  detail::FlatUpdater updater;
  detail::WholeMatrices matrices;
};

}  // namespace tranche::test
