#include "engine/whole_matrices.h"

#include <algorithm>
#include <array>
#include <utility>

#include "engine/offloaded_state.h"
#include "partition/matrix_plan.h"
#include "tranche/core/error.h"
#include "tranche/kernels/elementwise.h"

namespace tranche::detail {

namespace {

constexpr DataType message_type = DataType::bfloat16;
constexpr std::int64_t message_width = 2;
/// The least size of a buffer of the arena, also on a rank that has nothing of some matrices.
constexpr std::int64_t least_bytes = 64;
/// Buffers under way: one is prepared and sent, one computed, one sent back and applied.
constexpr std::size_t flights = 3;
constexpr const char* pass_name = "matrices";

void* at(void* data, std::int64_t element) {
  return static_cast<std::byte*>(data) + element * message_width;
}

TensorView message_view(void* data, std::int64_t first, std::int64_t elements) {
  return {at(data, first), message_type, Shape{elements}};
}

}  // namespace

WholeMatrices::WholeMatrices(StateStore& store, const Config& config, FlatUpdater& updater,
                             const Optimizer& optimizer, Communicator& ranks, std::vector<int> in_mesh,
                             const Mesh& mesh, Device& device, StepArena& arena)
    : store_(store),
      config_(config),
      updater_(updater),
      optimizer_(optimizer),
      ranks_(ranks),
      in_mesh_(std::move(in_mesh)),
      mesh_(mesh),
      arena_(arena),
      compute_(device.compute_stream()) {
  const Residency& residency = store.residency();
  // Every rank knows of all buffers, so that the stages between the ends refuse too, with the same text.
  const bool over_replicas =
      config.stage > 0 && config.replicate == Replicate::parameters && mesh.size(MeshAxis::replicate) > 1;
  for (FlatBuffer* flat : store.trainable()) {
    if (!flat->whole_matrices || flat->layout.padded_elements() == 0) continue;
    if (over_replicas && flat->stages > 1) {
      throw ConfigurationError("tranche.replicate parameters: stages of the pipeline share tensor " +
                               store.tensors()[static_cast<std::size_t>(flat->tensors.front())].name +
                               ", which its optimizer updates as a whole matrix; write all, or leave it out");
    }
    if (flat->empty()) continue;
    Exchange exchange;
    exchange.flat = flat;
    exchange.everywhere = residency.whole_optimizer(*flat);
    exchange.group = residency.over_replicas(*flat) ? &ranks_ : flat->group;
    exchanges_.push_back(std::move(exchange));
  }
  // One plan for all buffers of a group.
  std::vector<Communicator*> groups;
  for (const Exchange& exchange : exchanges_) {
    if (std::find(groups.begin(), groups.end(), exchange.group) == groups.end()) {
      groups.push_back(exchange.group);
    }
  }
  for (Communicator* const group : groups) plan(*group);
}

/// Elements of the buffer that a rank of the exchange's group brings to it.
ElementRange WholeMatrices::brought_by(const Exchange& exchange, int rank) const {
  const FlatBuffer& flat = *exchange.flat;
  if (!store_.residency().over_replicas(flat)) return flat.layout.shard_range(rank);
  const int number = in_mesh_[static_cast<std::size_t>(rank)];
  return flat.owned_by(mesh_.state_rank(number), mesh_.coordinate(MeshAxis::replicate, number));
}

void WholeMatrices::plan(Communicator& group) {
  const int ranks = group.size();
  const auto tensor_range = [](const FlatBuffer& flat, int t) {
    const std::int64_t begin = flat.layout.tensor_offset(t);
    return ElementRange{begin, begin + flat.layout.tensor_elements(t)};
  };
  std::vector<MatrixJob> jobs;
  for (const Exchange& exchange : exchanges_) {
    if (exchange.group != &group) continue;
    const FlatBuffer& flat = *exchange.flat;
    for (int t = 0; t < flat.layout.tensors(); ++t) {
      MatrixJob& job = jobs.emplace_back();
      job.operations =
          optimizer_.whole_work(updater_.facts(flat.tensors[static_cast<std::size_t>(t)])).operations;
      for (int r = 0; r < ranks; ++r) {
        job.held.push_back(intersect(tensor_range(flat, t), brought_by(exchange, r)).size());
      }
    }
  }
  const std::vector<int> owners = plan_matrices(jobs, ranks);
  load_ratio_ = std::max(load_ratio_, matrix_load_ratio(jobs, owners, ranks));
  auto owner = owners.begin();
  for (Exchange& exchange : exchanges_) {
    if (exchange.group != &group) continue;
    const FlatBuffer& flat = *exchange.flat;
    const std::span<const int> own{owner, owner + flat.layout.tensors()};
    owner += flat.layout.tensors();
    const ElementRange kept = store_.residency().optimizer_range(flat);
    for (int r = 0; r < ranks; ++r) {
      RankElements& message = exchange.messages.emplace_back();
      message.first = exchange.message_elements;
      for (int t = 0; t < flat.layout.tensors(); ++t) {
        if (own[static_cast<std::size_t>(t)] != r) continue;
        const ElementRange range = intersect(tensor_range(flat, t), kept);
        if (range.empty()) continue;
        exchange.pieces.push_back({range, exchange.message_elements});
        exchange.message_elements += range.size();
        exchange.largest_piece = std::max(exchange.largest_piece, range.size());
      }
      message.count = exchange.message_elements - message.first;
    }
    exchange.matrices.resize(static_cast<std::size_t>(ranks));
    // The matrices lie in the message, one behind the other, where all ranks keep everything.
    const std::int64_t first =
        exchange.everywhere ? exchange.messages[static_cast<std::size_t>(group.rank())].first : 0;
    for (int t = 0; t < flat.layout.tensors(); ++t) {
      if (own[static_cast<std::size_t>(t)] != group.rank()) continue;
      const ElementRange range = tensor_range(flat, t);
      const int tensor = flat.tensors[static_cast<std::size_t>(t)];
      const std::int64_t scratch = optimizer_.whole_work(updater_.facts(tensor)).scratch_bytes;
      exchange.owned.push_back({tensor, first + exchange.owned_elements, range.size()});
      exchange.scratch_bytes = std::max(exchange.scratch_bytes, scratch);
      // The part that one rank brings of all matrices is contiguous here, as it is in the buffer.
      for (int r = 0; r < ranks; ++r) {
        const ElementRange part = intersect(range, brought_by(exchange, r));
        if (part.empty()) continue;
        RankElements& from = exchange.matrices[static_cast<std::size_t>(r)];
        if (from.count == 0) from.first = exchange.owned_elements + part.begin - range.begin;
        from.count += part.size();
      }
      exchange.owned_elements += range.size();
    }
  }
}

void WholeMatrices::allocate(MemoryResource& host_memory) {
  std::int64_t message = 0, piece = 0;
  for (const Exchange& exchange : exchanges_) {
    if (exchange.flat->optimizer_tier == OffloadTier::none) continue;
    message = std::max(message, exchange.message_elements);
    piece = std::max(piece, exchange.largest_piece);
  }
  if (message == 0) return;
  for (std::size_t i = 0; i < flights; ++i) {
    host_messages_.emplace_back(host_memory, message * message_width, Category::communication,
                                "matrices between host and device");
  }
  host_scratch_ = Buffer(host_memory, piece * size_of(DataType::float32), Category::workspace, "matrices");
}

TrafficCount WholeMatrices::sent() const {
  TrafficCount count;
  for (const Exchange& exchange : exchanges_) {
    const auto own = static_cast<std::size_t>(exchange.group->rank());
    const std::int64_t others = exchange.group->size() - 1;
    if (exchange.everywhere) {
      count.elements += exchange.owned_elements * others;
      continue;
    }
    count.elements += exchange.message_elements - exchange.messages[own].count;
    count.elements += exchange.owned_elements - exchange.matrices[own].count;
  }
  count.bytes = count.elements * message_width;
  return count;
}

// --- A step ---------------------------------------------------------------------------------------------

void WholeMatrices::update(const OptimizerStep& step) {
  if (!any()) return;
  arena_.begin(pass_name, config_.debug.plan_memory && passed_ && !arena_.planned(pass_name));
  passed_ = true;
  {
    std::array<Flight, flights> under_way;
    for (std::size_t i = 0; i < flights && i < host_messages_.size(); ++i) {
      under_way[i].host_message = host_messages_[i].data();
    }
    const auto run = [&](std::size_t i, auto stage) {
      if (i < exchanges_.size()) (this->*stage)(exchanges_[i], under_way[i % flights], step);
    };
    // Unsigned numbers below zero are beyond the end.
    for (std::size_t i = 0; i < exchanges_.size() + 2; ++i) {
      run(i, &WholeMatrices::begin);
      run(i - 1, &WholeMatrices::compute);
      run(i - 2, &WholeMatrices::finish);
    }
  }
  arena_.end();
}

/// Calls visit for the parts of tensors in a slice, with their place in the message.
template <class Visit>
void WholeMatrices::for_each_piece(const Exchange& exchange, const ShardSlice& slice, void* message,
                                   const Visit& visit) {
  for (const Piece& piece : exchange.pieces) {
    const ElementRange range = intersect(piece.range, slice.range);
    if (range.empty()) continue;
    visit(part_of(slice, range),
          message_view(message, piece.offset + range.begin - piece.range.begin, range.size()));
  }
}

StepBuffer WholeMatrices::acquire(std::int64_t bytes, Category category, std::string_view tag) {
  StepBuffer buffer = arena_.acquire(std::max(bytes, least_bytes), category, tag);
  for (const Event& event : buffer.ready()) compute_.wait(event);
  buffer.used_on(compute_);
  return buffer;
}

void WholeMatrices::begin(Exchange& exchange, Flight& flight, const OptimizerStep& step) {
  FlatBuffer& flat = *exchange.flat;
  const bool on_host = flat.optimizer_tier != OffloadTier::none;
  Stream& stream = on_host ? store_.offload()->host() : compute_;
  flight.message = acquire(exchange.message_elements * message_width, Category::communication, flat.name);
  void* const message = on_host ? flight.host_message : flight.message.data();
  {
    StepBuffer own_scratch;
    if (!on_host) {
      own_scratch =
          acquire(exchange.largest_piece * size_of(DataType::float32), Category::workspace, flat.name);
    }
    void* const scratch = on_host ? host_scratch_.data() : own_scratch.data();
    if (!step.apply) kernels::fill_zero(stream, message_view(message, 0, exchange.message_elements));
    store_.visit_in_step(flat, [&](const ShardSlice& slice) {
      if (!step.apply) return;
      for_each_piece(exchange, slice, message, [&](const ShardSlice& part, const TensorView& part_message) {
        updater_.prepare(step, flat, part, part_message,
                         {scratch, DataType::float32, Shape{part.range.size()}});
      });
    });
  }
  std::vector<Event> ready{stream.record()};
  if (on_host) {
    ready.push_back(compute_.record());  // who had the device's memory before
    ready = {store_.offload()->link().copy_from_host(flight.message.data(), message,
                                                     exchange.message_elements * message_width, ready)};
  }
  flight.arrived = ready.front();
  if (exchange.everywhere) return;
  flight.matrices = arena_.acquire(std::max(exchange.owned_elements * message_width, least_bytes),
                                   Category::communication, flat.name);
  for (const Event& event : flight.matrices.ready()) ready.push_back(event);
  flight.arrived = exchange.group->all_to_all_v(flight.message.data(), exchange.messages,
                                                flight.matrices.data(), exchange.matrices, message_type,
                                                ready, OperationLabel{flat.name, "step", Traffic::data});
  if (!config_.overlap) flight.arrived.wait();
}

void WholeMatrices::compute(Exchange& exchange, Flight& flight, const OptimizerStep& step) {
  FlatBuffer& flat = *exchange.flat;
  compute_.wait(flight.arrived);
  void* const matrices = exchange.everywhere ? flight.message.data() : flight.matrices.data();
  if (!exchange.owned.empty()) {
    const StepBuffer scratch = acquire(exchange.scratch_bytes, Category::workspace, flat.name);
    for (const Matrix& matrix : exchange.owned) {
      if (!step.apply) break;
      optimizer_.whole(compute_, step, updater_.facts(matrix.tensor),
                       message_view(matrices, matrix.offset, matrix.elements),
                       {scratch.data(), exchange.scratch_bytes});
    }
  }
  const std::vector<Event> ready{compute_.record()};
  const OperationLabel label{flat.name, "step", Traffic::data};
  flight.returned = ready;
  if (!exchange.everywhere) {
    flight.returned = {exchange.group->all_to_all_v(matrices, exchange.matrices, flight.message.data(),
                                                    exchange.messages, message_type, ready, label)};
  } else if (exchange.group->size() > 1) {
    for (int root = 0; root < exchange.group->size(); ++root) {
      const RankElements& of = exchange.messages[static_cast<std::size_t>(root)];
      if (of.count == 0) continue;
      flight.returned.push_back(
          exchange.group->broadcast(at(matrices, of.first), of.count, message_type, root, ready, label));
    }
  }
  if (!config_.overlap) flight.returned.back().wait();
}

void WholeMatrices::finish(Exchange& exchange, Flight& flight, const OptimizerStep& step) {
  FlatBuffer& flat = *exchange.flat;
  for (const Event& event : flight.returned) compute_.wait(event);
  if (flight.matrices) flight.matrices.release(compute_.record());
  compute_.wait(flat.gather_done);  // peers read the old weights of this shard
  void* message = flight.message.data();
  if (flat.optimizer_tier != OffloadTier::none) {
    OffloadedState& offload = *store_.offload();
    message = flight.host_message;
    const Event copied = offload.link().copy_to_host(
        message, flight.message.data(), exchange.message_elements * message_width, flight.returned);
    flight.message.release(copied);
    offload.host().wait(copied);
  }
  const auto apply = [&](const ShardSlice& slice) {
    for_each_piece(exchange, slice, message, [&](const ShardSlice& part, const TensorView& part_message) {
      updater_.apply(step, flat, part, false, part_message);
    });
  };
  if (store_.residency().offloaded(flat)) {
    OffloadedState& offload = *store_.offload();
    offload.begin_update(flat);
    for (std::int64_t tile = 0; tile < offload.update_tiles(flat); ++tile) {
      const ShardSlice slice = offload.open_tile(flat, tile);
      if (!step.apply) {
        copy_master_to_weight(slice);
      } else {
        // Padding, where the memory held something else before.
        if (slice.weight.data != nullptr && !slice.in_halves()) {
          kernels::fill_zero(*slice.stream, slice.weight);
        }
        apply(slice);
      }
      offload.close_tile();
    }
    offload.end_update();
  } else {
    apply(store_.slice_in_step(flat));
    if (!step.apply && store_.residency().quantizes(flat)) store_.restore_weights(flat);
    flat.shard_ready = compute_.record();
  }
  flight.message.release();
  store_.gather_updated(flat, "step");
}

}  // namespace tranche::detail
