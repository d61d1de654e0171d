#pragma once
/// Exchanges that send gradients and weights as int8 blocks (kernels/quantization.h). Blocks are divided by
/// position in the flat buffer, and every shard has whole blocks, so they do not depend on the number of
/// ranks, the bucket or the stage. A rank also uses the quantized values of its own elements. Private to
/// engine/.

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/exchange.h"
#include "tranche/device/memory_resources.h"

namespace tranche::detail {

/// The sum over the group's ranks of their dequantized blocks, in the order of Communicator::reduce_scatter.
/// All ranks send, even those without gradients.
class BlockGradients final : public GradientExchange {
 public:
  /// The configuration and the device must outlive it; `trace` may be null.
  BlockGradients(const Config& config, Device& device, TraceRecorder* trace);
  /// Waits for its stream.
  ~BlockGradients() override;

  Bytes bytes(const FlatBuffer& flat, DataType dtype) const override;
  /// Blocks in the order in which reduce() sends them.
  ConstTensorView round(Stream& stream, const FlatBuffer& flat, const TensorView& gradients,
                        void* memory) const override;
  void reduce(FlatBuffer& flat, const ConstTensorView& sent, void* received, const TensorView& out,
              const GradientSum& sum, std::vector<Event> ready, const OperationLabel& label) override;

 private:
  /// Elements of a shard that reduce() exchanges at once: whole blocks, for all ranks together at most a
  /// bucket, but at least one block for each.
  std::int64_t slice_elements(const FlatBuffer& flat) const;

  std::unique_ptr<Stream> summing_;
};

/// Training reads the quantized weights; all other uses read the exact ones.
class BlockWeights final : public WeightExchange {
 public:
  /// The configuration and the device must outlive it; `trace` may be null.
  BlockWeights(const Config& config, Device& device, TraceRecorder* trace);
  /// Waits for its streams.
  ~BlockWeights() override;

  /// Must be called before allocate(), with the elements of each flat buffer.
  void expect(std::int64_t elements) { largest_ = std::max(largest_, elements); }
  void allocate(MemoryResource& memory) override;
  bool rounds() const override { return true; }
  void gather(FlatBuffer& flat, const ConstTensorView& own, const TensorView& whole,
              std::span<const Event> ready, bool training, const OperationLabel& label) override;

 private:
  struct Slot {
    Buffer blocks;
    Event free;
  };
  std::unique_ptr<Stream> packing_, unpacking_;
  std::array<Slot, 2> slots_;  ///< two, so that one is sent while another is quantized or dequantized
  std::size_t next_slot_ = 0;
  std::int64_t largest_ = 0;  ///< elements of the largest flat buffer
};

}  // namespace tranche::detail
