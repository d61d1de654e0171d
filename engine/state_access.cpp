// Tensors by name, in full, from whatever shards hold them; digests.

#include <cmath>
#include <cstring>

#include "engine/offloading.h"
#include "tranche/kernels/elementwise.h"

namespace tranche {

namespace {

float load_as_float(const std::byte* raw, std::int64_t index, DataType dtype) {
  switch (dtype) {
    case DataType::float32: {
      float value;
      std::memcpy(&value, raw + index * 4, 4);
      return value;
    }
    case DataType::bfloat16:
    case DataType::float16: {
      std::uint16_t bits;
      std::memcpy(&bits, raw + index * 2, 2);
      return dtype == DataType::bfloat16 ? to_float(bfloat16{bits}) : to_float(float16{bits});
    }
    default:
      throw InvalidArgument("cannot read " + std::string(name_of(dtype)) + " as fp32");
  }
}

void store_from_float(std::byte* raw, std::int64_t index, DataType dtype, float value) {
  switch (dtype) {
    case DataType::float32:
      std::memcpy(raw + index * 4, &value, 4);
      return;
    case DataType::bfloat16:
    case DataType::float16: {
      const std::uint16_t bits =
          dtype == DataType::bfloat16 ? to_bfloat16(value).bits : to_float16(value).bits;
      std::memcpy(raw + index * 2, &bits, 2);
      return;
    }
    default:
      throw InvalidArgument("cannot write fp32 as " + std::string(name_of(dtype)));
  }
}

constexpr OperationLabel access_label(std::string_view tensor, Tier memory = Tier::host) {
  return {tensor, "access", Traffic::control, memory};
}

}  // namespace

/// Collective: tensors in full, whoever keeps which part of them and where.
struct Engine::Impl::StateAccess {
  Impl& engine;

