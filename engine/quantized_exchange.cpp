#include "engine/quantized_exchange.h"

#include <algorithm>
#include <cstddef>

#include "partition/flat_layout.h"
#include "tranche/kernels/quantization.h"

namespace tranche::detail {

namespace {

using kernels::quantized_block;
using kernels::quantized_bytes;

TensorView elements_of(const ConstTensorView& view, std::int64_t first, std::int64_t count) {
  return {static_cast<std::byte*>(const_cast<void*>(view.data)) + first * size_of(view.dtype), view.dtype,
          Shape{count}};
}

std::byte* at(const void* blocks, std::int64_t elements) {
  return static_cast<std::byte*>(const_cast<void*>(blocks)) + quantized_bytes(elements);
}

}  // namespace

QuantizedExchange::QuantizedExchange(Device& device, TraceRecorder* trace)
    : packing_(device.create_stream("quantize")),
      unpacking_(device.create_stream("dequantize")),
      summing_(device.create_stream("quantized sums")) {
  for (Stream* stream : {packing_.get(), unpacking_.get(), summing_.get()}) stream->set_trace(trace);
}

QuantizedExchange::~QuantizedExchange() {
  for (Stream* stream : {packing_.get(), unpacking_.get(), summing_.get()}) {
    try {
      stream->synchronize();
    } catch (...) {  // the one who used what failed has the error
    }
  }
}

void QuantizedExchange::allocate(MemoryResource& memory, std::int64_t elements) {
  for (Slot& slot : slots_) {
    slot.blocks = Buffer(memory, quantized_bytes(elements), Category::communication, "quantized weights");
  }
}

Event QuantizedExchange::gather(Communicator& group, const ConstTensorView& own, const TensorView& whole,
                                std::int64_t bucket_elements, std::span<const Event> ready,
                                const OperationLabel& label) {
  Slot& slot = slots_[next_slot_];
  next_slot_ = (next_slot_ + 1) % slots_.size();
  const std::int64_t count = own.elements();
  const bool alone = count == whole.elements();
  std::byte* const mine = at(slot.blocks.data(), alone ? 0 : group.rank() * count);
  for (const Event& event : ready) packing_->wait(event);
  packing_->wait(slot.free);
  kernels::quantize(*packing_, own, mine);
  Event arrived = packing_->record();
  if (!alone) {
    // A bucket in the bytes that it is.
    const std::int64_t bucket = bucket_elements + bucket_elements / (quantized_block / 4);
    const std::vector<Event> packed{arrived};
    arrived = slot.free = group.all_gather(mine, slot.blocks.data(), quantized_bytes(count), DataType::uint8,
                                           bucket, packed, label);
  }
  unpacking_->wait(arrived);
  kernels::dequantize(*unpacking_, slot.blocks.data(), whole);
  slot.free = unpacking_->record();
  return slot.free;
}

std::int64_t QuantizedExchange::slice_elements(std::int64_t shard_elements, int ranks,
                                               std::int64_t bucket_elements) {
  const std::int64_t blocks = std::max<std::int64_t>(bucket_elements / ranks / quantized_block, 1);
  return ranks == 1 ? shard_elements : std::min(shard_elements, blocks * quantized_block);
}

std::int64_t QuantizedExchange::received_bytes(std::int64_t shard_elements, int ranks,
                                               std::int64_t bucket_elements) {
  if (ranks == 1) return 0;
  return ranks * quantized_bytes(slice_elements(shard_elements, ranks, bucket_elements));
}

void QuantizedExchange::pack(Stream& stream, const ConstTensorView& values, int ranks,
                             std::int64_t bucket_elements, void* blocks) {
  const std::int64_t shard = values.elements() / ranks;
  const std::int64_t slice = slice_elements(shard, ranks, bucket_elements);
  if (slice == shard) return kernels::quantize(stream, values, blocks);
  for (std::int64_t begin = 0; begin < shard; begin += slice) {
    const std::int64_t count = std::min(slice, shard - begin);
    for (int rank = 0; rank < ranks; ++rank) {
      kernels::quantize(stream, elements_of(values, rank * shard + begin, count),
                        at(blocks, ranks * begin + rank * count));
    }
  }
}

void QuantizedExchange::reduce(Communicator& group, const void* blocks, void* received, const TensorView& out,
                               const ReductionOptions& options, std::vector<Event> ready,
                               const OperationLabel& label, Event& done) {
  const int ranks = group.size();
  const std::int64_t shard = out.elements();
  const std::int64_t slice = slice_elements(shard, ranks, options.bucket_elements);
  for (std::int64_t begin = 0; begin < shard; begin += slice) {
    const std::int64_t count = std::min(slice, shard - begin);
    const std::byte* const sent = at(blocks, ranks * begin);
    if (ranks > 1) {
      done = group.all_to_all(sent, received, quantized_bytes(count), DataType::uint8, ready, label);
      ready = {done};
    }
    for (const Event& event : ready) summing_->wait(event);
    kernels::quantized_sum(*summing_, ranks > 1 ? received : sent, std::min(options.givers, ranks),
                           options.group_size, options.accumulate, elements_of(out, begin, count));
    done = summing_->record();
    ready = {done};
  }
}

}  // namespace tranche::detail
