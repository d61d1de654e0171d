#include "engine/state_digest.h"

#include <algorithm>
#include <map>
#include <utility>

#include "engine/offloaded_state.h"
#include "tranche/core/error.h"
#include "tranche/kernels/elementwise.h"

namespace tranche::detail {

namespace {

/// The least number of elements whose halves are joined at once.
constexpr std::int64_t joined_at_once = 1 << 12;

/// The range of a piece's elements within the tensor.
ElementRange elements_of_piece(const TensorPiece& piece) {
  return {piece.tensor_begin, piece.tensor_begin + piece.elements};
}

}  // namespace

StateDigest::StateDigest(StateStore& store, const Config& config, const Mesh& mesh, Device& device,
                         MemoryResource& memory, kernels::Workspace workspace, bool with_state, bool frozen)
    : store_(store),
      config_(config),
      mesh_(mesh),
      device_(device),
      compute_(device.compute_stream()),
      with_state_(with_state),
      frozen_(frozen),
      scratch_(workspace) {
  // The workspace is unused between steps, so a digest does not raise peak memory.
  constexpr std::int64_t least_bytes = joined_at + joined_at_once * size_of(DataType::float32);
  if (workspace.bytes < least_bytes) {
    instead_ = Buffer(memory, least_bytes, Category::other, "digest");
    scratch_ = {instead_.data(), least_bytes};
  }
  kernels::fill_zero(compute_, {scratch_.data, DataType::uint8, Shape{sizeof(Sums)}});
}

kernels::Digest StateDigest::over(Communicator& ranks, const OperationLabel& label) {
  for (UnitState& unit : store_.units()) {
    for (FlatBuffer& flat : unit.buffers) {
      if (!flat.empty() && !(flat.trainable && frozen_)) add(flat);
    }
  }
  Sums mine;
  device_.copy_to_host(compute_, mine.data(), scratch_.data, sizeof(mine));
  compute_.synchronize();
  for (std::size_t i = 0; i < mine.size(); ++i) mine[i] += host_sums_[i];
  // All ranks exchange all sums, so that all throw if copies differ in any group.
  std::vector<Sums> all(static_cast<std::size_t>(ranks.size()), mine);
  ranks.all_gather(&mine, all.data(), sizeof(mine), DataType::uint8, 0, {}, label).wait();
  compare_copies(all);
  kernels::Digest total;
  for (const Sums& of_rank : all) total += of_rank[own_elements];
  return total;
}

void StateDigest::add(FlatBuffer& flat) {
  compute_.wait(flat.gather_done);
  if (store_.residency().offloaded(flat)) compute_.wait(flat.shard_ready);
  if (flat.trainable) {
    add_state(flat, flat.owned(), own_elements);
  } else if (flat.parameters_tier == OffloadTier::none) {
    add_parameters(flat, flat.owned(), own_elements);
  } else {
    add_frozen_off_device(flat);
  }
  if (flat.owners() > 1) add_copies(flat);
}

void StateDigest::add_parameters(const FlatBuffer& flat, ElementRange range, Sum sum) {
  for (const TensorPiece& piece : flat.layout.pieces(range)) {
    const TensorView values =
        store_.residency().parameters(flat, {piece.buffer_begin, piece.buffer_begin + piece.elements});
    const TensorState& tensor = store_.tensor_of(flat, piece);
    for_each_run(tensor, elements_of_piece(piece), [&](const TensorRun& run) {
      kernels::add_digest(compute_,
                          part_of(values, piece.tensor_begin, {run.local, run.local + run.elements}),
                          tensor.model_index, run.global, sums() + sum);
    });
  }
}

void StateDigest::add_joined(const ShardSlice& part, std::uint64_t index, std::int64_t first,
                             kernels::Digest* target) {
  const std::int64_t most =
      part.on_host ? joined_at_once : (scratch_.bytes - joined_at) / size_of(DataType::float32);
  std::vector<float> on_host(part.on_host ? static_cast<std::size_t>(most) : 0);
  void* const joined =
      part.on_host ? static_cast<void*>(on_host.data()) : static_cast<std::byte*>(scratch_.data) + joined_at;
  for (std::int64_t done = 0; done < part.range.size(); done += most) {
    const std::int64_t begin = part.range.begin + done;
    const ShardSlice some = part_of(part, {begin, std::min(begin + most, part.range.end)});
    kernels::add_digest(*part.stream, master_in_fp32(some, joined), index, first + done, target);
  }
  if (part.on_host) part.stream->synchronize();
}

void StateDigest::add_slice(const FlatBuffer& flat, const ShardSlice& slice, Sum sum) {
  const auto tensor_count = static_cast<std::uint64_t>(store_.tensors().size());
  kernels::Digest* target = (slice.on_host ? host_sums_.data() : sums()) + sum;
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
      for (std::size_t s = 0; with_state_ && s < part.state.size(); ++s) {
        TensorView state = part.state[s];
        std::int64_t first = run.global;
        if (is_block(state.dtype)) {  // counted in words
          first = bytes_of(state.dtype, first) / size_of(DataType::float32);
          state = {state.data, DataType::float32, Shape{state.bytes() / size_of(DataType::float32)}};
        }
        kernels::add_digest(*slice.stream, state, index + (s + 1) * tensor_count, first, target);
      }
    });
  }
}