  /// Assembles a whole tensor on every rank. `read` fills host memory with elements, in `dtype`, of the flat
  /// buffer in `local_range`: all of them on all ranks, or this rank's shard; then every element is sent by
  /// the rank whose shard it lies in.
  std::vector<float> gather_tensor(int tensor, DataType dtype, ElementRange local_range,
                                   const std::function<void(ElementRange, void*)>& read);
  /// A trainable tensor's optimizer state, or its master weight with state -1.
  std::vector<float> gather_state(int tensor, int state);
  /// Sets this rank's part of it.
  void write_state(int tensor, int state, std::span<const float> values);
  int find_state(std::string_view state) const;
  void require_size(const TensorState& tensor, std::size_t given, const char* call) const;
  std::int64_t global_tokens_so_far();
  std::vector<float> gradient_of(std::string_view name);
  void write_gradient(std::string_view name, std::span<const float> values);
  /// Of an offloaded unit whose gradients have changed since they were taken on the way home.
  void take_statistics_again(UnitState& unit);
  /// From G to the mean gradient so far, or to what the update takes while the hook runs; collective.
  double gradient_scale();
  int find_trainable(std::string_view name) const;
  /// Over all ranks; `with_state` adds the optimizer state under indices behind the weights'.
  kernels::Digest digest(bool with_state);
};

std::vector<float> Engine::Impl::StateAccess::gather_tensor(
    int index, DataType dtype, ElementRange local_range,
    const std::function<void(ElementRange, void*)>& read) {
  const TensorState& tensor = engine.tensors[static_cast<std::size_t>(index)];
  const FlatState& flat = tensor.frozen ? engine.units[static_cast<std::size_t>(tensor.unit)].frozen
                                        : engine.units[static_cast<std::size_t>(tensor.unit)].trainable;
  const std::int64_t elements = tensor.shape.elements();
  const std::int64_t offset = flat.layout.tensor_offset(tensor.flat_index);
  std::vector<float> values(static_cast<std::size_t>(elements), 0.0f);
  std::vector<std::byte> raw;
  const bool everywhere = local_range == ElementRange{0, flat.layout.padded_elements()};
  for (int owner = 0; owner < engine.ranks; ++owner) {
    const ElementRange part = intersect(flat.layout.shard_range(owner), {offset, offset + elements});
    if (part.empty()) continue;
    float* target = values.data() + (part.begin - offset);
    if (everywhere || owner == engine.rank) {
      raw.assign(static_cast<std::size_t>(part.size() * size_of(dtype)), std::byte{0});
      read(part, raw.data());
      for (std::int64_t i = 0; i < part.size(); ++i) target[i] = load_as_float(raw.data(), i, dtype);
    }
    if (!everywhere) {
      engine.shard.broadcast(target, part.size(), DataType::float32, owner, {}, access_label(tensor.name))
          .wait();
    }
  }
  return values;
}

std::vector<float> Engine::Impl::StateAccess::gather_state(int index, int state) {
  UnitState& unit =
      engine.units[static_cast<std::size_t>(engine.tensors[static_cast<std::size_t>(index)].unit)];
  const DataType dtype =
      state < 0 ? DataType::float32 : engine.state_tensors[static_cast<std::size_t>(state)].dtype;
  return gather_tensor(
      index, dtype, engine.residency.optimizer_range(unit.trainable), [&](ElementRange range, void* to) {
        engine.visit_state(unit, range, Access::read, [&](const Stretch& stretch) {
          const std::byte* from = state < 0 ? stretch.master : stretch.state[static_cast<std::size_t>(state)];
          engine.read_from(static_cast<std::byte*>(to) + (stretch.range.begin - range.begin) * size_of(dtype),
                           from, stretch.range.size() * size_of(dtype), stretch.on_host);
        });
      });
}

void Engine::Impl::StateAccess::write_state(int index, int state, std::span<const float> values) {
  const TensorState& tensor = engine.tensors[static_cast<std::size_t>(index)];
  UnitState& unit = engine.units[static_cast<std::size_t>(tensor.unit)];
  const DataType dtype =
      state < 0 ? DataType::float32 : engine.state_tensors[static_cast<std::size_t>(state)].dtype;
  const std::int64_t offset = unit.trainable.layout.tensor_offset(tensor.flat_index);
  const ElementRange part =
      intersect({offset, offset + tensor.shape.elements()}, engine.residency.optimizer_range(unit.trainable));
  engine.visit_state(unit, part, Access::update, [&](const Stretch& stretch) {
    std::vector<std::byte> raw(static_cast<std::size_t>(stretch.range.size() * size_of(dtype)));
    for (std::int64_t i = 0; i < stretch.range.size(); ++i) {
      store_from_float(raw.data(), i, dtype,
                       values[static_cast<std::size_t>(stretch.range.begin - offset + i)]);
    }
    std::byte* to = state < 0 ? stretch.master : stretch.state[static_cast<std::size_t>(state)];
    engine.write_to(to, raw.data(), static_cast<std::int64_t>(raw.size()), stretch.on_host);
  });
}

std::vector<float> Engine::read_weight(std::string_view name) {
  Impl& impl = *impl_;
  Impl::StateAccess access{impl};
  const int index = impl.find_tensor(name);
  const TensorState& tensor = impl.tensors[static_cast<std::size_t>(index)];
  if (!tensor.frozen) return impl.guarded([&] { return access.gather_state(index, -1); });
  FlatState& flat = impl.units[static_cast<std::size_t>(tensor.unit)].frozen;
  return impl.guarded([&] {
    return access.gather_tensor(index, impl.config.precision.compute, flat.layout.shard_range(impl.rank),
                                [&](ElementRange range, void* to) { impl.read_parameters(flat, range, to); });
  });
}

void Engine::write_weight(std::string_view name, std::span<const float> values) {
  Impl& impl = *impl_;
  Impl::StateAccess access{impl};
  impl.require(!impl.in_step && !impl.in_micro_batch,
               "write_weight(" + std::string(name) + ") inside a step or micro-batch");
  const int index = impl.find_tensor(name);
  const TensorState& tensor = impl.tensors[static_cast<std::size_t>(index)];
  access.require_size(tensor, values.size(), "write_weight");
  impl.guarded([&] {
    UnitState& unit = impl.units[static_cast<std::size_t>(tensor.unit)];
    FlatState& flat = tensor.frozen ? unit.frozen : unit.trainable;
    const DataType compute_dtype = impl.config.precision.compute;
    impl.compute.wait(flat.filled);
    if (!tensor.frozen) access.write_state(index, -1, values);
    const std::int64_t offset = flat.layout.tensor_offset(tensor.flat_index);
    const ElementRange whole{offset, offset + tensor.shape.elements()};
    const ElementRange part =
        intersect(whole, impl.residency.whole_parameters() ? whole : flat.layout.shard_range(impl.rank));
    if (!part.empty()) {
      std::vector<std::byte> raw(static_cast<std::size_t>(part.size() * size_of(compute_dtype)));
      for (std::int64_t i = 0; i < part.size(); ++i) {
        store_from_float(raw.data(), i, compute_dtype,
                         values[static_cast<std::size_t>(part.begin - offset + i)]);
      }
      impl.write_parameters(flat, part, raw.data());
    }
    unit.shard_ready = impl.compute.record();
  });
}

int Engine::Impl::StateAccess::find_state(std::string_view state) const {
  std::vector<std::string> names;
  for (std::size_t s = 0; s < engine.state_tensors.size(); ++s) {
    if (engine.state_tensors[s].name == state) return static_cast<int>(s);
    names.push_back(engine.state_tensors[s].name);
  }
  std::string list;
  for (const std::string& name : names) list += (list.empty() ? "" : ", ") + name;
  throw InvalidArgument("optimizer " + engine.optimizer->name() + " keeps no state '" + std::string(state) +
                        "'; it keeps " + (list.empty() ? "none" : list));
}

void Engine::Impl::StateAccess::require_size(const TensorState& tensor, std::size_t given,
                                             const char* call) const {
  if (static_cast<std::int64_t>(given) != tensor.shape.elements()) {
    throw InvalidArgument(std::string(call) + "(" + tensor.name + ") wants " +
                          std::to_string(tensor.shape.elements()) + " values of shape " +
                          tensor.shape.to_string() + ", got " + std::to_string(given));
  }
}

std::vector<float> Engine::read_optimizer_state(std::string_view name, std::string_view state) {
  Impl& impl = *impl_;
  Impl::StateAccess access{impl};
  const int index = impl.find_tensor(name);
  const int which = access.find_state(state);
  const TensorState& tensor = impl.tensors[static_cast<std::size_t>(index)];
  if (tensor.frozen) throw InvalidArgument("tensor " + tensor.name + " is frozen and has no optimizer state");
  return impl.guarded([&] { return access.gather_state(index, which); });
}

void Engine::write_optimizer_state(std::string_view name, std::string_view state,
                                   std::span<const float> values) {
  Impl& impl = *impl_;
  Impl::StateAccess access{impl};
  impl.require(!impl.in_step, "write_optimizer_state(" + std::string(name) + ") inside a step");
  const int index = impl.find_tensor(name);
  const TensorState& tensor = impl.tensors[static_cast<std::size_t>(index)];
  const int which = access.find_state(state);
  if (tensor.frozen) throw InvalidArgument("tensor " + tensor.name + " is frozen and has no optimizer state");
  access.require_size(tensor, values.size(), "write_optimizer_state");
  impl.guarded([&] { access.write_state(index, which, values); });
}

std::int64_t Engine::Impl::StateAccess::global_tokens_so_far() {
  std::int64_t mine = 0;
  std::vector<std::int64_t> counts(static_cast<std::size_t>(engine.micro_batch),
                                   engine.config.micro_batch_size * engine.model.tokens_per_sample);
  engine.runtime.device().copy_to_host(engine.compute, counts.data(), engine.scalars.tokens(),
                                       engine.micro_batch * 8);
  engine.compute.synchronize();
  for (const std::int64_t count : counts) mine += count;
  engine.shard.all_reduce(&mine, 1, DataType::int64, ReduceOperation::sum, access_label("tokens")).wait();
  return mine;
}

double Engine::Impl::StateAccess::gradient_scale() {
  if (engine.hook_scale) return *engine.hook_scale;
  const std::int64_t tokens = global_tokens_so_far();
  return tokens > 0
             ? std::ldexp(1.0, engine.loss_exponent) / (engine.scaler.scale() * static_cast<double>(tokens))
             : 0.0;
}

int Engine::Impl::StateAccess::find_trainable(std::string_view name) const {
  const int index = engine.find_tensor(name);
  if (!engine.tensors[static_cast<std::size_t>(index)].frozen) return index;
  throw InvalidArgument("tensor " + std::string(name) + " is frozen and has no gradient");
}

std::vector<float> Engine::read_gradient(std::string_view name) {
  return impl_->guarded([&] { return Impl::StateAccess{*impl_}.gradient_of(name); });
}

std::vector<float> Engine::Impl::StateAccess::gradient_of(std::string_view name) {
  const int index = find_trainable(name);
  const TensorState& tensor = engine.tensors[static_cast<std::size_t>(index)];
  engine.require(
      engine.in_step && !engine.in_micro_batch && engine.micro_batch > 0,
      "read_gradient(" + tensor.name + ") outside a step: call it after end_micro_batch() and before step()");
  UnitState& unit = engine.units[static_cast<std::size_t>(tensor.unit)];
  FlatState& flat = unit.trainable;
  const ElementRange mine = flat.layout.shard_range(engine.rank);
  const DataType accumulation = engine.config.precision.accumulation;
  engine.compute.wait(unit.reduced);
  std::vector<float> values;
  const auto from_device = [&](const void* memory_of_mine) {
    return [this, mine, accumulation, memory_of_mine](ElementRange range, void* to) {
      engine.read_from(
          to,
          static_cast<const std::byte*>(memory_of_mine) + (range.begin - mine.begin) * size_of(accumulation),
          range.size() * size_of(accumulation), false);
    };
  };
  if (engine.policy == ReductionPolicy::boundary && engine.micro_batch < engine.config.accumulation_steps) {
    // Nothing has been reduced yet: reduce a copy, as the boundary would.
    const std::int64_t whole = flat.layout.padded_elements();
    const DataType wire = engine.config.precision.wire;
    Buffer rounded(engine.memory, whole * size_of(wire), Category::other, "read_gradient");
    Buffer sum(engine.memory, mine.size() * size_of(accumulation), Category::other, "read_gradient");
    const TensorView sent{rounded.data(), wire, Shape{whole}};
    kernels::cast(engine.compute, {flat.gradients_data(), accumulation, Shape{whole}}, sent);
    ReductionOptions options;
    options.group_size = engine.reduction_group;
    const std::vector<Event> ready{engine.compute.record()};
    engine.shard
        .reduce_scatter(sent.data, wire, sum.data(), accumulation, mine.size(), options, ready,
                        access_label(tensor.name, Tier::device))
        .wait();
    values = gather_tensor(index, accumulation, mine, from_device(sum.data()));
  } else if (flat.gradients) {
    values = gather_tensor(index, accumulation, mine, from_device(engine.residency.gradients_shard(flat)));
  } else {
    // Sent home, as the step has one micro-batch.
    flat.gradients_home.wait();
    const std::int64_t first = engine.residency.optimizer_range(flat).begin;
    values = gather_tensor(index, accumulation, mine, [&](ElementRange range, void* to) {
      engine.read_from(to,
                       static_cast<const std::byte*>(flat.host_gradients.data()) +
                           (range.begin - first) * size_of(accumulation),
                       range.size() * size_of(accumulation), true);
    });
  }
  const double scale = gradient_scale();
  for (float& value : values) value = static_cast<float>(value * scale);
  return values;
}

void Engine::write_gradient(std::string_view name, std::span<const float> values) {
  impl_->guarded([&] { Impl::StateAccess{*impl_}.write_gradient(name, values); });
}

void Engine::Impl::StateAccess::write_gradient(std::string_view name, std::span<const float> values) {
  const int index = find_trainable(name);
  const TensorState& tensor = engine.tensors[static_cast<std::size_t>(index)];
  const std::string call = "write_gradient(" + tensor.name + ")";
  require_size(tensor, values.size(), "write_gradient");
  engine.require(
      engine.in_step && !engine.in_micro_batch && engine.micro_batch == engine.config.accumulation_steps,
      call + " before a step's gradients are whole: call it between the last of its " +
          std::to_string(engine.config.accumulation_steps) +
          " micro-batches and step(), or in the gradient hook");
  const double scale = gradient_scale();
  engine.require(scale != 0, call + ": the step saw no tokens, so it has no mean");
  const DataType dtype = engine.config.precision.accumulation;
  std::vector<std::byte> raw(values.size() * static_cast<std::size_t>(size_of(dtype)));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto at = static_cast<std::int64_t>(i);
    store_from_float(raw.data(), at, dtype, static_cast<float>(values[i] / scale));
    if (!engine.hook_scale || std::isfinite(load_as_float(raw.data(), at, dtype))) continue;
    throw InvalidArgument(call + " in the gradient hook: " + std::to_string(values[i]) + " at element " +
                          std::to_string(i) + " does not fit " + std::string(name_of(dtype)) +
                          "; skip the step instead");
  }
  UnitState& unit = engine.units[static_cast<std::size_t>(tensor.unit)];
  FlatState& flat = unit.trainable;
  const ElementRange kept = engine.residency.optimizer_range(flat);
  const std::int64_t offset = flat.layout.tensor_offset(tensor.flat_index);
  const ElementRange part = intersect({offset, offset + tensor.shape.elements()}, kept);
  const bool away = flat.optimizer_tier != OffloadTier::none;
  unit.reduced.wait();
  if (away) flat.gradients_home.wait();
  if (!part.empty()) {
    const std::byte* from = raw.data() + (part.begin - offset) * size_of(dtype);
    const std::int64_t bytes = part.size() * size_of(dtype);
    if (flat.gradients) engine.write_to(engine.residency.gradients_at(flat, part.begin), from, bytes, false);
    if (away) {
      engine.write_to(
          static_cast<std::byte*>(flat.host_gradients.data()) + (part.begin - kept.begin) * size_of(dtype),
          from, bytes, true);
    }
  }
  if (away && !engine.hook_scale) take_statistics_again(unit);
}

