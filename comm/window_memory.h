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

/// Allocates the buffers that ranks exchange from one anonymous file (memfd_create), and passes every other
/// request to ordinary host memory. Peers open the file under /proc/PID/fd and map the ranges that they are
/// asked to read.
///
/// It uses neither MPI_Win_allocate_shared nor shm_open, because both keep their files on /dev/shm:
/// containers give that 64 MiB and end a process that touches more with SIGBUS, and a killed job leaves its
/// files there. An anonymous file has neither a size limit of its own nor a name to clean up; its pages count
/// as the process's memory, and are taken when touched (or, as huge pages, when allocated: below). It also
/// grows with each allocation, and freed memory goes back to the system at once, as with ordinary memory.
///
/// The file holds parameters, gradients, gathered tensors, communication buffers and the step arena; the
/// first three and the last from 64 KiB on. The bytes of a request are counted as everywhere (aligned_bytes);
/// the rounding to pages is not counted.
///
/// The whole 2 MiB blocks of an allocation are made huge pages at once, zeroed, where the system can
/// (MADV_COLLAPSE, Linux 6.1: it needs neither rights nor a setting, where shared memory otherwise has huge
/// pages only if /sys/kernel/mm/transparent_hugepage/shmem_enabled says so). Reading and writing such memory
/// is faster by a sixth to a third (bench/results/archive/superseded.md), and first use
/// takes one fault for each block instead of each 4 KiB. The remainder uses small pages, taken when touched.
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
    std::int64_t allocation = 0;  ///< start of the allocation in the file; never used twice
    std::int64_t bytes = 0;       ///< of the allocation, whole pages
    std::int64_t offset = 0;      ///< offset in the allocation
  };
  /// nullopt when [data, data + bytes) does not lie in one allocation. Thread-safe.
  std::optional<Place> find(const void* data, std::int64_t bytes) const;
  /// The bytes of the file's pages that were touched; the system counts them as shared, not as the process's
  /// own.
  std::int64_t resident_bytes() const noexcept;
  /// True when the system provided a file; without one, find() finds nothing.
  bool available() const noexcept { return file_ >= 0; }
  int file() const noexcept { return file_; }
  /// The control segment at the beginning of the file; null without a file.
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
  std::int64_t end_ = 0;                                    ///< end of the used part of the file
  std::map<const unsigned char*, Allocation> allocations_;  ///< by address
};

/// Maps `bytes` (whole pages) of a file from `offset` on, shared, with `protection` (PROT_READ, ...). From 2
/// MiB on, the address is a multiple of 2 MiB, as `offset` then has to be, so that huge pages of the file are
/// mapped as such. Null with errno when the system refuses; unmap with munmap(result, bytes).
void* map_window(int file, std::int64_t offset, std::int64_t bytes, int protection);

}  // namespace tranche::comm
