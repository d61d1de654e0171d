#pragma once
/// The peers that an operation waits for, and the text of a time-out that names them. Private to comm/.

#include <string>
#include <vector>

#include "comm/rank_names.h"

namespace tranche::comm {

/// The peers that an operation waits for.
struct PendingPeers {
  std::vector<int> ranks;  ///< job ranks
  bool sending = false;    ///< true: they have not received our data (all of theirs has arrived)
  bool indirect = false;   ///< true: they may have called, and wait for others themselves
};

/// "<what>: no data from rank 2 after 0.2 s (rank 2 has not entered ...)".
std::string timeout_message(const std::string& what, const PendingPeers& pending, double seconds,
                            const RankNames& names);

}  // namespace tranche::comm
