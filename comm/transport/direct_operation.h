#pragma once
/// Operations that only move bytes. Private to comm/.

#include <functional>
#include <vector>

#include "comm/transport/flow.h"
#include "comm/transport/operation.h"

namespace tranche::comm {

/// Moves bytes without arithmetic: gathers, broadcasts, all-to-all, send, recv, barriers.
class DirectOperation : public Operation {
 public:
  /// `local` copies this rank's own part and runs first.
  DirectOperation(OperationInfo info, std::function<void()> local, std::vector<Flow> sends,
                  std::vector<Flow> receives);
  void start() override;
  bool advance(Transport& transport, StagingBuffer& staging) override;
  bool finished() const override;
  PendingPeers pending_peers() const override;
  void abandon(StagingBuffer& staging) override;

 private:
  std::function<void()> local_;
  std::vector<Flow> sends_, receives_;
};

}  // namespace tranche::comm
