#include "engine/quantized_exchange.h"

#include <algorithm>
#include <cstddef>

#include "tranche/kernels/quantization.h"

namespace tranche::detail {

namespace {

using kernels::quantized_block;
using kernels::quantized_bytes;

std::byte* at(const void* blocks, std::int64_t elements) {
  return static_cast<std::byte*>(const_cast<void*>(blocks)) + quantized_bytes(elements);
}

std::unique_ptr<Stream> make_stream(Device& device, const char* name, TraceRecorder* trace) {
  std::unique_ptr<Stream> stream = device.create_stream(name);
  stream->set_trace(trace);
  return stream;
}

void finish(Stream& stream) noexcept {
  try {
    stream.synchronize();
  } catch (...) {  // the user of the failed work has the error
  }
}

}  // namespace

// --- Gradients ------------------------------------------------------------------------------------------

BlockGradients::BlockGradients(const Config& config, Device& device, TraceRecorder* trace)
    : GradientExchange(config), summing_(make_stream(device, "quantized sums", trace)) {}

BlockGradients::~BlockGradients() {
  finish(*summing_);
}

std::int64_t BlockGradients::slice_elements(const FlatBuffer& flat) const {
  const int ranks = flat.layout.ranks();
  const std::int64_t blocks =
      std::max<std::int64_t>(config_.reduce_bucket_elements / ranks / quantized_block, 1);
  return ranks == 1 ? flat.layout.shard_elements()
                    : std::min(flat.layout.shard_elements(), blocks * quantized_block);
}

GradientExchange::Bytes BlockGradients::bytes(const FlatBuffer& flat, DataType /*dtype*/) const {
  const int ranks = flat.layout.ranks();
  return {quantized_bytes(flat.layout.padded_elements()),
          ranks == 1 ? 0 : ranks * quantized_bytes(slice_elements(flat))};
}

ConstTensorView BlockGradients::round(Stream& stream, const FlatBuffer& flat, const TensorView& gradients,
                                      void* memory) const {
  const int ranks = flat.layout.ranks();
  const std::int64_t shard = flat.layout.shard_elements(), slice = slice_elements(flat);
  if (slice == shard) {
    kernels::quantize(stream, gradients, memory);
  } else {
    for (std::int64_t begin = 0; begin < shard; begin += slice) {
      const std::int64_t count = std::min(slice, shard - begin);
      for (int rank = 0; rank < ranks; ++rank) {
        const std::int64_t first = rank * shard + begin;
        kernels::quantize(stream, part_of(gradients, 0, {first, first + count}),
                          at(memory, ranks * begin + rank * count));
      }
    }
  }
  return {memory, DataType::uint8, Shape{quantized_bytes(gradients.elements())}};
}

void BlockGradients::reduce(FlatBuffer& flat, const ConstTensorView& sent, void* received,
                            const TensorView& out, const GradientSum& sum, std::vector<Event> ready,
                            const OperationLabel& label) {
  const ReductionOptions options = options_of(sum, flat);
  const int ranks = flat.layout.ranks();
  const std::int64_t shard = out.elements(), slice = slice_elements(flat);
  for (std::int64_t begin = 0; begin < shard; begin += slice) {
    const std::int64_t count = std::min(slice, shard - begin);
    const std::byte* const blocks = at(sent.data, ranks * begin);
    if (ranks > 1) {
      flat.reduce_done =
          flat.group->all_to_all(blocks, received, quantized_bytes(count), DataType::uint8, ready, label);
      ready = {flat.reduce_done};
    }
    for (const Event& event : ready) summing_->wait(event);
    kernels::quantized_sum(*summing_, ranks > 1 ? received : blocks, std::min(options.givers, ranks),
                           {options.group_size, options.outer_group}, options.accumulate,
                           part_of(out, 0, {begin, begin + count}));
    flat.reduce_done = summing_->record();
    ready = {flat.reduce_done};
  }
}

// --- Weights --------------------------------------------------------------------------------------------

BlockWeights::BlockWeights(const Config& config, Device& device, TraceRecorder* trace)
    : WeightExchange(config),
      packing_(make_stream(device, "quantize", trace)),
      unpacking_(make_stream(device, "dequantize", trace)) {}

BlockWeights::~BlockWeights() {
  finish(*packing_);
  finish(*unpacking_);
}

void BlockWeights::allocate(MemoryResource& memory) {
  for (Slot& slot : slots_) {
    if (slot.blocks) continue;
    slot.blocks = Buffer(memory, quantized_bytes(largest_), Category::communication, "quantized weights");
  }
}

void BlockWeights::gather(FlatBuffer& flat, const ConstTensorView& own, const TensorView& whole,
                          std::span<const Event> ready, bool training, const OperationLabel& label) {
  if (!training) return WeightExchange::gather(flat, own, whole, ready, training, label);
  Slot& slot = slots_[next_slot_];
  next_slot_ = (next_slot_ + 1) % slots_.size();
  const std::int64_t count = own.elements();
  const bool alone = count == whole.elements();
  std::byte* const mine = at(slot.blocks.data(), alone ? 0 : flat.group->rank() * count);
  for (const Event& event : ready) packing_->wait(event);
  packing_->wait(slot.free);
  kernels::quantize(*packing_, own, mine);
  Event arrived = packing_->record();
  if (!alone) {
    // The bucket is converted to bytes.
    const std::int64_t bucket =
        config_.allgather_bucket_elements + config_.allgather_bucket_elements / (quantized_block / 4);
    const std::vector<Event> packed{arrived};
    arrived = slot.free = flat.group->all_gather(mine, slot.blocks.data(), quantized_bytes(count),
                                                 DataType::uint8, bucket, packed, label);
  }
  unpacking_->wait(arrived);
  kernels::dequantize(*unpacking_, slot.blocks.data(), whole);
  slot.free = flat.gather_done = unpacking_->record();
  if (!config_.overlap) flat.gather_done.wait();
}

}  // namespace tranche::detail
