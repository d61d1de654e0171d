// NCCL's functions. Ranks are threads of one process; each needs its own emulated GPU, as on a real machine.
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstring>

#include "tests/cuda_emulation/nccl_clique.h"
#include "tests/cuda_emulation/state.h"

using cuda_emulation::Member;
using cuda_emulation::NcclCall;

struct ncclComm {
  std::shared_ptr<Member> member;
};

namespace cuda_emulation {
namespace {

struct Id {
  char magic[24];
  std::int64_t process;
  std::uint64_t number;
};
constexpr char id_magic[24] = "emulated NCCL";
static_assert(sizeof(Id) <= sizeof(ncclUniqueId));

struct Ranks {
  std::mutex mutex;
  std::map<std::uint64_t, std::shared_ptr<Clique>> cliques;  // until all ranks have arrived
  std::map<ncclComm_t, std::shared_ptr<Member>> live;
  std::uint64_t ids = 0;
};

Ranks& ranks() {
  static Ranks& instance = *new Ranks;
  return instance;
}

thread_local std::string last_problem;

struct Issued {
  std::shared_ptr<Member> member;
  cudaStream_t stream;
  std::vector<NcclCall> calls;
};
thread_local int group_depth = 0;
thread_local std::vector<Issued> group;
thread_local ncclResult_t group_error = ncclSuccess;

ncclResult_t problem(ncclResult_t result, const std::string& what) {
  misuse(cudaErrorUnknown, what);
  last_problem = what;
  return result;
}

template <class Body>
ncclResult_t nccl_call(const char* name, Body&& body) {
  const int refused = begin_call(name, ncclInvalidUsage, false);
  if (refused != 0) last_problem = fmt::format("{} was made to fail", name);
  return refused != 0 ? static_cast<ncclResult_t>(refused) : body();
}

std::shared_ptr<Member> member_of(ncclComm_t comm) {
  std::lock_guard lock(ranks().mutex);
  const auto found = ranks().live.find(comm);
  return found == ranks().live.end() ? nullptr : found->second;
}

/// The state that ncclCommGetAsyncError returns.
ncclResult_t state_of(Member& member) {
  if (const int injected = injected_error(member.rank); injected != 0)
    return static_cast<ncclResult_t>(injected);
  if (const int error = member.error; error != ncclSuccess) return static_cast<ncclResult_t>(error);
  Clique& clique = *member.clique;
  {
    std::lock_guard lock(clique.mutex);
    if (clique.joined < clique.size) return ncclInProgress;
    if (clique.start != ncclSuccess) return clique.start;
  }
  if (member.finalizing && member.outstanding > 0) return ncclInProgress;
  return ncclSuccess;
}

/// The error if the communicator accepts no call now.
ncclResult_t not_ready(const char* name, Member& member) {
  if (member.aborted) return problem(ncclInvalidUsage, fmt::format("{} on an aborted communicator", name));
  const ncclResult_t state = state_of(member);
  if (state == ncclInProgress || member.unread) {
    return problem(ncclInvalidUsage,
                   fmt::format("{}: the last call of this nonblocking communicator has not ended (poll "
                               "ncclCommGetAsyncError)",
                               name));
  }
  return state;
}

ncclResult_t submit_group(Issued issued) {
  Member& member = *issued.member;
  if (const ncclResult_t state = not_ready("ncclGroupEnd", member); state != ncclSuccess) return state;
  const bool counted = !is_capturing(issued.stream);
  if (counted) ++member.outstanding;
  auto shared = std::make_shared<Issued>(std::move(issued));
  count_launch();
  const cudaError_t error = submit(shared->stream, {[shared, counted] {
                                                      run_group(*shared->member, shared->calls);
                                                      if (counted) --shared->member->outstanding;
                                                    },
                                                    true});
  if (error != cudaSuccess) {
    if (counted) --member.outstanding;
    return problem(ncclUnhandledCudaError, fmt::format("NCCL: {}", cudaGetErrorString(error)));
  }
  if (member.blocking) return ncclSuccess;
  member.unread = true;
  return ncclInProgress;
}

ncclResult_t end_group() {
  std::vector<Issued> issued;
  issued.swap(group);
  ncclResult_t result = group_error;
  group_error = ncclSuccess;
  if (result != ncclSuccess) return result;
  for (Issued& each : issued) {
    const ncclResult_t one = submit_group(std::move(each));
    if (one != ncclSuccess) result = one;
  }
  return result;
}

/// Used by every function that moves data: checks the call, and adds it to the group or makes a group of it.
ncclResult_t issue(NcclCall call, std::size_t from_pieces, std::size_t to_pieces, ncclComm_t comm,
                   cudaStream_t stream) {
  const char* name = name_of(call.what);
  return nccl_call(name, [&]() -> ncclResult_t {
    const auto failed = [&](ncclResult_t error) {
      if (group_depth > 0) group_error = error;
      return error;
    };
    const auto member = member_of(comm);
    if (!member) return failed(problem(ncclInvalidArgument, fmt::format("{}: no live communicator", name)));
    if (call.peer < 0 || call.peer >= static_cast<int>(member->clique->size)) {
      return failed(problem(ncclInvalidArgument,
                            fmt::format("{}: peer or root {} of {}", name, call.peer, member->clique->size)));
    }
    if (device_of(stream) != member->device) {
      return failed(
          problem(ncclInvalidUsage, fmt::format("{}: the stream is not of the communicator's device", name)));
    }
    if (const ncclResult_t state = not_ready(name, *member); state != ncclSuccess) return failed(state);
    if (call.count == 0) return ncclSuccess;
    const std::size_t bytes = call.count * bytes_of(call.type);
    std::string why;
    if (from_pieces > 0) why = complaint_about(call.from, from_pieces * bytes, true);
    if (why.empty() && to_pieces > 0) why = complaint_about(call.to, to_pieces * bytes, true);
    if (!why.empty()) return failed(problem(ncclInvalidArgument, fmt::format("{}: {}", name, why)));
    for (Issued& each : group) {
      if (each.member != member) continue;
      if (each.stream != stream) {
        return failed(
            problem(ncclInvalidUsage, "one communicator on two streams in a group is not emulated"));
      }
      each.calls.push_back(call);
      return ncclSuccess;
    }
    group.push_back({member, stream, {call}});
    return group_depth > 0 ? ncclSuccess : end_group();
  });
}

std::size_t size_of(ncclComm_t comm) {
  const auto member = member_of(comm);
  return member ? member->clique->size : 0;
}

/// Called under the clique's lock when all ranks have arrived.
void check_devices(Clique& clique) {
  for (std::size_t a = 0; a < clique.size; ++a) {
    for (std::size_t b = 0; b < a; ++b) {
      if (clique.members[a]->device != clique.members[b]->device) continue;
      clique.start = ncclInvalidUsage;
      clique.problem = fmt::format("Duplicate GPU detected: rank {} and rank {} both on CUDA device {}", b, a,
                                   clique.members[a]->device);
    }
  }
}

ncclResult_t join(ncclComm_t* comm, int count, const ncclUniqueId& unique, int rank, bool blocking) {
  *comm = nullptr;
  if (count < 1 || rank < 0 || rank >= count) {
    return problem(ncclInvalidArgument, fmt::format("ncclCommInitRank: rank {} of {}", rank, count));
  }
  Id id;
  std::memcpy(&id, &unique, sizeof id);
  if (std::memcmp(id.magic, id_magic, sizeof id_magic) != 0 || id.process != getpid()) {
    return problem(ncclSystemError,
                   "ncclCommInitRank: the id is of another process; emulated ranks are threads of one");
  }
  auto member = std::make_shared<Member>();
  member->rank = rank;
  member->device = current_device();
  member->blocking = blocking;
  {
    std::lock_guard lock(ranks().mutex);
    auto& clique = ranks().cliques[id.number];
    if (!clique) {
      clique = std::make_shared<Clique>();
      clique->size = static_cast<std::size_t>(count);
      clique->members.resize(clique->size);
    }
    member->clique = clique;
    std::lock_guard clique_lock(clique->mutex);
    auto& place = clique->members[static_cast<std::size_t>(rank)];
    if (clique->size != static_cast<std::size_t>(count) || place) {
      return problem(ncclInvalidUsage, fmt::format("ncclCommInitRank: rank {} of {} came twice, or of {}",
                                                   rank, clique->size, count));
    }
    place = member;
    if (++clique->joined == clique->size) check_devices(*clique);
    auto* made = new ncclComm{member};
    ranks().live[made] = member;
    *comm = made;
    clique->changed.notify_all();
    if (clique->joined == clique->size) ranks().cliques.erase(id.number);
  }
  if (!blocking) return ncclInProgress;
  Clique& clique = *member->clique;
  std::unique_lock lock(clique.mutex);
  clique.changed.wait(lock, [&] { return clique.joined == clique.size || member->aborted.load(); });
  last_problem = clique.problem;
  return clique.start;
}

ncclResult_t drop(ncclComm_t comm) {
  {
    std::lock_guard lock(ranks().mutex);
    ranks().live.erase(comm);
  }
  // Cliques and members own each other, so it does not matter which leaves last.
  {
    std::lock_guard lock(comm->member->clique->mutex);
    comm->member->clique->members[static_cast<std::size_t>(comm->member->rank)] = nullptr;
  }
  delete comm;
  return ncclSuccess;
}

}  // namespace
}  // namespace cuda_emulation

