#include "engine/tensor_access.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "core/block8.h"
#include "core/split_float.h"
#include "engine/offloaded_state.h"
#include "engine/quantized_exchange.h"
#include "tranche/core/error.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/kernels/quantization.h"

namespace tranche::detail {

namespace {

constexpr OperationLabel access_label(std::string_view tensor, Tier memory = Tier::host) {
  return {tensor, "access", Traffic::control, memory};
}

/// The view that a slice has of an optimizer state, or of the master weights with -1.
TensorView state_of(const ShardSlice& slice, int which) {
  return which < 0 ? slice.master : slice.state[static_cast<std::size_t>(which)];
}

/// A piece's elements by their numbers in the tensor.
ElementRange elements_of_piece(const TensorPiece& piece) {
  return {piece.tensor_begin, piece.tensor_begin + piece.elements};
}

/// The least number of elements whose halves are put together at once for a tensor's digest.
constexpr std::int64_t joined_at_once = 1 << 12;

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
                  access_label(tensor_at(index).name))
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
                    access_label(tensor.name))
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
                     access_label(tensor.name))
          .wait();
    };
    // Ranks of other shards have nothing to send, but have to issue as many calls as these.
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
    // Reduced as the end of the step would reduce it.
    const Shape whole{flat.layout.padded_elements()};
    const DataType communication = config_.precision.communication;
    const int ranks = flat.group->size();
    const std::int64_t bucket = config_.reduce_bucket_elements;
    const bool quantized = config_.quantized_gradients;
    const Buffer rounded(
        memory_,
        quantized ? kernels::quantized_bytes(whole.elements()) : whole.elements() * size_of(communication),
        Category::other, "read_gradient");
    Buffer received;
    if (quantized && ranks > 1) {
      received = Buffer(memory_, QuantizedExchange::received_bytes(shard_range.size(), ranks, bucket),
                        Category::other, "read_gradient");
    }
    const DataType summed = flat.replicas == nullptr ? accumulation : DataType::float32;
    const Buffer sum(memory_, shard_range.size() * size_of(summed), Category::other, "read_gradient");
    const ConstTensorView accumulated{flat.gradients_data(), accumulation, whole};
    ReductionOptions options;
    options.group_size = reduction_group;
    options.bucket_elements = bucket;
    const OperationLabel label = access_label(tensor.name, Tier::device);
    if (quantized) {
      QuantizedExchange::pack(compute_, accumulated, ranks, bucket, rounded.data());
      Event done;
      store_.quantized()->reduce(*flat.group, rounded.data(), received.data(),
                                 {sum.data(), summed, Shape{shard_range.size()}}, options,
                                 {compute_.record()}, label, done);
      done.wait();
    } else {
      const TensorView sent{rounded.data(), communication, whole};
      kernels::cast(compute_, accumulated, sent);
      const std::vector<Event> ready{compute_.record()};
      flat.group
          ->reduce_scatter(sent.data, communication, sum.data(), summed, shard_range.size(), options, ready,
                           label)
          .wait();
    }
    std::vector<float> values = from({sum.data(), summed, Shape{shard_range.size()}}, shard_range, false);
    if (flat.replicas == nullptr) return values;
    flat.replicas
        ->all_reduce(values.data(), static_cast<std::int64_t>(values.size()), DataType::float32,
                     ReduceOperation::sum, access_label(tensor.name))
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
  // It is in host memory already, as the step has one micro-batch.
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

// --- Digests --------------------------------------------------------------------------------------------

