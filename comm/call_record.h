#pragma once
/// The latest collective calls of a rank. Private to comm/.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "comm/call_signature.h"

namespace tranche::comm {

/// The latest calls of a rank, to compare what peers tell of theirs with.
class CallRecord {
 public:
  void add(const CallSignature& mine);
  /// This rank's call of the same number. nullopt: it is not issued yet, or too long ago.
  std::optional<CallSignature> same_number(const CallSignature& theirs) const;
  /// True while this rank has not issued its call of that number.
  bool comes(const CallSignature& theirs) const;

 private:
  /// Ranks differ by no more operations than are under way at once.
  static constexpr std::size_t kept = 1024;
  struct Sequence {
    int context = 0;
    std::deque<CallSignature> calls;
  };
  const Sequence* find(int context) const;
  std::vector<Sequence> sequences_;
};

}  // namespace tranche::comm
