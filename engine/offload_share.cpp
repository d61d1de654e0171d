#include "engine/offload_share.h"

namespace tranche::detail {

std::vector<bool> units_that_move(std::span<const std::int64_t> padded_elements, double ratio) {
  double all = 0;
  for (const std::int64_t elements : padded_elements) all += static_cast<double>(elements);
  double stays = all * (1 - ratio) + 0.5;
  std::vector<bool> moves;
  for (const std::int64_t count : padded_elements) {
    const auto elements = static_cast<double>(count);
    moves.push_back(count > 0 && elements > stays);
    if (count > 0 && elements <= stays) stays -= elements;
  }
  return moves;
}

bool HostHomes::take_state(std::int64_t bytes) {
  if (bytes > bytes_) return false;
  bytes_ -= bytes;
  return true;
}

bool HostHomes::take_weights(std::int64_t elements, std::int64_t bytes) {
  if (elements > weights_ || !take_state(bytes)) return false;
  weights_ -= elements;
  return true;
}

}  // namespace tranche::detail
