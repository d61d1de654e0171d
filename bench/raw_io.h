#pragma once
/// Plain system calls on one range of a file: the speed of the disk, to which benches are compared.

#include <cstdint>
#include <memory>

namespace tranche::bench {

struct RawTransfer {
  int descriptor = -1;
  bool writing = false;
  char* memory = nullptr;  ///< memory of the first byte of the range
  std::int64_t bytes = 0;  ///< bytes from the start of the file
  std::int64_t block = std::int64_t{1} << 20;
};

/// Calls pwrite or pread for one block after the other; the last may be shorter. Throws Error.
void transfer_blocking(const RawTransfer& transfer);

/// The shortest io_uring loop, with `memory` registered if the kernel allows it. Throws NotCompiled, or Error
/// if the kernel refuses the ring.
class RawRing {
 public:
  RawRing(int depth, char* memory, std::int64_t bytes);
  ~RawRing();
  RawRing(const RawRing&) = delete;
  RawRing& operator=(const RawRing&) = delete;
  /// Throws Error. The transfer's memory must be within the ring's.
  void transfer(const RawTransfer& transfer);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tranche::bench
