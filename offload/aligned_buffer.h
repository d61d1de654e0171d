#pragma once
/// Memory for direct transfers.

#include <cstdint>
#include <string>

#include "tranche/device/memory.h"

namespace tranche::detail {

/// The alignment that direct I/O asks of memory, offsets and sizes, on every disk and page size of 4 KiB.
inline constexpr std::int64_t io_alignment = 4096;

/// Move-only owner of memory that starts on a multiple of io_alignment. Takes io_alignment bytes more than
/// asked of the resource, whatever that returns, so that plans are exact.
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  /// `resource` must be of Tier::host (else InvalidArgument); throws OutOfMemory.
  AlignedBuffer(MemoryResource& resource, std::int64_t bytes, Category category, std::string tag);

  void* data() const noexcept { return buffer_ ? data_ : nullptr; }
  std::int64_t bytes() const noexcept { return buffer_ ? bytes_ : 0; }
  explicit operator bool() const noexcept { return static_cast<bool>(buffer_); }
  /// The request to the resource for `bytes`.
  static constexpr std::int64_t requested_bytes(std::int64_t bytes) { return bytes + io_alignment; }

 private:
  Buffer buffer_;
  void* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

}  // namespace tranche::detail
