#pragma once
/// The memory of the other processes of a host, opened through MPI. Private to comm/mpi*.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tranche/comm/mpi.h"
#include "tranche/comm/transport.h"
#include "tranche/comm/window_memory.h"

namespace tranche::comm {

/// Opens the windows of the ranks of this host and maps pieces of them, for reading, when they are first
/// asked for. A piece stays mapped until the end: allocations of a run are few and long-lived.
class MpiWindow {
 public:
  /// Collective over `communicator`; `host` holds its ranks on this host. `own` null: this rank has no
  /// window, so nobody reads anybody.
  MpiWindow(MPI_Comm communicator, MPI_Comm host, const WindowMemory* own);
  ~MpiWindow();
  MpiWindow(const MpiWindow&) = delete;
  MpiWindow& operator=(const MpiWindow&) = delete;

  /// By rank of the communicator. All ranks of every host can read each other's memory, or none can.
  bool reads(int rank) const;
  /// Why none can: "rank 1 cannot open the memory of rank 0: ..."; empty when all can.
  const std::string& obstacle() const { return obstacle_; }
  const WindowMemory* own() const { return own_; }
  /// Throws CommunicationError when the system refuses the mapping.
  const void* look_at(int rank, const Exposure& exposure);

 private:
  struct Neighbour {
    int rank = 0, file = -1;
    std::map<std::int64_t, std::pair<void*, std::int64_t>>
        pieces;  ///< address and bytes, by place in the file
  };
  void open_all(MPI_Comm host, int rank);
  Neighbour* neighbour(int rank);

  const WindowMemory* own_;
  std::vector<Neighbour> neighbours_;
  std::string obstacle_;
};

}  // namespace tranche::comm
