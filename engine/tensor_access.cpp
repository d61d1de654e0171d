#include "engine/tensor_access.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "core/block8.h"
#include "core/split_float.h"
#include "engine/exchange.h"
#include "engine/offloaded_state.h"
#include "engine/state_digest.h"
#include "tranche/core/error.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/kernels/quantization.h"

namespace tranche::detail {

namespace {

constexpr OperationLabel access_label(std::string_view tensor, Tier memory = Tier::host) {
  return {tensor, "access", Traffic::control, memory};
}

/// A slice's view of an optimizer state, or of the master weights for `which` -1.
TensorView state_of(const ShardSlice& slice, int which) {
  return which < 0 ? slice.master : slice.state[static_cast<std::size_t>(which)];
}

}  // namespace

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

TensorAccess::TensorAccess(StateStore& store, const Config& config, Communicator& ranks, const Mesh& mesh,
                           Device& device, MemoryResource& memory, kernels::Workspace workspace,
                           Communicator* pipeline, Communicator* tensor_ranks)
    : store_(store),
      config_(config),
      ranks_(ranks),
      mesh_(mesh),
      device_(device),
      compute_(device.compute_stream()),
      memory_(memory),
      workspace_(workspace),
      pipeline_(pipeline),
      tensor_ranks_(tensor_ranks) {}

std::vector<float> TensorAccess::to_all_stages(int index, std::vector<float> values) {
  if (pipeline_ == nullptr) return values;
  const Placement& placement = store_.placement();
  const int root = placement.buffer(placement.buffer_of(index)).stages.front();
  pipeline_
      ->broadcast(values.data(), static_cast<std::int64_t>(values.size()), DataType::float32, root, {},
                  access_label(store_.call_name(tensor_at(index).name)))
      .wait();
  return values;
}

std::vector<float> TensorAccess::whole_of_parts(int index, const std::vector<float>& local) {
  const TensorState& tensor = tensor_at(index);
  const Placement& placement = store_.placement();
  const int number = placement.buffer_of(index), sharers = placement.buffer(number).sharers;
  const Box whole_tensor = whole_box(tensor.shape);
  std::vector<float> whole(static_cast<std::size_t>(tensor.shape.elements()), 0.0f);
  for (int part = 0; part < placement.buffer(number).parts(); ++part) {
    const Box box = placement.box(index, part);
    const int root = part * sharers;
    std::vector<float> values(static_cast<std::size_t>(elements_of(box)), 0.0f);
    if (tensor_ranks_->rank() == root) values = local;
    tensor_ranks_
        ->broadcast(values.data(), static_cast<std::int64_t>(values.size()), DataType::float32, root, {},
                    access_label(store_.call_name(tensor.name)))
        .wait();
    common_runs(tensor.shape, box, whole_tensor, {0, elements_of(box)}, [&](const CommonRun& run) {
      std::copy_n(values.begin() + run.first, run.elements, whole.begin() + run.tensor);
    });
  }
  return whole;
}

template <typename T>
std::vector<T> TensorAccess::part_of_whole(const TensorState& tensor, std::span<const T> whole,
                                           std::int64_t items) {
  std::vector<T> part(static_cast<std::size_t>(tensor.local.elements() * items));
  for_each_run(tensor, {0, tensor.local.elements()}, [&](const TensorRun& run) {
    std::copy_n(whole.begin() + run.global * items, run.elements * items, part.begin() + run.local * items);
  });
  return part;
}

std::vector<float> TensorAccess::gather(int index, DataType dtype, ElementRange local_range,
                                        const Read& read) {
  const TensorState& tensor = tensor_at(index);
  const FlatBuffer& flat = store_.buffer_of(tensor);
  if (flat.empty()) {
    return to_all_stages(index, std::vector<float>(static_cast<std::size_t>(tensor.shape.elements()), 0.0f));
  }
  const std::int64_t elements = tensor.local.elements();
  const std::int64_t offset = flat.layout.tensor_offset(tensor.flat_index);
  std::vector<float> values(static_cast<std::size_t>(elements), 0.0f);
  std::vector<std::byte> raw;
  const bool in_blocks = is_block(dtype);
  const bool everywhere = local_range == ElementRange{0, flat.layout.padded_elements()};
  const bool in_parts = !everywhere && !(local_range == flat.shard());
  for (int owner = 0; owner < flat.layout.ranks(); ++owner) {
    const ElementRange part = intersect(flat.layout.shard_range(owner), {offset, offset + elements});
    if (part.empty()) continue;
    const bool mine = owner == flat.rank();
    const ElementRange here = in_parts ? intersect(part, local_range) : part;
    if ((everywhere || mine) && !here.empty()) {
      float* const target = values.data() + (here.begin - offset);
      raw.assign(static_cast<std::size_t>(bytes_of(dtype, here.size())), std::byte{0});
      read(here, raw.data());
      if (in_blocks) decode_blocks8(dtype, raw.data(), {target, static_cast<std::size_t>(here.size())});
      for (std::int64_t i = 0; !in_blocks && i < here.size(); ++i) {
        target[i] = load_as_float(raw.data(), i, dtype);
      }
    }
    const auto send = [&](Communicator& ranks, ElementRange range, int root) {
      if (range.empty()) return;
      ranks
          .broadcast(values.data() + (range.begin - offset), range.size(), DataType::float32, root, {},
                     access_label(store_.call_name(tensor.name)))
          .wait();
    };
    // Every rank of the group must make the same number of calls, even if it has nothing to send.
    for (int replica = 0; in_parts && replica < flat.replica_count(); ++replica) {
      send(*flat.replicas, intersect(part, flat.owned_by(owner, replica)), replica);
    }
    if (!everywhere) send(*flat.group, part, owner);
  }
  return to_all_stages(index, tensor.cut() ? whole_of_parts(index, values) : std::move(values));
}

std::vector<float> TensorAccess::gather_state(int index, int which) {
  FlatBuffer& flat = store_.buffer_of(tensor_at(index));
  const DataType dtype =
      which < 0 ? store_.residency().saved_master_type() : flat.states[static_cast<std::size_t>(which)].dtype;
  return gather(index, dtype, store_.residency().optimizer_range(flat), [&](ElementRange range, void* to) {
    store_.visit(flat, range, StateStore::Access::read, [&](const ShardSlice& slice) {
      const TensorView from = state_of(slice, which);
      if (which < 0 && slice.in_halves()) {
        store_.read_halves(slice, static_cast<float*>(to) + (slice.range.begin - range.begin));
        return;
      }
      store_.read(static_cast<std::byte*>(to) + bytes_of(dtype, slice.range.begin - range.begin), from.data,
                  from.bytes(), slice.on_host);
    });
  });
}

void TensorAccess::write_slices(int index, int which, std::span<const float> values) {
  const TensorState& tensor = tensor_at(index);
  FlatBuffer& flat = store_.buffer_of(tensor);
  const std::int64_t offset = flat.layout.tensor_offset(tensor.flat_index);
  const ElementRange part =
      intersect({offset, offset + tensor.local.elements()}, store_.residency().optimizer_range(flat));
  store_.visit(flat, part, StateStore::Access::update, [&](const ShardSlice& slice) {
    const TensorView to = state_of(slice, which);
    std::vector<std::byte> raw(static_cast<std::size_t>(to.bytes()));
    const std::span<const float> own = values.subspan(static_cast<std::size_t>(slice.range.begin - offset),
                                                      static_cast<std::size_t>(slice.range.size()));
    if (which < 0 && slice.in_halves()) {
      store_.write_halves(slice, own.data());
      return;
    }
    if (is_block(to.dtype)) encode_blocks8(to.dtype, own, raw.data());
    for (std::size_t i = 0; !is_block(to.dtype) && i < own.size(); ++i) {
      store_from_float(raw.data(), static_cast<std::int64_t>(i), to.dtype, own[i]);
    }
    store_.write(to.data, raw.data(), to.bytes(), slice.on_host);
  });
}

std::vector<float> TensorAccess::weight(int index) {
  const TensorState& tensor = tensor_at(index);
  if (!tensor.frozen) return gather_state(index, -1);
  FlatBuffer& flat = store_.buffer_of(tensor);
  return gather(index, config_.precision.compute, flat.shard(),
                [&](ElementRange range, void* to) { store_.read_parameters(flat, range, to); });
}

void TensorAccess::write_weight(int index, std::span<const float> whole) {
  const TensorState& tensor = tensor_at(index);
  const std::vector<float> part_values = tensor.cut() ? part_of_whole(tensor, whole) : std::vector<float>();
  const std::span<const float> values = tensor.cut() ? part_values : whole;
  FlatBuffer& flat = store_.buffer_of(tensor);
  const DataType dtype = config_.precision.compute;
  compute_.wait(flat.gather_done);
  if (!tensor.frozen) write_slices(index, -1, values);
  const std::int64_t offset = flat.layout.tensor_offset(tensor.flat_index);
  const ElementRange part =
      intersect({offset, offset + tensor.local.elements()}, store_.residency().parameters_range(flat));
  if (!part.empty()) {
    std::vector<std::byte> raw(static_cast<std::size_t>(part.size() * size_of(dtype)));
    const bool half_away = !tensor.frozen && config_.precision.master == MasterFormat::split;
    for (std::int64_t i = 0; i < part.size(); ++i) {
      const float value = values[static_cast<std::size_t>(part.begin - offset + i)];
      store_from_float(raw.data(), i, dtype, half_away ? to_float(split_float(value).high) : value);
    }
    store_.write_parameters(flat, part, raw.data());
  }
  store_.weights_written();
  flat.shard_ready = compute_.record();
}

std::vector<float> TensorAccess::state(int index, int which) {
  return gather_state(index, which);
}

void TensorAccess::write_state(int index, int which, std::span<const float> whole) {
  const TensorState& tensor = tensor_at(index);
  if (tensor.cut()) {
    write_slices(index, which, part_of_whole(tensor, whole));
  } else {
    write_slices(index, which, whole);
  }
}

int TensorAccess::find_state(int index, std::string_view optimizer, std::string_view state) const {
  const std::vector<OptimizerStateTensor>& states = store_.buffer_of(tensor_at(index)).states;
  std::string list;
  for (std::size_t s = 0; s < states.size(); ++s) {
    const std::string& name = states[s].name;
    if (name == state) return static_cast<int>(s);
    list += (list.empty() ? "" : ", ") + name;
  }
  throw InvalidArgument("optimizer " + std::string(optimizer) + " keeps no state '" + std::string(state) +
                        "'; it keeps " + (list.empty() ? "none" : list));
}

// --- The main gradient ----------------------------------------------------------------------------------

std::vector<float> TensorAccess::main_gradient(int index, bool reduced, int reduction_group) {
  const TensorState& tensor = tensor_at(index);
  FlatBuffer& flat = store_.buffer_of(tensor);
  const DataType accumulation = config_.precision.accumulation;
  if (flat.empty()) return gather(index, accumulation, {}, {});
  const ElementRange shard_range = flat.shard();
  compute_.wait(flat.reduce_done);
  const auto from = [&](const TensorView& kept, ElementRange mine, bool on_host) {
    return gather(index, kept.dtype, mine, [&](ElementRange range, void* to) {
      const TensorView part = part_of(kept, mine.begin, range);
      store_.read(to, part.data, part.bytes(), on_host);
    });
  };
  if (!reduced) {
    // Reduces a copy in the same way as the end of the step.
    const Shape whole{flat.layout.padded_elements()};
    const TensorView accumulated{flat.gradients_data(), accumulation, whole};
    GradientExchange& exchange = flat.gradients_over->in_group();
    const GradientExchange::Bytes bytes = exchange.bytes(flat, accumulation);
    const auto memory = [&](std::int64_t size) {
      return Buffer(memory_, size, Category::other, "read_gradient");
    };
    const Buffer rounded = memory(bytes.sent), received = memory(bytes.received);
    const DataType summed = flat.replicas == nullptr ? accumulation : DataType::float32;
    const Buffer sum = memory(shard_range.size() * size_of(summed));
    const ConstTensorView sent =
        bytes.sent > 0 ? exchange.round(compute_, flat, accumulated, rounded.data()) : accumulated;
    GradientSum in_order;
    in_order.order(flat, reduction_group);
    exchange.reduce(flat, sent, received.data(), {sum.data(), summed, Shape{shard_range.size()}}, in_order,
                    {compute_.record()}, access_label(store_.call_name(tensor.name), Tier::device));
    flat.reduce_done.wait();
    std::vector<float> values = from({sum.data(), summed, Shape{shard_range.size()}}, shard_range, false);
    if (flat.replicas == nullptr) return values;
    flat.replicas
        ->all_reduce(values.data(), static_cast<std::int64_t>(values.size()), DataType::float32,
                     ReduceOperation::sum, access_label(store_.call_name(tensor.name)))
        .wait();
    std::array<std::byte, sizeof(float)> rounded_once{};
    for (float& value : values) {
      store_from_float(rounded_once.data(), 0, accumulation, value);
      value = load_as_float(rounded_once.data(), 0, accumulation);
    }
    return values;
  }
  const Residency& residency = store_.residency();
  const ElementRange mine = residency.over_replicas(flat) ? flat.owned() : shard_range;
  if (flat.gradients) return from(residency.gradients(flat, mine), mine, false);
  // The step has one micro-batch, so the gradient is already in host memory.
  flat.gradients_on_host.wait();
  return from(residency.host_gradients(flat, mine), mine, true);
}

void TensorAccess::write_main_gradient(int index, std::span<const std::byte> whole) {
  const TensorState& tensor = tensor_at(index);
  const std::vector<std::byte> part_raw =
      tensor.cut() ? part_of_whole(tensor, whole, size_of(config_.precision.accumulation))
                   : std::vector<std::byte>();
  const std::span<const std::byte> raw = tensor.cut() ? part_raw : whole;
  FlatBuffer& flat = store_.buffer_of(tensor);
  const std::int64_t offset = flat.layout.tensor_offset(tensor.flat_index);
  const ElementRange part =
      intersect({offset, offset + tensor.local.elements()}, store_.residency().optimizer_range(flat));
  const bool away = flat.optimizer_tier != OffloadTier::none;
  flat.reduce_done.wait();
  if (away) flat.gradients_on_host.wait();
  if (part.empty()) return;
  const std::byte* from = raw.data() + (part.begin - offset) * size_of(config_.precision.accumulation);
  if (flat.gradients) {
    const TensorView to = store_.residency().gradients(flat, part);
    store_.write(to.data, from, to.bytes(), false);
  }
  if (away) {
    const TensorView to = store_.residency().host_gradients(flat, part);
    store_.write(to.data, from, to.bytes(), true);
  }
}

void TensorAccess::take_statistics(FlatBuffer& flat, kernels::GradientStatistics* statistics) {
  const ElementRange mine = flat.owned();
  TensorView shard;
  Buffer copy;
  if (flat.gradients) {
    shard = store_.residency().gradients(flat, mine);
  } else {
    const TensorView on_host = store_.residency().host_gradients(flat, mine);
    copy = Buffer(memory_, on_host.bytes(), Category::other, "write_gradient");
    store_.write(copy.data(), on_host.data, copy.bytes(), false);
    shard = {copy.data(), on_host.dtype, on_host.shape};
  }
  kernels::gradient_statistics(compute_, shard, statistics);
  compute_.synchronize();
}

kernels::Digest TensorAccess::digest(Digested what) {
  StateDigest digest(store_, config_, mesh_, device_, memory_, workspace_,
                     what == Digested::weights_and_state, what == Digested::frozen_weights);
  return digest.over(ranks_, access_label(store_.call_name("digest")));
}

}  // namespace tranche::detail
