#pragma once
/// Collectives over a group of ranks.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tranche/comm/meter.h"
#include "tranche/core/dtype.h"
#include "tranche/core/error.h"
#include "tranche/device/event.h"
#include "tranche/device/memory.h"

namespace tranche {

enum class ReduceOperation : std::uint8_t { sum, minimum, maximum };

/// Names a call in errors, traces and the meter: "reduce_scatter of unit h.3 in backward".
struct OperationLabel {
  std::string_view unit;
  std::string_view phase;
  Traffic traffic = Traffic::data;  ///< counts as data (docs/internals/arithmetic.md) or control
  /// The tier of the call's buffers. Calls on host memory are ordered only by their `ready` events.
  /// Collectives on a GPU's memory also run in the order of issue, on one stream; a send there waits only for
  /// earlier sends to the same peer, and a recv likewise.
  Tier memory = Tier::device;
};

/// The order in which gradients are summed: in rank order inside groups of `group_size` consecutive ranks,
/// then inside outer groups, then over these (kernels::SumGroups).
struct ReductionOptions {
  /// 0 folds: the ranks' values are added one by one to the contents of `output` (with `accumulate`), so the
  /// bits equal those of any other number of ranks that give the same values in that order. -g folds sums of
  /// g ranks each.
  int group_size = 1 << 30;
  bool accumulate = false;  ///< add the sum to the contents of `output`
  std::int64_t bucket_elements =
      0;  ///< most elements (all ranks) exchanged at once; 0: as many as the staging buffer holds
  /// The dtype to which the values are rounded before they are added, if the communicator rounds() to it;
  /// nullopt: their own dtype.
  std::optional<DataType> round_to = std::nullopt;
  /// Only the first so many ranks contribute values; those of others are neither sent nor added. All by
  /// default.
  int givers = 1 << 30;
  int outer_group = 1;  ///< groups whose sums are added to each other first
};

/// Elements [first, first + count) of a buffer that are sent to one rank, or received from it.
struct RankElements {
  std::int64_t first = 0, count = 0;
};

/// A group of ranks. Every member function except the accessors is collective over the group: all ranks issue
/// the same sequence with equal counts, dtypes and labels. Used by one thread at a time.
///
/// Asynchronous calls return a done event. It is passed once the result is in place and no peer will access
/// the local buffers any more. Work starts once every event in `ready` has passed. Waiting on a done event
/// throws CommunicationError (operation, unit, phase, missing ranks) after a time-out or a peer's failure.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// "self", "threads", "mpi", "meta".
  virtual std::string_view backend() const = 0;
  /// The number of ranks on this rank's node, and this rank's index among them.
  virtual int local_size() const = 0;
  virtual int local_rank() const = 0;
  /// The node number of a rank of the group: ranks of one node have equal numbers.
  virtual int node_of(int /*rank*/) const { return 0; }

