#include "engine/tile_feed.h"

#include "tranche/core/error.h"

namespace tranche::detail {

void TileFeed::hand_over(const Tile& tile) noexcept {
  std::unique_lock lock(mutex_);
  if (cancelled_ || closed_) return;
  offered_ = &tile;
  changed_.notify_all();
  // A copy in progress must finish in any case, because the tile's memory changes next.
  changed_.wait(lock, [this] { return offered_ == nullptr || (!in_use_ && (cancelled_ || closed_)); });
  offered_ = nullptr;
}

bool TileFeed::wanted() const noexcept {
  const std::lock_guard lock(mutex_);
  return !cancelled_ && !closed_;
}

void TileFeed::finish() noexcept {
  const std::lock_guard lock(mutex_);
  if (!cancelled_) finished_ = true;
  changed_.notify_all();
}

void TileFeed::cancel() noexcept {
  const std::lock_guard lock(mutex_);
  if (!finished_) cancelled_ = true;
  changed_.notify_all();
}

bool TileFeed::take(const std::function<void(const Tile&)>& use) {
  std::unique_lock lock(mutex_);
  if (closed_) throw LogicError("a tile is taken from a closed feed");
  changed_.wait(lock, [this] { return offered_ != nullptr || finished_ || cancelled_; });
  if (cancelled_) {
    throw CheckpointError(
        "state on the nvme tier was not read to its end: the step that was to do so failed, or the engine "
        "ended");
  }
  if (offered_ == nullptr) return false;
  in_use_ = true;
  const Tile& tile = *offered_;
  lock.unlock();
  std::exception_ptr failure;
  try {
    use(tile);
  } catch (...) {
    failure = std::current_exception();
  }
  lock.lock();
  in_use_ = false;
  offered_ = nullptr;
  if (failure) closed_ = true;
  changed_.notify_all();
  lock.unlock();
  if (failure) std::rethrow_exception(failure);
  return true;
}

void TileFeed::close() noexcept {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

}  // namespace tranche::detail
