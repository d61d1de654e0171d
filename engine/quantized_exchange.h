#pragma once
/// Gradients and weights that travel between ranks as int8 blocks (kernels/quantization.h). Blocks are cut by
/// the position in the flat buffer, of which every shard has whole blocks: so they are the same for every
/// number of ranks, bucket and stage. A rank reads its own elements back from their blocks too. Private to
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

/// The sum over the ranks of the group of what their blocks say, as Communicator::reduce_scatter orders it.
/// All ranks send, whoever gives.
class BlockGradients final : public GradientExchange {
 public:
  /// The configuration and the device outlive it; `trace` may be null.
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
  /// Elements of a shard that reduce() exchanges at once: whole blocks, of all ranks at most a bucket as far
  /// as that is a block for each.
  std::int64_t slice_elements(const FlatBuffer& flat) const;

  std::unique_ptr<Stream> summing_;
};

/// Training reads weights as their blocks say them, everything else as they are.
class BlockWeights final : public WeightExchange {
 public:
  /// The configuration and the device outlive it; `trace` may be null.
  BlockWeights(const Config& config, Device& device, TraceRecorder* trace);
  /// Waits for its streams.
  ~BlockWeights() override;

  /// Before allocate(): some flat buffer has so many elements.
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
  std::array<Slot, 2> slots_;  ///< so that one travels while another is rounded or read back
  std::size_t next_slot_ = 0;
  std::int64_t largest_ = 0;  ///< elements of a flat buffer
};

}  // namespace tranche::detail
