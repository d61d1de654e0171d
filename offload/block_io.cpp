#include "offload/block_io.h"

#include <utility>

#include "offload/aligned_buffer.h"
#include "offload/block_transfers.h"
#include "tranche/core/error.h"

namespace tranche::detail {
namespace {

class ThreadBlockIo final : public BlockIoBase {
 public:
  ThreadBlockIo(const BlockIoOptions& options, std::string fallback_reason)
      : BlockIoBase(options, false, std::move(fallback_reason)) {}
  ~ThreadBlockIo() override { shut_down(); }
  BlockIoEngine engine() const override { return BlockIoEngine::threads; }
};

void check(const BlockIoOptions& options) {
  constexpr std::int64_t largest_block = std::int64_t{1} << 30;
  if (options.block_bytes < io_alignment || options.block_bytes > largest_block) {
    throw InvalidArgument("block_bytes is " + std::to_string(options.block_bytes) + ": it must be from " +
                          std::to_string(io_alignment) + " to " + std::to_string(largest_block));
  }
  if (options.depth < 1 || options.depth > 1024) {
    throw InvalidArgument("depth is " + std::to_string(options.depth) + ": it must be from 1 to 1024");
  }
}

}  // namespace

std::string_view name_of(BlockIoEngine engine) {
  switch (engine) {
    case BlockIoEngine::automatic:
      return "automatic";
    case BlockIoEngine::uring:
      return "io_uring";
    case BlockIoEngine::threads:
      return "threads";
  }
  return "unknown";
}

std::unique_ptr<BlockIo> make_thread_block_io(const BlockIoOptions& options, std::string fallback_reason) {
  return std::make_unique<ThreadBlockIo>(options, std::move(fallback_reason));
}

std::unique_ptr<BlockIo> make_block_io(const BlockIoOptions& options) {
  check(options);
  if (options.engine == BlockIoEngine::threads) return make_thread_block_io(options, {});
  if (options.engine == BlockIoEngine::uring) return make_uring_block_io(options);
  try {
    return make_uring_block_io(options);
  } catch (const NotCompiled& error) {
    return make_thread_block_io(options, error.message());
  } catch (const IoError& error) {
    return make_thread_block_io(options, error.message());
  }
}

}  // namespace tranche::detail
