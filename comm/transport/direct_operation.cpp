#include "comm/transport/direct_operation.h"

#include <algorithm>

namespace tranche::comm {

DirectOperation::DirectOperation(OperationInfo info, std::function<void()> local, std::vector<Flow> sends,
                                 std::vector<Flow> receives)
    : Operation(std::move(info)),
      local_(std::move(local)),
      sends_(std::move(sends)),
      receives_(std::move(receives)) {}

void DirectOperation::start() {
  if (local_) local_();
}

bool DirectOperation::advance(Transport& transport, StagingBuffer&) {
  bool moved = false;
  // Receives come first, because data that finds its buffer posted is not buffered elsewhere.
  for (Flow& flow : receives_) moved |= flow.advance(transport);
  for (Flow& flow : sends_) moved |= flow.advance(transport);
  return moved;
}

bool DirectOperation::finished() const {
  const auto finished = [](const Flow& flow) { return flow.finished(); };
  return std::all_of(receives_.begin(), receives_.end(), finished) &&
         std::all_of(sends_.begin(), sends_.end(), finished);
}

PendingPeers DirectOperation::pending_peers() const {
  PendingPeers result;
  for (const Flow& flow : receives_) {
    if (!flow.finished()) result.ranks.push_back(flow.peer());
  }
  if (!result.ranks.empty()) return result;
  result.sending = true;
  for (const Flow& flow : sends_) {
    if (!flow.finished()) result.ranks.push_back(flow.peer());
  }
  return result;
}

void DirectOperation::abandon(StagingBuffer&) {
  for (Flow& flow : receives_) flow.abandon();
  for (Flow& flow : sends_) flow.abandon();
}

}  // namespace tranche::comm
