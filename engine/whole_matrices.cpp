#include "engine/whole_matrices.h"

#include <algorithm>
#include <array>
#include <utility>

#include "engine/offloaded_state.h"
#include "partition/matrix_plan.h"
#include "tranche/kernels/copy_columns.h"
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

ElementRange tensor_range(const FlatLayout& layout, int tensor) {
  const std::int64_t begin = layout.tensor_offset(tensor);
  return {begin, begin + layout.tensor_elements(tensor)};
}

TensorView message_view(void* data, std::int64_t first, std::int64_t elements) {
  return {at(data, first), message_type, Shape{elements}};
}

}  // namespace

WholeMatrices::WholeMatrices(StateStore& store, const Config& config, FlatUpdater& updater,
                             const Optimizer& optimizer, DataGroups& groups, Device& device, StepArena& arena)
    : store_(store),
      config_(config),
      updater_(updater),
      optimizer_(optimizer),
      arena_(arena),
      compute_(device.compute_stream()) {
  const Placement& placement = store.placement();
  for (FlatBuffer* flat : store.trainable()) {
    if (!flat->whole_matrices || flat->tensors.empty()) continue;
    Exchange exchange;
    exchange.flat = flat;
    exchange.buffer = placement.buffer_of(flat->tensors.front());
    DataGroups::MatrixRanks ranks = groups.of_matrices(placement, exchange.buffer);
    if (flat->empty()) continue;
    exchange.group = ranks.group;
    exchange.in_mesh = std::move(ranks.in_mesh);
    exchange.axis = groups.axis_of(*exchange.group);
    exchange.cut = placement.buffer(exchange.buffer).parts() > 1;
    exchange.everywhere = store.residency().whole_optimizer(*flat);
    exchanges_.push_back(std::move(exchange));
  }
  // One plan for all buffers of a group.
  std::vector<Communicator*> planned;
  for (const Exchange& exchange : exchanges_) {
    if (std::find(planned.begin(), planned.end(), exchange.group) != planned.end()) continue;
    planned.push_back(exchange.group);
  }
  for (Communicator* const group : planned) plan(*group);
}

int WholeMatrices::part_held_by(const Exchange& exchange, int rank) const {
  return store_.placement().part_of(exchange.buffer, exchange.in_mesh[static_cast<std::size_t>(rank)]);
}

const FlatLayout& WholeMatrices::layout_of(const Exchange& exchange, int part) const {
  return store_.placement().buffer(exchange.buffer).layout(part);
}

/// Elements of its part of the buffer that a rank of the exchange's group brings to it.
ElementRange WholeMatrices::brought_by(const Exchange& exchange, int rank) const {
  const int number = exchange.in_mesh[static_cast<std::size_t>(rank)];
  const Placement& placement = store_.placement();
  if (exchange.cut && exchange.everywhere) {
    return {0, placement.layout(exchange.buffer, number).padded_elements()};
  }
  return store_.residency().over_replicas(*exchange.flat) ? placement.owned(exchange.buffer, number)
                                                          : placement.shard(exchange.buffer, number);
}

/// Of ranks that keep the same state, the owner or the next one behind it sends its part.
bool WholeMatrices::gives(const Exchange& exchange, int rank, int owner) const {
  if (!(exchange.cut && exchange.everywhere)) return true;
  const int part = part_held_by(exchange, rank), ranks = exchange.group->size();
  int giver = owner;
  while (part_held_by(exchange, giver) != part) giver = (giver + 1) % ranks;
  return giver == rank;
}

void WholeMatrices::plan(Communicator& group) {
  const int ranks = group.size();
  std::vector<MatrixJob> jobs;
  for (const Exchange& exchange : exchanges_) {
    if (exchange.group != &group) continue;
    const FlatBuffer& flat = *exchange.flat;
    for (int t = 0; t < flat.layout.tensors(); ++t) {
      MatrixJob& job = jobs.emplace_back();
      job.operations =
          optimizer_.whole_work(updater_.facts(flat.tensors[static_cast<std::size_t>(t)])).operations;
      for (int r = 0; r < ranks; ++r) {
        const FlatLayout& layout = layout_of(exchange, part_held_by(exchange, r));
        job.held.push_back(intersect(tensor_range(layout, t), brought_by(exchange, r)).size());
      }
    }
  }
  const std::vector<int> owners = plan_matrices(jobs, ranks);
  load_ratio_ = std::max(load_ratio_, matrix_load_ratio(jobs, owners, ranks));
  auto owner = owners.begin();
  for (Exchange& exchange : exchanges_) {
    if (exchange.group != &group) continue;
    const std::span<const int> own{owner, owner + exchange.flat->layout.tensors()};
    owner += exchange.flat->layout.tensors();
    plan_messages(exchange, own);
    plan_matrices_of(exchange, own);
  }
}