kernels::Digest TensorAccess::digest(Digested what) {
  const bool with_state = what == Digested::weights_and_state;
  // Sums of what this rank owns, of weights and of state that all ranks keep alike, and of those parts of a
  // shard that its replicas keep alike; and of what both ends of a pipeline, or all ranks of the axis
  // `tensor`, keep alike.
  enum Sum {
    own_elements,
    weights_of_all,
    state_of_all,
    weights_of_shard,
    state_of_shard,
    weights_of_ends,
    state_of_ends,
    weights_of_tensor,
    state_of_tensor,
    sum_count
  };
  // In the workspace, which nothing uses between steps, so that a digest never makes the peak.
  constexpr auto sum_bytes = static_cast<std::int64_t>(sum_count * sizeof(kernels::Digest));
  constexpr std::int64_t joined_at = round_up(sum_bytes, 16);
  constexpr std::int64_t least_bytes = joined_at + joined_at_once * size_of(DataType::float32);
  Buffer instead;
  if (workspace_.bytes < least_bytes) instead = Buffer(memory_, least_bytes, Category::other, "digest");
  void* const memory = instead ? instead.data() : workspace_.data;
  const std::int64_t memory_bytes = instead ? least_bytes : workspace_.bytes;
  kernels::fill_zero(compute_, {memory, DataType::uint8, Shape{sum_bytes}});
  auto* const sums = static_cast<kernels::Digest*>(memory);
  const auto tensor_count = static_cast<std::uint64_t>(store_.tensors().size());
  const Residency& residency = store_.residency();
  kernels::Digest host_sums[sum_count];  // of what lives in host memory
  const auto add_parameters = [&](const FlatBuffer& flat, ElementRange range, Sum sum) {
    for (const TensorPiece& piece : flat.layout.pieces(range)) {
      const TensorView values =
          residency.parameters(flat, {piece.buffer_begin, piece.buffer_begin + piece.elements});
      const TensorState& tensor = store_.tensor_of(flat, piece);
      for_each_run(tensor, elements_of_piece(piece), [&](const TensorRun& run) {
        kernels::add_digest(compute_,
                            part_of(values, piece.tensor_begin, {run.local, run.local + run.elements}),
                            tensor.model_index, run.global, sums + sum);
      });
    }
  };
  const auto add_joined = [&](const ShardSlice& part, std::uint64_t index, std::int64_t first,
                              kernels::Digest* target) {
    const std::int64_t most =
        part.on_host ? joined_at_once : (memory_bytes - joined_at) / size_of(DataType::float32);
    std::vector<float> on_host(part.on_host ? static_cast<std::size_t>(most) : 0);
    void* const joined =
        part.on_host ? static_cast<void*>(on_host.data()) : static_cast<std::byte*>(memory) + joined_at;
    for (std::int64_t done = 0; done < part.range.size(); done += most) {
      const std::int64_t begin = part.range.begin + done;
      const ShardSlice some = part_of(part, {begin, std::min(begin + most, part.range.end)});
      kernels::add_digest(*part.stream, master_in_fp32(some, joined), index, first + done, target);
    }
    if (part.on_host) part.stream->synchronize();
  };
  const auto add_state = [&](FlatBuffer& flat, ElementRange range, Sum sum) {
    const auto add = [&](const ShardSlice& slice) {
      kernels::Digest* target = (slice.on_host ? host_sums : sums) + sum;
      for (const TensorPiece& piece : flat.layout.pieces(slice.range)) {
        const TensorState& tensor = store_.tensor_of(flat, piece);
        const std::uint64_t index = tensor.model_index;
        for_each_run(tensor, elements_of_piece(piece), [&](const TensorRun& run) {
          const std::int64_t begin = piece.buffer_begin + run.local - piece.tensor_begin;
          const ShardSlice part = part_of(slice, {begin, begin + run.elements});
          if (part.in_halves()) {
            add_joined(part, index, run.global, target);
          } else {
            kernels::add_digest(*slice.stream, part.master, index, run.global, target);
          }
          for (std::size_t s = 0; with_state && s < part.state.size(); ++s) {
            TensorView state = part.state[s];
            std::int64_t first = run.global;
            if (is_block(state.dtype)) {  // as words
              first = bytes_of(state.dtype, first) / size_of(DataType::float32);
              state = {state.data, DataType::float32, Shape{state.bytes() / size_of(DataType::float32)}};
            }
            kernels::add_digest(*slice.stream, state, index + (s + 1) * tensor_count, first, target);
          }
        });
      }
    };
    if (flat.optimizer_tier == OffloadTier::none) {
      if (!range.empty()) add(store_.slice(flat, range));
    } else {
      store_.visit(flat, range, StateStore::Access::read, add);
    }
  };
  std::vector<std::byte> frozen;
  for (UnitState& unit : store_.units()) {
    for (FlatBuffer& flat : unit.buffers) {
      if (flat.empty() || (flat.trainable && what == Digested::frozen_weights)) continue;
      compute_.wait(flat.gather_done);
      if (residency.offloaded(flat)) compute_.wait(flat.shard_ready);
      const ElementRange whole{0, flat.layout.padded_elements()};
      const ElementRange mine = flat.owned();
      if (flat.trainable) {
        add_state(flat, mine, own_elements);
      } else if (flat.parameters_tier == OffloadTier::none) {
        add_parameters(flat, mine, own_elements);
      } else {
        for (const TensorPiece& piece : flat.layout.pieces(mine)) {
          frozen.assign(static_cast<std::size_t>(piece.elements * size_of(config_.precision.compute)),
                        std::byte{0});
          store_.read_parameters(flat, {piece.buffer_begin, piece.buffer_begin + piece.elements},
                                 frozen.data());
          const TensorState& tensor = store_.tensor_of(flat, piece);
          const TensorView values{frozen.data(), config_.precision.compute, Shape{piece.elements}};
          for_each_run(tensor, elements_of_piece(piece), [&](const TensorRun& run) {
            kernels::add_digest(store_.offload()->host(),
                                part_of(values, piece.tensor_begin, {run.local, run.local + run.elements}),
                                tensor.model_index, run.global, host_sums);
          });
          store_.offload()->host().synchronize();
        }
      }
      if (flat.owners() == 1) continue;
      if (flat.stages > 1) {
        if (residency.whole_parameters(flat)) add_parameters(flat, whole, weights_of_ends);
        if (flat.trainable && residency.whole_optimizer(flat)) add_state(flat, whole, state_of_ends);
      }
      if (flat.sharers > 1 && flat.sharers == mesh_.size(MeshAxis::tensor)) {
        if (residency.whole_parameters(flat)) add_parameters(flat, whole, weights_of_tensor);
        if (flat.trainable && residency.whole_optimizer(flat)) add_state(flat, whole, state_of_tensor);
      }
      if (residency.whole_parameters(flat)) {
        add_parameters(flat, whole, weights_of_all);
      } else if (flat.replicas != nullptr && flat.parameters_tier == OffloadTier::none) {
        add_parameters(flat, flat.shard(), weights_of_shard);
      }
      if (!flat.trainable) continue;
      if (residency.whole_optimizer(flat)) {
        add_state(flat, whole, state_of_all);
      } else if (flat.replicas != nullptr && !residency.over_replicas(flat)) {
        add_state(flat, flat.shard(), state_of_shard);
      }
    }
  }
  std::array<kernels::Digest, sum_count> mine;
  device_.copy_to_host(compute_, mine.data(), memory, sizeof(mine));
  compute_.synchronize();
  for (std::size_t i = 0; i < mine.size(); ++i) mine[i] += host_sums[i];
  // All sums of all ranks at once, so that where copies differ all throw, whichever group they are of.
  std::vector<decltype(mine)> all(static_cast<std::size_t>(ranks_.size()), mine);
  ranks_.all_gather(&mine, all.data(), sizeof(mine), DataType::uint8, 0, {}, access_label("digest")).wait();
  kernels::Digest total;
  std::map<std::pair<int, int>, int> holders;  // the lowest rank with a shard, by the buffers that it holds
  for (int rank = 0; rank < ranks_.size(); ++rank) {
    const auto& sums_of_rank = all[static_cast<std::size_t>(rank)];
    total += sums_of_rank[own_elements];
    const int alike = store_.placement().class_of(rank);
    const int holder =
        holders.try_emplace({alike, mesh_.coordinate(MeshAxis::shard, rank)}, rank).first->second;
    const auto compare = [&](Sum sum, int with, const char* what) {
      if (sums_of_rank[sum] == all[static_cast<std::size_t>(with)][sum]) return;
      throw CommunicationError("replicas differ: " + mesh_.name_of_rank(rank) + " holds other " + what +
                               " than " + mesh_.name_of_rank(with));
    };
    compare(weights_of_all, alike, "weights");
    compare(state_of_all, alike, "optimizer state");
    compare(weights_of_shard, holder, "weights");
    compare(state_of_shard, holder, "optimizer state");
    const int first_of_tensor = mesh_.group({MeshAxis::tensor}, rank).front();
    compare(weights_of_tensor, first_of_tensor, "weights");
    compare(state_of_tensor, first_of_tensor, "optimizer state");
    const int stage = mesh_.coordinate(MeshAxis::pipeline, rank);
    if (stage != 0 && stage + 1 != mesh_.size(MeshAxis::pipeline)) continue;
    // Rank 0 is of the first stage.
    const int first_end = mesh_.group({MeshAxis::tensor},
                                      0)[static_cast<std::size_t>(mesh_.coordinate(MeshAxis::tensor, rank))];
    compare(weights_of_ends, first_end, "weights");
    compare(state_of_ends, first_end, "optimizer state");
  }
  return total;
}

}  // namespace tranche::detail
