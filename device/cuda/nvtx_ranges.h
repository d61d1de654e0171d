#pragma once
/// Ranges for NVIDIA's profilers (NVTX): what the host issues, by phase of the engine and by operation. The
/// library is header-only and loads what a profiler injects; without one every call here is a test of one
/// pointer.

#include <cstdint>
#include <string_view>

namespace tranche::cuda::nvtx {

/// True when a profiler (or whatever NVTX_INJECTION64_PATH names) takes the ranges of this process. Constant
/// from the first call on.
bool attached() noexcept;

/// Opens and closes a range of the calling thread; pairs nest. No-ops unless attached().
void push(std::string_view name) noexcept;
void pop() noexcept;

/// A push with its pop.
class Range {
 public:
  explicit Range(std::string_view name) noexcept { push(name); }
  ~Range() { pop(); }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;
};

/// The phase that the engine is in: each mark ends the range of the one before, on whatever thread that
/// began.
class PhaseRange {
 public:
  PhaseRange() = default;
  ~PhaseRange() { end(); }
  PhaseRange(const PhaseRange&) = delete;
  PhaseRange& operator=(const PhaseRange&) = delete;

  /// Begins a range "<phase> <unit>"; of the phase "idle" none.
  void mark(std::string_view phase, std::string_view unit) noexcept;
  void end() noexcept;

 private:
  std::uint64_t range_ = 0;
  bool open_ = false;
};

}  // namespace tranche::cuda::nvtx
