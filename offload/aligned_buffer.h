#pragma once
/// Memory for direct I/O.

#include <cstdint>
#include <string>

#include "tranche/device/memory.h"

namespace tranche::detail {

/// The alignment of memory, offsets and sizes that direct I/O accepts on every disk, with pages of 4 KiB.
inline constexpr std::int64_t io_alignment = 4096;

/// Move-only owner of memory that starts on a multiple of io_alignment. It takes io_alignment bytes more than
/// requested, whatever address the resource returns, so that plans are exact.
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  /// `resource` must be of Tier::host (else InvalidArgument); throws OutOfMemory.
  AlignedBuffer(MemoryResource& resource, std::int64_t bytes, Category category, std::string tag);

  void* data() const noexcept { return buffer_ ? data_ : nullptr; }
  std::int64_t bytes() const noexcept { return buffer_ ? bytes_ : 0; }
  explicit operator bool() const noexcept { return static_cast<bool>(buffer_); }
  /// The bytes that are requested from the resource for `bytes`.
  static constexpr std::int64_t requested_bytes(std::int64_t bytes) { return bytes + io_alignment; }

 private:
  Buffer buffer_;
  void* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

}  // namespace tranche::detail
