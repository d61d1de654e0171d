#include "engine/traffic_formulas.h"

#include <cstddef>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "tranche/kernels/quantization.h"

namespace tranche::detail {

using nlohmann::ordered_json;

std::int64_t TrafficFormulas::reductions(const FlatBuffer& flat) const {
  return store_.residency().policy(flat) == ReductionPolicy::boundary ? 1 : config_.accumulation_steps;
}

std::int64_t TrafficFormulas::sent_reductions(const FlatBuffer& flat) const {
  const Mesh& mesh = runtime_.mesh();
  return store_.residency().policy(flat) == ReductionPolicy::boundary
             ? 1
             : config_.micro_batches_of(mesh.data_rank(runtime_.rank()), mesh.data_ranks());
}

TrafficCount TrafficFormulas::over_replicas() const {
  TrafficCount sent;
  const Residency& residency = store_.residency();
  for (const FlatBuffer* flat : store_.trainable()) {
    if (flat->empty() || flat->replicas == nullptr) continue;
    // A rank's own range is reduced each time, in fp32, and gathered once, as sums or as new weights.
    const std::int64_t sums = residency.sums_replicas_once(*flat) ? 1 : reductions(*flat);
    const std::int64_t part = flat->owned().size() * (flat->replicas->size() - 1);
    const DataType gathered =
        residency.over_replicas(*flat) ? config_.precision.compute : config_.precision.accumulation;
    sent.elements += (sums + 1) * part;
    sent.bytes += (sums * size_of(DataType::float32) + size_of(gathered)) * part;
  }
  return sent;
}

std::int64_t TrafficFormulas::summed_elements(const FlatBuffer& flat) const {
  ReductionOptions options;
  options.group_size =
      flat.axis() == MeshAxis::shard ? reducer_.reduction_group() : flat.givers_a_data_rank();
  options.bucket_elements = config_.reduce_bucket_elements;
  return reductions(flat) * flat.group->summed_elements_sent(flat.layout.shard_elements(),
                                                             config_.precision.communication, options);
}

TrafficCount TrafficFormulas::of_rows() const {
  TrafficCount sent;
  const int parts = runtime_.mesh().size(MeshAxis::tensor);
  if (parts == 1 || !model_.tensor_messages || config_.tensor_sums == TensorSums::chain) return sent;
  const auto frozen = [this](std::string_view name) {
    return store_.tensors()[static_cast<std::size_t>(store_.find_tensor(name))].frozen;
  };
  TensorMessages messages;
  for (const int chunk : stages_.chunks_of(stage())) {
    const TensorMessages of_chunk =
        model_.tensor_messages(config_, stages_.begin(chunk), stages_.end(model_, chunk), frozen);
    messages.rows += of_chunk.rows;
    messages.numbers += of_chunk.numbers;
  }
  const std::int64_t tokens = tokens_of_rank();
  const std::int64_t times = config_.accumulation_steps * (parts - 1);
  const std::int64_t rows = times * divide_round_up(tokens, parts) * model_.residual_width * messages.rows;
  const std::int64_t numbers = times * tokens * messages.numbers;
  sent.elements = rows + numbers;
  sent.bytes = rows * size_of(config_.precision.compute) + numbers * size_of(DataType::float32);
  return sent;
}

TrafficCount TrafficFormulas::of_noise() const {
  TrafficCount sent;
  for (const FlatBuffer* flat : store_.trainable()) {
    if (!config_.gradient_noise_scale || flat->empty()) continue;
    const std::int64_t elements = reductions(*flat) * PieceStatistics::sent_elements(*flat);
    const bool boundary = store_.residency().policy(*flat) == ReductionPolicy::boundary;
    sent.elements += elements;
    sent.bytes += elements * size_of(boundary ? config_.precision.accumulation : DataType::float32);
  }
  return sent;
}

TrafficCount TrafficFormulas::of_sequences() const {
  TrafficCount sent;
  const Mesh& mesh = runtime_.mesh();
  if (mesh.size(MeshAxis::context) == 1 || !model_.context_elements) return sent;
  for (const int chunk : stages_.chunks_of(stage())) {
    sent.elements += config_.accumulation_steps *
                     model_.context_elements(config_, mesh, stages_.begin(chunk), stages_.end(model_, chunk));
  }
  sent.bytes = sent.elements * size_of(config_.precision.compute);
  return sent;
}

TrafficCount TrafficFormulas::along(MeshAxis axis) const {
  if (axis == MeshAxis::replicate) return over_replicas();
  if (axis == MeshAxis::context) return of_sequences();
  if (axis != MeshAxis::tensor) return in_groups(axis, 0);
  TrafficCount sent = of_rows();
  const TrafficCount noise = of_noise();
  sent.elements += noise.elements;
  sent.bytes += noise.bytes;
  const TrafficCount of_matrices = matrices_.sent(axis);
  sent.elements += of_matrices.elements;
  sent.bytes += of_matrices.bytes;
  // Whole tensors, and tensors that only some ranks share, are summed over groups of different sizes.
  std::set<int> sizes;
  for (const FlatBuffer* flat : store_.trainable()) {
    if (flat->empty() || flat->axis() != axis || !sizes.insert(flat->group->size()).second) continue;
    const TrafficCount of_group = in_groups(axis, flat->group->size());
    sent.elements += of_group.elements;
    sent.bytes += of_group.bytes;
  }
  return sent;
}

TrafficCount TrafficFormulas::in_groups(MeshAxis axis, int group) const {
  const PrecisionConfig& precision = config_.precision;
  TrafficCount sent = axis == MeshAxis::tensor ? TrafficCount() : matrices_.sent(axis);
  const bool of_stages = axis == MeshAxis::pipeline;
  if (of_stages) {
    // The residual to the next chunk and its gradient to the chunk before, if these are on other stages.
    const int messages = stages_.messages_of(stage());
    const std::int64_t rows = divide_round_up(tokens_of_rank(), runtime_.mesh().size(MeshAxis::tensor));
    const std::int64_t elements = config_.accumulation_steps * rows * model_.residual_width * messages;
    sent.elements += elements;
    sent.bytes += elements * size_of(precision.compute);
  }
  std::int64_t gathered = 0, reduced = 0, summed = 0, blocks = 0;
  std::int64_t wider_sums = 0;  // elements that are added by use, and are sent in fp32
  int shards = 1;
  for (const FlatBuffer* flat : store_.trainable()) {
    if (flat->empty() || flat->axis() != axis || (group > 0 && flat->group->size() != group)) continue;
    shards = flat->group->size();
    const std::int64_t elements = flat->layout.padded_elements();
    gathered += elements;
    if (store_.residency().quantizes_gradients(*flat)) {  // all ranks send, even those without samples
      blocks += reductions(*flat) * kernels::quantized_bytes(elements);
      continue;
    }
    reduced += sent_reductions(*flat) * elements;
    if (flat->sums_uses()) {
      wider_sums += sent_reductions(*flat) * elements;
    } else {
      summed += summed_elements(*flat);
    }
  }
  // Stages 0-2 gather once per step (the main gradient, or new weights). Stage 3 gathers by its schedule, and
  // also gathers the new weights of units that it keeps whole.
  if (config_.stage > 0) {
    const std::int64_t published = formulas_.published_elements(axis, group);
    const bool of_shards = axis == MeshAxis::shard;
    const std::int64_t quantized = config_.quantized_weights ? published + (of_shards ? quantized_ : 0) : 0;
    gathered = published + (of_shards ? gathered_ : 0) - quantized;
    blocks += kernels::quantized_bytes(quantized);
  }
  const std::int64_t gathered_bytes =
      gathered * size_of(config_.stage == 0 ? precision.accumulation : precision.compute);
  // Sums between nodes are fp32, whatever the dtype of other messages.
  const std::int64_t wider = size_of(DataType::float32) - size_of(precision.communication);
  // Blocks are counted in bytes, also as elements.
  sent.elements += (reduced + gathered + blocks) / shards * (shards - 1);
  sent.bytes += (reduced * size_of(precision.communication) + wider_sums * wider + gathered_bytes + blocks) /
                    shards * (shards - 1) +
                summed * wider;
  return sent;
}

TrafficCount TrafficFormulas::all() const {
  TrafficCount sum;
  for (int a = 0; a < mesh_axes; ++a) {
    const auto axis = static_cast<MeshAxis>(a);
    const TrafficCount sent = along(axis);
    sum.elements += sent.elements;
    sum.bytes += sent.bytes;
  }
  return sum;
}

std::string TrafficFormulas::report(const StepTraffic& traffic, const DataGroups& groups) const {
  const auto by_operation = [](const StepTraffic::Counts& counts) {
    ordered_json result = ordered_json::object();
    for (const auto& [operation, count] : counts) {
      result[operation] = {{"calls", count.calls}, {"elements", count.elements}, {"bytes", count.bytes}};
    }
    return result;
  };
  ordered_json result = by_operation(traffic.data());
  result["control"] = by_operation(traffic.control());
  const TrafficCount formula_of_all = all();
  const auto known = [](bool knows, std::int64_t count) {
    return knows ? ordered_json(count) : ordered_json();
  };
  result["formula_elements"] = known(knows(MeshAxis::tensor), formula_of_all.elements);
  result["formula_bytes"] = known(knows(MeshAxis::tensor), formula_of_all.bytes);
  // Data is sent only within groups of the axes; only control messages are sent to all ranks.
  std::map<MeshAxis, TrafficCount> axes{{MeshAxis::shard, {}}};
  const std::vector<TrafficCount>& sent = traffic.data_of_groups();
  for (std::size_t i = 0; i < sent.size(); ++i) {
    TrafficCount& of = axes[groups.axis(i)];
    of.elements += sent[i].elements;
    of.bytes += sent[i].bytes;
  }
  ordered_json by_axis = ordered_json::array();
  for (const auto& [axis, count] : axes) {
    const TrafficCount formula = along(axis);
    by_axis.push_back({{"axis", name_of(axis)},
                       {"elements", count.elements},
                       {"bytes", count.bytes},
                       {"formula_elements", known(knows(axis), formula.elements)},
                       {"formula_bytes", known(knows(axis), formula.bytes)}});
  }
  result["by_axis"] = std::move(by_axis);
  return result.dump();
}

}  // namespace tranche::detail
