#include "engine/whole_matrices.h"

#include <algorithm>
#include <array>
#include <utility>

#include "engine/offloaded_state.h"
#include "tranche/kernels/copy_columns.h"
#include "tranche/kernels/elementwise.h"

namespace tranche::detail {

namespace {

/// The least size of an arena buffer, even on a rank that has nothing of some matrices.
constexpr std::int64_t least_bytes = 64;
/// The number of buffers in flight: one is prepared and sent, one computed, one returned and applied.
constexpr std::size_t flights = 3;
constexpr const char* pass_name = "matrices";

}  // namespace

WholeMatrices::WholeMatrices(StateStore& store, const Config& config, FlatUpdater& updater,
                             const Optimizer& optimizer, const MatrixRanksOf& ranks_of, Device& device,
                             StepArena& arena)
    : store_(store),
      config_(config),
      updater_(updater),
      optimizer_(optimizer),
      arena_(arena),
      compute_(device.compute_stream()),
      message_type_(config.precision.compute == DataType::float32 ? DataType::float32 : DataType::bfloat16),
      plan_(plan_exchanges(store, updater, optimizer, ranks_of)) {}

std::int64_t WholeMatrices::bytes_of_message(std::int64_t elements) const {
  return elements * size_of(message_type_);
}

void* WholeMatrices::at(void* data, std::int64_t element) const {
  return static_cast<std::byte*>(data) + bytes_of_message(element);
}

TensorView WholeMatrices::message_view(void* data, std::int64_t first, std::int64_t elements) const {
  return {at(data, first), message_type_, Shape{elements}};
}

void WholeMatrices::allocate(MemoryResource& host_memory) {
  std::int64_t message = 0, piece = 0;
  for (const MatrixExchange& exchange : plan_.exchanges) {
    if (exchange.flat->optimizer_tier == OffloadTier::none) continue;
    message = std::max(message, exchange.message_elements);
    piece = std::max(piece, exchange.largest_piece);
  }
  if (message == 0) return;
  for (std::size_t i = 0; i < flights; ++i) {
    host_messages_.emplace_back(host_memory, bytes_of_message(message), Category::communication,
                                "matrices between host and device");
  }
  host_scratch_ = Buffer(host_memory, piece * size_of(DataType::float32), Category::workspace, "matrices");
}

TrafficCount WholeMatrices::sent(MeshAxis axis) const {
  TrafficCount count;
  for (const MatrixExchange& exchange : plan_.exchanges) {
    if (exchange.ranks.axis == axis) count.elements += exchange.elements_sent();
  }
  count.bytes = bytes_of_message(count.elements);
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
      if (i < plan_.exchanges.size()) (this->*stage)(plan_.exchanges[i], under_way[i % flights], step);
    };
    // Unsigned wrap-around puts negative numbers beyond the end. visits() has the same order.
    for (std::size_t i = 0; i < plan_.exchanges.size() + 2; ++i) {
      run(i, &WholeMatrices::begin);
      run(i - 1, &WholeMatrices::compute);
      run(i - 2, &WholeMatrices::finish);
    }
  }
  arena_.end();
}

std::vector<const FlatBuffer*> WholeMatrices::visits() const {
  std::vector<const FlatBuffer*> visits;
  const std::size_t count = plan_.exchanges.size();
  for (std::size_t i = 0; i < count + 2; ++i) {
    if (i < count) visits.push_back(plan_.exchanges[i].flat);          // begin()
    if (i - 2 < count) visits.push_back(plan_.exchanges[i - 2].flat);  // finish()
  }
  return visits;
}

