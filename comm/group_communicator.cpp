#include "comm/group_communicator.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>

#include <fmt/format.h>

#include "comm/call_signature.h"
#include "comm/deterministic_sum.h"
#include "comm/transport/direct_operation.h"
#include "comm/transport/reduce_exchange.h"
#include "tranche/core/shape.h"

namespace tranche::comm {

namespace {

/// Reductions of at most this many bytes from all peers (norms, flags, losses) allocate their own buffer and
/// so never queue for the staging buffer.
constexpr std::int64_t small_bytes = 64 << 10;

void copy(void* to, const void* from, std::int64_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

/// Operations in which a rank receives at most this many bytes are done by the issuing thread if all ranks
/// have arrived: that takes it some 50 microseconds, while switching to the communication thread and back
/// takes 8.
constexpr std::int64_t eager_bytes = 512 << 10;

void set_size(OperationInfo& info, std::int64_t bytes) {
  info.bytes = bytes;
  info.eager = bytes <= eager_bytes && std::all_of(info.ready.begin(), info.ready.end(),
                                                   [](const Event& event) { return event.query(); });
}

/// A NaN of any rank is kept in minimum and maximum.
template <ReduceOperation operation, typename T>
T combine(T a, T b) {
  const bool nan = a != a;
  if constexpr (operation == ReduceOperation::minimum) {
    return nan || a < b ? a : b;
  } else if constexpr (operation == ReduceOperation::maximum) {
    return nan || a > b ? a : b;
  } else if constexpr (std::is_integral_v<T>) {  // wraps, because overflow is undefined behaviour
    return static_cast<T>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
  } else {
    return a + b;
  }
}

template <ReduceOperation operation, typename T>
void combine_in_rank_order(std::span<const void* const> pieces, void* result, std::int64_t count) {
  // The result is built in a separate block, because it may overwrite one of the inputs.
  constexpr std::int64_t block_elements = 1024;
  T block[block_elements];
  for (std::int64_t done = 0; done < count; done += block_elements) {
    const std::int64_t some = std::min(block_elements, count - done);
    std::memcpy(block, static_cast<const T*>(pieces[0]) + done, static_cast<std::size_t>(some) * sizeof(T));
    for (std::size_t r = 1; r < pieces.size(); ++r) {
      const T* piece = static_cast<const T*>(pieces[r]) + done;
      for (std::int64_t i = 0; i < some; ++i) block[i] = combine<operation>(block[i], piece[i]);
    }
    std::memcpy(static_cast<T*>(result) + done, block, static_cast<std::size_t>(some) * sizeof(T));
  }
}

template <typename T>
void combine_in_rank_order(std::span<const void* const> pieces, void* result, std::int64_t count,
                           ReduceOperation operation) {
  switch (operation) {
    case ReduceOperation::minimum:
      return combine_in_rank_order<ReduceOperation::minimum, T>(pieces, result, count);
    case ReduceOperation::maximum:
      return combine_in_rank_order<ReduceOperation::maximum, T>(pieces, result, count);
    case ReduceOperation::sum:
      return combine_in_rank_order<ReduceOperation::sum, T>(pieces, result, count);
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
  const int self = engine_->transport().rank();
  rank_ = static_cast<int>(std::find(members_.begin(), members_.end(), self) - members_.begin());
  window_ = std::make_unique<const WindowAlgorithms>(*engine_, members_, rank_);
  const NodeLayout& layout = window_->layout();
  local_size_ = static_cast<int>(layout.members(layout.node(rank_)).size());
  local_rank_ = layout.local(rank_);
  count_crossings(
      std::make_unique<const Crossings>(layout, rank_, engine_->options().collectives, window_->available()));
}

std::unique_ptr<Communicator> GroupCommunicator::of_all(std::shared_ptr<ProgressEngine> engine) {
  std::vector<int> members(static_cast<std::size_t>(engine->transport().size()));
  for (std::size_t i = 0; i < members.size(); ++i) members[i] = static_cast<int>(i);
  auto group = std::make_unique<GroupCommunicator>(engine, std::move(members), 0);
  std::string obstacle = group->window_->obstacle();
  if (obstacle.empty()) return group;
  // Communicators are destroyed in order first, so that MPI can be finalised in order.
  group.reset();
  engine.reset();
  throw ConfigurationError("tranche.collectives: shared was asked for, but " + obstacle +
                           "; choose auto or messages");
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
  info.tag.call = hash_of_call(name, label.unit);
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
                              const std::vector<Part>& receives, std::int64_t message_bytes) {
  message_bytes = std::clamp<std::int64_t>(message_bytes, 1, largest_message_bytes);
  const auto flows = [&](bool sending, const std::vector<Part>& parts) {
    std::vector<Flow> result;
    result.reserve(parts.size());
    for (const Part& part : parts) {
      result.emplace_back(sending, members_[part.member], part.data, part.bytes, message_bytes, info.tag);
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
      sends.push_back({member, const_cast<void*>(shard), bytes});
      receives.push_back({member, base + member * bytes, bytes});
    }
  }
  auto local = [to = base + rank_ * bytes, shard, bytes] { copy(to, shard, bytes); };
  return move(std::move(info), std::move(local), sends, receives, message_bytes);
}

Event GroupCommunicator::all_gather(const void* shard, void* full, std::int64_t count, DataType dtype,
                                    std::int64_t bucket_elements, std::span<const Event> ready,
                                    const OperationLabel& label) {
  OperationInfo info = open("all_gather", ready, label);
  validate_and_record_all_gather(shard, full, count, dtype, bucket_elements, label);
  info.tag.sequence = sequence_++;
  set_size(info, (size() - 1) * count * size_of(dtype));
  if (window_->serves((size() - 1) * count * size_of(dtype), least_gathered_bytes)) {
    return engine_->submit(window_->all_gather(std::move(info), shard, full, count, dtype));
  }
  const std::int64_t bucket = bucket_elements > 0 ? std::max<std::int64_t>(bucket_elements / size(), 1)
                                                  : std::max<std::int64_t>(count, 1);
  return gather(std::move(info), shard, full, count * size_of(dtype),
                checked_multiply(bucket, size_of(dtype)));
}

Event GroupCommunicator::reduce_scatter(const void* full, DataType dtype, void* output, DataType output_dtype,
                                        std::int64_t count, const ReductionOptions& options,
                                        std::span<const Event> ready, const OperationLabel& label) {
  OperationInfo info = open("reduce_scatter", ready, label);
  validate_and_record_reduce_scatter(full, dtype, output, output_dtype, count, options, label);
  set_size(info, (size() - 1) * count * size_of(dtype));
  info.tag.sequence = sequence_++;
  if (size() == 1) {
    const TensorView sum{output, output_dtype, Shape{count}};
    auto local = [this_engine = engine_.get(), full, dtype, sum, options] {
      if (const std::unique_ptr<Stream> stream = this_engine->make_wide_stream()) {
        deterministic_sum(*stream, {&full, 1}, dtype, options, sum, kernels::SumTarget::memory);
      }
    };
    return move(std::move(info), std::move(local), {}, {}, 1);
  }
  if (window_->serves((size() - 1) * count * size_of(dtype))) {
    return engine_->submit(
        window_->reduce_scatter(std::move(info), full, dtype, output, output_dtype, count, options));
  }
  Reduction reduction;
  reduction.members = members_;
  reduction.self = rank_;
  reduction.givers = std::min(options.givers, size());
  for (int member = 0; member < size(); ++member) {
    reduction.pieces.push_back(static_cast<const unsigned char*>(full) + member * count * size_of(dtype));
  }
  reduction.count = count;
  reduction.chunk = reduction_chunk(engine_->slot_bytes(), size(), dtype, options.bucket_elements);
  reduction.dtype = dtype;
  reduction.combine = [this_engine = engine_.get(), output, output_dtype, options](
                          std::span<const void* const> pieces, std::int64_t first, std::int64_t elements,
                          DataType piece_dtype) {
    void* place = static_cast<unsigned char*>(output) + first * size_of(output_dtype);
    deterministic_sum(this_engine->stream(), pieces, piece_dtype, options,
                      TensorView{place, output_dtype, Shape{elements}});
  };
  return engine_->submit(std::make_unique<ReduceExchange>(std::move(info), std::move(reduction)));
}

std::int64_t GroupCommunicator::summed_elements_sent(std::int64_t count, DataType dtype,
                                                     const ReductionOptions& options) const {
  return window_->summed_elements_sent(count, dtype, options);
}

Event GroupCommunicator::all_reduce(void* values, std::int64_t count, DataType dtype,
                                    ReduceOperation operation, const OperationLabel& label) {
  OperationInfo info = open("all_reduce", {}, label);
  validate_and_record_all_reduce(values, count, dtype, label);
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
  set_size(info, (size() - 1) * count * size_of(dtype));
  if (window_->serves_all_reduce((size() - 1) * count * size_of(dtype))) {
    return engine_->submit(window_->all_reduce(std::move(info), values, count, dtype, combine_pieces));
  }
  Reduction reduction;
  reduction.members = members_;
  reduction.self = rank_;
  reduction.givers = size();
  reduction.pieces.assign(members_.size(), values);
  reduction.count = count;
  reduction.dtype = dtype;
  reduction.in_place = true;
  const std::int64_t all_bytes = count * size_of(dtype) * (size() - 1);
  if (all_bytes <= small_bytes) {
    reduction.chunk = count;
    reduction.scratch_bytes = all_bytes;
  } else {
    reduction.chunk = reduction_chunk(engine_->slot_bytes(), size(), dtype, 0);
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
  validate_and_record_all_to_all(sent, received, count, dtype, label);
  info.tag.sequence = sequence_++;
  const std::int64_t bytes = info.bytes = count * size_of(dtype);
  auto* from = static_cast<unsigned char*>(const_cast<void*>(sent));
  auto* to = static_cast<unsigned char*>(received);
  std::vector<Part> sends, receives;
  if (bytes > 0) {
    for (const int member : peers()) {
      sends.push_back({member, from + member * bytes, bytes});
      receives.push_back({member, to + member * bytes, bytes});
    }
  }
  auto local = [to = to + rank_ * bytes, from = from + rank_ * bytes, bytes] { copy(to, from, bytes); };
  return move(std::move(info), std::move(local), sends, receives, bytes);
}

Event GroupCommunicator::all_to_all_v(const void* sent, std::span<const RankElements> sends, void* received,
                                      std::span<const RankElements> receives, DataType dtype,
                                      std::span<const Event> ready, const OperationLabel& label) {
  OperationInfo info = open("all_to_all_v", ready, label);
  validate_and_record_all_to_all_v(sent, sends, received, receives, dtype, label);
  info.tag.sequence = sequence_++;
  const std::int64_t width = size_of(dtype);
  auto* from = static_cast<unsigned char*>(const_cast<void*>(sent));
  auto* to = static_cast<unsigned char*>(received);
  // A pair of ranks without data to exchange posts no message.
  const auto parts_of = [&](unsigned char* base, std::span<const RankElements> of) {
    std::vector<Part> parts;
    for (const int member : peers()) {
      const RankElements& part = of[static_cast<std::size_t>(member)];
      if (part.count > 0) parts.push_back({member, base + part.first * width, part.count * width});
    }
    return parts;
  };
  const auto own = static_cast<std::size_t>(rank_);
  auto local = [to = to + receives[own].first * width, from = from + sends[own].first * width,
                bytes = sends[own].count * width] { copy(to, from, bytes); };
  return move(std::move(info), std::move(local), parts_of(from, sends), parts_of(to, receives),
              largest_message_bytes);
}

Event GroupCommunicator::broadcast(void* values, std::int64_t count, DataType dtype, int root,
                                   std::span<const Event> ready, const OperationLabel& label) {
  OperationInfo info = open("broadcast", ready, label);
  validate_and_record_broadcast(values, count, dtype, root, label);
  info.tag.sequence = sequence_++;
  std::vector<Part> sends, receives;
  const std::int64_t bytes = info.bytes = count * size_of(dtype);
  if (count > 0 && rank_ == root) {
    for (const int member : peers()) sends.push_back({member, values, bytes});
  } else if (count > 0) {
    receives.push_back({root, values, bytes});
  }
  return move(std::move(info), nullptr, sends, receives, bytes);
}

Event GroupCommunicator::send(const void* values, std::int64_t count, DataType dtype, int peer,
                              std::span<const Event> ready, const OperationLabel& label) {
  OperationInfo info = open("send", ready, label);
  validate_and_record_send(values, count, dtype, peer, label);
  info.tag.point_to_point = true;
  info.tag.call = 0;  // 0, because sender and receiver name this call differently
  info.tag.sequence = sends_[static_cast<std::size_t>(peer)]++;
  const std::int64_t bytes = count * size_of(dtype);
  return move(std::move(info), nullptr, {{peer, const_cast<void*>(values), bytes}}, {}, bytes);
}

Event GroupCommunicator::recv(void* values, std::int64_t count, DataType dtype, int peer,
                              std::span<const Event> ready, const OperationLabel& label) {
  OperationInfo info = open("recv", ready, label);
  validate_and_record_recv(values, count, dtype, peer, label);
  info.tag.point_to_point = true;
  info.tag.call = 0;  // 0, because sender and receiver name this call differently
  info.tag.sequence = receives_[static_cast<std::size_t>(peer)]++;
  const std::int64_t bytes = count * size_of(dtype);
  return move(std::move(info), nullptr, {}, {{peer, values, bytes}}, bytes);
}

Event GroupCommunicator::barrier(const OperationLabel& label) {
  OperationInfo info = open("barrier", {}, label);
  validate_and_record_barrier(label);
  info.tag.sequence = sequence_++;
  set_size(info, 0);
  // Every rank sends an empty message to every other: more messages than in a tree, but a missing rank is
  // identified.
  std::vector<Part> parts;
  for (const int member : peers()) parts.push_back({member, nullptr, 0});
  return move(std::move(info), nullptr, parts, parts, 1);
}

std::unique_ptr<Communicator> GroupCommunicator::split(int color, int key) {
  OperationInfo info = open("split", {}, {});
  validate_and_record_split();
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
  // All colours use one context, because their groups have no rank in common.
  engine_->set_next_context(static_cast<int>(context) + 1);
  if (color < 0) return nullptr;
  std::sort(chosen.begin(), chosen.end());
  std::vector<int> members;
  for (const auto& [unused, member] : chosen) members.push_back(members_[static_cast<std::size_t>(member)]);
  return std::make_unique<GroupCommunicator>(engine_, std::move(members), static_cast<int>(context));
}

}  // namespace tranche::comm
