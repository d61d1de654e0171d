#pragma once
/// All-reduce among ranks that read each other's memory. Private to comm/.

#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "comm/node/window_exchange.h"

namespace tranche::comm {

/// values = their combination over the members, in rank order. Each rank combines a slice of every chunk in
/// place, then all copy the others' slices.
class WindowAllReduce : public WindowExchange {
 public:
  using Combine = std::function<void(std::span<const void* const> pieces, void* result, std::int64_t count)>;
  WindowAllReduce(OperationInfo info, WindowCall call, Combine combine);

 private:
  void fill(std::int64_t chunk, unsigned char* slot) override;
  Progress work(std::int64_t chunk) override;
  bool two_phases() const override { return true; }
  /// The elements of a chunk that a member combines.
  std::pair<std::int64_t, std::int64_t> slice(int member, std::int64_t chunk) const;
  Combine combine_;
  bool combined_ = false;
  std::vector<bool> copied_;  ///< by member
};

}  // namespace tranche::comm
