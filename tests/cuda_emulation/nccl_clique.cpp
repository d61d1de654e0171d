// The exchange between the ranks: messages and collectives, run on the streams' threads.
#include "tests/cuda_emulation/nccl_clique.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "tests/cuda_emulation/control.h"
#include "tests/cuda_emulation/state.h"
#include "tranche/core/dtype.h"

namespace cuda_emulation {
namespace {

constexpr int most_ranks = 64;
std::array<std::atomic<bool>, most_ranks> silent{};
std::array<std::atomic<int>, most_ranks> failing{};

/// The combination of all ranks' operands in rank order; types up to fp32 are combined in fp32 and rounded
/// once.
template <class T, class Wide, class Load, class Store>
void combine(const std::vector<const void*>& pieces, std::vector<unsigned char>& out, std::size_t count,
             ncclRedOp_t operation, Load load, Store store) {
  auto* to = reinterpret_cast<T*>(out.data());
  for (std::size_t i = 0; i < count; ++i) {
    Wide total = load(static_cast<const T*>(pieces[0])[i]);
    for (std::size_t rank = 1; rank < pieces.size(); ++rank) {
      const Wide value = load(static_cast<const T*>(pieces[rank])[i]);
      switch (operation) {
        case ncclProd:
          total = static_cast<Wide>(total * value);
          break;
        case ncclMax:
          total = std::max(total, value);
          break;
        case ncclMin:
          total = std::min(total, value);
          break;
        default:
          total = static_cast<Wide>(total + value);
      }
    }
    if (operation == ncclAvg) total = static_cast<Wide>(total / static_cast<Wide>(pieces.size()));
    to[i] = store(total);
  }
}

std::vector<unsigned char> combined(const std::vector<const void*>& pieces, std::size_t count,
                                    ncclDataType_t type, ncclRedOp_t operation) {
  std::vector<unsigned char> out(count * bytes_of(type));
  const auto same = [](auto value) { return value; };
  const auto widened = [](auto value) { return tranche::to_float(value); };
  switch (type) {
    case ncclBfloat16:
      combine<tranche::bfloat16, float>(pieces, out, count, operation, widened, tranche::to_bfloat16);
      break;
    case ncclFloat16:
      combine<tranche::float16, float>(pieces, out, count, operation, widened, tranche::to_float16);
      break;
    case ncclFloat32:
      combine<float, float>(pieces, out, count, operation, same, same);
      break;
    case ncclFloat64:
      combine<double, double>(pieces, out, count, operation, same, same);
      break;
    case ncclInt32:
      combine<std::int32_t, std::int32_t>(pieces, out, count, operation, same, same);
      break;
    case ncclUint32:
      combine<std::uint32_t, std::uint32_t>(pieces, out, count, operation, same, same);
      break;
    case ncclInt64:
      combine<std::int64_t, std::int64_t>(pieces, out, count, operation, same, same);
      break;
    case ncclUint64:
      combine<std::uint64_t, std::uint64_t>(pieces, out, count, operation, same, same);
      break;
    case ncclInt8:
      combine<std::int8_t, std::int8_t>(pieces, out, count, operation, same, same);
      break;
    default:
      combine<std::uint8_t, std::uint8_t>(pieces, out, count, operation, same, same);
  }
  return out;
}

void* at(void* base, std::size_t bytes) {
  return static_cast<unsigned char*>(base) + bytes;
}
const void* at(const void* base, std::size_t bytes) {
  return static_cast<const unsigned char*>(base) + bytes;
}

/// One item of a group, and the event for which it waits.
struct Pending {
  const NcclCall* call;
  std::shared_ptr<Message> message;  // sent
  std::shared_ptr<Round> round;      // joined
};

void fail(Member& member, ncclResult_t error, const std::string& what) {
  misuse(cudaErrorUnknown, fmt::format("NCCL rank {}: {}", member.rank, what));
  member.error = error;
}

/// Begins an item. Called under the lock.
Pending begin(Member& member, const NcclCall& call) {
  Clique& clique = *member.clique;
  if (call.what == Collective::send) {
    auto message = std::make_shared<Message>(Message{call.from, call.count * bytes_of(call.type), false});
    clique.messages[{member.rank, call.peer}].push_back(message);
    return {&call, std::move(message), nullptr};
  }
  if (call.what == Collective::receive) return {&call, nullptr, nullptr};
  auto& round = clique.open_rounds[member.rounds];
  if (!round) {
    round = std::make_shared<Round>();
    round->calls.resize(clique.size);
  }
  auto joined = round;
  joined->calls[static_cast<std::size_t>(member.rank)] = call;
  if (++joined->arrived == static_cast<int>(clique.size)) {
    clique.open_rounds.erase(member.rounds);
    complete(*joined);
    joined->done = true;
  }
  ++member.rounds;
  return {&call, nullptr, std::move(joined)};
}

/// Returns true if the item is complete. Called under the lock.
bool advance(Member& member, Pending& item) {
  if (item.message) return item.message->taken;
  if (item.round) {
    if (item.round->done && item.round->result != ncclSuccess) member.error = item.round->result;
    return item.round->done;
  }
  auto& queue = member.clique->messages[{item.call->peer, member.rank}];
  if (queue.empty()) return false;
  const auto message = queue.front();
  const std::size_t bytes = item.call->count * bytes_of(item.call->type);
  if (message->bytes != bytes) {
    fail(
        member, ncclInvalidUsage,
        fmt::format("receives {} bytes from rank {}, which sent {}", bytes, item.call->peer, message->bytes));
  } else {
    std::memmove(item.call->to, message->from, bytes);
  }
  queue.pop_front();
  message->taken = true;
  return true;
}

}  // namespace

const char* name_of(Collective what) {
  static constexpr const char* names[] = {"ncclSend",          "ncclRecv",      "ncclAllGather",
                                          "ncclReduceScatter", "ncclAllReduce", "ncclBroadcast",
                                          "ncclReduce"};
  return names[static_cast<std::size_t>(what)];
}

std::size_t bytes_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    default:
      return 1;
  }
}

