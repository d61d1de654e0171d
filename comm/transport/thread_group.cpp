#include <mutex>
#include <thread>

#include <fmt/format.h>

#include "comm/group_communicator.h"
#include "comm/transport/thread_transport.h"
#include "tranche/comm/backends.h"

namespace tranche {

ThreadGroup::ThreadGroup(int size, const FaultInjection& faults) {
  if (size < 1) throw InvalidArgument(fmt::format("a group of {} thread ranks", size));
  hub_ = std::make_shared<comm::ThreadHub>(size, faults);
}

int ThreadGroup::size() const noexcept {
  return hub_->size;
}

std::unique_ptr<Communicator> ThreadGroup::communicator(int rank, const CommunicatorOptions& options) const {
  if (rank < 0 || rank >= hub_->size) {
    throw InvalidArgument(fmt::format("rank {} of a group of {} thread ranks", rank, hub_->size));
  }
  if (options.inline_progress) {
    throw ConfigurationError(
        "tranche.progress: inline is for MPI communicators that a program hands over "
        "(adopt_mpi_communicator); ranks that are threads have a communication thread each: leave the key "
        "out");
  }
  {
    const std::lock_guard lock(hub_->mutex);
    if (hub_->made[static_cast<std::size_t>(rank)]) {
      throw LogicError(fmt::format("the communicator of thread rank {} has been made already", rank));
    }
    hub_->made[static_cast<std::size_t>(rank)] = true;
  }
  auto thread = std::make_shared<comm::CommunicationThread>();
  auto transport = comm::make_thread_transport(hub_, rank, *thread);
  return comm::GroupCommunicator::of_all(
      std::make_shared<comm::ProgressEngine>(std::move(transport), std::move(thread), options, hub_->faults));
}

void ThreadGroup::post_failure(int rank, std::string_view cause, ExitStatus status) const noexcept {
  try {
    hub_->post_failure({rank, std::string(cause), status});
  } catch (...) {
    // Copying the cause ran out of memory; the time-outs end the peers' calls.
  }
}

void run_thread_ranks(int size, const std::function<void(int rank, const CommunicatorFactory&)>& body,
                      const FaultInjection& faults) {
  const ThreadGroup group(size, faults);
  std::mutex mutex;
  std::exception_ptr first_cause, first_echo;
  const auto run = [&](int rank) {
    std::exception_ptr error;
    bool echo = false;
    try {
      body(rank, [&](const CommunicatorOptions& options) { return group.communicator(rank, options); });
      return;
    } catch (comm::PeerFailure&) {
      echo = true;
      error = std::current_exception();
    } catch (Error& known) {
      known.attach_rank(rank);
      error = std::current_exception();
    } catch (...) {
      error = std::current_exception();
    }
    {
      const std::lock_guard lock(mutex);
      std::exception_ptr& first = echo ? first_echo : first_cause;
      if (!first) first = error;
    }
    group.post_failure(rank, message_of(error), exit_status_of(error));
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(run, rank);
  for (std::thread& thread : threads) thread.join();
  if (first_cause) std::rethrow_exception(first_cause);
  if (first_echo) std::rethrow_exception(first_echo);
}

}  // namespace tranche
