#pragma once
/// The latest collective calls of a rank. Private to comm/.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "comm/call_signature.h"

namespace tranche::comm {

/// The latest collective calls of a rank, for comparison with those that peers report.
class CallRecord {
 public:
  void add(const CallSignature& mine);
  /// This rank's call with the same number; nullopt if it is not issued yet, or too long ago.
  std::optional<CallSignature> same_number(const CallSignature& theirs) const;
  /// True while this rank has not issued its call of that number.
  bool comes(const CallSignature& theirs) const;

 private:
  /// The number of calls kept. Ranks differ by at most the number of operations in flight.
  static constexpr std::size_t kept = 1024;
  struct Sequence {
    int context = 0;
    std::deque<CallSignature> calls;
  };
  const Sequence* find(int context) const;
  std::vector<Sequence> sequences_;
};

}  // namespace tranche::comm
