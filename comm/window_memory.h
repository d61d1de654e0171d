#pragma once
/// Memory of a process that the other processes of its node can read. Private to the library.

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "tranche/device/memory.h"

namespace tranche::comm {

struct ControlSegment;

/// Hands out pieces of one anonymous file (memfd_create) for what ranks exchange, and passes everything else
/// on to ordinary host memory. Peers open the file under /proc/PID/fd and map what they are told to read.
///
/// Not MPI_Win_allocate_shared and not shm_open, because both keep their files on /dev/shm: containers give
/// that 64 MiB and end a process that touches more with SIGBUS, and a killed job leaves its files there. An
/// anonymous file has neither a size limit of its own nor a name to clean up; its pages count as the
/// process's memory does, and are taken when touched (or, as huge pages, when allocated: below). It also
/// grows piece by piece, and a piece that is freed goes back to the system at once, as with ordinary memory.
///
/// The file holds parameters, gradients, gathered tensors, communication buffers and the step arena; the
/// first three and the last from 64 KiB on. The bytes of a request are counted as everywhere (aligned_bytes);
/// the rounding to pages is the system's.
///
/// A piece's whole 2 MiB blocks are made huge pages at once, zeroed, where the system can (MADV_COLLAPSE,
/// Linux 6.1: it needs neither rights nor a setting, where shared memory otherwise has huge pages only if
/// /sys/kernel/mm/transparent_hugepage/shmem_enabled says so). Reading and writing such memory is quicker by
/// a sixth to a third (bench/results/archive/2026-11-22-collectives-idle.md), and first use takes a fault for
/// each block and not for each 4 KiB. The rest stays small pages, taken when touched.
class WindowMemory : public MemoryResource {
 public:
  explicit WindowMemory(Tier tier);
  ~WindowMemory() override;
  WindowMemory(const WindowMemory&) = delete;
  WindowMemory& operator=(const WindowMemory&) = delete;

  Tier tier() const override { return ordinary_->tier(); }
  /// Throws OutOfMemory when the system refuses.
  void* allocate(const AllocationRequest& request) override;
  void deallocate(void* pointer, const AllocationRequest& request) noexcept override;

  /// The place of bytes that peers can read.
  struct Place {
    std::int64_t allocation = 0;  ///< of the file: where the allocation starts; never used twice
    std::int64_t bytes = 0;       ///< of the allocation, whole pages
    std::int64_t offset = 0;      ///< in the allocation
  };
  /// nullopt when [data, data + bytes) is not one allocation's. Thread-safe.
  std::optional<Place> find(const void* data, std::int64_t bytes) const;
  /// Pages of the file that were touched; the system counts them as shared, not as the process's own.
  std::int64_t resident_bytes() const noexcept;
  /// True when the system gave a file; without one nothing can be found.
  bool available() const noexcept { return file_ >= 0; }
  int file() const noexcept { return file_; }
  /// Beginning of the file; null without one.
  ControlSegment* control_segment() const noexcept { return segment_; }

 private:
  bool in_window(const AllocationRequest& request) const;
  std::unique_ptr<MemoryResource> ordinary_;
  int file_ = -1;
  ControlSegment* segment_ = nullptr;
  struct Allocation {
    std::int64_t offset, bytes;
  };
  mutable std::mutex mutex_;
  std::int64_t end_ = 0;                                    ///< of the file
  std::map<const unsigned char*, Allocation> allocations_;  ///< by address
};

/// Maps `bytes` (whole pages) of a file from `offset` on, for `protection` (PROT_READ, ...), shared. From
/// 2 MiB on at an address that is a multiple of that, as `offset` then has to be, so that huge pages of the
/// file are mapped as such. Null with errno when the system refuses; munmap(result, bytes) ends it.
void* map_window(int file, std::int64_t offset, std::int64_t bytes, int protection);

}  // namespace tranche::comm
