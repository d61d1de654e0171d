#include "engine/micro_batches.h"

#include <algorithm>

#include "tranche/core/error.h"

namespace tranche::detail {

std::int64_t MicroBatches::open(std::span<const std::int64_t> samples) {
  open_.push_back({begun_, samples, std::vector<int>(units_)});
  current_ = begun_;
  return begun_++;
}

void MicroBatches::close(std::int64_t number) {
  std::erase_if(open_, [number](const Open& open) { return open.number == number; });
  if (current_ == number && any_open()) current_ = open_.front().number;
}

const MicroBatches::Open* MicroBatches::find(std::int64_t number) const {
  const auto found =
      std::find_if(open_.begin(), open_.end(), [number](const Open& open) { return open.number == number; });
  return found == open_.end() ? nullptr : &*found;
}

bool MicroBatches::is_open(std::int64_t number) const {
  return find(number) != nullptr;
}

std::span<const std::int64_t> MicroBatches::samples() const {
  return any_open() ? find(current_)->samples : std::span<const std::int64_t>();
}

int& MicroBatches::held(std::int64_t number, int unit) {
  const Open* const open = find(number);
  if (open == nullptr) throw LogicError("micro-batch " + std::to_string(number) + " is not open");
  return const_cast<Open*>(open)->held.at(static_cast<std::size_t>(unit));
}

void MicroBatches::let_go(std::int64_t number, int unit) {
  if (is_open(number)) --held(number, unit);
}

int MicroBatches::first_held(std::int64_t number) const {
  const Open* const open = find(number);
  if (open == nullptr) return -1;
  const auto found =
      std::find_if(open->held.begin(), open->held.end(), [](int handles) { return handles > 0; });
  return found == open->held.end() ? -1 : static_cast<int>(found - open->held.begin());
}

}  // namespace tranche::detail
