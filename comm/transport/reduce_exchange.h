#pragma once
/// Reductions by messages. Private to comm/.

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "comm/transport/flow.h"
#include "comm/transport/operation.h"

namespace tranche::comm {

/// The data that a reduction exchanges, and the order of its sum.
struct Reduction {
  std::vector<int> members;         ///< job ranks of the group, in group order
  int self = 0;                     ///< this rank's index in members
  int givers = 0;                   ///< only the first so many members send, and are added
  std::vector<const void*> pieces;  ///< the part for each member; [self] stays here
  std::int64_t count = 0;           ///< elements of a part
  std::int64_t chunk = 0;           ///< elements exchanged at once
  DataType dtype = DataType::float32;
  /// The result overwrites data to send, so a chunk must have been sent before it is summed.
  bool in_place = false;
  std::int64_t scratch_bytes = 0;  ///< > 0: small enough for its own buffer; chunk must be >= count
  /// Adds one chunk: pieces[member] holds elements [first, first + count) of a contributing member.
  std::function<void(std::span<const void* const> pieces, std::int64_t first, std::int64_t count,
                     DataType dtype)>
      combine;
};

/// Exchanges the parts pairwise and sums each chunk once all of it has arrived.
class ReduceExchange : public Operation {
 public:
  ReduceExchange(OperationInfo info, Reduction reduction);
  bool advance(Transport& transport, StagingBuffer& staging) override;
  bool finished() const override { return summed_ == chunks_ && sent(); }
  PendingPeers pending_peers() const override;
  bool uses_staging() const override;
  void abandon(StagingBuffer& staging) override;
  bool waits_for_staging() const override;

 private:
  struct Arrival {
    std::int64_t chunk = 0;
    int slot = -1;
    unsigned char* data = nullptr;
    std::vector<std::unique_ptr<Message>> messages;  ///< by member; null once arrived
    bool arrived = false;
  };
  bool sent() const;
  bool post(Transport& transport, StagingBuffer& staging);
  void sum(const Arrival& arrival);
  std::int64_t elements_of(std::int64_t chunk) const;

  Reduction reduction_;
  std::int64_t chunks_ = 0, posted_ = 0, summed_ = 0;
  std::vector<Flow> sends_;
  std::deque<Arrival> arrivals_;
  std::vector<unsigned char> scratch_;
};

}  // namespace tranche::comm
