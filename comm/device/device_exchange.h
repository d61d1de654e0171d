#pragma once
/// The interface of the transports of device memory between ranks. Private to comm/.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/device/guarded_event.h"
#include "tranche/comm/communicator.h"
#include "tranche/device/device.h"

namespace tranche::comm {

/// One call, after checking and counting. Counts are elements per rank, as in Communicator; for an
/// all_to_all_v, the most that this rank exchanges with any other.
struct DeviceCall {
  std::string_view name;    ///< a literal
  std::string unit, phase;  ///< from the label
  const void* from = nullptr;
  void* to = nullptr;
  std::int64_t count = 0;
  DataType dtype = DataType::float32;
  DataType output_dtype = DataType::float32;  ///< for a reduce_scatter
  ReductionOptions sum;                       ///< for a reduce_scatter; bucket_elements also for a gather
  int other = 0;                              ///< the root, or the peer of send and recv
  /// The ranges of `from` and of `to` for each rank, in an all_to_all or all_to_all_v.
  std::vector<RankElements> sends, receives;
  /// Asks the peers whether they will make this call; called once if the call takes long; empty if no peer
  /// can be asked. From any thread.
  std::function<void()> ask;

  std::string what() const;
  OperationLabel label() const { return {unit, phase, Traffic::data, Tier::host}; }
  std::int64_t bytes() const { return count * size_of(dtype); }
  const unsigned char* from_bytes() const { return static_cast<const unsigned char*>(from); }
  unsigned char* to_bytes() const { return static_cast<unsigned char*>(to); }
  const RankElements& sent_to(int rank) const { return sends[static_cast<std::size_t>(rank)]; }
  const RankElements& received_from(int rank) const { return receives[static_cast<std::size_t>(rank)]; }
  const unsigned char* place_sent_to(int rank) const {
    return from_bytes() + sent_to(rank).first * size_of(dtype);
  }
  unsigned char* place_received_from(int rank) const {
    return to_bytes() + received_from(rank).first * size_of(dtype);
  }
  /// The bytes sent to one rank of the group, and those expected from it.
  std::int64_t bytes_to(int rank) const {
    return sends.empty() ? bytes() : sent_to(rank).count * size_of(dtype);
  }
  std::int64_t bytes_from(int rank) const {
    return receives.empty() ? bytes() : received_from(rank).count * size_of(dtype);
  }
};

/// Seconds after which DeviceCall::ask is called: longer than a transfer, shorter than people wait.
inline double patience_of(double timeout_seconds) {
  constexpr double longest = 1;
  return timeout_seconds > 0 ? std::min(longest, timeout_seconds / 4) : longest;
}

/// The group for which a communicator makes its strategy. The communicator outlives the strategy.
struct DeviceGroup {
  Device* device = nullptr;
  Stream* stream = nullptr;  ///< the communication stream; null on a line
  bool line = false;         ///< for messages between neighbours alone (Communicator::line())
  bool ring = false;         ///< the ends of the line are neighbours too (Communicator::join_ends())
  Communicator* host = nullptr;
  std::shared_ptr<DeviceFailure> failure;
  std::vector<int> job_ranks;  ///< ranks of the members in the job, for messages
  double timeout_seconds = 300;
  std::int64_t staging_bytes = 0;
  MemoryResource* device_memory = nullptr;
  MemoryResource* host_memory = nullptr;

  int rank() const { return host->rank(); }
  int size() const { return host->size(); }
  /// The other members, in cyclic order after this rank, so that the ranks do not all begin with the same
  /// peer.
  std::vector<int> peers() const;
  /// The previous and the next rank on a line; empty for other groups.
  std::vector<int> neighbours() const;
  /// The other end, at the ends of a line of three ranks or more; otherwise -1.
  int other_end() const;
  /// The rank of the job that a member is.
  int job_rank(int member) const { return job_ranks[static_cast<std::size_t>(member)]; }
};

/// The work that was enqueued for a call.
struct Issued {
  Event done;
  std::vector<std::pair<int, Event>> peers;  ///< job ranks, and the points of theirs that the call waits for
  bool sending = false;
  bool abortable = false;  ///< after an abort `done` passes although the work was not done
  int awaited = -1;        ///< a job rank for a time-out's text whose point is unknown
};

/// A transport's strategy. Construction is collective.
class DeviceExchange {
 public:
  virtual ~DeviceExchange() = default;
  /// Enqueues a collective call on the communication stream, in the same order on every rank. The stream
  /// already waits for all earlier work (`started` is that point). A line does not support it.
  virtual Issued issue(const std::shared_ptr<const DeviceCall>& call, const Event& started);
  /// Enqueues a send or a recv on the channel of its peer and direction, a separate stream that already waits
  /// for the call's `ready` events.
  virtual Issued message(const std::shared_ptr<const DeviceCall>& call, const Event& started,
                         Stream& channel) = 0;
  /// Makes a further peer a neighbour on a line. Both of them call it at once.
  virtual void connect(int /*peer*/) {}
  /// See Communicator.
  virtual std::int64_t summed_elements_sent(std::int64_t /*count*/, DataType /*dtype*/,
                                            const ReductionOptions& /*options*/) const {
    return 0;
  }
  /// True when DeviceWatch must enforce the calls' deadlines.
  virtual bool watched() const { return true; }
  /// Ends in order when everything has been done; it may wait for peers within the time-out.
  virtual void close() noexcept {}
  /// Throws when the exchange itself has failed. Runs on the watch's thread.
  virtual void check() {}
  /// Makes all work in flight end, after a failure. Runs once, on the watch's thread.
  virtual void abort() noexcept {}
};

/// Exchanges through pinned host memory and the host communicator.
std::unique_ptr<DeviceExchange> make_staged_exchange(const DeviceGroup& group);
/// Exchanges between threads of this process: kernels read the peers' memory.
std::unique_ptr<DeviceExchange> make_shared_exchange(const DeviceGroup& group);

/// Copies device memory to device memory, in stream order.
void copy_on_device(Stream& stream, void* to, const void* from, std::int64_t count, DataType dtype);
/// Copies the part that a rank sends to itself in an all_to_all or all_to_all_v.
void copy_own_part(Stream& stream, const DeviceCall& call, int rank);
/// Throws CommunicationError, naming both ranks of the group, if the sender's number of bytes differs from
/// the receiver's.
void require_equal_bytes(const DeviceGroup& group, const DeviceCall& call, int sender, std::int64_t sent,
                         int receiver, std::int64_t expected);

}  // namespace tranche::comm