using namespace cuda_emulation;

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error";
    case ncclSystemError:
      return "unhandled system error";
    case ncclInternalError:
      return "internal error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclInvalidUsage:
      return "invalid usage";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
    default:
      return "unknown result code";
  }
}

const char* ncclGetLastError(ncclComm_t) {
  return last_problem.c_str();
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* unique) {
  return nccl_call("ncclGetUniqueId", [&] {
    Id id{};
    std::memcpy(id.magic, id_magic, sizeof id_magic);
    id.process = getpid();
    {
      std::lock_guard lock(ranks().mutex);
      id.number = ++ranks().ids;
    }
    *unique = ncclUniqueId{};
    std::memcpy(unique, &id, sizeof id);
    return ncclSuccess;
  });
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int count, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  return nccl_call("ncclCommInitRankConfig", [&] {
    const bool blocking = config == nullptr || config->blocking != 0;  // undefined is blocking
    return join(comm, count, id, rank, blocking);
  });
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int count, ncclUniqueId id, int rank) {
  return nccl_call("ncclCommInitRank", [&] { return join(comm, count, id, rank, true); });
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  return nccl_call("ncclCommGetAsyncError", [&] {
    const auto member = member_of(comm);
    if (!member) return problem(ncclInvalidArgument, "ncclCommGetAsyncError: no live communicator");
    *state = state_of(*member);
    if (*state != ncclInProgress) member->unread = false;
    if (*state != ncclSuccess && *state != ncclInProgress) {
      std::lock_guard lock(member->clique->mutex);
      last_problem = member->clique->problem;
    }
    return ncclSuccess;
  });
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  return nccl_call("ncclCommFinalize", [&] {
    const auto member = member_of(comm);
    if (!member) return problem(ncclInvalidArgument, "ncclCommFinalize: no live communicator");
    if (const ncclResult_t state = not_ready("ncclCommFinalize", *member); state != ncclSuccess) return state;
    member->finalizing = true;
    if (!member->blocking) {
      member->unread = true;
      return ncclInProgress;
    }
    while (member->outstanding > 0 && !member->aborted)
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    return ncclSuccess;
  });
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  return nccl_call("ncclCommDestroy", [&] {
    const auto member = member_of(comm);
    if (!member) return problem(ncclInvalidArgument, "ncclCommDestroy: no live communicator");
    while (member->outstanding > 0 && !member->aborted)
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    return drop(comm);
  });
}

