#pragma once
/// Ranges for NVIDIA's profilers (NVTX) around the operations that the host issues and around the engine's
/// phases. The library is header-only and loads the tool that a profiler injects; without one, every call
/// here tests one pointer.

#include <cstdint>
#include <string_view>

namespace tranche::cuda::nvtx {

/// True when a profiler (or the library that NVTX_INJECTION64_PATH names) receives the ranges of this
/// process. Constant from the first call on.
bool attached() noexcept;

/// Opens and closes a range of the calling thread; pairs nest. No-ops unless attached().
void push(std::string_view name) noexcept;
void pop() noexcept;

/// A range for the object's lifetime.
class Range {
 public:
  explicit Range(std::string_view name) noexcept { push(name); }
  ~Range() { pop(); }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;
};

/// The engine's current phase: each mark ends the previous range, on whichever thread that began.
class PhaseRange {
 public:
  PhaseRange() = default;
  ~PhaseRange() { end(); }
  PhaseRange(const PhaseRange&) = delete;
  PhaseRange& operator=(const PhaseRange&) = delete;

  /// Begins a range "<phase> <unit>", except for the phase "idle".
  void mark(std::string_view phase, std::string_view unit) noexcept;
  void end() noexcept;

 private:
  std::uint64_t range_ = 0;
  bool open_ = false;
};

}  // namespace tranche::cuda::nvtx
