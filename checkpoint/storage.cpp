#include "checkpoint/storage.h"

#include "tranche/core/error.h"
#include "tranche/device/memory_resources.h"

namespace tranche::checkpoint {

LocalStorage::LocalStorage()
    : files_(detail::posix_file_system()),
      io_(detail::make_block_io()),
      memory_(make_host_resource(Tier::host)) {}

void with_reason(const std::string& what, const std::function<void()>& body) {
  try {
    body();
  } catch (const IoError& problem) {
    throw CheckpointError(what + ": " + problem.message());
  } catch (const CheckpointError& problem) {
    throw CheckpointError(what + ": " + problem.message());
  }
}

}  // namespace tranche::checkpoint
