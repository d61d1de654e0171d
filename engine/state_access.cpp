// Tensors by name, in full, from whatever shards hold them; digests.

#include <cmath>
#include <cstring>

#include "tranche/engine/engine_impl.h"
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

/// Assembles a whole tensor on every rank. `local` holds, in any floating dtype in device memory, the
/// elements of the flat buffer in `local_range`: all of them on all ranks, or this rank's shard; then every
/// element is sent by the rank whose shard it lies in.
std::vector<float> Engine::Impl::gather_tensor(int index, const void* local, DataType dtype,
                                               ElementRange local_range) {
  const TensorState& tensor = tensors[static_cast<std::size_t>(index)];
  const FlatState& flat = tensor.frozen ? units[static_cast<std::size_t>(tensor.unit)].frozen
                                        : units[static_cast<std::size_t>(tensor.unit)].trainable;
  const std::int64_t elements = tensor.shape.elements();
  const std::int64_t offset = flat.layout.tensor_offset(tensor.flat_index);
  std::vector<float> values(static_cast<std::size_t>(elements), 0.0f);
  std::vector<std::byte> raw;
  const bool everywhere = local_range == ElementRange{0, flat.layout.padded_elements()};
  for (int owner = 0; owner < ranks; ++owner) {
    const ElementRange part = intersect(flat.layout.shard_range(owner), {offset, offset + elements});
    if (part.empty()) continue;
    float* target = values.data() + (part.begin - offset);
    if (everywhere || owner == rank) {
      raw.resize(static_cast<std::size_t>(part.size() * size_of(dtype)));
      const auto* source =
          static_cast<const std::byte*>(local) + (part.begin - local_range.begin) * size_of(dtype);
      runtime.device().copy_to_host(compute, raw.data(), source, part.size() * size_of(dtype));
      compute.synchronize();
      for (std::int64_t i = 0; i < part.size(); ++i) target[i] = load_as_float(raw.data(), i, dtype);
    }
    if (!everywhere) {
      shard.broadcast(target, part.size(), DataType::float32, owner, {}, access_label(tensor.name)).wait();
    }
  }
  return values;
}

std::vector<float> Engine::read_weight(std::string_view name) {
  Impl& impl = *impl_;
  const int index = impl.find_tensor(name);
  const TensorState& tensor = impl.tensors[static_cast<std::size_t>(index)];
  UnitState& unit = impl.units[static_cast<std::size_t>(tensor.unit)];
  if (tensor.frozen) {
    const FlatState& flat = unit.frozen;
    const ElementRange mine = flat.layout.shard_range(impl.rank);
    return impl.guarded([&] {
      return impl.gather_tensor(index, impl.parameters_shard(flat), impl.config.precision.compute, mine);
    });
  }
  const FlatState& flat = unit.trainable;
  const ElementRange range = impl.optimizer_range(flat);
  return impl.guarded([&] {
    return impl.gather_tensor(index, impl.master_view(flat, range.begin, range.size()).data,
                              DataType::float32, range);
  });
}

void Engine::write_weight(std::string_view name, std::span<const float> values) {
  Impl& impl = *impl_;
  impl.require(!impl.in_step && !impl.in_micro_batch,
               "write_weight(" + std::string(name) + ") inside a step or micro-batch");
  const TensorState& tensor = impl.tensors[static_cast<std::size_t>(impl.find_tensor(name))];
  impl.require_size(tensor, values.size(), "write_weight");
  UnitState& unit = impl.units[static_cast<std::size_t>(tensor.unit)];
  FlatState& flat = tensor.frozen ? unit.frozen : unit.trainable;
  const DataType compute_dtype = impl.config.precision.compute;
  impl.compute.wait(flat.filled);
  const std::int64_t offset = flat.layout.tensor_offset(tensor.flat_index);
  const ElementRange whole{offset, offset + tensor.shape.elements()};
  const ElementRange mine = flat.layout.shard_range(impl.rank);
  if (!tensor.frozen && flat.master) {
    const ElementRange part = intersect(whole, impl.whole_optimizer() ? whole : mine);
    if (!part.empty()) {
      impl.runtime.device().copy_from_host(impl.compute, impl.master_view(flat, part.begin, part.size()).data,
                                           values.data() + (part.begin - offset), part.size() * 4);
    }
  }
  const ElementRange part = intersect(whole, impl.whole_parameters() ? whole : mine);
  if (!part.empty()) {
    std::vector<std::byte> raw(static_cast<std::size_t>(part.size() * size_of(compute_dtype)));
    for (std::int64_t i = 0; i < part.size(); ++i) {
      store_from_float(raw.data(), i, compute_dtype,
                       values[static_cast<std::size_t>(part.begin - offset + i)]);
    }
    void* target = impl.at(flat, flat.parameters, impl.whole_parameters(), part.begin, compute_dtype);
    impl.runtime.device().copy_from_host(impl.compute, target, raw.data(),
                                         static_cast<std::int64_t>(raw.size()));
    impl.compute.synchronize();
  }
  unit.shard_ready = impl.compute.record();
}