void Engine::Impl::StateAccess::take_statistics_again(UnitState& unit) {
  const FlatState& flat = unit.trainable;
  const DataType dtype = engine.config.precision.accumulation;
  const ElementRange mine = flat.layout.shard_range(engine.rank);
  Buffer copy;
  const void* shard = nullptr;
  if (flat.gradients) {
    shard = engine.residency.gradients_shard(flat);
  } else {
    copy = Buffer(engine.memory, mine.size() * size_of(dtype), Category::other, "write_gradient");
    engine.write_to(copy.data(),
                    static_cast<const std::byte*>(flat.host_gradients.data()) +
                        (mine.begin - engine.residency.optimizer_range(flat).begin) * size_of(dtype),
                    copy.bytes(), false);
    shard = copy.data();
  }
  Offloading& offload = *engine.offload;
  offload.link.to_host().synchronize();  // where other units' are taken, in the same workspace
  kernels::gradient_statistics(engine.compute, {shard, dtype, Shape{mine.size()}},
                               engine.scalars.statistics() + (&unit - engine.units.data()),
                               {offload.norm_workspace.data(), offload.norm_workspace.bytes()});
  engine.compute.synchronize();
}

kernels::Digest Engine::Impl::StateAccess::digest(bool with_state) {
  // In the workspace, which nothing uses between steps, so that a digest never makes the peak.
  constexpr auto sum_bytes = static_cast<std::int64_t>(3 * sizeof(kernels::Digest));
  Buffer instead;
  if (engine.workspace_buffer.bytes() < sum_bytes)
    instead = Buffer(engine.memory, sum_bytes, Category::other, "digest");
  void* const sums = instead ? instead.data() : engine.workspace_buffer.data();
  kernels::fill_zero(engine.compute, {sums, DataType::uint8, Shape{sum_bytes}});
  auto* own = static_cast<kernels::Digest*>(sums);
  kernels::Digest* weights_copy = own + 1;  // of everything this rank holds whole: must agree over ranks
  kernels::Digest* state_copy = own + 2;
  const auto tensor_count = static_cast<std::uint64_t>(engine.tensors.size());
  const DataType compute_dtype = engine.config.precision.compute;
  kernels::Digest host_sums[3];  // of what lives in host memory
  const auto tensor_of = [&](const FlatState& flat, const TensorPiece& piece) -> const TensorState& {
    return engine.tensors[static_cast<std::size_t>(flat.tensors[static_cast<std::size_t>(piece.tensor)])];
  };
  const auto add_parameters = [&](const FlatState& flat, ElementRange range, kernels::Digest* target) {
    for (const TensorPiece& piece : flat.layout.pieces(range)) {
      const TensorState& tensor = tensor_of(flat, piece);
      const void* values = engine.residency.parameters_at(flat, piece.buffer_begin);
      kernels::add_digest(engine.compute, {values, compute_dtype, Shape{piece.elements}}, tensor.model_index,
                          piece.tensor_begin, target);
    }
  };
  const auto add_state = [&](UnitState& unit, ElementRange range, std::ptrdiff_t sum) {
    const FlatState& flat = unit.trainable;
    const auto add = [&](const Stretch& stretch) {
      kernels::Digest* target = (stretch.on_host ? host_sums : own) + sum;
      for (const TensorPiece& piece : flat.layout.pieces(stretch.range)) {
        const TensorState& tensor = tensor_of(flat, piece);
        const std::int64_t skipped = piece.buffer_begin - stretch.range.begin;
        const Shape shape{piece.elements};
        kernels::add_digest(*stretch.stream,
                            {stretch.master + skipped * size_of(DataType::float32), DataType::float32, shape},
                            tensor.model_index, piece.tensor_begin, target);
        for (std::size_t s = 0; with_state && s < engine.state_tensors.size(); ++s) {
          const DataType dtype = engine.state_tensors[s].dtype;
          kernels::add_digest(*stretch.stream, {stretch.state[s] + skipped * size_of(dtype), dtype, shape},
                              tensor.model_index + (s + 1) * tensor_count, piece.tensor_begin, target);
        }
      }
    };
    if (flat.optimizer_tier == OffloadTier::none) {
      if (!range.empty()) add(engine.stretch_of(unit, range));
    } else {
      engine.visit_state(unit, range, Access::read, add);
    }
  };
  std::vector<std::byte> frozen;
  for (UnitState& unit : engine.units) {
    for (FlatState* flat : {&unit.trainable, &unit.frozen}) {
      if (flat->layout.padded_elements() == 0) continue;
      engine.compute.wait(flat->filled);
      if (engine.residency.offloaded(unit)) engine.compute.wait(unit.shard_ready);
      const bool trainable = flat == &unit.trainable;
      const ElementRange whole{0, flat->layout.padded_elements()};
      const ElementRange mine = flat->layout.shard_range(engine.rank);
      if (trainable) {
        add_state(unit, mine, 0);
      } else if (flat->parameters_tier == OffloadTier::none) {
        add_parameters(*flat, mine, own);
      } else {
        for (const TensorPiece& piece : flat->layout.pieces(mine)) {
          frozen.assign(static_cast<std::size_t>(piece.elements * size_of(compute_dtype)), std::byte{0});
          engine.read_parameters(*flat, {piece.buffer_begin, piece.buffer_begin + piece.elements},
                                 frozen.data());
          kernels::add_digest(*engine.offload->host, {frozen.data(), compute_dtype, Shape{piece.elements}},
                              tensor_of(*flat, piece).model_index, piece.tensor_begin, host_sums);
          engine.offload->host->synchronize();
        }
      }
      if (engine.ranks > 1 && engine.residency.whole_parameters()) add_parameters(*flat, whole, weights_copy);
      if (engine.ranks > 1 && engine.residency.whole_optimizer()) {
        if (trainable) {
          add_state(unit, whole, 2);
        } else {
          add_parameters(*flat, whole, state_copy);
        }
      }
    }
  }
  kernels::Digest host[3];
  engine.runtime.device().copy_to_host(engine.compute, host, sums, sizeof(host));
  engine.compute.synchronize();
  for (int i = 0; i < 3; ++i) host[i] += host_sums[i];
  std::vector<kernels::Digest> all(3 * static_cast<std::size_t>(engine.ranks));
  for (std::size_t r = 0; r < static_cast<std::size_t>(engine.ranks); ++r)
    std::memcpy(&all[3 * r], host, sizeof(host));
  engine.shard.all_gather(host, all.data(), sizeof(host), DataType::uint8, 0, {}, access_label("digest"))
      .wait();
  kernels::Digest total;
  for (std::size_t r = 0; r < static_cast<std::size_t>(engine.ranks); ++r) {
    total += all[3 * r];
    if (!(all[3 * r + 1] == all[1]) || !(all[3 * r + 2] == all[2])) {
      throw CommunicationError("replicas differ: rank " + std::to_string(r) + " holds other " +
                               (all[3 * r + 1] == all[1] ? "optimizer state" : "weights") + " than rank 0");
    }
  }
  return total;
}

kernels::Digest Engine::weights_digest() {
  return impl_->guarded([&] { return Impl::StateAccess{*impl_}.digest(false); });
}
kernels::Digest Engine::state_digest() {
  return impl_->guarded([&] { return Impl::StateAccess{*impl_}.digest(true); });
}

}  // namespace tranche
