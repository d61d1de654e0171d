#include "comm/transport/pending_peers.h"

#include <fmt/format.h>

#include <string_view>

namespace tranche::comm {

namespace {
std::string rank_list(const std::vector<int>& ranks, const RankNames& names) {
  constexpr std::string_view rank = "rank ";
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += names.of(ranks[i]).substr(rank.size());
  }
  return text;
}
}  // namespace

std::string timeout_message(const std::string& what, const PendingPeers& pending, double timeout,
                            const RankNames& names) {
  const std::string seconds = fmt::format("{:.1f} s", timeout);
  if (pending.ranks.empty()) {
    return fmt::format("{}: not done after {} (no rank is known to be missing: a device or its link hangs)",
                       what, seconds);
  }
  const std::string who = rank_list(pending.ranks, names);
  const bool one = pending.ranks.size() == 1;
  const std::string observed = pending.sending
                                   ? fmt::format("{}: {} {} not taken the data of this rank after {}", what,
                                                 who, one ? "has" : "have", seconds)
                                   : fmt::format("{}: no data from {} after {}", what, who, seconds);
  const std::string they = !pending.sending ? who : one ? "it" : "they";
  if (pending.indirect) {
    return fmt::format("{} ({}, or a rank that {} for, has not entered the operation, or hangs)", observed,
                       they, one ? "it waits" : "they wait");
  }
  return fmt::format("{} ({} {} not entered the operation, or {})", observed, they, one ? "has" : "have",
                     one ? "hangs" : "hang");
}

}  // namespace tranche::comm
