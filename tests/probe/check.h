#pragma once
/// The checks of gpu_probe, which run before anything longer runs on a GPU.

#include <memory>
#include <stdexcept>
#include <string>

namespace tranche::gpu_probe {

/// Throws std::exception with the reason when something does not work. Each is run in a process of its own.
void check_device();  ///< prints what it found
void check_copy();
void check_tensor_core();
void check_product();
void check_graph();
void check_host_wait();
void check_nccl();

/// A device of the GPU, and with it the process's context there. Throws std::exception where there is none.
std::shared_ptr<void> open_context();

/// Throws `reason` unless `holds`.
inline void expect(bool holds, const std::string& reason) {
  if (!holds) throw std::runtime_error(reason);
}

}  // namespace tranche::gpu_probe
