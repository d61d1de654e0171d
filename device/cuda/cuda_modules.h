#pragma once
/// The kernels of this process, by the sources that hold them, so that they can be loaded before they are
/// launched.
///
/// CUDA loads a kernel at its first launch unless told otherwise, and may wait for all work of the GPU then.
/// With ranks that are threads of one process this can hang: a stream waits for a word that another rank's
/// host thread writes, and that thread waits in its first launch.

namespace tranche::cuda {

/// A source that launches kernels, known by one of them. Objects are static and register themselves.
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

/// Held by each device. From the second that lives in this process on, all kernels of all KernelSources are
/// loaded on every GPU that one of them has, once a GPU. Drivers before CUDA 12.4 load only the kernels that
/// sources are known by.
class KernelsOfRanks {
 public:
  explicit KernelsOfRanks(int gpu);
  ~KernelsOfRanks();
  KernelsOfRanks(const KernelsOfRanks&) = delete;
  KernelsOfRanks& operator=(const KernelsOfRanks&) = delete;

 private:
  int gpu_;
};

}  // namespace tranche::cuda