void complete(Round& round) {
  const NcclCall& first = round.calls.front();
  for (std::size_t rank = 1; rank < round.calls.size(); ++rank) {
    const NcclCall& call = round.calls[rank];
    if (call.what == first.what && call.count == first.count && call.type == first.type &&
        call.operation == first.operation && call.peer == first.peer) {
      continue;
    }
    round.result = ncclInvalidUsage;
    misuse(cudaErrorUnknown,
           fmt::format(
               "NCCL ranks do not agree: rank 0 calls {} of {} elements (type {}, root {}), rank {} calls {} "
               "of {} (type {}, root {})",
               name_of(first.what), first.count, static_cast<int>(first.type), first.peer, rank,
               name_of(call.what), call.count, static_cast<int>(call.type), call.peer));
    return;
  }
  const std::size_t ranks = round.calls.size(), bytes = first.count * bytes_of(first.type);
  const auto pieces = [&](std::size_t offset) {
    std::vector<const void*> all;
    for (const NcclCall& call : round.calls) all.push_back(at(call.from, offset));
    return all;
  };
  switch (first.what) {
    case Collective::all_gather:
      for (std::size_t from = 0; from < ranks; ++from) {
        for (const NcclCall& call : round.calls)
          std::memmove(at(call.to, from * bytes), round.calls[from].from, bytes);
      }
      break;
    case Collective::broadcast: {
      const void* source = round.calls[static_cast<std::size_t>(first.peer)].from;
      for (const NcclCall& call : round.calls) std::memmove(call.to, source, bytes);
      break;
    }
    case Collective::all_reduce: {
      const auto total = combined(pieces(0), first.count, first.type, first.operation);
      for (const NcclCall& call : round.calls) std::memcpy(call.to, total.data(), bytes);
      break;
    }
    case Collective::reduce: {
      const auto total = combined(pieces(0), first.count, first.type, first.operation);
      std::memcpy(round.calls[static_cast<std::size_t>(first.peer)].to, total.data(), bytes);
      break;
    }
    case Collective::reduce_scatter: {
      // All sums are computed before any is written, because results may overlap operands.
      std::vector<std::vector<unsigned char>> totals;
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        totals.push_back(combined(pieces(rank * bytes), first.count, first.type, first.operation));
      }
      for (std::size_t rank = 0; rank < ranks; ++rank)
        std::memcpy(round.calls[rank].to, totals[rank].data(), bytes);
      break;
    }
    case Collective::send:
    case Collective::receive:
      break;
  }
}

void run_group(Member& member, const std::vector<NcclCall>& calls) {
  Clique& clique = *member.clique;
  std::unique_lock lock(clique.mutex);
  std::vector<Pending> items;
  // A rank that stopped responding posts nothing and waits for its abort.
  while (is_silent(member.rank) && !member.aborted)
    clique.changed.wait_for(lock, std::chrono::milliseconds(1));
  if (!member.aborted) {
    for (const NcclCall& call : calls) items.push_back(begin(member, call));
    clique.changed.notify_all();
  }
  while (!items.empty() && !member.aborted) {
    const std::size_t before = items.size();
    for (std::size_t i = 0; i < items.size();) {  // in order, because messages between two ranks do not
                                                  // overtake each other
      if (advance(member, items[i])) {
        items.erase(items.begin() + static_cast<std::ptrdiff_t>(i));
      } else {
        ++i;
      }
    }
    if (items.size() < before) {
      clique.changed.notify_all();
    } else if (!items.empty()) {
      clique.changed.wait_for(lock, std::chrono::milliseconds(1));
    }
  }
  // Data that this rank offered and that was not received must not be read any more, because its memory may
  // be freed.
  for (const Pending& item : items) {
    if (item.round && !item.round->done) --item.round->arrived;  // so that it never completes
    if (!item.message) continue;
    auto& queue = clique.messages[{member.rank, item.call->peer}];
    queue.erase(std::remove(queue.begin(), queue.end(), item.message), queue.end());
  }
}

bool is_silent(int rank) {
  return rank < most_ranks && silent[static_cast<std::size_t>(rank)];
}

int injected_error(int rank) {
  return rank < most_ranks ? failing[static_cast<std::size_t>(rank)].load() : 0;
}

void silence_rank(int rank) {
  silent[static_cast<std::size_t>(rank)] = true;
}

void fail_rank(int rank, int nccl_error) {
  failing[static_cast<std::size_t>(rank)] = nccl_error;
}

void heal_ranks() {
  for (auto& each : silent) each = false;
  for (auto& each : failing) each = 0;
}

}  // namespace cuda_emulation
