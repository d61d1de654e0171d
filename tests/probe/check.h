#pragma once
/// The checks of gpu_probe, which run on a GPU before longer programs.

#include <memory>
#include <stdexcept>
#include <string>

namespace tranche::gpu_probe {

/// Each check throws std::exception with the reason if something does not work. Each runs in a process of its
/// own.
void check_device();  ///< prints what it found
void check_copy();
void check_tensor_core();
void check_product();
void check_graph();
void check_host_wait();
void check_nccl();

/// Creates a device of the GPU, and with it the process's context. Throws std::exception if there is no GPU.
std::shared_ptr<void> open_context();

/// Throws `reason` unless `holds`.
inline void expect(bool holds, const std::string& reason) {
  if (!holds) throw std::runtime_error(reason);
}

}  // namespace tranche::gpu_probe
