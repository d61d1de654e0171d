#include "engine/flat_buffer.h"

namespace tranche::detail {

Event FlatBuffer::all_gather(void* whole, DataType dtype, std::int64_t bucket_elements,
                             std::span<const Event> ready, const OperationLabel& label) const {
  const std::byte* own = static_cast<const std::byte*>(whole) + shard().begin * size_of(dtype);
  return group->all_gather(own, whole, layout.shard_elements(), dtype, bucket_elements, ready, label);
}

std::int64_t UnitState::gathered_elements() const {
  std::int64_t elements = 0;
  for (const FlatBuffer& flat : buffers)
    elements += flat.persistent || flat.empty() ? 0 : flat.layout.padded_elements();
  return elements;
}

}  // namespace tranche::detail
