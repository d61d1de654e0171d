#include "offload/tile_flow.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/thread.h"
#include "tranche/core/error.h"

namespace tranche::detail {

TileFlow::TileFlow(BlockIo& io, std::size_t at_once, std::shared_ptr<DiskMeter> meter)
    : io_(io), meter_(std::move(meter)), at_once_(at_once) {
  reads_.track = "tile reads";
  writes_.track = "tile writes";
  for (Lane* lane : {&reads_, &writes_}) {
    lane->under_way.reserve(at_once_);  // started() must not allocate, or a transfer could be lost
  }
  reads_.thread = start_quiet_thread([this] { run(reads_); });
  try {
    writes_.thread = start_quiet_thread([this] { run(writes_); });
  } catch (...) {
    finish();
    throw;
  }
}

TileFlow::Place& TileFlow::at(std::int64_t position) {
  const std::int64_t index = position - first_;
  if (index < 0 || index >= static_cast<std::int64_t>(places_.size())) {
    throw LogicError("tile " + std::to_string(position) + " of a tile ring was given up");
  }
  return places_[static_cast<std::size_t>(index)];
}

bool TileFlow::settled(std::int64_t position) {
  return position < first_ || at(position).stage == Stage::settled;
}

void TileFlow::check_not_stopped() const {
  if (!stopped_) return;
  if (failure_) std::rethrow_exception(failure_);
  throw LogicError(
      "the stream that worked on the tiles has failed, with the error that its events throw; abandon the "
      "pass");
}

std::int64_t TileFlow::add(File& file, const std::vector<Tile>& tiles, bool read) {
  const std::lock_guard lock(mutex_);
  check_not_stopped();
  const std::int64_t position = end(), pass_end = position + static_cast<std::int64_t>(tiles.size());
  for (Tile tile : tiles) {
    if (tile.lent_after >= 0) tile.lent_after += position;
    places_.push_back({tile, &file, read, Stage::queued, pass_end});
  }
  start_reads();
  tell_meter();
  return position;
}

void TileFlow::issued(std::int64_t position) noexcept {
  const std::lock_guard lock(mutex_);
  issued_ = std::max(issued_, position + 1);
  tell_meter();
}

// A tile can start once its memory is free, no earlier tile may still write any of its bytes, and not too
// many are being read.
bool TileFlow::can_start(std::int64_t position) {
  if (at(position).read && reads_.under_way.size() >= at_once_) return false;
  const Tile& tile = at(position).tile;
  if (tile.lent_after >= first_ && at(tile.lent_after).stage < Stage::left) return false;
  for (std::int64_t earlier = first_; earlier < position; ++earlier) {
    const Place& other = at(earlier);
    if (other.stage == Stage::settled) continue;
    if (other.tile.memory == tile.memory) return false;
    if (other.tile.offset < tile.offset + tile.bytes && tile.offset < other.tile.offset + other.tile.bytes) {
      return false;
    }
  }
  return true;
}

void TileFlow::start_reads() {
  bool in_memory = false;
  while (!stopped_ && next_ < end() && can_start(next_)) {
    Place& place = at(next_);
    if (place.read) {
      try {
        started(reads_, io_.read(*place.file, place.tile.offset, place.tile.memory, place.tile.bytes), next_);
      } catch (...) {
        stop_locked(std::current_exception());
        return;
      }
      place.stage = Stage::reading;
    } else {
      place.stage = Stage::in_memory;
      in_memory = true;
    }
    ++next_;
  }
  if (in_memory) changed_.notify_all();
  if (!lent_.empty()) start_writes();
}

void TileFlow::started(Lane& lane, IoTicket ticket, std::int64_t position) {
  meter_->begin();
  lane.under_way.push_back({ticket, position, meter_->trace() == nullptr ? 0 : meter_->now()});
  lane.arrived.notify_one();
}

// A lane's transfers are spans of one track, which must not overlap: each begins where the last one ended, if
// it was in flight before.
void TileFlow::ended(Lane& lane, const UnderWay& transfer) {
  if (meter_->trace() != nullptr) {
    const double now = meter_->now();
    meter_->trace()->span(lane.track, "tile", std::max(transfer.begun, lane.ended), now);
    lane.ended = now;
  }
  meter_->end();
}

void TileFlow::tell_meter() noexcept {
  const std::int64_t next = std::max(issued_, first_);
  meter_->set_tiles(!stopped_ && next < next_ && at(next).stage == Stage::in_memory,
                    !stopped_ && next_ < end() && at(next_).read && reads_.under_way.size() < at_once_);
}

void TileFlow::settle(std::int64_t position) {
  at(position).stage = Stage::settled;
  while (!places_.empty() && places_.front().stage == Stage::settled) {
    places_.pop_front();
    ++first_;
  }
  start_reads();
  changed_.notify_all();
}

void TileFlow::await_tile(std::int64_t position) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return stopped_ || at(position).stage == Stage::in_memory; });
  check_not_stopped();
}