  /// full[r * count ...] = rank r's shard of `count` elements. `shard` may be the rank's own part of `full`
  /// (in place). `bucket_elements`: most elements of all ranks that are exchanged at once; 0: no limit.
  virtual Event all_gather(const void* shard, void* full, std::int64_t count, DataType dtype,
                           std::int64_t bucket_elements, std::span<const Event> ready,
                           const OperationLabel& label) = 0;
  /// output[i] (output_dtype) = deterministic sum over ranks s of full_s[rank * count + i] (dtype), in fp32.
  /// `output` may alias the rank's own part of `full` when the dtypes are equal.
  virtual Event reduce_scatter(const void* full, DataType dtype, void* output, DataType output_dtype,
                               std::int64_t count, const ReductionOptions& options,
                               std::span<const Event> ready, const OperationLabel& label) = 0;
  /// True when reduce_scatter itself rounds values of dtype `from` to `to` (ReductionOptions::round_to): if
  /// the dtypes are equal, and for fp32 in a group of one rank. Otherwise the caller casts first.
  virtual bool rounds(DataType from, DataType to) const { return from == to; }
  /// The number of elements that this rank sends as sums over several ranks of its node, among the (size() -
  /// 1) * count elements of such a reduce_scatter. These sums travel in fp32, whatever `dtype`. Computed
  /// without communication; differs among ranks; zero where all ranks share a node.
  virtual std::int64_t summed_elements_sent(std::int64_t /*count*/, DataType /*dtype*/,
                                            const ReductionOptions& /*options*/) const {
    return 0;
  }
  /// values[i] = operation over ranks, in rank order; fp32, fp64, int64. Host memory only, which must be
  /// ready at the call: it is for flags, counts and norms, not for gradients.
  virtual Event all_reduce(void* values, std::int64_t count, DataType dtype, ReduceOperation operation,
                           const OperationLabel& label) = 0;
  /// received[r * count ...] = the elements that rank r sent to this rank; sent[r * count ...] goes to rank
  /// r. Each pair of ranks exchanges `count` elements.
  virtual Event all_to_all(const void* sent, void* received, std::int64_t count, DataType dtype,
                           std::span<const Event> ready, const OperationLabel& label) = 0;
  /// Exchanges a different number of elements for each pair of ranks: sends[r] is the range of `sent` that
  /// goes to rank r, receives[r] the range of `received` that comes from it; the rank's own range is copied.
  /// Ranges that are received do not overlap.
  virtual Event all_to_all_v(const void* sent, std::span<const RankElements> sends, void* received,
                             std::span<const RankElements> receives, DataType dtype,
                             std::span<const Event> ready, const OperationLabel& label) = 0;
  virtual Event broadcast(void* values, std::int64_t count, DataType dtype, int root,
                          std::span<const Event> ready, const OperationLabel& label) = 0;
  /// Not collective over the group: the peer's recv or send must match, in the same order per pair.
  virtual Event send(const void* values, std::int64_t count, DataType dtype, int peer,
                     std::span<const Event> ready, const OperationLabel& label) = 0;
  virtual Event recv(void* values, std::int64_t count, DataType dtype, int peer, std::span<const Event> ready,
                     const OperationLabel& label) = 0;
  virtual Event barrier(const OperationLabel& label) = 0;
  /// Groups of equal colour, ordered by key then rank; nullptr for colour < 0. Blocking.
  virtual std::unique_ptr<Communicator> split(int color, int key) = 0;
  /// The group of `ranks`, ascending, which include this one. All ranks call it at once, each with the ranks
  /// of its own group; the groups are disjoint. Blocking.
  virtual std::unique_ptr<Communicator> subgroup(std::span<const int> ranks) {
    return split(ranks.front(), rank());
  }

  /// Makes the same group as subgroup(), for messages between consecutive ranks, such as the stages of a
  /// pipeline. Collective like subgroup(). On a device the group takes neither staging memory nor a
  /// communication stream, and each neighbour and direction has its own channel from the start: collectives
  /// on device memory throw LogicError, and a message to a rank that is not a neighbour throws
  /// InvalidArgument. Collectives on host memory are those of any group.
  virtual std::unique_ptr<Communicator> line(std::span<const int> ranks) { return subgroup(ranks); }
  /// Makes neighbours of the first and the last rank of a line. All ranks of the line call it, while no
  /// message is under way; a second call does nothing. Blocking. Groups whose ranks all reach each other need
  /// nothing.
  virtual void join_ends() {}

  /// True when there are no peers (plans). Nothing is received then, and a caller that simulates the peers'
  /// data need not hold a copy for each of them.
  virtual bool simulated() const { return false; }

  /// True if the meter knows the bytes sent to other nodes. It does not know them for GPU memory, where NCCL
  /// decides the route.
  virtual bool counts_nodes() const { return false; }
  /// The bytes and elements that this rank sent, by operation.
  virtual const ByteMeter& meter() const = 0;
  virtual ByteMeter& meter() = 0;
  /// A rolling hash of the sequence of collective calls (operation, count, dtype, label). It is equal on all
  /// ranks by construction; the engine compares it at each step's end.
  virtual std::uint64_t sequence_hash() const = 0;
  /// Reports to every peer that this rank cannot continue: their pending and later calls throw
  /// CommunicationError with `cause`, and `status` as its exit status. A rank that was ended by a peer's
  /// failure reports that peer's cause instead, so that all ranks name the origin. Returns within `seconds`.
  /// Never throws.
  virtual void post_failure(std::string_view cause, ExitStatus status, double seconds) noexcept = 0;
  /// Like post_failure, for the time while an exception unwinds and its text is not known yet: it ends this
  /// rank's own operations and asks the peers to wait for the cause, for two seconds at most. post_failure
  /// then reports it; otherwise the peers report `where`.
  virtual void post_unwinding(std::string_view where, double seconds) noexcept = 0;
  /// Throws the error that ended this rank's communication, if there was one: CommunicationError, also for a
  /// peer's failure. Not collective, from any thread, never blocks.
  virtual void check_health() {}
  /// Ends the whole job with `status` (MPI_Abort); in-process communicators only post the failure.
  virtual void abort_job(int status) noexcept = 0;
};

}  // namespace tranche