// Does not wait for peers; queued operations end at once when they would start.
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  return nccl_call("ncclCommAbort", [&] {
    const auto member = member_of(comm);
    if (!member) return problem(ncclInvalidArgument, "ncclCommAbort: no live communicator");
    {
      std::lock_guard lock(member->clique->mutex);
      member->aborted = true;
    }
    member->clique->changed.notify_all();
    return drop(comm);
  });
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  *count = static_cast<int>(size_of(comm));
  return *count > 0 ? ncclSuccess : ncclInvalidArgument;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  const auto member = member_of(comm);
  if (!member) return ncclInvalidArgument;
  *rank = member->rank;
  return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  const auto member = member_of(comm);
  if (!member) return ncclInvalidArgument;
  *device = member->device;
  return ncclSuccess;
}

ncclResult_t ncclCommRegister(const ncclComm_t comm, void* data, std::size_t bytes, void** handle) {
  return nccl_call("ncclCommRegister", [&] {
    if (!member_of(comm)) return problem(ncclInvalidArgument, "ncclCommRegister: no live communicator");
    if (const std::string why = complaint_about(data, bytes, true); !why.empty() || bytes == 0) {
      return problem(ncclInvalidArgument,
                     fmt::format("ncclCommRegister: {}", why.empty() ? "no bytes" : why));
    }
    *handle = comm;  // nothing to own, because an aborted communicator drops its registrations
    return ncclSuccess;
  });
}

ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* handle) {
  return nccl_call("ncclCommDeregister", [&] {
    if (!member_of(comm)) return problem(ncclInvalidArgument, "ncclCommDeregister: no live communicator");
    if (handle != comm)
      return problem(ncclInvalidArgument, "ncclCommDeregister: not a handle of this communicator");
    return ncclSuccess;
  });
}

