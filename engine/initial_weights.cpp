// Initial weights: drawn by tensor and element, each rank what it keeps, to where it lives.

#include <algorithm>
#include <cstring>

#include "engine/offloading.h"
#include "tranche/kernels/elementwise.h"

namespace tranche {

struct Engine::Impl::InitialWeights {
  Impl& engine;

  /// The caller's own values, by way of host memory.
  void fill(const Initializer& how, std::int64_t first, const TensorView& target);
  /// Of elements of a piece, from the `done`-th on.
  void draw(const FlatState& flat, const TensorPiece& piece, std::int64_t done, const TensorView& target);
  void trainable(UnitState& unit);
  void frozen(UnitState& unit);
};

void Engine::Impl::InitialWeights::fill(const Initializer& how, std::int64_t first,
                                        const TensorView& target) {
  constexpr std::int64_t most = 1 << 18;
  const std::int64_t elements = target.elements();
  const Buffer staged(engine.runtime.memory(Tier::host),
                      std::min(most, elements) * size_of(DataType::float32), Category::other,
                      "initial weights");
  for (std::int64_t done = 0; done < elements; done += most) {
    const std::int64_t count = std::min(most, elements - done);
    auto* values = static_cast<float*>(staged.data());
    if (!engine.simulated()) how.fill(first + done, {values, static_cast<std::size_t>(count)});
    engine.runtime.device().copy_from_host(engine.compute, target.as<float>() + done, values,
                                           count * size_of(DataType::float32));
    engine.compute.synchronize();  // the next values take the place of these
  }
}

void Engine::Impl::InitialWeights::draw(const FlatState& flat, const TensorPiece& piece, std::int64_t done,
                                        const TensorView& target) {
  const TensorState& tensor =
      engine.tensors[static_cast<std::size_t>(flat.tensors[static_cast<std::size_t>(piece.tensor)])];
  const RandomKey key{engine.config.seed, RandomPurpose::initialization, tensor.model_index};
  const std::int64_t first = piece.tensor_begin + done;
  const Initializer& how = tensor.initializer;
  switch (how.kind) {
    case Initializer::Kind::constant:
      kernels::fill_constant(engine.compute, target, how.a);
      break;
    case Initializer::Kind::normal:
      kernels::fill_normal(engine.compute, target, key, first, how.a, how.b);
      break;
    case Initializer::Kind::uniform:
      kernels::fill_uniform(engine.compute, target, key, first, how.a, how.b);
      break;
    case Initializer::Kind::custom:
      fill(how, first, target);
      break;
  }
}

void Engine::Impl::InitialWeights::trainable(UnitState& unit) {
  FlatState& flat = unit.trainable;
  const DataType dtype = engine.config.precision.compute;
  const std::int64_t kept =
      engine.residency.whole_parameters() ? flat.layout.padded_elements() : flat.layout.shard_elements();
  if (flat.parameters_tier == OffloadTier::none) {
    kernels::fill_zero(engine.compute, {flat.parameters.data(), dtype, Shape{kept}});
  } else if (flat.parameters_tier == OffloadTier::cpu) {
    kernels::fill_zero(*engine.offload->host, {flat.parameters.data(), dtype, Shape{kept}});
    engine.offload->host->synchronize();  // weights drawn on the device take another road
  }
  // Drawn on the device, whose bits they are, in tiles that fit the workspace; each rank draws what it keeps.
  const std::int64_t tile = engine.config.workspace_bytes / size_of(DataType::float32);
  engine.visit_state(
      unit, engine.residency.optimizer_range(flat), Access::replace, [&](const Stretch& stretch) {
        const std::int64_t elements = stretch.range.size();
        kernels::fill_zero(*stretch.stream, {stretch.master, DataType::float32, Shape{elements}});
        for (std::size_t s = 0; s < engine.state_tensors.size(); ++s) {
          kernels::fill_constant(*stretch.stream,
                                 {stretch.state[s], engine.state_tensors[s].dtype, Shape{elements}},
                                 engine.state_tensors[s].initial_value);
        }
        if (stretch.on_host) stretch.stream->synchronize();
        for (const TensorPiece& piece : flat.layout.pieces(stretch.range)) {
          for (std::int64_t done = 0; done < piece.elements; done += tile) {
            const std::int64_t count = std::min(tile, piece.elements - done);
            std::byte* home = stretch.master +
                              (piece.buffer_begin + done - stretch.range.begin) * size_of(DataType::float32);
            const TensorView drawn{stretch.on_host ? engine.workspace_buffer.data() : home, DataType::float32,
                                   Shape{count}};
            draw(flat, piece, done, drawn);
            if (stretch.on_host)
              engine.read_from(home, drawn.data, count * size_of(DataType::float32), false);
          }
        }
        if (engine.residency.offloaded(unit)) {
          (void)engine.offload->publish_stretch(unit, stretch);
        } else if (dtype != DataType::float32) {
          kernels::cast(engine.compute, {stretch.master, DataType::float32, Shape{elements}},
                        {engine.residency.parameters_at(flat, stretch.range.begin), dtype, Shape{elements}});
        }
      });
  if (!engine.residency.offloaded(unit)) unit.shard_ready = engine.compute.record();
  if (engine.ranks > 1 && engine.residency.whole_parameters() && !engine.residency.whole_optimizer()) {
    const std::vector<Event> ready{unit.shard_ready};
    flat.filled = engine.all_gather_shard(flat, flat.parameters.data(), dtype, ready, unit.name, "start");
  }
}

void Engine::Impl::InitialWeights::frozen(UnitState& unit) {
  FlatState& flat = unit.frozen;
  const DataType dtype = engine.config.precision.compute;
  const std::int64_t held =
      engine.residency.whole_parameters() ? flat.layout.padded_elements() : flat.layout.shard_elements();
  const bool away = flat.parameters_tier != OffloadTier::none;
  if (!away) {
    kernels::fill_zero(engine.compute, {flat.parameters.data(), dtype, Shape{held}});
  } else if (flat.parameters_tier == OffloadTier::cpu && !engine.simulated()) {
    std::memset(flat.parameters.data(), 0, static_cast<std::size_t>(flat.parameters.bytes()));
  }
  // fp32 draws, their rounding, and for what lives elsewhere a copy on the way there.
  const std::int64_t tile = engine.config.workspace_bytes / (2 * size_of(DataType::float32));
  auto* second = static_cast<std::byte*>(engine.workspace_buffer.data()) + tile * size_of(DataType::float32);
  std::vector<std::byte> there;
  for (const TensorPiece& piece : flat.layout.pieces(engine.residency.optimizer_range(flat))) {
    for (std::int64_t done = 0; done < piece.elements; done += tile) {
      const std::int64_t count = std::min(tile, piece.elements - done);
      const std::int64_t position = piece.buffer_begin + done;
      void* target = away ? second : engine.residency.parameters_at(flat, position);
      if (dtype == DataType::float32) {
        draw(flat, piece, done, {target, dtype, Shape{count}});
      } else {
        const TensorView drawn{engine.workspace_buffer.data(), DataType::float32, Shape{count}};
        draw(flat, piece, done, drawn);
        kernels::cast(engine.compute, drawn, {target, dtype, Shape{count}});
      }
      if (!away) continue;
      there.resize(engine.simulated() ? 0 : static_cast<std::size_t>(count * size_of(dtype)));
      engine.read_from(there.data(), target, count * size_of(dtype), false);
      engine.write_parameters(flat, {position, position + count}, there.data());
    }
  }
  if (engine.residency.offloaded(unit)) {
    engine.compute.synchronize();  // shard_ready tells of the trainable ones
  } else {
    unit.shard_ready = engine.compute.record();
  }
  if (engine.ranks > 1 && engine.residency.whole_parameters() && !engine.residency.whole_optimizer()) {
    const std::vector<Event> ready{unit.shard_ready};
    flat.filled = engine.all_gather_shard(flat, flat.parameters.data(), dtype, ready, unit.name, "start");
  }
}

void Engine::Impl::initialize_weights() {
  InitialWeights initial{*this};
  for (UnitState& unit : units) {
    if (unit.trainable.layout.padded_elements() > 0) initial.trainable(unit);
    if (unit.frozen.layout.padded_elements() > 0) initial.frozen(unit);
  }
}

}  // namespace tranche
