#pragma once
/// The kernels of this process, by the sources that hold them, so that they can be loaded before they are
/// launched.
///
/// CUDA loads a kernel at its first launch unless told otherwise, and may wait for all work of the GPU then.
/// With ranks that are threads of one process this can hang: a stream waits for a word that another rank's
/// host thread writes, and that thread waits in its first launch.

namespace tranche::cuda {

struct DriverFunctions;

/// A source that launches kernels, known by one of them. Objects are static: they register themselves before
/// main() or when their library is loaded, and the list does not change after that.
class KernelSource {
 public:
  explicit KernelSource(const void* kernel) noexcept;
  const void* kernel() const noexcept { return kernel_; }
  const KernelSource* next() const noexcept { return next_; }
  /// The head of the list; null without sources.
  static const KernelSource* first() noexcept;

 private:
  const void* kernel_;
  const KernelSource* next_;
};

/// Loads all kernels of all KernelSources on the current GPU; what is loaded already stays. Every device
/// calls it when it is made, before any of its streams can wait: a later one would find the GPU busy. Drivers
/// before CUDA 12.4 load only the kernels that sources are known by.
void load_kernels(const DriverFunctions& driver) noexcept;

}  // namespace tranche::cuda
