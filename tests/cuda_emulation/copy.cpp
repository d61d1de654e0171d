// Copies and fills.
#include <fmt/format.h>

#include <cstring>
#include <memory>

#include "tests/cuda_emulation/state.h"

namespace cuda_emulation {
namespace {

bool is_device_memory(const void* address) {
  Allocation allocation;
  return find(address, allocation) && allocation.kind == MemoryKind::device;
}

bool is_pageable(const void* address) {
  Allocation allocation;
  return !find(address, allocation);
}

struct Sides {
  bool to_device = false, from_device = false;
  cudaError_t error = cudaSuccess;
};

Sides sides_of(const char* name, void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  Sides sides;
  switch (kind) {
    case cudaMemcpyHostToHost:
      break;
    case cudaMemcpyHostToDevice:
      sides.to_device = true;
      break;
    case cudaMemcpyDeviceToHost:
      sides.from_device = true;
      break;
    case cudaMemcpyDeviceToDevice:
      sides.to_device = sides.from_device = true;
      break;
    case cudaMemcpyDefault:
      sides.to_device = is_device_memory(to);
      sides.from_device = is_device_memory(from);
      break;
    default:
      sides.error = misuse(cudaErrorInvalidMemcpyDirection,
                           fmt::format("{}: direction {}", name, static_cast<int>(kind)));
      return sides;
  }
  if (const std::string why = complaint_about(to, bytes, sides.to_device); !why.empty()) {
    sides.error = misuse(cudaErrorInvalidValue, fmt::format("{}: destination {}", name, why));
  } else if (const std::string from_why = complaint_about(from, bytes, sides.from_device);
             !from_why.empty()) {
    sides.error = misuse(cudaErrorInvalidValue, fmt::format("{}: source {}", name, from_why));
  }
  return sides;
}

}  // namespace
}  // namespace cuda_emulation

using namespace cuda_emulation;

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return call("cudaMemcpyAsync", [&] {
    if (device_of(stream) < 0) {
      return misuse(cudaErrorInvalidResourceHandle,
                    "cudaMemcpyAsync: no live stream (the default one is not emulated)");
    }
    if (bytes == 0) return cudaSuccess;
    const Sides sides = sides_of("cudaMemcpyAsync", to, from, bytes, kind);
    if (sides.error != cudaSuccess) return sides.error;
    count_copy();
    const bool pageable = (!sides.to_device && is_pageable(to)) || (!sides.from_device && is_pageable(from));
    if (pageable && is_capturing(stream)) {
      return refuse_on_captured("cudaMemcpyAsync with pageable host memory", stream);
    }
    // The memory may be freed before the copy runs, so it is checked then.
    const int device = device_of(stream);
    const cudaError_t error =
        submit(stream, {[=] {
                          std::string why = complaint_about(to, bytes, sides.to_device);
                          if (why.empty()) why = complaint_about(from, bytes, sides.from_device);
                          if (why.empty()) {
                            std::memmove(to, from, bytes);
                          } else {
                            fail_device(device, cudaErrorIllegalAddress,
                                        fmt::format("a copy ran after its memory was freed: {}", why));
                          }
                        },
                        true});
    if (error != cudaSuccess || !pageable) return error;
    count_host_wait();
    drain(stream);
    return sticky_error(device);
  });
}

cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, std::size_t bytes,
                                cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}

// Runs on the default stream, which waits for the others.
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  return call("cudaMemcpy", [&] {
    if (const cudaError_t refused = refuse_under_capture("cudaMemcpy"); refused != cudaSuccess)
      return refused;
    if (bytes == 0) return cudaSuccess;
    const Sides sides = sides_of("cudaMemcpy", to, from, bytes, kind);
    if (sides.error != cudaSuccess) return sides.error;
    count_copy();
    count_host_wait();
    drain_device(current_device());
    const DeviceAccess access;
    std::memmove(to, from, bytes);
    return sticky_error(current_device());
  });
}