int Engine::Impl::find_state(std::string_view state) const {
  std::vector<std::string> names;
  for (std::size_t s = 0; s < state_tensors.size(); ++s) {
    if (state_tensors[s].name == state) return static_cast<int>(s);
    names.push_back(state_tensors[s].name);
  }
  std::string list;
  for (const std::string& name : names) list += (list.empty() ? "" : ", ") + name;
  throw InvalidArgument("optimizer " + optimizer->name() + " keeps no state '" + std::string(state) +
                        "'; it keeps " + (list.empty() ? "none" : list));
}

void Engine::Impl::require_size(const TensorState& tensor, std::size_t given, const char* call) const {
  if (static_cast<std::int64_t>(given) != tensor.shape.elements()) {
    throw InvalidArgument(std::string(call) + "(" + tensor.name + ") wants " +
                          std::to_string(tensor.shape.elements()) + " values of shape " +
                          tensor.shape.to_string() + ", got " + std::to_string(given));
  }
}

std::vector<float> Engine::read_optimizer_state(std::string_view name, std::string_view state) {
  Impl& impl = *impl_;
  const int index = impl.find_tensor(name);
  const auto which = static_cast<std::size_t>(impl.find_state(state));
  const TensorState& tensor = impl.tensors[static_cast<std::size_t>(index)];
  if (tensor.frozen) throw InvalidArgument("tensor " + tensor.name + " is frozen and has no optimizer state");
  const FlatState& flat = impl.units[static_cast<std::size_t>(tensor.unit)].trainable;
  return impl.guarded([&] {
    return impl.gather_tensor(index, flat.state[which].data(), impl.state_tensors[which].dtype,
                              impl.optimizer_range(flat));
  });
}

void Engine::write_optimizer_state(std::string_view name, std::string_view state,
                                   std::span<const float> values) {
  Impl& impl = *impl_;
  impl.require(!impl.in_step, "write_optimizer_state(" + std::string(name) + ") inside a step");
  const TensorState& tensor = impl.tensors[static_cast<std::size_t>(impl.find_tensor(name))];
  const auto which = static_cast<std::size_t>(impl.find_state(state));
  if (tensor.frozen) throw InvalidArgument("tensor " + tensor.name + " is frozen and has no optimizer state");
  impl.require_size(tensor, values.size(), "write_optimizer_state");
  FlatState& flat = impl.units[static_cast<std::size_t>(tensor.unit)].trainable;
  const DataType dtype = impl.state_tensors[which].dtype;
  const std::int64_t offset = flat.layout.tensor_offset(tensor.flat_index);
  const ElementRange part = intersect({offset, offset + tensor.shape.elements()}, impl.optimizer_range(flat));
  if (part.empty()) return;
  std::vector<std::byte> raw(static_cast<std::size_t>(part.size() * size_of(dtype)));
  for (std::int64_t i = 0; i < part.size(); ++i) {
    store_from_float(raw.data(), i, dtype, values[static_cast<std::size_t>(part.begin - offset + i)]);
  }
  void* target = impl.at(flat, flat.state[which], impl.whole_optimizer(), part.begin, dtype);
  impl.runtime.device().copy_from_host(impl.compute, target, raw.data(),
                                       static_cast<std::int64_t>(raw.size()));
  impl.compute.synchronize();
}

std::int64_t Engine::Impl::global_tokens_so_far() {
  std::int64_t mine = 0;
  std::vector<std::int64_t> counts(static_cast<std::size_t>(micro_batch),
                                   config.micro_batch_size * model.tokens_per_sample);
  const auto* tokens = static_cast<const std::int64_t*>(scalars.data()) + config.accumulation_steps;
  runtime.device().copy_to_host(compute, counts.data(), tokens, micro_batch * 8);
  compute.synchronize();
  for (const std::int64_t count : counts) mine += count;
  shard.all_reduce(&mine, 1, DataType::int64, ReduceOperation::sum, access_label("tokens")).wait();
  return mine;
}

std::vector<float> Engine::read_gradient(std::string_view name) {
  return impl_->guarded([&] { return impl_->gradient_of(name); });
}

