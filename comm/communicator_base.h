#pragma once
/// The base of all communicators: validates and records each call before any data moves. Private to comm/.

#include <memory>
#include <string_view>
#include <utility>

#include "comm/node/crossings.h"
#include "tranche/comm/communicator.h"
#include "tranche/core/shape.h"

namespace tranche::comm {

class CommunicatorBase : public Communicator {
 public:
  const ByteMeter& meter() const override { return meter_; }
  ByteMeter& meter() override { return meter_; }
  bool counts_nodes() const override { return crossings_ != nullptr; }
  std::uint64_t sequence_hash() const override { return hash_; }
  bool rounds(DataType from, DataType to) const override {
    return from == to || (size() == 1 && from == DataType::float32);
  }

 protected:
  /// Makes the base also count the bytes to other nodes. Communicators of host memory call it once.
  void count_crossings(std::unique_ptr<const Crossings> crossings) { crossings_ = std::move(crossings); }
  // Each of these checks the arguments (InvalidArgument naming the operation), counts the traffic of this
  // rank and, for collectives, extends the hash.
  void validate_and_record_all_gather(const void* shard, const void* full, std::int64_t count, DataType dtype,
                                      std::int64_t bucket_elements, const OperationLabel& label);
  void validate_and_record_reduce_scatter(const void* full, DataType dtype, const void* output,
                                          DataType output_dtype, std::int64_t count,
                                          const ReductionOptions& options, const OperationLabel& label);
  void validate_and_record_all_reduce(const void* values, std::int64_t count, DataType dtype,
                                      const OperationLabel& label);
  void validate_and_record_all_to_all(const void* sent, const void* received, std::int64_t count,
                                      DataType dtype, const OperationLabel& label);
  void validate_and_record_all_to_all_v(const void* sent, std::span<const RankElements> sends,
                                        const void* received, std::span<const RankElements> receives,
                                        DataType dtype, const OperationLabel& label);
  void validate_and_record_broadcast(const void* values, std::int64_t count, DataType dtype, int root,
                                     const OperationLabel& label);
  void validate_and_record_send(const void* values, std::int64_t count, DataType dtype, int peer,
                                const OperationLabel& label);
  void validate_and_record_recv(const void* values, std::int64_t count, DataType dtype, int peer,
                                const OperationLabel& label);
  void validate_and_record_barrier(const OperationLabel& label);
  void validate_and_record_split();

 private:
  void record(std::string_view name, std::int64_t count, DataType dtype, std::int64_t sent_elements,
              const OperationLabel& label, Crossings::Bytes crossing = {}, bool collective = true,
              std::int64_t more_bytes = 0);
  /// The bytes to other nodes if every rank sends `elements` to every other.
  Crossings::Bytes to_all(std::int64_t elements, DataType dtype) const {
    return crossings_ ? crossings_->to_all(checked_multiply(elements, size_of(dtype))) : Crossings::Bytes{};
  }
  std::unique_ptr<const Crossings> crossings_;
  ByteMeter meter_;
  std::uint64_t hash_ = 0x6a09e667f3bcc908ull;
};

/// The number of int64 values that split gathers from every rank: colour, key, first free context.
inline constexpr std::int64_t split_values = 3;

}  // namespace tranche::comm
