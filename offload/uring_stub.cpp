// In place of uring_block_io.cpp where liburing is absent.
#include "tranche/core/error.h"
#include "tranche/offload/block_transfers.h"

namespace tranche {

std::unique_ptr<BlockIo> make_uring_block_io(const BlockIoOptions&) {
  throw NotCompiled("io_uring", "TRANCHE_URING");
}

}  // namespace tranche
