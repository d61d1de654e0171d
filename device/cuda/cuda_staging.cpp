#include "device/cuda/cuda_staging.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace tranche::cuda {
namespace {

constexpr const char* copy_call = "cudaMemcpyAsync";

}  // namespace
Buffer StagingMemory::take(std::int64_t bytes) {
  {
    std::lock_guard lock(mutex_);
    for (Buffer& buffer : free_) {
      if (buffer.bytes() != bytes) continue;
      std::swap(buffer, free_.back());
      Buffer found = std::move(free_.back());
      free_.pop_back();
      return found;
    }
  }
  Buffer made(pinned_, bytes, Category::other, "copy staging");
  state_->count_staging(bytes);
  return made;
}

void StagingMemory::give(Buffer buffer) noexcept {
  if (!buffer) return;
  std::lock_guard lock(mutex_);
  free_.push_back(std::move(buffer));
}

Staging::Staging(StagingMemory& memory, std::string stream)
    : memory_(memory), state_(memory.state()), stream_name_(std::move(stream)) {}

Staging::~Staging() {
  for (const cudaEvent_t event : segment_left_) state_->give_event(event, false);
  for (const cudaEvent_t event : chunk_done_) state_->give_event(event, false);
  memory_.give(std::move(ring_));
  memory_.give(std::move(chunks_));
}

// There are many copies and few failures, so the text is built only on failure.
void Staging::check_copy(cudaError_t error, const char* call, const char* what, std::int64_t bytes) const {
  if (error == cudaSuccess) return;
  check(error, call,
        std::string(what) + " of " + std::to_string(bytes) + " B on stream '" + stream_name_ + "'");
}

void Staging::await(cudaEvent_t event, bool count) {
  const cudaError_t state = cudaEventQuery(event);
  if (state == cudaErrorNotReady) {
    cudaGetLastError();
    if (count) state_->count_host_wait();
    check(cudaEventSynchronize(event), "cudaEventSynchronize", stream_name_);
  } else {
    check(state, "cudaEventQuery", stream_name_);
  }
}

// Returns the place for the next `bytes` in the ring. Entering a segment waits for the copies of its previous
// use.
std::byte* Staging::ring_place(cudaStream_t stream, std::int64_t bytes) {
  if (!ring_) ring_ = memory_.take(segments * segment_bytes);
  if (used_ + bytes > segment_bytes) {
    cudaEvent_t& left = segment_left_[static_cast<std::size_t>(lap_ % segments)];
    if (left == nullptr) left = state_->take_event(false);
    check(cudaEventRecord(left, stream), "cudaEventRecord", stream_name_);
    ++lap_;
    used_ = 0;
    if (lap_ >= segments) {
      if (const cudaEvent_t before = segment_left_[static_cast<std::size_t>(lap_ % segments)];
          before != nullptr)
        await(before, true);
      deliver_through(lap_ - segments);
    }
  }
  std::byte* place = static_cast<std::byte*>(ring_.data()) + lap_ % segments * segment_bytes + used_;
  used_ += aligned_bytes(bytes);
  return place;
}

void Staging::deliver_through(std::int64_t lap) noexcept {
  while (!deliveries_.empty() && deliveries_.front().lap <= lap) {
    const Delivery& delivery = deliveries_.front();
    std::memcpy(delivery.host, delivery.from, static_cast<std::size_t>(delivery.bytes));
    deliveries_.pop_front();
  }
}

void Staging::deliver() noexcept {
  deliver_through(lap_);
}

std::byte* Staging::chunk(int index) {
  if (!chunks_) chunks_ = memory_.take(2 * chunk_bytes);
  return static_cast<std::byte*>(chunks_.data()) + index * chunk_bytes;
}

void Staging::to_host(cudaStream_t stream, void* host, const void* device, std::int64_t bytes) {
  constexpr const char* what = "copy to host";
  if (bytes <= small_bytes) {
    std::byte* place = ring_place(stream, bytes);
    deliveries_.push_back({host, place, bytes, lap_});
    const cudaError_t error =
        cudaMemcpyAsync(place, device, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToHost, stream);
    if (error != cudaSuccess) deliveries_.pop_back();
    check_copy(error, copy_call, what, bytes);
    return;
  }
  state_->count_host_wait();
  const auto piece = [&](std::int64_t begin) { return std::min(chunk_bytes, bytes - begin); };
  const auto arrive = [&](std::int64_t begin) {
    const int index = static_cast<int>(begin / chunk_bytes % 2);
    await(chunk_done_[static_cast<std::size_t>(index)], false);
    // Small copies issued before have arrived too, and may write the same memory.
    if (begin == 0) deliver();
    std::memcpy(static_cast<std::byte*>(host) + begin, chunk(index), static_cast<std::size_t>(piece(begin)));
  };
  for (std::int64_t begin = 0; begin < bytes; begin += chunk_bytes) {
    const int index = static_cast<int>(begin / chunk_bytes % 2);
    cudaEvent_t& done = chunk_done_[static_cast<std::size_t>(index)];
    if (done == nullptr) done = state_->take_event(false);
    check_copy(cudaMemcpyAsync(chunk(index), static_cast<const std::byte*>(device) + begin,
                               static_cast<std::size_t>(piece(begin)), cudaMemcpyDeviceToHost, stream),
               copy_call, what, bytes);
    check_copy(cudaEventRecord(done, stream), "cudaEventRecord", what, bytes);
    if (begin > 0) arrive(begin - chunk_bytes);
  }
  arrive((bytes - 1) / chunk_bytes * chunk_bytes);
}

void Staging::from_host(cudaStream_t stream, void* device, const void* host, std::int64_t bytes) {
  constexpr const char* what = "copy from host";
  if (bytes <= small_bytes) {
    std::byte* place = ring_place(stream, bytes);
    std::memcpy(place, host, static_cast<std::size_t>(bytes));
    check_copy(
        cudaMemcpyAsync(device, place, static_cast<std::size_t>(bytes), cudaMemcpyHostToDevice, stream),
        copy_call, what, bytes);
    return;
  }
  for (std::int64_t begin = 0; begin < bytes; begin += chunk_bytes) {
    // The two chunks alternate across calls too, so that one copy does not wait for the one before it.
    const int index = std::exchange(next_chunk_, 1 - next_chunk_);
    const std::int64_t piece = std::min(chunk_bytes, bytes - begin);
    cudaEvent_t& done = chunk_done_[static_cast<std::size_t>(index)];
    if (done == nullptr) {
      done = state_->take_event(false);
    } else {
      await(done, true);  // an event that was never recorded has passed
    }
    std::memcpy(chunk(index), static_cast<const std::byte*>(host) + begin, static_cast<std::size_t>(piece));
    check_copy(cudaMemcpyAsync(static_cast<std::byte*>(device) + begin, chunk(index),
                               static_cast<std::size_t>(piece), cudaMemcpyHostToDevice, stream),
               copy_call, what, bytes);
    check_copy(cudaEventRecord(done, stream), "cudaEventRecord", what, bytes);
  }
}

}  // namespace tranche::cuda