/// What this rank keeps, for the owners of its matrices.
void WholeMatrices::plan_messages(Exchange& exchange, std::span<const int> owners) {
  const FlatBuffer& flat = *exchange.flat;
  const ElementRange kept = store_.residency().optimizer_range(flat);
  for (int r = 0; r < exchange.group->size(); ++r) {
    RankElements& message = exchange.messages.emplace_back();
    message.first = exchange.message_elements;
    for (int t = 0; t < flat.layout.tensors(); ++t) {
      if (owners[static_cast<std::size_t>(t)] != r) continue;
      const ElementRange range = intersect(tensor_range(flat.layout, t), kept);
      if (range.empty()) continue;
      exchange.pieces.push_back({range, exchange.message_elements});
      exchange.message_elements += range.size();
      exchange.largest_piece = std::max(exchange.largest_piece, range.size());
    }
    message.count = exchange.message_elements - message.first;
    exchange.given.push_back(gives(exchange, exchange.group->rank(), r) ? message : RankElements());
  }
}

/// What this rank owns, and what each rank brings of it.
void WholeMatrices::plan_matrices_of(Exchange& exchange, std::span<const int> owners) {
  const FlatBuffer& flat = *exchange.flat;
  const Placement& placement = store_.placement();
  const int own = exchange.group->rank();
  exchange.matrices.resize(static_cast<std::size_t>(exchange.group->size()));
  // The matrices lie in the message, one behind the other, where all ranks keep everything.
  const std::int64_t first = exchange.everywhere && !exchange.cut
                                 ? exchange.messages[static_cast<std::size_t>(own)].first
                                 : 0;
  for (int t = 0; t < flat.layout.tensors(); ++t) {
    if (owners[static_cast<std::size_t>(t)] != own) continue;
    const int tensor = flat.tensors[static_cast<std::size_t>(t)];
    const TrainableTensor& facts = updater_.facts(tensor);
    exchange.owned.push_back({tensor, facts.shape.elements(), {}});
    exchange.scratch_bytes = std::max(exchange.scratch_bytes, optimizer_.whole_work(facts).scratch_bytes);
    if (exchange.cut) exchange.largest_matrix = std::max(exchange.largest_matrix, facts.shape.elements());
  }
  // Part by part of the buffer: what one rank brings of all matrices is contiguous here, as it is in its part.
  for (int part = 0; part < placement.buffer(exchange.buffer).parts(); ++part) {
    auto matrix = exchange.owned.begin();
    for (int t = 0; t < flat.layout.tensors(); ++t) {
      if (owners[static_cast<std::size_t>(t)] != own) continue;
      const ElementRange range = tensor_range(layout_of(exchange, part), t);
      matrix->parts.push_back({first + exchange.owned_elements, placement.box(matrix->tensor, part)});
      ++matrix;
      for (int r = 0; r < exchange.group->size(); ++r) {
        if (part_held_by(exchange, r) != part) continue;
        const ElementRange brought = intersect(range, brought_by(exchange, r));
        if (brought.empty()) continue;
        RankElements& from = exchange.matrices[static_cast<std::size_t>(r)];
        if (from.count == 0) from.first = exchange.owned_elements + brought.begin - range.begin;
        from.count += brought.size();
      }
      exchange.owned_elements += range.size();
    }
  }
  for (int r = 0; r < exchange.group->size(); ++r) {
    exchange.received.push_back(
        gives(exchange, r, own) ? exchange.matrices[static_cast<std::size_t>(r)] : RankElements());
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

TrafficCount WholeMatrices::sent(MeshAxis axis) const {
  TrafficCount count;
  for (const Exchange& exchange : exchanges_) {
    if (exchange.axis != axis) continue;
    const int ranks = exchange.group->size();
    if (exchange.everywhere && !exchange.cut) {
      count.elements += exchange.owned_elements * (ranks - 1);
      continue;
    }
    for (int r = 0; r < ranks; ++r) {
      if (r == exchange.group->rank()) continue;
      count.elements += exchange.given[static_cast<std::size_t>(r)].count;
      count.elements += exchange.matrices[static_cast<std::size_t>(r)].count;
    }
  }
  count.bytes = count.elements * message_width;
  return count;
}

TrafficCount WholeMatrices::sent() const {
  TrafficCount sum;
  for (const MeshAxis axis : {MeshAxis::shard, MeshAxis::pipeline, MeshAxis::tensor}) {
    const TrafficCount of = sent(axis);
    sum.elements += of.elements;
    sum.bytes += of.bytes;
  }
  return sum;
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

/// Copies a part of a matrix from where it was received to its place, or back. The dimension that is cut
/// makes columns of the matrix, in as many blocks as it is cut in.
void WholeMatrices::copy_part(const Matrix& matrix, const Part& part, void* whole, void* parts, bool back) {
  const Shape& shape = updater_.facts(matrix.tensor).shape;
  int axis = 0;
  while (axis + 1 < shape.rank() && part.box[static_cast<std::size_t>(axis)].size() == shape[axis]) ++axis;
  std::int64_t rows = 1, inner = 1;
  for (int d = 0; d < axis; ++d) rows *= shape[d];
  for (int d = axis + 1; d < shape.rank(); ++d) inner *= shape[d];
  const Slice& slice = part.box[static_cast<std::size_t>(axis)];
  const TensorView all{whole, message_type, {rows, shape[axis] * inner}};
  const TensorView own{at(parts, part.offset), message_type, {rows, slice.size() * inner}};
  for (std::int64_t block = 0; block < slice.count; ++block) {
    const std::int64_t in_whole = (slice.start + block * slice.stride) * inner,
                       in_part = block * slice.block * inner, columns = slice.block * inner;
    if (back) {
      kernels::copy_columns(compute_, all, in_whole, own, in_part, columns);
    } else {
      kernels::copy_columns(compute_, own, in_part, all, in_whole, columns);
    }
  }
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
  if (exchange.everywhere && !exchange.cut) return;
  flight.matrices = arena_.acquire(std::max(exchange.owned_elements * message_width, least_bytes),
                                   Category::communication, flat.name);
  for (const Event& event : flight.matrices.ready()) ready.push_back(event);
  flight.arrived = exchange.group->all_to_all_v(flight.message.data(), exchange.given,
                                                flight.matrices.data(), exchange.received, message_type,
                                                ready, OperationLabel{flat.name, "step", Traffic::data});
  if (!config_.overlap) flight.arrived.wait();
}

void WholeMatrices::compute(Exchange& exchange, Flight& flight, const OptimizerStep& step) {
  FlatBuffer& flat = *exchange.flat;
  compute_.wait(flight.arrived);
  const bool all_have_all = exchange.everywhere && !exchange.cut;
  void* const matrices = all_have_all ? flight.message.data() : flight.matrices.data();
  if (!exchange.owned.empty()) {
    const StepBuffer scratch = acquire(exchange.scratch_bytes, Category::workspace, flat.name);
    StepBuffer whole;
    if (exchange.cut) whole = acquire(exchange.largest_matrix * message_width, Category::workspace, flat.name);
    for (const Matrix& matrix : exchange.owned) {
      if (!step.apply) break;
      if (exchange.cut) {
        for (const Part& part : matrix.parts) copy_part(matrix, part, whole.data(), matrices, false);
      }
      optimizer_.whole(compute_, step, updater_.facts(matrix.tensor),
                       exchange.cut ? message_view(whole.data(), 0, matrix.elements)
                                    : message_view(matrices, matrix.parts.front().offset, matrix.elements),
                       {scratch.data(), exchange.scratch_bytes});
      if (exchange.cut) {
        for (const Part& part : matrix.parts) copy_part(matrix, part, whole.data(), matrices, true);
      }
    }
  }
  const std::vector<Event> ready{compute_.record()};
  const OperationLabel label{flat.name, "step", Traffic::data};
  flight.returned = ready;
  if (!all_have_all) {
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
