#include "engine/flat_buffer.h"

namespace tranche::detail {

std::int64_t UnitState::gathered_elements() const {
  std::int64_t elements = 0;
  for (const FlatBuffer& flat : buffers)
    elements += flat.persistent || flat.empty() ? 0 : flat.layout.padded_elements();
  return elements;
}

}  // namespace tranche::detail
