// Replaces uring_block_io.cpp in builds without liburing.
#include "offload/block_transfers.h"
#include "tranche/core/error.h"

namespace tranche::detail {

std::unique_ptr<BlockIo> make_uring_block_io(const BlockIoOptions&) {
  throw NotCompiled("io_uring", "TRANCHE_URING");
}

}  // namespace tranche::detail
