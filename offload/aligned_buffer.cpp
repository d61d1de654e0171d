#include "offload/aligned_buffer.h"

#include <utility>

#include "tranche/core/error.h"
#include "tranche/core/shape.h"

namespace tranche::detail {

AlignedBuffer::AlignedBuffer(MemoryResource& resource, std::int64_t bytes, Category category, std::string tag)
    : bytes_(bytes) {
  if (resource.tier() != Tier::host) {
    throw InvalidArgument("'" + tag +
                          "' is a buffer for file I/O, which needs memory of the tier host, not " +
                          std::string(name_of(resource.tier())));
  }
  buffer_ = Buffer(resource, requested_bytes(bytes), category, std::move(tag));
  const auto address = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(buffer_.data()));
  data_ = static_cast<char*>(buffer_.data()) + (round_up(address, io_alignment) - address);
}

}  // namespace tranche::detail