ncclResult_t ncclMemAlloc(void** data, std::size_t bytes) {
  return nccl_call("ncclMemAlloc", [&] {
    *data = allocate_device(current_device(), bytes);
    return *data == nullptr ? ncclUnhandledCudaError : ncclSuccess;
  });
}

ncclResult_t ncclMemFree(void* data) {
  return nccl_call("ncclMemFree",
                   [&] { return cudaFree(data) == cudaSuccess ? ncclSuccess : ncclInvalidArgument; });
}

ncclResult_t ncclGroupStart() {
  return nccl_call("ncclGroupStart", [] {
    ++group_depth;
    return ncclSuccess;
  });
}

ncclResult_t ncclGroupEnd() {
  const int refused = begin_call("ncclGroupEnd", ncclInvalidUsage, false);
  if (group_depth == 0) return problem(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  if (--group_depth > 0) return ncclSuccess;
  if (refused != 0) {
    group.clear();
    group_error = ncclSuccess;
    return static_cast<ncclResult_t>(refused);
  }
  return end_group();
}

ncclResult_t ncclSend(const void* from, std::size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return issue({Collective::send, from, nullptr, count, type, ncclSum, peer}, 1, 0, comm, stream);
}

ncclResult_t ncclRecv(void* to, std::size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return issue({Collective::receive, nullptr, to, count, type, ncclSum, peer}, 0, 1, comm, stream);
}

ncclResult_t ncclAllGather(const void* from, void* to, std::size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return issue({Collective::all_gather, from, to, count, type, ncclSum, 0}, 1, size_of(comm), comm, stream);
}

ncclResult_t ncclReduceScatter(const void* from, void* to, std::size_t count, ncclDataType_t type,
                               ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream) {
  return issue({Collective::reduce_scatter, from, to, count, type, operation, 0}, size_of(comm), 1, comm,
               stream);
}

ncclResult_t ncclAllReduce(const void* from, void* to, std::size_t count, ncclDataType_t type,
                           ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream) {
  return issue({Collective::all_reduce, from, to, count, type, operation, 0}, 1, 1, comm, stream);
}

ncclResult_t ncclBroadcast(const void* from, void* to, std::size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  const auto member = member_of(comm);
  const bool is_root = member && member->rank == root;
  return issue({Collective::broadcast, from, to, count, type, ncclSum, root}, is_root, 1, comm, stream);
}

ncclResult_t ncclReduce(const void* from, void* to, std::size_t count, ncclDataType_t type,
                        ncclRedOp_t operation, int root, ncclComm_t comm, cudaStream_t stream) {
  const auto member = member_of(comm);
  const bool is_root = member && member->rank == root;
  return issue({Collective::reduce, from, to, count, type, operation, root}, 1, is_root, comm, stream);
}
