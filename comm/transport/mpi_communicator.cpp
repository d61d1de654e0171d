#include <mutex>

#include <fmt/format.h>

#include "comm/group_communicator.h"
#include "comm/transport/mpi_transport.h"
#include "comm/window_memory.h"
#include "tranche/comm/mpi.h"
#include "tranche/core/error.h"

namespace tranche {

namespace {

std::string_view name_of_level(int level) {
  switch (level) {
    case MPI_THREAD_SINGLE:
      return "MPI_THREAD_SINGLE";
    case MPI_THREAD_FUNNELED:
      return "MPI_THREAD_FUNNELED";
    case MPI_THREAD_SERIALIZED:
      return "MPI_THREAD_SERIALIZED";
    default:
      return "MPI_THREAD_MULTIPLE";
  }
}

/// MPI, initialised by this library, and the only thread of the process that calls it.
class MpiProcess {
 public:
  MpiProcess() {
    thread.run([] {
      int finalized = 0, initialized = 0;
      MPI_Finalized(&finalized);
      MPI_Initialized(&initialized);
      if (finalized != 0) {
        throw LogicError(
            "MPI has been finalised in this process and cannot start again; keep one communicator "
            "until the end");
      }
      if (initialized != 0) {
        throw LogicError(
            "MPI has been initialised by this program; hand its communicator over with "
            "adopt_mpi_communicator");
      }
      int provided = MPI_THREAD_SINGLE;
      comm::require_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided),
                        "MPI_Init_thread");
      if (provided < MPI_THREAD_SERIALIZED) {
        throw CommunicationError(
            fmt::format("this MPI offers {}; MPI_THREAD_SERIALIZED is needed", name_of_level(provided)));
      }
    });
  }
  ~MpiProcess() {
    // MPI_Finalize waits for all peers; after a failure it would never return.
    if (*clean) thread.run([] { MPI_Finalize(); });
  }

  comm::CommunicationThread thread;
  std::shared_ptr<bool> clean = std::make_shared<bool>(true);  // used by the thread
};

/// MPI can be initialised once per process, so this is state of the process, not of a caller. It is the only
/// such state in the library.
std::shared_ptr<MpiProcess> mpi_process() {
  static std::mutex mutex;
  static std::weak_ptr<MpiProcess> running;
  const std::lock_guard lock(mutex);
  auto process = running.lock();
  if (!process) running = process = std::make_shared<MpiProcess>();
  return process;
}

/// Adds a window owned by the communicator to options without memory and window.
struct WithWindow {
  explicit WithWindow(const CommunicatorOptions& given) : options(given) {
    if (options.memory != nullptr || options.window != nullptr ||
        options.collectives == NodeCollectives::messages) {
      return;
    }
    own = std::make_shared<comm::WindowMemory>(Tier::host);
    options.window = own.get();
    options.memory = own.get();
  }
  CommunicatorOptions options;
  std::shared_ptr<comm::WindowMemory> own;
};

}  // namespace

std::unique_ptr<Communicator> make_mpi_communicator(const CommunicatorOptions& options) {
  if (options.inline_progress) {
    throw ConfigurationError(
        "tranche.progress: inline is for a program that hands its own MPI communicator over "
        "(adopt_mpi_communicator); here MPI is started by Tranche and has a thread of its own: leave the key "
        "out");
  }
  auto process = mpi_process();
  WithWindow window(options);
  std::unique_ptr<comm::Transport> transport;
  process->thread.run([&] {
    int size = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    require_joined_world(size);
    MPI_Comm world = MPI_COMM_NULL;
    comm::require_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &world), "MPI_Comm_dup");
    transport = comm::make_mpi_transport(world, process->clean, window.options.window, options.local_size);
  });
  auto* thread = &process->thread;
  return comm::GroupCommunicator::of_all(std::make_shared<comm::ProgressEngine>(
      std::move(transport), std::shared_ptr<comm::CommunicationThread>(std::move(process), thread),
      window.options, FaultInjection{}, window.own));
}

std::unique_ptr<Communicator> adopt_mpi_communicator(MPI_Comm communicator, Progress progress,
                                                     const CommunicatorOptions& options) {
  int initialized = 0, finalized = 0, level = MPI_THREAD_SINGLE;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  if (initialized == 0 || finalized != 0) {
    throw InvalidArgument(
        "adopt_mpi_communicator needs a communicator of a running MPI: call MPI_Init_thread "
        "before, MPI_Finalize after");
  }
  if (communicator == MPI_COMM_NULL) {
    throw InvalidArgument(
        "adopt_mpi_communicator got MPI_COMM_NULL, which MPI_Comm_split gives a rank with MPI_UNDEFINED: "
        "only "
        "ranks within a communicator may adopt it");
  }
  int between_groups = 0, main_thread = 1;
  comm::require_mpi(MPI_Comm_test_inter(communicator, &between_groups), "MPI_Comm_test_inter");
  if (between_groups != 0) {
    throw InvalidArgument(
        "adopt_mpi_communicator got an intercommunicator, which connects two groups; it needs the "
        "communicator of "
        "one: make one with MPI_Intercomm_merge");
  }
  MPI_Query_thread(&level);
  MPI_Is_thread_main(&main_thread);
  if (progress == Progress::inline_ && level < MPI_THREAD_SERIALIZED && main_thread == 0) {
    throw ConfigurationError(
        fmt::format("MPI was initialised with {}, so only the thread that initialised it may call MPI, and "
                    "progress: inline "
                    "calls it on this thread, which is another; initialise MPI with MPI_THREAD_SERIALIZED",
                    name_of_level(level)));
  }
  if (progress == Progress::thread && level < MPI_THREAD_MULTIPLE) {
    throw ConfigurationError(fmt::format(
        "MPI was initialised with {}, but a communication thread beside the program's own calls needs "
        "MPI_THREAD_MULTIPLE; initialise MPI with that, or choose progress: inline",
        name_of_level(level)));
  }
  MPI_Comm mine = MPI_COMM_NULL;
  comm::require_mpi(MPI_Comm_dup(communicator, &mine), "MPI_Comm_dup");
  WithWindow window(options);
  auto transport = comm::make_mpi_transport(mine, nullptr, window.options.window, options.local_size);
  auto thread = progress == Progress::thread ? std::make_shared<comm::CommunicationThread>() : nullptr;
  return comm::GroupCommunicator::of_all(std::make_shared<comm::ProgressEngine>(
      std::move(transport), std::move(thread), window.options, FaultInjection{}, window.own));
}

std::string mpi_version() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  MPI_Get_library_version(text, &length);
  // "Open MPI v4.1.4, package: ..." is shortened to "Open MPI 4.1.4".
  std::string version(text, static_cast<std::size_t>(length));
  version.resize(std::min(version.size(), version.find_first_of(",\n")));
  if (const auto v = version.find(" v"); v != std::string::npos) version.erase(v + 1, 1);
  return version;
}

}  // namespace tranche
