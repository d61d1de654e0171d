#include "tranche/comm/backends.h"

#include <algorithm>

#include "comm/node/staging_buffer.h"
#include "tranche/core/shape.h"

namespace tranche {

std::int64_t default_staging_bytes(int ranks) {
  constexpr std::int64_t mebibyte = std::int64_t{1} << 20;
  return std::max(8 * mebibyte, round_up(2 * comm::StagingBuffer::least_bytes(ranks), mebibyte));
}

std::string_view name_of(NodeCollectives collectives) {
  switch (collectives) {
    case NodeCollectives::messages:
      return "messages";
    case NodeCollectives::shared:
      return "shared";
    case NodeCollectives::automatic:
      break;
  }
  return "auto";
}

}  // namespace tranche
