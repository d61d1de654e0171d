#pragma once
/// The location of state that need not be on the device.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

namespace tranche {

/// The memory or disk that holds state outside the device.
enum class OffloadTier : std::uint8_t { none, cpu, nvme };
std::string_view name_of(OffloadTier tier);

/// State in host memory and on NVMe. docs/guides/offload.md.
struct OffloadConfig {
  OffloadTier optimizer =
      OffloadTier::none;  ///< `offload_optimizer.device`: master weights and moments; any stage
  OffloadTier parameters = OffloadTier::none;  ///< `offload_param.device`: compute-dtype weights; stage 3
  double ratio = 1;       ///< `offload_optimizer.ratio`: share of the optimizer state that is offloaded
  std::string nvme_path;  ///< folder for swap files; both blocks' nvme_path must agree
  std::int64_t tile_elements = std::int64_t{1} << 20;  ///< elements updated at a time; multiple of 4096
  int tile_buffers = 4;  ///< tiles of state in host memory at once (nvme), and of weights being copied back
  int parameter_buffers = 3;            ///< units' shards in host memory at once (parameters on nvme)
  bool activations = false;             ///< `activation_checkpointing.cpu_checkpointing`
  std::string io_engine = "automatic";  ///< `tranche.io_engine`: automatic, uring or threads
  std::int64_t io_block_bytes = 0;      ///< `aio.block_size`; 0: calibrated
  int io_depth = 0;                     ///< `aio.queue_depth`; 0: calibrated
  std::int64_t host_memory_limit = 0;   ///< bytes a rank; 0: limited only by the machine
  std::int64_t nvme_limit = 0;          ///< bytes a rank; 0: limited only by the disk's free space
  /// `tranche.host_state`: bytes of host memory for state that is requested on nvme; it stays there as far as
  /// it fits. -1: auto, which programs replace by what is free; an engine takes it as 0.
  std::int64_t host_state = -1;
  std::string host_state_reason;  ///< where the number comes from, as words for the start table; there is no
                                  ///< key for it
  /// `offload_param.max_in_cpu`: the most elements of weights that stay in host memory this way.
  std::int64_t most_weights_in_host = std::numeric_limits<std::int64_t>::max();
  bool any() const {
    return optimizer != OffloadTier::none || parameters != OffloadTier::none || activations;
  }
  std::int64_t host_state_bytes() const { return uses_nvme() ? std::max<std::int64_t>(host_state, 0) : 0; }
  bool uses_nvme() const { return optimizer == OffloadTier::nvme || parameters == OffloadTier::nvme; }
};

}  // namespace tranche
