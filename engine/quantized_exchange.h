#pragma once
/// Gradients and weights that travel between ranks as int8 blocks (kernels/quantization.h). Private to
/// engine/.

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "tranche/comm/communicator.h"
#include "tranche/core/tensor_view.h"
#include "tranche/device/device.h"
#include "tranche/device/memory_resources.h"

namespace tranche {
class TraceRecorder;
}

namespace tranche::detail {

/// Blocks are cut by the position in the flat buffer, of which every shard has whole blocks: so they are the
/// same for every number of ranks, bucket and stage. A rank reads its own elements back from their blocks
/// too.
class QuantizedExchange {
 public:
  /// The device outlives it; `trace` may be null.
  QuantizedExchange(Device& device, TraceRecorder* trace);
  /// Waits for its streams.
  ~QuantizedExchange();
  QuantizedExchange(const QuantizedExchange&) = delete;
  QuantizedExchange& operator=(const QuantizedExchange&) = delete;

  /// Takes the two buffers through which weights travel, of flat buffers of at most so many elements.
  void allocate(MemoryResource& memory, std::int64_t elements);

  /// whole = the weights of all ranks of the group as their blocks say. `own` is this rank's shard, which may
  /// lie in its place in `whole`; where it is all of `whole`, nothing is sent. Collective over the group.
  Event gather(Communicator& group, const ConstTensorView& own, const TensorView& whole,
               std::int64_t bucket_elements, std::span<const Event> ready, const OperationLabel& label);

  /// Elements of a shard that reduce() exchanges at once: whole blocks, of all ranks at most
  /// `bucket_elements` as far as that is a block for each.
  static std::int64_t slice_elements(std::int64_t shard_elements, int ranks, std::int64_t bucket_elements);
  /// Bytes that reduce() receives at once; 0 for one rank.
  static std::int64_t received_bytes(std::int64_t shard_elements, int ranks, std::int64_t bucket_elements);
  /// Issues the rounding of a whole flat buffer to `blocks`, quantized_bytes() of it, in the order in which
  /// reduce() sends them.
  static void pack(Stream& stream, const ConstTensorView& values, int ranks, std::int64_t bucket_elements,
                   void* blocks);
  /// out = the deterministic sum over the ranks of the group of what their blocks say, as
  /// Communicator::reduce_scatter orders it. All ranks send, whoever gives. `done` follows it call by call,
  /// so that it covers what was issued before an error too. Collective over the group.
  void reduce(Communicator& group, const void* blocks, void* received, const TensorView& out,
              const ReductionOptions& options, std::vector<Event> ready, const OperationLabel& label,
              Event& done);

 private:
  struct Slot {
    Buffer blocks;
    Event free;
  };
  std::unique_ptr<Stream> packing_, unpacking_, summing_;
  std::array<Slot, 2> slots_;  ///< so that one travels while another is rounded or read back
  std::size_t next_slot_ = 0;
};

}  // namespace tranche::detail
