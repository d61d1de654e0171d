#pragma once
/// Files, block I/O and memory for writing and reading checkpoints.

#include <functional>
#include <memory>
#include <string>

#include "offload/block_io.h"
#include "offload/file_system.h"
#include "tranche/device/memory.h"

namespace tranche::checkpoint {

/// All members outlive the objects that use them. `memory` is of Tier::host; it provides buffers for
/// transfers.
struct Storage {
  detail::FileSystem& files;
  detail::BlockIo& io;
  MemoryResource& memory;
};

/// The operating system's files, automatic asynchronous I/O and process memory, for programs that only read
/// or write a checkpoint.
class LocalStorage {
 public:
  LocalStorage();
  // NOLINTNEXTLINE(google-explicit-constructor): a view of this
  operator Storage() const { return {files_, *io_, *memory_}; }

 private:
  detail::FileSystem& files_;
  std::unique_ptr<detail::BlockIo> io_;
  std::unique_ptr<MemoryResource> memory_;
};

/// Runs `body`; an IoError in it becomes a CheckpointError whose text starts with `what`: "cannot save ...".
void with_reason(const std::string& what, const std::function<void()>& body);

}  // namespace tranche::checkpoint
