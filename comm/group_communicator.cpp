#include "tranche/comm/group_communicator.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>

#include <fmt/format.h>

#include "tranche/core/shape.h"
#include "tranche/device/large_copy.h"
#include "tranche/kernels/reduction.h"

namespace tranche::comm {

namespace {

/// Reductions of at most this many bytes from all peers bring a buffer of their own and so never queue for
/// the slab: norms, flags, losses.
constexpr std::int64_t small_bytes = 64 << 10;

/// From here on (bytes that a rank reads of its peers) reading the peers' memory is quicker than messages.
constexpr std::int64_t window_least_bytes = 64 << 10;

/// Elements summed before they are written to memory.
constexpr std::int64_t block_elements = 8192;

void copy(void* to, const void* from, std::int64_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

/// A NaN of any rank survives in minimum and maximum.
template <typename T>
T combine(T a, T b, ReduceOperation operation) {
  const bool nan = a != a;
  switch (operation) {
    case ReduceOperation::minimum:
      return nan || a < b ? a : b;
    case ReduceOperation::maximum:
      return nan || a > b ? a : b;
    case ReduceOperation::sum:
      break;
  }
  if constexpr (std::is_integral_v<T>) {  // wraps: overflow must not be undefined behaviour
    return static_cast<T>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
  } else {
    return a + b;
  }
}

template <typename T>
void combine_in_rank_order(std::span<const void* const> pieces, void* result, std::int64_t count,
                           ReduceOperation operation) {
  T* out = static_cast<T*>(result);
  for (std::int64_t i = 0; i < count; ++i) {
    T sum = static_cast<const T*>(pieces[0])[i];
    for (std::size_t r = 1; r < pieces.size(); ++r) {
      sum = combine(sum, static_cast<const T*>(pieces[r])[i], operation);
    }
    out[i] = sum;
  }
}

}  // namespace

GroupCommunicator::GroupCommunicator(std::shared_ptr<ProgressEngine> engine, std::vector<int> members,
                                     int context)
    : engine_(std::move(engine)),
      members_(std::move(members)),
      context_(context),
      exceptions_(std::uncaught_exceptions()),
      sends_(members_.size()),
      receives_(members_.size()) {
  const Transport& transport = engine_->transport();
  const CommunicatorOptions& options = engine_->options();
  const int local = options.local_size;
  const auto host = [&](int member) { return local > 0 ? member / local : transport.host_of(member); };
  rank_ = static_cast<int>(std::find(members_.begin(), members_.end(), transport.rank()) - members_.begin());
  for (int member = 0; member < size(); ++member) {
    if (host(members_[member]) != host(transport.rank())) continue;
    ++local_size_;
    if (member < rank_) ++local_rank_;
  }
  window_ = size() > 1 && local_size_ == size() && options.collectives != HostCollectives::messages &&
            std::all_of(members_.begin(), members_.end(),
                        [&](int member) { return member == transport.rank() || transport.reads(member); });
}

bool GroupCommunicator::by_window(std::int64_t bytes) const {
  if (!window_ || bytes == 0) return false;
  return engine_->options().collectives == HostCollectives::shared || bytes >= window_least_bytes;
}

WindowCall GroupCommunicator::window_call(void* readable, std::int64_t bytes, std::int64_t count,
                                          DataType dtype) const {
  WindowCall call;
  call.members = members_;
  call.self = rank_;
  call.mine = readable;
  call.mine_bytes = bytes;
  call.count = count;
  call.chunk = std::max<std::int64_t>(engine_->lane_bytes() / size_of(dtype) / 64 * 64, 1);
  call.dtype = dtype;
  call.transport = &engine_->transport();
  if (!engine_->faults().copy_in) call.exposure = call.transport->expose(readable, bytes);
  return call;
}

std::unique_ptr<Communicator> GroupCommunicator::of_all(std::shared_ptr<ProgressEngine> engine) {
  std::vector<int> members(static_cast<std::size_t>(engine->transport().size()));
  for (std::size_t i = 0; i < members.size(); ++i) members[i] = static_cast<int>(i);
  auto group = std::make_unique<GroupCommunicator>(engine, std::move(members), 0);
  std::string obstacle = group->window_obstacle();
  if (obstacle.empty()) return group;
  // In order first, so that MPI can end in order too.
  group.reset();
  engine.reset();
  throw ConfigurationError("tranche.collectives: shared was asked for, but " + obstacle +
                           "; choose auto or messages");
}

std::string GroupCommunicator::window_obstacle() const {
  if (engine_->options().collectives != HostCollectives::shared || size() == 1 || window_) return {};
  std::string obstacle = engine_->transport().window_obstacle();
  return obstacle.empty() ? "the ranks do not share one host" : obstacle;
}

GroupCommunicator::~GroupCommunicator() {
  engine_->leave(context_, std::uncaught_exceptions() == exceptions_);
}

OperationInfo GroupCommunicator::open(std::string_view name, std::span<const Event> ready,
                                      const OperationLabel& label) {
  engine_->require_healthy(describe(name, label.unit, label.phase));
  OperationInfo info;
  info.name = name;
  info.unit = label.unit;
  info.phase = label.phase;
  info.tag.context = context_;
  for (const Event& event : ready) {
    if (event.state()) info.ready.push_back(event);
  }
  info.done = std::make_shared<HostEvent>();
  return info;
}

std::vector<int> GroupCommunicator::peers() const {
  std::vector<int> result;
  for (int step = 1; step < size(); ++step) result.push_back((rank_ + step) % size());
  return result;
}

Event GroupCommunicator::move(OperationInfo info, std::function<void()> local, const std::vector<Part>& sends,
                              const std::vector<Part>& receives, std::int64_t bytes,
                              std::int64_t message_bytes) {
  message_bytes = std::clamp<std::int64_t>(message_bytes, 1, largest_message_bytes);
  const auto flows = [&](bool sending, const std::vector<Part>& parts) {
    std::vector<Flow> result;
    result.reserve(parts.size());
    for (const Part& part : parts) {
      result.emplace_back(sending, members_[part.member], part.data, bytes, message_bytes, info.tag);
    }
    return result;
  };
  auto send_flows = flows(true, sends);
  auto receive_flows = flows(false, receives);
  return engine_->submit(std::make_unique<DirectOperation>(std::move(info), std::move(local),
                                                           std::move(send_flows), std::move(receive_flows)));
}

Event GroupCommunicator::gather(OperationInfo info, const void* shard, void* full, std::int64_t bytes,
                                std::int64_t message_bytes) {
  auto* base = static_cast<unsigned char*>(full);
  std::vector<Part> sends, receives;
  if (bytes > 0) {
    for (const int member : peers()) {
      sends.push_back({member, const_cast<void*>(shard)});
      receives.push_back({member, base + member * bytes});
    }
  }
  auto local = [to = base + rank_ * bytes, shard, bytes] { copy(to, shard, bytes); };
  return move(std::move(info), std::move(local), sends, receives, bytes, message_bytes);
}

Event GroupCommunicator::all_gather(const void* shard, void* full, std::int64_t count, DataType dtype,
                                    std::int64_t bucket_elements, std::span<const Event> ready,
                                    const OperationLabel& label) {
  OperationInfo info = open("all_gather", ready, label);
  note_all_gather(shard, full, count, dtype, bucket_elements, label);
  info.tag.sequence = sequence_++;
  if (by_window((size() - 1) * count * size_of(dtype))) {
    WindowCall call = window_call(const_cast<void*>(shard), count * size_of(dtype), count, dtype);
    return engine_->submit(std::make_unique<WindowGather>(std::move(info), std::move(call), full));
  }
  const std::int64_t bucket = bucket_elements > 0 ? std::max<std::int64_t>(bucket_elements / size(), 1)
                                                  : std::max<std::int64_t>(count, 1);
  return gather(std::move(info), shard, full, count * size_of(dtype),
                checked_multiply(bucket, size_of(dtype)));
}

Event GroupCommunicator::reduce_scatter(const void* full, DataType dtype, void* output, DataType output_dtype,
                                        std::int64_t count, const OrderedSumOptions& options,
                                        std::span<const Event> ready, const OperationLabel& label) {
  OperationInfo info = open("reduce_scatter", ready, label);
  note_reduce_scatter(full, dtype, output, output_dtype, count, options, label);
  info.tag.sequence = sequence_++;
  if (by_window((size() - 1) * count * size_of(dtype))) {
    return reduce_by_window(std::move(info), full, dtype, output, output_dtype, count, options);
  }
  Reduction reduction;
  reduction.members = members_;
  reduction.self = rank_;
  for (int member = 0; member < size(); ++member) {
    reduction.pieces.push_back(static_cast<const unsigned char*>(full) + member * count * size_of(dtype));
  }
  reduction.count = count;
  reduction.chunk =
      size() == 1 ? count : reduction_chunk(engine_->lane_bytes(), size(), dtype, options.bucket_elements);
  reduction.dtype = dtype;
  reduction.combine = [this_engine = engine_.get(), output, output_dtype, options](
                          std::span<const void* const> pieces, std::int64_t first, std::int64_t elements,
                          DataType piece_dtype) {
    void* place = static_cast<unsigned char*>(output) + first * size_of(output_dtype);
    kernels::ordered_sum(this_engine->stream(), pieces, piece_dtype, options.group_size, options.accumulate,
                         TensorView{place, output_dtype, Shape{elements}});
  };
  return engine_->submit(std::make_unique<ReduceExchange>(std::move(info), std::move(reduction)));
}

Event GroupCommunicator::reduce_by_window(OperationInfo info, const void* full, DataType dtype, void* output,
                                          DataType output_dtype, std::int64_t count,
                                          const OrderedSumOptions& options) {
  WindowCall call = window_call(const_cast<void*>(full), size() * count * size_of(dtype), count, dtype);
  call.chunk = reduction_chunk(engine_->lane_bytes(), size(), dtype, options.bucket_elements);
  const std::int64_t width = size_of(output_dtype);
  const bool streamed = !options.accumulate && count * width >= streamed_bytes;
  auto combine = [engine = engine_.get(), output, output_dtype, options, dtype, width, streamed](
                     std::span<const void* const> pieces, std::int64_t first, std::int64_t elements) {
    auto* place = static_cast<unsigned char*>(output) + first * width;
    const auto sum = [&](std::span<const void* const> from, void* to, std::int64_t some) {
      kernels::ordered_sum(engine->stream(), from, dtype, options.group_size, options.accumulate,
                           TensorView{to, output_dtype, Shape{some}});
    };
    if (!streamed) return sum(pieces, place, elements);
    // The sums of a block stay in the nearest cache until they leave it past all of them.
    alignas(64) unsigned char block[block_elements * 4];
    std::vector<const void*> from(pieces.begin(), pieces.end());
    for (std::int64_t done = 0; done < elements; done += block_elements) {
      const std::int64_t some = std::min(block_elements, elements - done);
      sum(from, block, some);
      copy_past_caches(place + done * width, block, some * width);
      for (const void*& piece : from)
        piece = static_cast<const unsigned char*>(piece) + some * size_of(dtype);
    }
  };
  return engine_->submit(
      std::make_unique<WindowReduce>(std::move(info), std::move(call), std::move(combine)));
}

Event GroupCommunicator::all_reduce(void* values, std::int64_t count, DataType dtype,
                                    ReduceOperation operation, const OperationLabel& label) {
  OperationInfo info = open("all_reduce", {}, label);
  note_all_reduce(values, count, dtype, label);
  info.tag.sequence = sequence_++;
  const auto combine_pieces = [operation, dtype](std::span<const void* const> pieces, void* result,
                                                 std::int64_t elements) {
    switch (dtype) {
      case DataType::float32:
        return combine_in_rank_order<float>(pieces, result, elements, operation);
      case DataType::float64:
        return combine_in_rank_order<double>(pieces, result, elements, operation);
      default:
        return combine_in_rank_order<std::int64_t>(pieces, result, elements, operation);
    }
  };
  if (by_window((size() - 1) * count * size_of(dtype))) {
    WindowCall call = window_call(values, count * size_of(dtype), count, dtype);
    return engine_->submit(
        std::make_unique<WindowAllReduce>(std::move(info), std::move(call), combine_pieces));
  }
  Reduction reduction;
  reduction.members = members_;
  reduction.self = rank_;
  reduction.pieces.assign(members_.size(), values);
  reduction.count = count;
  reduction.dtype = dtype;
  reduction.in_place = true;
  const std::int64_t all_bytes = count * size_of(dtype) * (size() - 1);
  if (all_bytes <= small_bytes) {
    reduction.chunk = count;
    reduction.scratch_bytes = all_bytes;
  } else {
    reduction.chunk = reduction_chunk(engine_->lane_bytes(), size(), dtype, 0);
  }
  reduction.combine = [values, combine_pieces](std::span<const void* const> pieces, std::int64_t first,
                                               std::int64_t elements, DataType piece_dtype) {
    combine_pieces(pieces, static_cast<unsigned char*>(values) + first * size_of(piece_dtype), elements);
  };
  return engine_->submit(std::make_unique<ReduceExchange>(std::move(info), std::move(reduction)));
}

Event GroupCommunicator::all_to_all(const void* sent, void* received, std::int64_t count, DataType dtype,
                                    std::span<const Event> ready, const OperationLabel& label) {
  OperationInfo info = open("all_to_all", ready, label);
  note_all_to_all(sent, received, count, dtype, label);
  info.tag.sequence = sequence_++;
  const std::int64_t bytes = count * size_of(dtype);
  auto* from = static_cast<unsigned char*>(const_cast<void*>(sent));
  auto* to = static_cast<unsigned char*>(received);
  std::vector<Part> sends, receives;
  if (bytes > 0) {
    for (const int member : peers()) {
      sends.push_back({member, from + member * bytes});
      receives.push_back({member, to + member * bytes});
    }
  }
  auto local = [to = to + rank_ * bytes, from = from + rank_ * bytes, bytes] { copy(to, from, bytes); };
  return move(std::move(info), std::move(local), sends, receives, bytes, bytes);
}

Event GroupCommunicator::broadcast(void* values, std::int64_t count, DataType dtype, int root,
                                   std::span<const Event> ready, const OperationLabel& label) {
  OperationInfo info = open("broadcast", ready, label);
  note_broadcast(values, count, dtype, root, label);
  info.tag.sequence = sequence_++;
  std::vector<Part> sends, receives;
  if (count > 0 && rank_ == root) {
    for (const int member : peers()) sends.push_back({member, values});
  } else if (count > 0) {
    receives.push_back({root, values});
  }
  const std::int64_t bytes = count * size_of(dtype);
  return move(std::move(info), nullptr, sends, receives, bytes, bytes);
}

Event GroupCommunicator::send(const void* values, std::int64_t count, DataType dtype, int peer,
                              std::span<const Event> ready, const OperationLabel& label) {
  OperationInfo info = open("send", ready, label);
  note_send(values, count, dtype, peer, label);
  info.tag.point_to_point = true;
  info.tag.sequence = sends_[static_cast<std::size_t>(peer)]++;
  const std::int64_t bytes = count * size_of(dtype);
  return move(std::move(info), nullptr, {{peer, const_cast<void*>(values)}}, {}, bytes, bytes);
}

Event GroupCommunicator::recv(void* values, std::int64_t count, DataType dtype, int peer,
                              std::span<const Event> ready, const OperationLabel& label) {
  OperationInfo info = open("recv", ready, label);
  note_recv(values, count, dtype, peer, label);
  info.tag.point_to_point = true;
  info.tag.sequence = receives_[static_cast<std::size_t>(peer)]++;
  const std::int64_t bytes = count * size_of(dtype);
  return move(std::move(info), nullptr, {}, {{peer, values}}, bytes, bytes);
}

Event GroupCommunicator::barrier(const OperationLabel& label) {
  OperationInfo info = open("barrier", {}, label);
  note_barrier(label);
  info.tag.sequence = sequence_++;
  // An empty message to and from everyone: more messages than a tree, but whoever is missing is known.
  std::vector<Part> parts;
  for (const int member : peers()) parts.push_back({member, nullptr});
  return move(std::move(info), nullptr, parts, parts, 0, 1);
}

std::unique_ptr<Communicator> GroupCommunicator::split(int color, int key) {
  OperationInfo info = open("split", {}, {});
  note_split();
  info.tag.sequence = sequence_++;
  struct Entry {
    std::int64_t color, key, context;
  };
  static_assert(sizeof(Entry) == split_values * sizeof(std::int64_t));
  std::vector<Entry> entries(members_.size());
  entries[static_cast<std::size_t>(rank_)] = {color, key, engine_->next_context()};
  gather(std::move(info), &entries[static_cast<std::size_t>(rank_)], entries.data(), sizeof(Entry),
         sizeof(Entry))
      .wait();
  std::int64_t context = 0;
  std::vector<std::pair<std::int64_t, int>> chosen;  // key, member
  for (std::size_t member = 0; member < entries.size(); ++member) {
    context = std::max(context, entries[member].context);
    if (entries[member].color == color) chosen.emplace_back(entries[member].key, static_cast<int>(member));
  }
  // One context for all colours: their groups have no rank in common.
  engine_->set_next_context(static_cast<int>(context) + 1);
  if (color < 0) return nullptr;
  std::sort(chosen.begin(), chosen.end());
  std::vector<int> members;
  for (const auto& [unused, member] : chosen) members.push_back(members_[static_cast<std::size_t>(member)]);
  return std::make_unique<GroupCommunicator>(engine_, std::move(members), static_cast<int>(context));
}

}  // namespace tranche::comm