/// Calls visit for the parts of tensors in a slice, with their place in the message.
template <class Visit>
void WholeMatrices::for_each_piece(const MatrixExchange& exchange, const ShardSlice& slice, void* message,
                                   const Visit& visit) const {
  for (const MatrixExchange::Piece& piece : exchange.pieces) {
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

/// Copies a part of a matrix from received memory to its place, or back. The cut dimension forms columns of
/// the matrix, in as many blocks as the cut has.
void WholeMatrices::copy_part(const MatrixExchange::Matrix& matrix, const MatrixExchange::Part& part,
                              void* whole, void* parts, bool back) {
  const Shape& shape = updater_.facts(matrix.tensor).shape;
  int axis = 0;
  while (axis + 1 < shape.rank() && part.box[static_cast<std::size_t>(axis)].size() == shape[axis]) ++axis;
  std::int64_t rows = 1, inner = 1;
  for (int d = 0; d < axis; ++d) rows *= shape[d];
  for (int d = axis + 1; d < shape.rank(); ++d) inner *= shape[d];
  const Slice& slice = part.box[static_cast<std::size_t>(axis)];
  const TensorView all{whole, message_type_, {rows, shape[axis] * inner}};
  const TensorView own{at(parts, part.offset), message_type_, {rows, slice.size() * inner}};
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

void WholeMatrices::begin(MatrixExchange& exchange, Flight& flight, const OptimizerStep& step) {
  FlatBuffer& flat = *exchange.flat;
  const bool on_host = flat.optimizer_tier != OffloadTier::none;
  Stream& stream = on_host ? store_.offload()->host() : compute_;
  flight.message = acquire(bytes_of_message(exchange.message_elements), Category::communication, flat.name);
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
    ready.push_back(compute_.record());  // includes earlier work on the device memory
    ready = {store_.offload()->link().copy_from_host(flight.message.data(), message,
                                                     bytes_of_message(exchange.message_elements), ready)};
  }
  flight.arrived = ready.front();
  if (exchange.all_have_all()) return;
  flight.matrices = arena_.acquire(std::max(bytes_of_message(exchange.owned_elements), least_bytes),
                                   Category::communication, flat.name);
  for (const Event& event : flight.matrices.ready()) ready.push_back(event);
  flight.arrived = exchange.group().all_to_all_v(
      flight.message.data(), exchange.given, flight.matrices.data(), exchange.received, message_type_, ready,
      OperationLabel{store_.call_name(flat.name), "step", Traffic::data});
  if (!config_.overlap) flight.arrived.wait();
}

void WholeMatrices::compute(MatrixExchange& exchange, Flight& flight, const OptimizerStep& step) {
  FlatBuffer& flat = *exchange.flat;
  compute_.wait(flight.arrived);
  const bool all_have_all = exchange.all_have_all();
  void* const matrices = all_have_all ? flight.message.data() : flight.matrices.data();
  if (!exchange.owned.empty()) {
    const StepBuffer scratch = acquire(exchange.scratch_bytes, Category::workspace, flat.name);
    StepBuffer whole;
    if (exchange.cut)
      whole = acquire(bytes_of_message(exchange.largest_matrix), Category::workspace, flat.name);
    for (const MatrixExchange::Matrix& matrix : exchange.owned) {
      if (!step.apply) break;
      if (exchange.cut) {
        for (const MatrixExchange::Part& part : matrix.parts)
          copy_part(matrix, part, whole.data(), matrices, false);
      }
      optimizer_.whole(compute_, step, updater_.facts(matrix.tensor),
                       exchange.cut ? message_view(whole.data(), 0, matrix.elements)
                                    : message_view(matrices, matrix.parts.front().offset, matrix.elements),
                       {scratch.data(), exchange.scratch_bytes});
      if (exchange.cut) {
        for (const MatrixExchange::Part& part : matrix.parts)
          copy_part(matrix, part, whole.data(), matrices, true);
      }
    }
  }
  const std::vector<Event> ready{compute_.record()};
  const OperationLabel label{store_.call_name(flat.name), "step", Traffic::data};
  flight.returned = ready;
  if (!all_have_all) {
    flight.returned = {exchange.group().all_to_all_v(matrices, exchange.matrices, flight.message.data(),
                                                     exchange.messages, message_type_, ready, label)};
  } else if (exchange.group().size() > 1) {
    for (int root = 0; root < exchange.group().size(); ++root) {
      const RankElements& of = exchange.messages[static_cast<std::size_t>(root)];
      if (of.count == 0) continue;
      flight.returned.push_back(
          exchange.group().broadcast(at(matrices, of.first), of.count, message_type_, root, ready, label));
    }
  }
  if (!config_.overlap) flight.returned.back().wait();
}

void WholeMatrices::finish(MatrixExchange& exchange, Flight& flight, const OptimizerStep& step) {
  FlatBuffer& flat = *exchange.flat;
  for (const Event& event : flight.returned) compute_.wait(event);
  if (flight.matrices) flight.matrices.release(compute_.record());
  compute_.wait(flat.gather_done);  // peers may still read the old weights of this shard
  void* message = flight.message.data();
  if (flat.optimizer_tier != OffloadTier::none) {
    OffloadedState& offload = *store_.offload();
    message = flight.host_message;
    const Event copied = offload.link().copy_to_host(
        message, flight.message.data(), bytes_of_message(exchange.message_elements), flight.returned);
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
    for (std::int64_t tile = 0; tile < offload.update_tiles(flat); ++tile) {
      const ShardSlice slice = offload.open_tile(flat, tile);
      if (!step.apply) {
        copy_master_to_weight(slice);
      } else {
        // Padding is cleared, because the memory had other contents.
        if (slice.weight.data != nullptr && !slice.in_halves()) {
          kernels::fill_zero(*slice.stream, slice.weight);
        }
        apply(slice);
      }
      offload.close_tile();
    }
  } else {
    apply(store_.slice_in_step(flat));
    if (!step.apply && store_.residency().quantizes(flat)) store_.restore_weights(flat);
    flat.shard_ready = compute_.record();
  }
  flight.message.release();
  store_.gather_updated(flat, "step");
}

}  // namespace tranche::detail
