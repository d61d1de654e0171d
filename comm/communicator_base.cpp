#include "comm/communicator_base.h"

#include <fmt/format.h>

#include <utility>

#include "comm/transport/operation.h"
#include "tranche/core/error.h"
#include "tranche/core/shape.h"

namespace tranche::comm {

namespace {

std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {
  // The finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), applied to the running value.
  std::uint64_t x = hash * 0x9e3779b97f4a7c15ull + value + 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

std::uint64_t mix(std::uint64_t hash, std::string_view text) {
  hash = mix(hash, text.size());
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return mix(hash, 0u);
}

[[noreturn]] void refuse(std::string_view name, const OperationLabel& label, const std::string& why) {
  throw InvalidArgument(describe(name, label.unit, label.phase) + ": " + why);
}

void require_buffer(std::string_view name, const OperationLabel& label, const void* data, std::int64_t count,
                    std::string_view what) {
  if (count < 0) refuse(name, label, fmt::format("count {} is negative", count));
  if (data == nullptr && count > 0) refuse(name, label, fmt::format("{} is a null pointer", what));
}

void require_rank(std::string_view name, const OperationLabel& label, int rank, int size,
                  std::string_view what) {
  if (rank < 0 || rank >= size) {
    refuse(name, label, fmt::format("{} {} is not a rank of this group of {}", what, rank, size));
  }
}

bool summable(DataType dtype) {
  return dtype == DataType::float32 || dtype == DataType::bfloat16 || dtype == DataType::float16;
}

}  // namespace

void CommunicatorBase::record(std::string_view name, std::int64_t count, DataType dtype,
                              std::int64_t sent_elements, const OperationLabel& label,
                              Crossings::Bytes crossing, bool collective, std::int64_t more_bytes) {
  checked_multiply(checked_multiply(count, size_of(dtype)), size());
  meter_.add(name, label.traffic,
             {1, sent_elements, sent_elements * size_of(dtype) + more_bytes, crossing.own, crossing.node});
  if (!collective) return;
  hash_ = mix(mix(hash_, name), static_cast<std::uint64_t>(count));
  hash_ = mix(mix(mix(hash_, static_cast<std::uint64_t>(dtype)), label.unit), label.phase);
}

void CommunicatorBase::validate_and_record_all_gather(const void* shard, const void* full, std::int64_t count,
                                                      DataType dtype, std::int64_t bucket_elements,
                                                      const OperationLabel& label) {
  constexpr std::string_view name = "all_gather";
  require_buffer(name, label, shard, count, "shard");
  require_buffer(name, label, full, count, "full");
  if (bucket_elements < 0) refuse(name, label, fmt::format("bucket of {} elements", bucket_elements));
  record(name, count, dtype, (size() - 1) * count, label,
         crossings_ ? crossings_->all_gather(count, dtype) : Crossings::Bytes{});
}

void CommunicatorBase::validate_and_record_reduce_scatter(const void* full, DataType dtype,
                                                          const void* output, DataType output_dtype,
                                                          std::int64_t count, const ReductionOptions& options,
                                                          const OperationLabel& label) {
  constexpr std::string_view name = "reduce_scatter";
  require_buffer(name, label, full, count, "full");
  require_buffer(name, label, output, count, "output");
  for (const DataType each : {dtype, output_dtype}) {
    if (!summable(each)) {
      refuse(name, label, fmt::format("sums fp32, bf16 and fp16, not {}", name_of(each)));
    }
  }
  if (const DataType to = options.round_to.value_or(dtype); !summable(to) || !rounds(dtype, to)) {
    refuse(name, label,
           fmt::format("rounds fp32 to bf16 or fp16 in a group of one rank, not {} to {} in one of {}; cast "
                       "the values first",
                       name_of(dtype), name_of(to), size()));
  }
  if (options.givers < 1) refuse(name, label, fmt::format("{} ranks give values", options.givers));
  if (options.outer_group < 1) {
    refuse(name, label, fmt::format("outer groups of {} groups", options.outer_group));
  }
  if (options.bucket_elements < 0) {
    refuse(name, label, fmt::format("bucket of {} elements", options.bucket_elements));
  }
  const std::int64_t sums = summed_elements_sent(count, dtype, options);
  record(name, count, dtype, rank() < options.givers ? (size() - 1) * count : 0, label,
         crossings_ ? crossings_->reduce_scatter(count, dtype, options) : Crossings::Bytes{}, true,
         sums * (size_of(DataType::float32) - size_of(dtype)));
}

void CommunicatorBase::validate_and_record_all_reduce(const void* values, std::int64_t count, DataType dtype,
                                                      const OperationLabel& label) {
  constexpr std::string_view name = "all_reduce";
  require_buffer(name, label, values, count, "values");
  if (dtype != DataType::float32 && dtype != DataType::float64 && dtype != DataType::int64) {
    refuse(name, label, fmt::format("reduces fp32, fp64 and int64, not {}", name_of(dtype)));
  }
  record(name, count, dtype, (size() - 1) * count, label, to_all(count, dtype));
}

void CommunicatorBase::validate_and_record_all_to_all(const void* sent, const void* received,
                                                      std::int64_t count, DataType dtype,
                                                      const OperationLabel& label) {
  constexpr std::string_view name = "all_to_all";
  require_buffer(name, label, sent, count, "sent");
  require_buffer(name, label, received, count, "received");
  if (sent == received && count > 0) refuse(name, label, "sent and received are the same buffer");
  record(name, count, dtype, (size() - 1) * count, label, to_all(count, dtype));
}

void CommunicatorBase::validate_and_record_all_to_all_v(const void* sent, std::span<const RankElements> sends,
                                                        const void* received,
                                                        std::span<const RankElements> receives,
                                                        DataType dtype, const OperationLabel& label) {
  constexpr std::string_view name = "all_to_all_v";
  const auto check = [&](const void* data, std::span<const RankElements> parts, std::string_view what) {
    if (static_cast<int>(parts.size()) != size()) {
      refuse(name, label, fmt::format("{} has {} entries for {} ranks", what, parts.size(), size()));
    }
    std::int64_t others = 0, crossing = 0;
    for (int r = 0; r < size(); ++r) {
      const RankElements& part = parts[static_cast<std::size_t>(r)];
      require_buffer(name, label, data, part.count, what);
      if (part.first < 0) refuse(name, label, fmt::format("{} begins at element {}", what, part.first));
      checked_multiply(part.first + part.count, size_of(dtype));
      if (r != rank()) others += part.count;
      if (crossings_ && crossings_->elsewhere(r)) crossing += part.count * size_of(dtype);
    }
    return std::pair(others, crossing);
  };
  const auto [others, crossing] = check(sent, sends, "sent");
  check(received, receives, "received");
  const auto own = static_cast<std::size_t>(rank());
  if (sends[own].count != receives[own].count) {
    refuse(name, label,
           fmt::format("the rank sends itself {} elements and receives {}", sends[own].count,
                       receives[own].count));
  }
  // The counts of the node's other ranks are unknown here, so each is assumed to send as much as this one.
  record(name, 0, dtype, others, label,
         {crossing, crossing * local_size()});  // counts differ between ranks, so the hash excludes them
}

void CommunicatorBase::validate_and_record_broadcast(const void* values, std::int64_t count, DataType dtype,
                                                     int root, const OperationLabel& label) {
  constexpr std::string_view name = "broadcast";
  require_buffer(name, label, values, count, "values");
  require_rank(name, label, root, size(), "root");
  const bool sends = rank() == root;
  record(name, count, dtype, sends ? (size() - 1) * count : 0, label,
         sends ? to_all(count, dtype) : Crossings::Bytes{});
}

void CommunicatorBase::validate_and_record_send(const void* values, std::int64_t count, DataType dtype,
                                                int peer, const OperationLabel& label) {
  require_buffer("send", label, values, count, "values");
  require_rank("send", label, peer, size(), "peer");
  if (peer == rank()) refuse("send", label, "the peer is this rank itself");
  const std::int64_t crossing =
      crossings_ && crossings_->elsewhere(peer) ? checked_multiply(count, size_of(dtype)) : 0;
  record("send", count, dtype, count, label, {crossing, crossing}, false);
}

void CommunicatorBase::validate_and_record_recv(const void* values, std::int64_t count, DataType dtype,
                                                int peer, const OperationLabel& label) {
  require_buffer("recv", label, values, count, "values");
  require_rank("recv", label, peer, size(), "peer");
  if (peer == rank()) refuse("recv", label, "the peer is this rank itself");
  record("recv", count, dtype, 0, label, {}, false);
}

void CommunicatorBase::validate_and_record_barrier(const OperationLabel& label) {
  record("barrier", 0, DataType::uint8, 0, label);
}

void CommunicatorBase::validate_and_record_split() {
  record("split", split_values, DataType::int64, (size() - 1) * split_values, {"", "", Traffic::control});
}

}  // namespace tranche::comm
