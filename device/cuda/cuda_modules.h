#pragma once
/// The kernels of this process, grouped by source file, so that they can be loaded before their first launch.
///
/// By default CUDA loads a kernel at its first launch, and may then wait for all work of the GPU. With ranks
/// that are threads of one process this can deadlock: a stream waits for a memory word that another rank's
/// host thread writes, and that thread waits in its first launch.

namespace tranche::cuda {

struct DriverFunctions;

/// A source that launches kernels, identified by one of them. Objects are static: they register themselves
/// before main() or when their library is loaded, and the list does not change afterwards.
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

/// Loads all kernels of all KernelSources on the current GPU, unless they are loaded already. Every device
/// calls it at its creation, before any of its streams can wait, because a later call would find the GPU
/// busy. Drivers before CUDA 12.4 load only the kernels that identify the sources.
void load_kernels(const DriverFunctions& driver) noexcept;

}  // namespace tranche::cuda
