#pragma once
/// Ranks of an emulated NCCL communicator: threads of this process that find each other by the communicator's
/// id.

#include <nccl.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace cuda_emulation {

enum class Collective : std::uint8_t {
  send,
  receive,
  all_gather,
  reduce_scatter,
  all_reduce,
  broadcast,
  reduce
};
const char* name_of(Collective what);

struct NcclCall {
  Collective what = Collective::send;
  const void* from = nullptr;
  void* to = nullptr;
  std::size_t count = 0;  // in the units that NCCL uses for this call
  ncclDataType_t type = ncclUint8;
  ncclRedOp_t operation = ncclSum;
  int peer = 0;  // peer, or the root
};

struct Message {
  const void* from = nullptr;
  std::size_t bytes = 0;
  bool taken = false;
};

/// One collective, until all ranks have arrived.
struct Round {
  std::vector<NcclCall> calls;  // by rank
  int arrived = 0;
  bool done = false;
  ncclResult_t result = ncclSuccess;
};

struct Clique;

struct Member {
  std::shared_ptr<Clique> clique;
  int rank = 0;
  int device = 0;
  bool blocking = true;
  std::atomic<bool> aborted{false};
  std::atomic<int> error{ncclSuccess};  // the asynchronous error
  std::atomic<int> outstanding{0};      // groups that were submitted and have not ended
  std::atomic<bool> unread{false};      // true if a nonblocking call has not been polled to its end
  std::atomic<bool> finalizing{false};
  std::uint64_t rounds = 0;  // collectives begun; used by the stream's thread
};

struct Clique {
  std::mutex mutex;
  std::condition_variable changed;
  std::size_t size = 0;
  std::vector<std::shared_ptr<Member>> members;  // by rank; null before the rank arrives
  std::size_t joined = 0;
  ncclResult_t start = ncclSuccess;  // result for all ranks, once all have arrived
  std::string problem;
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Message>>> messages;  // (from, to)
  std::map<std::uint64_t, std::shared_ptr<Round>> open_rounds;
};

std::size_t bytes_of(ncclDataType_t type);
/// Performs the work of a round for all its ranks.
void complete(Round& round);
/// Runs one group for one rank on a stream's thread; returns when the peers have done their part, or after an
/// abort.
void run_group(Member& member, const std::vector<NcclCall>& calls);

/// See control.h.
bool is_silent(int rank);
int injected_error(int rank);

}  // namespace cuda_emulation
