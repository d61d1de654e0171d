#pragma once
/// Step memory divided into tensors: a model's activations and scratch memory within a micro-batch.

#include <initializer_list>
#include <string_view>
#include <vector>

#include "tranche/core/tensor_view.h"
#include "tranche/device/step_arena.h"

namespace tranche {

class Engine;

namespace models {

/// A tensor to allocate in step memory.
struct TensorRequest {
  DataType dtype = DataType::float32;
  Shape shape;
};

/// One buffer of the engine's step memory that holds a tensor for each request, each aligned to 256 bytes.
/// Move-only; its destruction releases the buffer for reuse once the compute stream has passed that point.
class StepTensors {
 public:
  StepTensors() = default;
  /// Throws OutOfMemory when the device cannot hold it.
  StepTensors(Engine& engine, Category category, std::string_view tag,
              std::initializer_list<TensorRequest> requests);
  /// Makes the tensors in a buffer that take() returned, for the same requests.
  StepTensors(StepBuffer buffer, std::initializer_list<TensorRequest> requests);
  ~StepTensors() { release(); }
  StepTensors(StepTensors&& other) noexcept;
  StepTensors& operator=(StepTensors&& other) noexcept;
  StepTensors(const StepTensors&) = delete;
  StepTensors& operator=(const StepTensors&) = delete;

  /// The tensor of request `index`; its contents are undefined until written.
  const TensorView& operator[](int index) const { return tensors_.at(static_cast<std::size_t>(index)); }
  /// True between construction and release.
  bool held() const noexcept { return static_cast<bool>(buffer_); }
  void release() noexcept;
  /// Moves out the buffer, for example to send it to the host; existing views stay valid while it is on the
  /// device.
  StepBuffer take() noexcept;

 private:
  void lay_views(std::initializer_list<TensorRequest> requests);

  StepBuffer buffer_;
  std::vector<TensorView> tensors_;
};

}  // namespace models
}  // namespace tranche
