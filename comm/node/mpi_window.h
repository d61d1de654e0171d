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

/// Opens the windows of the ranks of this node and maps pieces of them for reading when they are first asked
/// for. A piece stays mapped until the end: allocations of a run are few and long-lived.
class MpiWindow {
 public:
  /// Collective over `communicator`; `node` holds its ranks on this node. `own` null: this rank has no
  /// window, so nobody reads anybody.
  MpiWindow(MPI_Comm communicator, MPI_Comm node, WindowMemory* own);
  ~MpiWindow();
  MpiWindow(const MpiWindow&) = delete;
  MpiWindow& operator=(const MpiWindow&) = delete;

  /// By rank of the communicator. All ranks of every node can read each other's memory, or none can.
  bool reads(int rank) const;
  /// Why none can: "rank 1 cannot open the memory of rank 0: ..."; empty when all can.
  const std::string& obstacle() const { return obstacle_; }
  WindowMemory* own() const { return own_; }
  /// Throws CommunicationError when the system refuses the mapping.
  const void* map_peer(int rank, const MemoryRegistration& registration);
  /// The control segment of a rank that reads(), or of this one.
  ControlSegment& segment(int rank);

 private:
  struct Neighbour {
    int rank = 0, file = -1;
    ControlSegment* segment = nullptr;
    std::map<std::int64_t, std::pair<void*, std::int64_t>>
        pieces;  ///< address and bytes, by place in the file
  };
  void open_all(MPI_Comm node);
  Neighbour* neighbour(int rank);

  WindowMemory* own_;
  int rank_ = 0;
  std::vector<Neighbour> neighbours_;
  std::string obstacle_;
};

}  // namespace tranche::comm
