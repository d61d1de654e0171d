#include "engine/initial_weights.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/block8.h"
#include "engine/offloaded_state.h"
#include "tranche/core/random.h"
#include "tranche/kernels/elementwise.h"

namespace tranche::detail {

namespace {

class InitialWeights {
 public:
  InitialWeights(StateStore& store, const Config& config, std::uint64_t seed, Device& device,
                 MemoryResource& host_memory, kernels::Workspace workspace)
      : store_(store),
        config_(config),
        seed_(seed),
        device_(device),
        compute_(device.compute_stream()),
        host_memory_(host_memory),
        workspace_(workspace) {}
  void draw_trainable(FlatBuffer& flat);
  void draw_frozen(FlatBuffer& flat);

 private:
  /// Sets all elements of a state to one value.
  void fill_state(const ShardSlice& slice, const TensorView& state, float value);
  /// Writes the caller's values, through host memory.
  void fill(const Initializer& how, std::int64_t first, const TensorView& target);
  /// Draws the master weights of a slice, which has the elements of `piece` from element `done` on.
  void draw_master(const FlatBuffer& flat, const TensorPiece& piece, std::int64_t done, const ShardSlice& to);
  /// Draws the elements of a piece from element `done` on.
  void draw(const FlatBuffer& flat, const TensorPiece& piece, std::int64_t done, const TensorView& target);
  bool simulated() const { return device_.kind() == DeviceKind::meta; }