void StateDigest::add_state(FlatBuffer& flat, ElementRange range, Sum sum) {
  const auto visit = [&](const ShardSlice& slice) { add_slice(flat, slice, sum); };
  if (flat.optimizer_tier != OffloadTier::none) {
    store_.visit(flat, range, StateStore::Access::read, visit);
  } else if (!range.empty()) {
    visit(store_.slice(flat, range));
  }
}

void StateDigest::add_frozen_off_device(FlatBuffer& flat) {
  std::vector<std::byte> frozen;
  for (const TensorPiece& piece : flat.layout.pieces(flat.owned())) {
    frozen.assign(static_cast<std::size_t>(piece.elements * size_of(config_.precision.compute)),
                  std::byte{0});
    store_.read_parameters(flat, {piece.buffer_begin, piece.buffer_begin + piece.elements}, frozen.data());
    const TensorState& tensor = store_.tensor_of(flat, piece);
    const TensorView values{frozen.data(), config_.precision.compute, Shape{piece.elements}};
    for_each_run(tensor, elements_of_piece(piece), [&](const TensorRun& run) {
      kernels::add_digest(store_.offload()->host(),
                          part_of(values, piece.tensor_begin, {run.local, run.local + run.elements}),
                          tensor.model_index, run.global, host_sums_.data() + own_elements);
    });
    store_.offload()->host().synchronize();
  }
}

void StateDigest::add_copies(FlatBuffer& flat) {
  const Residency& residency = store_.residency();
  const ElementRange whole{0, flat.layout.padded_elements()};
  if (flat.stages > 1) {
    if (residency.whole_parameters(flat)) add_parameters(flat, whole, weights_of_ends);
    if (flat.trainable && residency.whole_optimizer(flat)) add_state(flat, whole, state_of_ends);
  }
  if (flat.sharers > 1) {
    const bool all = flat.sharers == mesh_.size(MeshAxis::tensor);
    if (residency.whole_parameters(flat)) {
      add_parameters(flat, whole, all ? weights_of_tensor : weights_of_sharers);
    }
    if (flat.trainable && residency.whole_optimizer(flat)) {
      add_state(flat, whole, all ? state_of_tensor : state_of_sharers);
    }
  }
  if (residency.whole_parameters(flat)) {
    add_parameters(flat, whole, weights_of_all);
  } else if (flat.replicas != nullptr && flat.parameters_tier == OffloadTier::none) {
    add_parameters(flat, flat.shard(), weights_of_shard);
  }
  if (!flat.trainable) return;
  if (residency.whole_optimizer(flat)) {
    add_state(flat, whole, state_of_all);
  } else if (flat.replicas != nullptr && !residency.over_replicas(flat)) {
    add_state(flat, flat.shard(), state_of_shard);
  }
}

int StateDigest::sharers_of_slices() const {
  for (const Placement::Buffer& buffer : store_.placement().buffers()) {
    if (!buffer.empty() && buffer.sharers > 1 && buffer.parts() > 1) return buffer.sharers;
  }
  return 1;
}

void StateDigest::compare_copies(const std::vector<Sums>& all) const {
  std::map<std::pair<int, int>, int> holders;  // the lowest rank with a shard, by the class of its buffers
  // The lowest rank of each group of the axis tensor, and of each group that shares slices.
  std::map<std::array<int, 4>, int> first_parts;
  const int parts = mesh_.size(MeshAxis::tensor), sharers = sharers_of_slices();
  const std::vector<int> ends = mesh_.group({MeshAxis::tensor}, 0);  // the group of rank 0, which is in the
                                                                     // first stage
  for (int rank = 0; rank < static_cast<int>(all.size()); ++rank) {
    const auto& sums_of_rank = all[static_cast<std::size_t>(rank)];
    const int alike = store_.placement().class_of(rank);
    const int holder = holders.try_emplace({alike, mesh_.state_rank(rank)}, rank).first->second;
    const auto compare = [&](Sum sum, int with, const char* what) {
      if (sums_of_rank[sum] == all[static_cast<std::size_t>(with)][sum]) return;
      throw CommunicationError("replicas differ: " + mesh_.name_of_rank(rank) + " holds other " + what +
                               " than " + mesh_.name_of_rank(with));
    };
    compare(weights_of_all, alike, "weights");
    compare(state_of_all, alike, "optimizer state");
    compare(weights_of_shard, holder, "weights");
    compare(state_of_shard, holder, "optimizer state");
    const auto first_of_neighbours = [&](int neighbours) {
      const int group = mesh_.coordinate(MeshAxis::tensor, rank) / neighbours;
      return first_parts
          .try_emplace(
              {mesh_.coordinate(MeshAxis::replicate, rank), mesh_.coordinate(MeshAxis::pipeline, rank),
               mesh_.state_rank(rank), neighbours == parts ? -1 : group},
              rank)
          .first->second;
    };
    compare(weights_of_tensor, first_of_neighbours(parts), "weights");
    compare(state_of_tensor, first_of_neighbours(parts), "optimizer state");
    compare(weights_of_sharers, first_of_neighbours(sharers), "weights");
    compare(state_of_sharers, first_of_neighbours(sharers), "optimizer state");
    const int stage = mesh_.coordinate(MeshAxis::pipeline, rank);
    if (stage != 0 && stage + 1 != mesh_.size(MeshAxis::pipeline)) continue;
    const int first_end = ends[static_cast<std::size_t>(mesh_.coordinate(MeshAxis::tensor, rank))];
    compare(weights_of_ends, first_end, "weights");
    compare(state_of_ends, first_end, "optimizer state");
  }
}

}  // namespace tranche::detail