std::vector<float> Engine::Impl::gradient_of(std::string_view name) {
  const int index = find_tensor(name);
  const TensorState& tensor = tensors[static_cast<std::size_t>(index)];
  if (tensor.frozen) throw InvalidArgument("tensor " + tensor.name + " is frozen and has no gradient");
  require(
      in_step && !in_micro_batch && micro_batch > 0,
      "read_gradient(" + tensor.name + ") outside a step: call it after end_micro_batch() and before step()");
  UnitState& unit = units[static_cast<std::size_t>(tensor.unit)];
  FlatState& flat = unit.trainable;
  const ElementRange mine = flat.layout.shard_range(rank);
  const DataType accumulation = config.precision.accumulation;
  compute.wait(unit.reduced);
  std::vector<float> values;
  if (policy == ReductionPolicy::boundary && micro_batch < config.accumulation_steps) {
    // Nothing has been reduced yet: reduce a copy, as the boundary would.
    const std::int64_t whole = flat.layout.padded_elements();
    const DataType wire = config.precision.wire;
    Buffer rounded(memory, whole * size_of(wire), Category::other, "read_gradient");
    Buffer sum(memory, mine.size() * size_of(accumulation), Category::other, "read_gradient");
    const TensorView sent{rounded.data(), wire, Shape{whole}};
    kernels::cast(compute, {flat.gradients.data(), accumulation, Shape{whole}}, sent);
    OrderedSumOptions options;
    options.group_size = reduction_group;
    const std::vector<Event> ready{compute.record()};
    shard
        .reduce_scatter(sent.data, wire, sum.data(), accumulation, mine.size(), options, ready,
                        access_label(tensor.name, Tier::device))
        .wait();
    values = gather_tensor(index, sum.data(), accumulation, mine);
  } else {
    values = gather_tensor(index, gradients_shard(flat), accumulation, mine);
  }
  const std::int64_t tokens = global_tokens_so_far();
  const double unscale =
      tokens > 0 ? std::ldexp(1.0, loss_exponent) / (scaler.scale() * static_cast<double>(tokens)) : 0.0;
  for (float& value : values) value = static_cast<float>(value * unscale);
  return values;
}

/// Digest over all ranks; `with_state` adds the optimizer state under indices behind the weights'.
kernels::Digest Engine::Impl::digest(bool with_state) {
  Buffer sums(memory, 3 * static_cast<std::int64_t>(sizeof(kernels::Digest)), Category::other, "digest");
  kernels::fill_zero(compute, {sums.data(), DataType::uint8, Shape{sums.bytes()}});
  auto* own = static_cast<kernels::Digest*>(sums.data());
  kernels::Digest* weights_copy = own + 1;  // of everything this rank holds whole: must agree over ranks
  kernels::Digest* state_copy = own + 2;
  const auto tensor_count = static_cast<std::uint64_t>(tensors.size());
  const DataType compute_dtype = config.precision.compute;
  for (UnitState& unit : units) {
    for (FlatState* flat : {&unit.trainable, &unit.frozen}) {
      if (flat->layout.padded_elements() == 0) continue;
      compute.wait(flat->filled);
      const bool trainable = flat == &unit.trainable;
      const ElementRange whole{0, flat->layout.padded_elements()};
      const auto visit = [&](ElementRange range, bool values, kernels::Digest* target, bool state) {
        for (const TensorPiece& piece : flat->layout.pieces(range)) {
          const TensorState& tensor =
              tensors[static_cast<std::size_t>(flat->tensors[static_cast<std::size_t>(piece.tensor)])];
          const Shape shape{piece.elements};
          if (values) {
            ConstTensorView view{
                at(*flat, flat->parameters, whole_parameters(), piece.buffer_begin, compute_dtype),
                compute_dtype, shape};
            if (trainable && target != weights_copy)
              view = master_view(*flat, piece.buffer_begin, piece.elements);
            kernels::add_digest(compute, view, tensor.model_index, piece.tensor_begin, target);
          }
          for (std::size_t s = 0; state && trainable && s < state_tensors.size(); ++s) {
            const DataType dtype = state_tensors[s].dtype;
            kernels::add_digest(
                compute,
                {at(*flat, flat->state[s], whole_optimizer(), piece.buffer_begin, dtype), dtype, shape},
                tensor.model_index + (s + 1) * tensor_count, piece.tensor_begin, target);
          }
        }
      };
      visit(flat->layout.shard_range(rank), true, own, with_state);
      if (ranks > 1 && whole_parameters()) visit(whole, true, weights_copy, false);
      if (ranks > 1 && whole_optimizer()) visit(whole, true, state_copy, with_state);
    }
  }
  kernels::Digest host[3];
  runtime.device().copy_to_host(compute, host, sums.data(), sizeof(host));
  compute.synchronize();
  std::vector<kernels::Digest> all(3 * static_cast<std::size_t>(ranks));
  for (std::size_t r = 0; r < static_cast<std::size_t>(ranks); ++r)
    std::memcpy(&all[3 * r], host, sizeof(host));
  shard.all_gather(host, all.data(), sizeof(host), DataType::uint8, 0, {}, access_label("digest")).wait();
  kernels::Digest total;
  for (std::size_t r = 0; r < static_cast<std::size_t>(ranks); ++r) {
    total += all[3 * r];
    if (!(all[3 * r + 1] == all[1]) || !(all[3 * r + 2] == all[2])) {
      throw CommunicationError("replicas differ: rank " + std::to_string(r) + " holds other " +
                               (all[3 * r + 1] == all[1] ? "optimizer state" : "weights") + " than rank 0");
    }
  }
  return total;
}

kernels::Digest Engine::weights_digest() {
  return impl_->guarded([&] { return impl_->digest(false); });
}
kernels::Digest Engine::state_digest() {
  return impl_->guarded([&] { return impl_->digest(true); });
}

}  // namespace tranche
