#include "comm/node/mpi_window.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>

#include <fmt/format.h>

#include "comm/transport/mpi_transport.h"
#include "tranche/core/error.h"

namespace tranche::comm {

namespace {
struct Signature {
  std::int64_t rank, process, file;
  std::uint64_t token;
};

/// Opens the peer's file; -1 with errno on failure.
int open_file_of(const Signature& signature) {
  // In another container the process number may belong to another process, so the token is compared.
  const std::string path = fmt::format("/proc/{}/fd/{}", signature.process, signature.file);
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return -1;
  std::uint64_t token = 0;
  if (pread(file, &token, sizeof token, 0) == static_cast<ssize_t>(sizeof token) &&
      token == signature.token) {
    return file;
  }
  close(file);
  errno = ENXIO;
  return -1;
}
}  // namespace

MpiWindow::MpiWindow(MPI_Comm communicator, MPI_Comm node, WindowMemory* own) : own_(own) {
  MPI_Comm_rank(communicator, &rank_);
  open_all(node);
  // All ranks must choose the same algorithm, so an obstacle of one rank applies to all.
  const int mine = obstacle_.empty() ? INT_MAX : rank_;
  int culprit = INT_MAX;
  require_mpi(MPI_Allreduce(&mine, &culprit, 1, MPI_INT, MPI_MIN, communicator), "MPI_Allreduce");
  if (culprit == INT_MAX) return;
  char text[400] = "";
  if (culprit == rank_) obstacle_.copy(text, sizeof text - 1);
  require_mpi(MPI_Bcast(text, sizeof text, MPI_CHAR, culprit, communicator), "MPI_Bcast");
  obstacle_ = text;
}

MpiWindow::~MpiWindow() {
  for (Neighbour& each : neighbours_) {
    for (auto& [offset, piece] : each.pieces) munmap(piece.first, static_cast<std::size_t>(piece.second));
    if (each.segment != nullptr) munmap(each.segment, ControlSegment::file_bytes);
    if (each.file >= 0) close(each.file);
  }
}

void MpiWindow::open_all(MPI_Comm node) {
  int size = 1;
  MPI_Comm_size(node, &size);
  const bool mine = own_ != nullptr && own_->available();
  const Signature signature{rank_, getpid(), mine ? own_->file() : -1,
                            mine ? own_->control_segment()->token : 0};
  std::vector<Signature> signatures(static_cast<std::size_t>(size));
  require_mpi(MPI_Allgather(&signature, sizeof signature, MPI_BYTE, signatures.data(), sizeof signature,
                            MPI_BYTE, node),
              "MPI_Allgather");
  if (size > 1 && !mine) {
    obstacle_ = own_ == nullptr
                    ? fmt::format("rank {} was made without memory that others can read", rank_)
                    : fmt::format("rank {} cannot make memory that others can read (memfd_create)", rank_);
  }
  for (const Signature& each : signatures) {
    if (each.rank == rank_) continue;
    Neighbour neighbour;
    neighbour.rank = static_cast<int>(each.rank);
    if (each.file >= 0) {
      neighbour.file = open_file_of(each);
      if (neighbour.file >= 0) {
        neighbour.segment = static_cast<ControlSegment*>(
            map_window(neighbour.file, 0, ControlSegment::file_bytes, PROT_READ | PROT_WRITE));
      }
      if (neighbour.segment == nullptr && obstacle_.empty()) {
        obstacle_ = fmt::format("rank {} cannot open the memory of rank {}: {}", rank_, each.rank,
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

ControlSegment& MpiWindow::segment(int rank) {
  return rank == rank_ ? *own_->control_segment() : *neighbour(rank)->segment;
}

const void* MpiWindow::map_peer(int rank, const MemoryRegistration& registration) {
  Neighbour& from = *neighbour(rank);
  auto found = from.pieces.find(registration.allocation);
  if (found == from.pieces.end()) {
    void* data = map_window(from.file, registration.allocation, registration.bytes, PROT_READ);
    if (data == nullptr) {
      throw CommunicationError(fmt::format("mapping {} bytes of rank {}'s memory: {}", registration.bytes,
                                           rank, std::strerror(errno)));
    }
    found = from.pieces.emplace(registration.allocation, std::pair{data, registration.bytes}).first;
  }
  return static_cast<const unsigned char*>(found->second.first) + registration.offset;
}

}  // namespace tranche::comm
