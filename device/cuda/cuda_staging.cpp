#include "tranche/device/cuda/cuda_staging.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace tranche::cuda {
namespace {

constexpr const char* copy_call = "cudaMemcpyAsync";

std::string purpose_of(const char* what, std::int64_t bytes, const std::string& stream) {
  return std::string(what) + " of " + std::to_string(bytes) + " B on stream '" + stream + "'";
}

}  // namespace

Staging::Staging(std::shared_ptr<CudaState> state, PinnedMemory& pinned, std::string stream)
    : state_(std::move(state)), pinned_(pinned), stream_name_(std::move(stream)) {}

Staging::~Staging() {
  state_->count_staging(-held_bytes());
  for (const cudaEvent_t event : segment_left_) state_->give_event(event, false);
  for (const cudaEvent_t event : chunk_done_) state_->give_event(event, false);
}

void Staging::await(cudaEvent_t event, bool count) {
  const cudaError_t state = cudaEventQuery(event);
  if (state == cudaErrorNotReady) {
    cudaGetLastError();
    if (count) state_->count_host_wait();
    check(cudaEventSynchronize(event), "cudaEventSynchronize", "a copy on stream '" + stream_name_ + "'");
  } else {
    check(state, "cudaEventQuery", "a copy on stream '" + stream_name_ + "'");
  }
}

// The next `bytes` of the ring. Entering a segment waits until what went through it before has passed.
std::byte* Staging::ring_place(cudaStream_t stream, std::int64_t bytes) {
  if (!ring_) {
    ring_ = Buffer(pinned_, segments * segment_bytes, Category::other, "copy staging");
    state_->count_staging(ring_.bytes());
  }
  if (used_ + bytes > segment_bytes) {
    cudaEvent_t& left = segment_left_[static_cast<std::size_t>(lap_ % segments)];
    if (left == nullptr) left = state_->take_event(false);
    check(cudaEventRecord(left, stream), "cudaEventRecord", "copy staging of stream '" + stream_name_ + "'");
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
  if (!chunks_) {
    chunks_ = Buffer(pinned_, 2 * chunk_bytes, Category::other, "copy staging");
    state_->count_staging(chunks_.bytes());
  }
  return static_cast<std::byte*>(chunks_.data()) + index * chunk_bytes;
}

void Staging::to_host(cudaStream_t stream, void* host, const void* device, std::int64_t bytes) {
  const std::string purpose = purpose_of("copy to host", bytes, stream_name_);
  if (bytes <= small_bytes) {
    std::byte* place = ring_place(stream, bytes);
    deliveries_.push_back({host, place, bytes, lap_});
    const cudaError_t error =
        cudaMemcpyAsync(place, device, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToHost, stream);
    if (error != cudaSuccess) deliveries_.pop_back();
    check(error, copy_call, purpose);
    return;
  }
  state_->count_host_wait();
  const auto piece = [&](std::int64_t begin) { return std::min(chunk_bytes, bytes - begin); };
  const auto arrive = [&](std::int64_t begin) {
    const int index = static_cast<int>(begin / chunk_bytes % 2);
    await(chunk_done_[static_cast<std::size_t>(index)], false);
    // Small copies issued before have arrived as well, and may be for the same memory.
    if (begin == 0) deliver();
    std::memcpy(static_cast<std::byte*>(host) + begin, chunk(index), static_cast<std::size_t>(piece(begin)));
  };
  for (std::int64_t begin = 0; begin < bytes; begin += chunk_bytes) {
    const int index = static_cast<int>(begin / chunk_bytes % 2);
    cudaEvent_t& done = chunk_done_[static_cast<std::size_t>(index)];
    if (done == nullptr) done = state_->take_event(false);
    check(cudaMemcpyAsync(chunk(index), static_cast<const std::byte*>(device) + begin,
                          static_cast<std::size_t>(piece(begin)), cudaMemcpyDeviceToHost, stream),
          copy_call, purpose);
    check(cudaEventRecord(done, stream), "cudaEventRecord", purpose);
    if (begin > 0) arrive(begin - chunk_bytes);
  }
  arrive((bytes - 1) / chunk_bytes * chunk_bytes);
}

void Staging::from_host(cudaStream_t stream, void* device, const void* host, std::int64_t bytes) {
  const std::string purpose = purpose_of("copy from host", bytes, stream_name_);
  if (bytes <= small_bytes) {
    std::byte* place = ring_place(stream, bytes);
    std::memcpy(place, host, static_cast<std::size_t>(bytes));
    check(cudaMemcpyAsync(device, place, static_cast<std::size_t>(bytes), cudaMemcpyHostToDevice, stream),
          copy_call, purpose);
    return;
  }
  state_->count_host_wait();
  for (std::int64_t begin = 0; begin < bytes; begin += chunk_bytes) {
    const int index = static_cast<int>(begin / chunk_bytes % 2);
    const std::int64_t piece = std::min(chunk_bytes, bytes - begin);
    cudaEvent_t& done = chunk_done_[static_cast<std::size_t>(index)];
    if (done == nullptr) {
      done = state_->take_event(false);
    } else {
      await(done, false);  // an event that was never recorded has passed
    }
    std::memcpy(chunk(index), static_cast<const std::byte*>(host) + begin, static_cast<std::size_t>(piece));
    check(cudaMemcpyAsync(static_cast<std::byte*>(device) + begin, chunk(index),
                          static_cast<std::size_t>(piece), cudaMemcpyHostToDevice, stream),
          copy_call, purpose);
    check(cudaEventRecord(done, stream), "cudaEventRecord", purpose);
  }
}

}  // namespace tranche::cuda