  StateStore& store_;
  const Config& config_;
  std::uint64_t seed_;
  Device& device_;
  Stream& compute_;
  MemoryResource& host_memory_;
  kernels::Workspace workspace_;
};

void InitialWeights::fill(const Initializer& how, std::int64_t first, const TensorView& target) {
  constexpr std::int64_t most = 1 << 18;
  const std::int64_t elements = target.elements();
  const Buffer staged(host_memory_, std::min(most, elements) * size_of(DataType::float32), Category::other,
                      "initial weights");
  for (std::int64_t done = 0; done < elements; done += most) {
    const std::int64_t count = std::min(most, elements - done);
    auto* values = static_cast<float*>(staged.data());
    if (!simulated()) how.fill(first + done, {values, static_cast<std::size_t>(count)});
    device_.copy_from_host(compute_, target.as<float>() + done, values, count * size_of(DataType::float32));
    compute_.synchronize();  // the next values overwrite these
  }
}

void InitialWeights::draw(const FlatBuffer& flat, const TensorPiece& piece, std::int64_t done,
                          const TensorView& target) {
  const TensorState& tensor = store_.tensor_of(flat, piece);
  const RandomKey key{seed_, RandomPurpose::initialization, tensor.model_index};
  const std::int64_t begin = piece.tensor_begin + done;
  const Initializer& how = tensor.initializer;
  if (how.kind == Initializer::Kind::constant) {
    kernels::fill_constant(compute_, target, how.a);
    return;
  }
  for_each_run(tensor, {begin, begin + target.elements()}, [&](const TensorRun& run) {
    const TensorView part = part_of(target, begin, {run.local, run.local + run.elements});
    switch (how.kind) {
      case Initializer::Kind::constant:
        break;
      case Initializer::Kind::normal:
        kernels::fill_normal(compute_, part, key, run.global, how.a, how.b);
        break;
      case Initializer::Kind::uniform:
        kernels::fill_uniform(compute_, part, key, run.global, how.a, how.b);
        break;
      case Initializer::Kind::custom:
        fill(how, run.global, part);
        break;
    }
  });
}

void InitialWeights::draw_master(const FlatBuffer& flat, const TensorPiece& piece, std::int64_t done,
                                 const ShardSlice& to) {
  const bool converted = to.master.dtype != DataType::float32;
  const TensorView drawn{to.on_host || converted ? workspace_.data : to.master.data, DataType::float32,
                         to.master.shape};
  draw(flat, piece, done, drawn);
  if (!to.on_host) {
    if (converted) take_master_from_fp32(to, drawn);
    return;
  }
  if (!converted) {
    store_.read(to.master.data, drawn.data, drawn.bytes(), false);
    return;
  }
  std::vector<std::byte> there(simulated() ? 0 : static_cast<std::size_t>(drawn.bytes()));
  store_.read(there.data(), drawn.data, drawn.bytes(), false);
  take_master_from_fp32(to, {there.data(), drawn.dtype, drawn.shape});
  to.stream->synchronize();
}

void InitialWeights::fill_state(const ShardSlice& slice, const TensorView& state, float value) {
  if (!is_block(state.dtype)) {
    kernels::fill_constant(*slice.stream, state, value);
    return;
  }
  const std::vector<float> values(static_cast<std::size_t>(std::min<std::int64_t>(1 << 18, state.elements())),
                                  value);
  std::vector<std::byte> blocks(
      static_cast<std::size_t>(bytes_of(state.dtype, static_cast<std::int64_t>(values.size()))));
  encode_blocks8(state.dtype, values, blocks.data());
  const auto most = static_cast<std::int64_t>(blocks.size());
  for (std::int64_t done = 0; done < state.bytes(); done += most) {
    store_.write(static_cast<std::byte*>(state.data) + done, blocks.data(),
                 std::min(most, state.bytes() - done), slice.on_host);
  }
}

void InitialWeights::draw_trainable(FlatBuffer& flat) {
  const Residency& residency = store_.residency();
  if (flat.parameters_tier == OffloadTier::none) {
    kernels::fill_zero(compute_, residency.parameters(flat, residency.parameters_range(flat)));
  } else if (flat.parameters_tier == OffloadTier::cpu) {
    Stream& host = store_.offload()->host();
    kernels::fill_zero(host, residency.parameters(flat, residency.parameters_range(flat)));
    host.synchronize();  // weights drawn on the device are copied by another stream
  }
  const std::int64_t most = workspace_.bytes / size_of(DataType::float32);
  const bool offloaded = residency.offloaded(flat);
  store_.visit(flat, residency.optimizer_range(flat), StateStore::Access::replace,
               [&](const ShardSlice& slice) {
                 kernels::fill_zero(*slice.stream, slice.master);
                 for (std::size_t s = 0; s < slice.state.size(); ++s) {
                   fill_state(slice, slice.state[s], flat.states[s].initial_value);
                 }
                 if (slice.on_host) slice.stream->synchronize();
                 for (const TensorPiece& piece : flat.layout.pieces(slice.range)) {
                   for (std::int64_t done = 0; done < piece.elements; done += most) {
                     const std::int64_t first = piece.buffer_begin + done;
                     const ShardSlice to =
                         detail::part_of(slice, {first, first + std::min(most, piece.elements - done)});
                     draw_master(flat, piece, done, to);
                   }
                 }
                 if (offloaded) {
                   store_.offload()->publish(flat, slice);
                 } else if (flat.master) {
                   ShardSlice drawn = slice;
                   drawn.weight = residency.parameters(flat, slice.range);
                   copy_master_to_weight(drawn);
                 }
               });
  if (!offloaded) flat.shard_ready = compute_.record();
  store_.gather_updated(flat, "start");
}

void InitialWeights::draw_frozen(FlatBuffer& flat) {
  const Residency& residency = store_.residency();
  const DataType dtype = config_.precision.compute;
  const bool away = flat.parameters_tier != OffloadTier::none;
  if (!away) {
    kernels::fill_zero(compute_, residency.parameters(flat, residency.parameters_range(flat)));
  } else if (flat.parameters_tier == OffloadTier::cpu && !simulated()) {
    std::memset(flat.parameters.data(), 0, static_cast<std::size_t>(flat.parameters.bytes()));
  }
  // The workspace holds fp32 draws, and their rounded values on the way to another tier.
  const std::int64_t most = workspace_.bytes / (2 * size_of(DataType::float32));
  auto* second = static_cast<std::byte*>(workspace_.data) + most * size_of(DataType::float32);
  std::vector<std::byte> there;
  for (const TensorPiece& piece : flat.layout.pieces(residency.optimizer_range(flat))) {
    for (std::int64_t done = 0; done < piece.elements; done += most) {
      const std::int64_t first = piece.buffer_begin + done;
      const ElementRange range{first, first + std::min(most, piece.elements - done)};
      const Shape shape{range.size()};
      const TensorView target = away ? TensorView{second, dtype, shape} : residency.parameters(flat, range);
      if (dtype == DataType::float32) {
        draw(flat, piece, done, target);
      } else {
        const TensorView drawn{workspace_.data, DataType::float32, shape};
        draw(flat, piece, done, drawn);
        kernels::cast(compute_, drawn, target);
      }
      if (!away) continue;
      there.resize(simulated() ? 0 : static_cast<std::size_t>(target.bytes()));
      store_.read(there.data(), target.data, target.bytes(), false);
      store_.write_parameters(flat, range, there.data());
    }
  }
  flat.shard_ready = compute_.record();
  store_.gather_updated(flat, "start");
}

}  // namespace

void draw_initial_weights(StateStore& store, const Config& config, Device& device,
                          MemoryResource& host_memory, kernels::Workspace workspace) {
  InitialWeights initial(store, config, config.seed, device, host_memory, workspace);
  for (UnitState& unit : store.units()) {
    for (FlatBuffer& flat : unit.buffers) {
      if (flat.empty()) continue;
      if (flat.trainable) {
        initial.draw_trainable(flat);
      } else {
        initial.draw_frozen(flat);
      }
    }
  }
}

void draw_frozen_weights(StateStore& store, const Config& config, std::uint64_t seed, Device& device,
                         MemoryResource& host_memory, kernels::Workspace workspace) {
  InitialWeights initial(store, config, seed, device, host_memory, workspace);
  for (UnitState& unit : store.units()) {
    for (FlatBuffer& flat : unit.buffers) {
      if (!flat.empty() && !flat.trainable) initial.draw_frozen(flat);
    }
  }
}

}  // namespace tranche::detail
