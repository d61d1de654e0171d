#include "tranche/comm/mpi_window.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>

#include <fmt/format.h>

#include "tranche/comm/mpi_transport.h"
#include "tranche/core/error.h"

namespace tranche::comm {

namespace {
struct Card {
  std::int64_t rank, process, file;
  std::uint64_t token;
};

/// The peer's file, or -1 with errno.
int open_file_of(const Card& card) {
  // From another container's view the number may be a process of somebody else, hence the token.
  const std::string path = fmt::format("/proc/{}/fd/{}", card.process, card.file);
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return -1;
  std::uint64_t token = 0;
  if (pread(file, &token, sizeof token, 0) == static_cast<ssize_t>(sizeof token) && token == card.token) {
    return file;
  }
  close(file);
  errno = ENXIO;
  return -1;
}
}  // namespace

MpiWindow::MpiWindow(MPI_Comm communicator, MPI_Comm host, const WindowMemory* own) : own_(own) {
  int rank = 0;
  MPI_Comm_rank(communicator, &rank);
  open_all(host, rank);
  // One rank's obstacle is all ranks': they have to choose alike.
  int first = obstacle_.empty() ? INT_MAX : rank, culprit = INT_MAX;
  require_mpi(MPI_Allreduce(&first, &culprit, 1, MPI_INT, MPI_MIN, communicator), "MPI_Allreduce");
  if (culprit == INT_MAX) return;
  char text[400] = "";
  if (culprit == rank) obstacle_.copy(text, sizeof text - 1);
  require_mpi(MPI_Bcast(text, sizeof text, MPI_CHAR, culprit, communicator), "MPI_Bcast");
  obstacle_ = text;
}

MpiWindow::~MpiWindow() {
  for (Neighbour& each : neighbours_) {
    for (auto& [offset, piece] : each.pieces) munmap(piece.first, static_cast<std::size_t>(piece.second));
    if (each.file >= 0) close(each.file);
  }
}

void MpiWindow::open_all(MPI_Comm host, int rank) {
  int size = 1, local = 0;
  MPI_Comm_size(host, &size);
  MPI_Comm_rank(host, &local);
  const bool mine = own_ != nullptr && own_->available();
  const Card card{rank, getpid(), mine ? own_->file() : -1, mine ? own_->token() : 0};
  std::vector<Card> cards(static_cast<std::size_t>(size));
  require_mpi(MPI_Allgather(&card, sizeof card, MPI_BYTE, cards.data(), sizeof card, MPI_BYTE, host),
              "MPI_Allgather");
  if (size > 1 && !mine) {
    obstacle_ = own_ == nullptr
                    ? fmt::format("rank {} was made without memory that others can read", rank)
                    : fmt::format("rank {} cannot make memory that others can read (memfd_create)", rank);
  }
  for (const Card& each : cards) {
    if (each.rank == rank) continue;
    Neighbour neighbour;
    neighbour.rank = static_cast<int>(each.rank);
    if (each.file >= 0) {
      neighbour.file = open_file_of(each);
      if (neighbour.file < 0 && obstacle_.empty()) {
        obstacle_ = fmt::format("rank {} cannot open the memory of rank {}: {}", rank, each.rank,
                                std::strerror(errno));
      }
    }
    neighbours_.push_back(std::move(neighbour));
  }
}

MpiWindow::Neighbour* MpiWindow::neighbour(int rank) {
  for (Neighbour& each : neighbours_) {
    if (each.rank == rank) return &each;
  }
  return nullptr;
}

bool MpiWindow::reads(int rank) const {
  return obstacle_.empty() && std::any_of(neighbours_.begin(), neighbours_.end(),
                                          [rank](const Neighbour& each) { return each.rank == rank; });
}

const void* MpiWindow::look_at(int rank, const Exposure& exposure) {
  Neighbour& from = *neighbour(rank);
  auto found = from.pieces.find(exposure.piece);
  if (found == from.pieces.end()) {
    void* data = map_window(from.file, exposure.piece, exposure.bytes, PROT_READ);
    if (data == nullptr) {
      throw CommunicationError(fmt::format("mapping {} bytes of rank {}'s memory: {}", exposure.bytes, rank,
                                           std::strerror(errno)));
    }
    found = from.pieces.emplace(exposure.piece, std::pair{data, exposure.bytes}).first;
  }
  return static_cast<const unsigned char*>(found->second.first) + exposure.offset;
}

}  // namespace tranche::comm
