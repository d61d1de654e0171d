#include "comm/node/window_algorithms.h"

#include <algorithm>

#include "comm/deterministic_sum.h"
#include "comm/node/hierarchical_all_gather.h"
#include "comm/node/hierarchical_reduce_scatter.h"
#include "comm/node/window_all_gather.h"
#include "comm/node/window_reduce_scatter.h"

namespace tranche::comm {

namespace {
/// Chunks are multiples of this, so that the data after them in a slot stays aligned.
constexpr std::int64_t chunk_granule = 16;
}  // namespace

WindowAlgorithms::WindowAlgorithms(ProgressEngine& engine, std::vector<int> members, int self)
    : engine_(engine), members_(std::move(members)), self_(self) {
  const CommunicatorOptions& options = engine_.options();
  const Transport& transport = engine_.transport();
  std::vector<int> nodes;
  for (const int member : members_) {
    nodes.push_back(options.local_size > 0 ? member / options.local_size : transport.node_of(member));
  }
  layout_ = std::make_shared<const NodeLayout>(nodes);
  if (options.collectives == NodeCollectives::messages || layout_->nodes() == layout_->ranks()) return;
  // The answer is the same on every rank: the ranks have agreed on which memory they can read, and declared
  // nodes must lie within real ones.
  available_ = transport.window_obstacle().empty();
  for (int node = 0; node < layout_->nodes(); ++node) {
    const auto& there = layout_->members(node);
    const int real = transport.node_of(members_[static_cast<std::size_t>(there[0])]);
    for (const int member : there) {
      available_ &= transport.node_of(members_[static_cast<std::size_t>(member)]) == real;
    }
  }
}

std::string WindowAlgorithms::obstacle() const {
  if (engine_.options().collectives != NodeCollectives::shared || layout_->ranks() == 1 || available_)
    return {};
  if (layout_->nodes() == layout_->ranks()) return "no two ranks share a node";
  const std::string obstacle = engine_.transport().window_obstacle();
  return obstacle.empty() ? "the ranks that were declared to share a node do not" : obstacle;
}

std::shared_ptr<const ReducePlan> WindowAlgorithms::reduce_plan(const ReductionOptions& options,
                                                                DataType dtype) const {
  const std::lock_guard lock(plans_mutex_);
  auto& plan = plans_[{options.group_size, options.givers, dtype}];
  if (!plan) {
    plan = std::make_shared<const ReducePlan>(*layout_, options.group_size, size_of(dtype), options.givers);
  }
  return plan;
}

std::int64_t WindowAlgorithms::summed_elements_sent(std::int64_t count, DataType dtype,
                                                    const ReductionOptions& options) const {
  if (layout_->nodes() == 1 || !serves((layout_->ranks() - 1) * count * size_of(dtype))) return 0;
  return reduce_plan(options, dtype)->sums_sent(*layout_, self_) * count;
}

WindowCall WindowAlgorithms::window_call(void* readable, std::int64_t bytes, std::int64_t count,
                                         DataType dtype) const {
  WindowCall call;
  for (const int member : layout_->members(layout_->node(self_))) {
    call.members.push_back(members_[static_cast<std::size_t>(member)]);
  }
  call.self = layout_->local(self_);
  call.mine = readable;
  call.mine_bytes = bytes;
  call.count = count;
  call.chunk = std::max<std::int64_t>(engine_.slot_bytes() / size_of(dtype) / 64 * 64, 1);
  call.dtype = dtype;
  call.transport = &engine_.transport();
  if (!engine_.faults().copy_in) call.registration = call.transport->register_memory(readable, bytes);
  return call;
}

std::unique_ptr<Operation> WindowAlgorithms::reduce_scatter(OperationInfo info, const void* full,
                                                            DataType dtype, void* output,
                                                            DataType output_dtype, std::int64_t count,
                                                            const ReductionOptions& options) const {
  if (layout_->nodes() > 1) {
    return hierarchical_reduce_scatter(std::move(info), full, dtype, output, output_dtype, count, options);
  }
  const int ranks = layout_->ranks();
  WindowCall call = window_call(const_cast<void*>(full), ranks * count * size_of(dtype), count, dtype);
  call.chunk = reduction_chunk(engine_.slot_bytes(), ranks, dtype, options.bucket_elements);
  const std::int64_t width = size_of(output_dtype);
  // A sum that is accumulated has its output in the caches already.
  const auto target = !options.accumulate && count * width >= streamed_bytes ? kernels::SumTarget::memory
                                                                             : kernels::SumTarget::caches;
  auto combine = [engine = &engine_, output_dtype, options, dtype, target](
                     std::span<const void* const> pieces, void* out, std::int64_t elements) {
    deterministic_sum(engine->stream(), pieces, dtype, options,
                      TensorView{out, output_dtype, Shape{elements}}, target);
  };
  const WindowReduceScatter::Output result{output, width};
  return std::make_unique<WindowReduceScatter>(std::move(info), std::move(call), result, options.givers,
                                               std::move(combine));
}

std::unique_ptr<Operation> WindowAlgorithms::hierarchical_reduce_scatter(
    OperationInfo info, const void* full, DataType dtype, void* output, DataType output_dtype,
    std::int64_t count, const ReductionOptions& options) const {
  const int ranks = layout_->ranks();
  WindowCall call = window_call(const_cast<void*>(full), ranks * count * size_of(dtype), count, dtype);
  const auto plan = reduce_plan(options, dtype);
  const std::int64_t most = std::min(engine_.slot_bytes() / plan->slot_width(),
                                     largest_message_bytes / plan->largest_message_width());
  call.chunk = std::max(most / chunk_granule * chunk_granule, chunk_granule);
  if (options.bucket_elements > 0) {
    const std::int64_t bucket = options.bucket_elements / ranks / chunk_granule * chunk_granule;
    call.chunk = std::min(call.chunk, std::max(bucket, chunk_granule));
  }
  HierarchicalReduceScatter::Result result{output, output_dtype, options, &engine_.stream()};
  return std::make_unique<HierarchicalReduceScatter>(
      std::move(info), std::move(call), HierarchicalCall{layout_, members_, self_}, plan, result);
}

std::unique_ptr<Operation> WindowAlgorithms::all_gather(OperationInfo info, const void* shard, void* full,
                                                        std::int64_t count, DataType dtype) const {
  WindowCall call = window_call(const_cast<void*>(shard), count * size_of(dtype), count, dtype);
  if (layout_->nodes() == 1) {
    return std::make_unique<WindowAllGather>(std::move(info), std::move(call), full);
  }
  const std::int64_t most = std::min(
      engine_.slot_bytes() / (1 + HierarchicalAllGather::most_received(*layout_)), largest_message_bytes);
  call.chunk = std::max(most / size_of(dtype) / chunk_granule * chunk_granule, chunk_granule);
  return std::make_unique<HierarchicalAllGather>(std::move(info), std::move(call),
                                                 HierarchicalCall{layout_, members_, self_}, full);
}

std::unique_ptr<Operation> WindowAlgorithms::all_reduce(OperationInfo info, void* values, std::int64_t count,
                                                        DataType dtype,
                                                        WindowAllReduce::Combine combine) const {
  return std::make_unique<WindowAllReduce>(
      std::move(info), window_call(values, count * size_of(dtype), count, dtype), std::move(combine));
}

}  // namespace tranche::comm