cudaError_t cudaMemsetAsync(void* data, int value, std::size_t bytes, cudaStream_t stream) {
  return call("cudaMemsetAsync", [&] {
    if (device_of(stream) < 0) {
      return misuse(cudaErrorInvalidResourceHandle,
                    "cudaMemsetAsync: no live stream (the default one is not emulated)");
    }
    if (bytes == 0) return cudaSuccess;
    if (const std::string why = complaint_about(data, bytes, true); !why.empty()) {
      return misuse(cudaErrorInvalidValue, fmt::format("cudaMemsetAsync: {}", why));
    }
    count_copy();
    const int device = device_of(stream);
    return submit(stream, {[=] {
                             const std::string why = complaint_about(data, bytes, true);
                             if (why.empty()) {
                               std::memset(data, value, bytes);
                             } else {
                               fail_device(device, cudaErrorIllegalAddress,
                                           fmt::format("a fill ran after its memory was freed: {}", why));
                             }
                           },
                           true});
  });
}

cudaError_t cudaMemset(void* data, int value, std::size_t bytes) {
  return call("cudaMemset", [&] {
    if (const cudaError_t refused = refuse_under_capture("cudaMemset"); refused != cudaSuccess)
      return refused;
    if (bytes == 0) return cudaSuccess;
    if (const std::string why = complaint_about(data, bytes, true); !why.empty()) {
      return misuse(cudaErrorInvalidValue, fmt::format("cudaMemset: {}", why));
    }
    count_copy();
    drain_device(current_device());
    const DeviceAccess access;
    std::memset(data, value, bytes);
    return sticky_error(current_device());
  });
}

namespace {

std::string complaint_about_rows(const void* data, std::size_t pitch, std::size_t width, std::size_t height,
                                 bool device_side) {
  if (pitch < width) return fmt::format("a pitch of {} bytes for rows of {}", pitch, width);
  return complaint_about(data, pitch * (height - 1) + width, device_side);
}

}  // namespace

cudaError_t cudaMemset2DAsync(void* data, std::size_t pitch, int value, std::size_t width, std::size_t height,
                              cudaStream_t stream) {
  return call("cudaMemset2DAsync", [&] {
    if (device_of(stream) < 0)
      return misuse(cudaErrorInvalidResourceHandle, "cudaMemset2DAsync: no live stream");
    if (width == 0 || height == 0) return cudaSuccess;
    if (const std::string why = complaint_about_rows(data, pitch, width, height, true); !why.empty()) {
      return misuse(cudaErrorInvalidValue, fmt::format("cudaMemset2DAsync: {}", why));
    }
    count_copy();
    return submit(stream, {[=] {
                             for (std::size_t row = 0; row < height; ++row) {
                               std::memset(static_cast<unsigned char*>(data) + row * pitch, value, width);
                             }
                           },
                           true});
  });
}

cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                              std::size_t width, std::size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream) {
  return call("cudaMemcpy2DAsync", [&] {
    if (device_of(stream) < 0)
      return misuse(cudaErrorInvalidResourceHandle, "cudaMemcpy2DAsync: no live stream");
    if (width == 0 || height == 0) return cudaSuccess;
    if (to_pitch < width || from_pitch < width)
      return misuse(cudaErrorInvalidPitchValue, "cudaMemcpy2DAsync: pitch below width");
    // The first row determines the sides; then the whole ranges are checked.
    const Sides sides = sides_of("cudaMemcpy2DAsync", to, from, width, kind);
    if (sides.error != cudaSuccess) return sides.error;
    std::string why = complaint_about_rows(to, to_pitch, width, height, sides.to_device);
    if (why.empty()) why = complaint_about_rows(from, from_pitch, width, height, sides.from_device);
    if (!why.empty()) return misuse(cudaErrorInvalidValue, fmt::format("cudaMemcpy2DAsync: {}", why));
    count_copy();
    const bool pageable = (!sides.to_device && is_pageable(to)) || (!sides.from_device && is_pageable(from));
    if (pageable && is_capturing(stream))
      return refuse_on_captured("cudaMemcpy2DAsync with pageable host memory", stream);
    const cudaError_t error =
        submit(stream, {[=] {
                          for (std::size_t row = 0; row < height; ++row) {
                            std::memmove(static_cast<unsigned char*>(to) + row * to_pitch,
                                         static_cast<const unsigned char*>(from) + row * from_pitch, width);
                          }
                        },
                        true});
    if (error != cudaSuccess || !pageable) return error;
    count_host_wait();
    drain(stream);
    return sticky_error(device_of(stream));
  });
}
