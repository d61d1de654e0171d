#pragma once
/// The memory of the other processes of a node, opened through MPI. Private to comm/mpi*.

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "comm/node/control_segment.h"
#include "comm/transport/transport.h"
#include "comm/window_memory.h"
#include "tranche/comm/mpi.h"

namespace tranche::comm {

/// Opens the windows of the ranks of this node, and maps an allocation for reading at its first use. It stays
/// mapped until the end: a run has few, long-lived allocations.
class MpiWindow {
 public:
  /// Collective over `communicator`; `node` holds its ranks on this node. If `own` is null, this rank has no
  /// window, and no rank reads another's memory.
  MpiWindow(MPI_Comm communicator, MPI_Comm node, WindowMemory* own);
  ~MpiWindow();
  MpiWindow(const MpiWindow&) = delete;
  MpiWindow& operator=(const MpiWindow&) = delete;

  /// `rank` is a rank of the communicator. Either all ranks of every node can read each other's memory, or
  /// none can.
  bool reads(int rank) const;
  /// The reason why none can: "rank 1 cannot open the memory of rank 0: ..."; empty when all can.
  const std::string& obstacle() const { return obstacle_; }
  WindowMemory* own() const { return own_; }
  /// Throws CommunicationError when the system refuses the mapping.
  const void* map_peer(int rank, const MemoryRegistration& registration);
  /// The control segment of a rank that this rank reads(), or its own.
  ControlSegment& segment(int rank);

 private:
  struct Neighbour {
    int rank = 0, file = -1;
    ControlSegment* segment = nullptr;
    std::map<std::int64_t, std::pair<void*, std::int64_t>>
        pieces;  ///< address and bytes, by offset in the file
  };
  void open_all(MPI_Comm node);
  Neighbour* neighbour(int rank);

  WindowMemory* own_;
  int rank_ = 0;
  std::vector<Neighbour> neighbours_;
  std::string obstacle_;
};

}  // namespace tranche::comm
