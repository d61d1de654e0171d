#pragma once
/// The speed of a disk, for benches to be measured against: one range of a file by plain system calls.

#include <cstdint>
#include <memory>

namespace tranche::bench {

struct RawTransfer {
  int descriptor = -1;
  bool writing = false;
  char* memory = nullptr;  ///< of the range's first byte
  std::int64_t bytes = 0;  ///< from the file's start on
  std::int64_t block = std::int64_t{1} << 20;
};

/// pwrite or pread, one block after the other. Throws Error; the last block may be shorter.
void transfer_blocking(const RawTransfer& transfer);

/// The shortest io_uring loop, with `memory` registered if the kernel takes it. Throws NotCompiled, or Error
/// when the kernel refuses the ring.
class RawRing {
 public:
  RawRing(int depth, char* memory, std::int64_t bytes);
  ~RawRing();
  RawRing(const RawRing&) = delete;
  RawRing& operator=(const RawRing&) = delete;
  /// Throws Error. The transfer's memory is within that of the ring.
  void transfer(const RawTransfer& transfer);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tranche::bench