void TileFlow::leave(std::int64_t position, bool write) {
  const std::lock_guard lock(mutex_);
  check_not_stopped();
  Place& place = at(position);
  if (!write) {
    settle(position);
    tell_meter();
    return;
  }
  if (place.tile.lent_after < 0) {
    left_.push_back(position);
  } else {
    lent_.push_back(position);
  }
  place.stage = Stage::left;
  start_reads();  // into memory that was lent until now
  start_writes();
  check_not_stopped();
}

// Takes the next tile to write, or -1. The memory that was lent last is needed back first.
std::int64_t TileFlow::next_write() {
  std::int64_t position = -1;
  if (!left_.empty()) {
    position = left_.front();
    left_.pop_front();
    return position;
  }
  const auto found = std::find_if(lent_.rbegin(), lent_.rend(), [this](std::int64_t tile) {
    return next_ >= std::min(end(), at(tile).pass_end);
  });
  if (found == lent_.rend()) return position;
  position = *found;
  lent_.erase(std::next(found).base());
  return position;
}

void TileFlow::start_writes() {
  while (!stopped_ && writes_.under_way.size() < at_once_) {
    const std::int64_t position = next_write();
    if (position < 0) break;
    Place& place = at(position);
    try {
      started(writes_, io_.write(*place.file, place.tile.offset, place.tile.memory, place.tile.bytes),
              position);
    } catch (...) {
      return stop_locked(std::current_exception());
    }
    place.stage = Stage::writing;
  }
  tell_meter();
}

void TileFlow::await_settled(std::int64_t position) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return stopped_ || settled(position); });
  check_not_stopped();
}

void TileFlow::await_left(std::int64_t end) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return stopped_ || first_ >= end; });
  check_not_stopped();
}

void TileFlow::stop(std::exception_ptr failure) noexcept {
  const std::lock_guard lock(mutex_);
  stop_locked(std::move(failure));
}

void TileFlow::stop_locked(std::exception_ptr failure) noexcept {
  if (!stopped_) failure_ = std::move(failure);
  stopped_ = true;
  tell_meter();
  changed_.notify_all();
}

void TileFlow::cut(std::int64_t from) noexcept {
  const std::lock_guard lock(mutex_);
  while (end() > std::max(from, next_)) places_.pop_back();
  start_writes();
}

void TileFlow::reset() noexcept {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return (stopped_ || (left_.empty() && lent_.empty())) && idle(); });
  first_ += static_cast<std::int64_t>(places_.size());
  next_ = issued_ = first_;
  places_.clear();
  left_.clear();
  lent_.clear();
  failure_ = nullptr;
  stopped_ = false;
  tell_meter();
}

void TileFlow::finish() noexcept {
  {
    const std::lock_guard lock(mutex_);
    finishing_ = true;
    stop_locked(nullptr);
  }
  for (Lane* lane : {&reads_, &writes_}) {
    lane->arrived.notify_all();
    if (lane->thread.joinable()) lane->thread.join();
  }
}

void TileFlow::run(Lane& lane) {
  std::unique_lock lock(mutex_);
  while (true) {
    lane.arrived.wait(lock, [&] { return finishing_ || !lane.under_way.empty(); });
    if (lane.under_way.empty()) return;
    const UnderWay oldest = lane.under_way.front();
    lock.unlock();
    std::exception_ptr failure;
    try {
      io_.wait(oldest.ticket);
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    // The ticket is removed only after the wait, because the list names every transfer that may access
    // memory.
    lane.under_way.erase(lane.under_way.begin());
    if (failure) {
      stop_locked(std::move(failure));
    } else if (at(oldest.position).stage == Stage::writing) {
      settle(oldest.position);
      start_writes();
    } else {
      at(oldest.position).stage = Stage::in_memory;
      start_reads();
    }
    tell_meter();
    // This comes after the transfers that it permits have begun, so that the disk does not count as idle.
    ended(lane, oldest);
    changed_.notify_all();
  }
}

}  // namespace tranche::detail
