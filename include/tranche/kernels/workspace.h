#pragma once
#include <cstdint>

namespace tranche::kernels {

/// Scratch memory of a kernel for one call. Its size is a function of the configuration only; a kernel that
/// would need more uses another algorithm. `data` is aligned to 256 bytes.
struct Workspace {
  void* data = nullptr;
  std::int64_t bytes = 0;
};

/// The least workspace with which every kernel works on every device.
inline constexpr std::int64_t minimum_workspace_bytes = std::int64_t{8} << 20;

}  // namespace tranche::kernels
