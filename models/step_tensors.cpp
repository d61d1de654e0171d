#include "tranche/models/step_tensors.h"

#include <utility>

#include "tranche/engine/engine.h"

namespace tranche::models {

namespace {
constexpr std::int64_t alignment = 256;
}

StepTensors::StepTensors(Engine& engine, Category category, std::string_view tag,
                         std::initializer_list<TensorRequest> requests) {
  std::int64_t bytes = 0;
  for (const auto& request : requests) {
    bytes = checked_add(
        bytes, round_up(checked_multiply(request.shape.elements(), size_of(request.dtype)), alignment));
  }
  buffer_ = engine.acquire(bytes, category, tag);
  lay_views(requests);
}

StepTensors::StepTensors(StepBuffer buffer, std::initializer_list<TensorRequest> requests)
    : buffer_(std::move(buffer)) {
  lay_views(requests);
}

void StepTensors::lay_views(std::initializer_list<TensorRequest> requests) {
  tensors_.reserve(requests.size());
  auto* at = static_cast<std::byte*>(buffer_.data());
  for (const auto& request : requests) {
    TensorView view{at, request.dtype, request.shape};
    // Memory of the meta device may have a null address, which must not be advanced.
    if (at != nullptr) at += round_up(view.bytes(), alignment);
    tensors_.push_back(view);
  }
}

StepTensors::StepTensors(StepTensors&& other) noexcept
    : buffer_(std::move(other.buffer_)), tensors_(std::move(other.tensors_)) {}

StepTensors& StepTensors::operator=(StepTensors&& other) noexcept {
  if (this != &other) {
    release();
    buffer_ = std::move(other.buffer_);
    tensors_ = std::move(other.tensors_);
  }
  return *this;
}

StepBuffer StepTensors::take() noexcept {
  tensors_.clear();
  return std::move(buffer_);
}

void StepTensors::release() noexcept {
  buffer_.release();
  tensors_.clear();
}

}  // namespace tranche::models
