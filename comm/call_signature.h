#pragma once
/// The control message by which ranks detect that their collective calls differ. Private to comm/.

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "comm/transport/transport.h"

namespace tranche::comm {

/// A hash of operation and unit for Tag::call, so that the messages of different calls do not match.
std::uint32_t hash_of_call(std::string_view operation, std::string_view unit);

/// A collective call, or a notice that `rank` waits for another rank. It travels as bytes.
struct CallSignature {
  static constexpr int no_call = -2;  ///< the value of waits_for in the message of a call
  int rank = 0;                       ///< in the job
  int context = 0;
  std::uint64_t number = 0;  ///< its number in the communicator's sequence
  std::int64_t bytes = 0;    ///< that a rank receives from all others
  int waits_for = no_call;   ///< the rank of the job that `rank` waits for; -1: no longer waits
  std::array<char, 24> operation{};
  std::array<char, 104> unit{};  ///< cut if longer
};
static_assert(std::is_trivially_copyable_v<CallSignature>);

CallSignature make_call_signature(int rank, const Tag& tag, std::int64_t bytes, std::string_view operation,
                                  std::string_view unit);
/// "rank 0 issued all_gather of unit a (number 17) where rank 1 issued reduce_scatter of unit b (number 17):
/// the ranks' calls differ"; empty when the calls are equal.
std::string difference(const CallSignature& one, const CallSignature& other, const RankNames& names);

}  // namespace tranche::comm
