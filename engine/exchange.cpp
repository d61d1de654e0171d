#include "engine/exchange.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "engine/quantized_exchange.h"
#include "tranche/kernels/elementwise.h"

namespace tranche::detail {

void GradientSum::order(const FlatBuffer& flat, int reduction_group) {
  const int of_data_rank = flat.givers_a_data_rank();
  group_size = reduction_group == 0 ? -of_data_rank : of_data_rank == 1 ? reduction_group : of_data_rank;
  outer_group = of_data_rank == 1 ? 1 : std::max(reduction_group, 1);
}

// --- Over the group -------------------------------------------------------------------------------------

GradientExchange::Bytes GradientExchange::bytes(const FlatBuffer& flat, DataType dtype) const {
  // Gradients that already have that dtype need no copy, nor do those that the communicator rounds while it
  // reduces them.
  const DataType communication = config_.precision.communication;
  if (flat.group->rounds(dtype, communication)) return {};
  return {flat.layout.padded_elements() * size_of(communication), 0};
}

ConstTensorView GradientExchange::round(Stream& stream, const FlatBuffer& /*flat*/,
                                        const TensorView& gradients, void* memory) const {
  const TensorView sent{memory, config_.precision.communication, gradients.shape};
  kernels::cast(stream, gradients, sent);
  return sent;
}

ReductionOptions GradientExchange::options_of(const GradientSum& sum, const FlatBuffer& flat) const {
  ReductionOptions options;
  options.group_size = sum.group_size;
  options.outer_group = sum.outer_group;
  options.accumulate = sum.accumulate;
  options.bucket_elements = config_.reduce_bucket_elements;
  if (!flat.sums_uses()) options.round_to = config_.precision.communication;  // uses are rounded separately
  options.givers = config_.ranks_with_samples(sum.micro_batch, flat.data_ranks()) * flat.givers_a_data_rank();
  return options;
}

void GradientExchange::reduce(FlatBuffer& flat, const ConstTensorView& sent, void* /*received*/,
                              const TensorView& out, const GradientSum& sum, std::vector<Event> ready,
                              const OperationLabel& label) {
  flat.reduce_done = flat.group->reduce_scatter(sent.data, sent.dtype, out.data, out.dtype, out.elements(),
                                                options_of(sum, flat), ready, label);
}

void WeightExchange::gather(FlatBuffer& flat, const ConstTensorView& own, const TensorView& whole,
                            std::span<const Event> ready, bool /*training*/, const OperationLabel& label) {
  if (own.elements() == whole.elements()) return;
  flat.gather_done = flat.group->all_gather(own.data, whole.data, own.elements(), own.dtype,
                                            config_.allgather_bucket_elements, ready, label);
  if (!config_.overlap) flat.gather_done.wait();
}

void WeightExchange::gather_updated(FlatBuffer& flat, bool training, const OperationLabel& label) {
  if (!residency_.whole_parameters(flat)) return;
  const std::vector<Event> ready{flat.shard_ready};
  gather(flat, residency_.parameters(flat, residency_.optimizer_range(flat)),
         residency_.parameters(flat, residency_.parameters_range(flat)), ready, training, label);
}

// --- Over copies ----------------------------------------------------------------------------------------

namespace {

/// The replicas sum the groups' sums, in fp32 and in their order, and each keeps the range that it owns. With
/// a reduction group of the group's size this has the same bits as one reduction over all of them. Once the
/// step's gradients are complete, ranks that keep more than this range gather it in the accumulation dtype.
class CopiedGradients final : public GradientExchange {
 public:
  CopiedGradients(const Config& config, std::shared_ptr<GradientExchange> inner, StepArena& arena)
      : GradientExchange(config), inner_(std::move(inner)), arena_(arena) {}

  Bytes bytes(const FlatBuffer& flat, DataType dtype) const override { return inner_->bytes(flat, dtype); }
  ConstTensorView round(Stream& stream, const FlatBuffer& flat, const TensorView& gradients,
                        void* memory) const override {
    return inner_->round(stream, flat, gradients, memory);
  }
  GradientExchange& in_group() override { return *inner_; }

  void reduce(FlatBuffer& flat, const ConstTensorView& sent, void* received, const TensorView& out,
              const GradientSum& sum, std::vector<Event> ready, const OperationLabel& label) override {
    if (flat.replicas == nullptr) {
      inner_->reduce(flat, sent, received, out, sum, std::move(ready), label);
    } else {
      reduce_over_replicas(flat, sent, received, out, sum, std::move(ready), label);
    }
    if (!sum.last || residency_.over_replicas(flat)) return;
    const TensorView shard = residency_.gradients(flat, flat.shard());
    if (flat.replicas != nullptr) gather(*flat.replicas, flat, out, shard.data, label);
    if (residency_.gathers_gradients()) {
      gather(*flat.group, flat, shard, flat.gradients_data(), {label.unit, "reduce", Traffic::data});
    }
  }

 private:
  void reduce_over_replicas(FlatBuffer& flat, const ConstTensorView& sent, void* received,
                            const TensorView& out, const GradientSum& sum, std::vector<Event> ready,
                            const OperationLabel& label) {
    const bool once = residency_.sums_replicas_once(flat);
    GradientSum in_group = sum;
    StepBuffer memory;
    TensorView of_group;
    if (once) {
      of_group = residency_.gradients(flat, flat.shard());
    } else {
      const std::int64_t elements = flat.layout.shard_elements();
      memory = arena_.acquire(elements * size_of(DataType::float32), Category::communication,
                              flat.name + " replica's sum");
      of_group = {memory.data(), DataType::float32, Shape{elements}};
      ready.insert(ready.end(), memory.ready().begin(), memory.ready().end());
      in_group.accumulate = false;
    }
    inner_->reduce(flat, sent, received, of_group, in_group, std::move(ready), label);
    if (once && !sum.last) return;
    ReductionOptions options;
    options.group_size = options.givers = flat.replicas->size();
    options.accumulate = sum.accumulate && !once;
    options.bucket_elements = config_.reduce_bucket_elements;
    const std::vector<Event> reduced{flat.reduce_done};
    flat.reduce_done = flat.replicas->reduce_scatter(of_group.data, DataType::float32, out.data, out.dtype,
                                                     out.elements(), options, reduced, label);
    memory.release(flat.reduce_done);
  }

  void gather(Communicator& ranks, FlatBuffer& flat, const TensorView& own, void* all,
              const OperationLabel& label) {
    const std::vector<Event> summed{flat.reduce_done};
    flat.reduce_done = ranks.all_gather(own.data, all, own.elements(), own.dtype,
                                        config_.allgather_bucket_elements, summed, label);
  }

  const std::shared_ptr<GradientExchange> inner_;
  StepArena& arena_;
};

/// Each replica has updated a part of the shard; the replicas gather these parts first.
class ReplicatedWeights final : public WeightExchange {
 public:
  ReplicatedWeights(const Config& config, std::shared_ptr<WeightExchange> inner)
      : WeightExchange(config), inner_(std::move(inner)) {}

  void allocate(MemoryResource& memory) override { inner_->allocate(memory); }
  bool rounds() const override { return inner_->rounds(); }
  void gather(FlatBuffer& flat, const ConstTensorView& own, const TensorView& whole,
              std::span<const Event> ready, bool training, const OperationLabel& label) override {
    inner_->gather(flat, own, whole, ready, training, label);
  }
  void gather_updated(FlatBuffer& flat, bool training, const OperationLabel& label) override {
    const TensorView own = residency_.parameters(flat, flat.owned());
    const TensorView shard = residency_.parameters(flat, flat.shard());
    const std::vector<Event> updated{flat.shard_ready};
    flat.shard_ready = flat.gather_done = flat.replicas->all_gather(
        own.data, shard.data, own.elements(), own.dtype, config_.allgather_bucket_elements, updated, label);
    if (!config_.overlap) flat.gather_done.wait();
    if (!residency_.whole_parameters(flat)) return;
    const std::vector<Event> ready{flat.shard_ready};
    gather(flat, shard, residency_.parameters(flat, residency_.parameters_range(flat)), ready, training,
           label);
  }

 private:
  const std::shared_ptr<WeightExchange> inner_;
};

}  // namespace

StateLayout with_exchanges(StateLayout layout, const Config& config, Device& device, StepArena& arena,
                           TraceRecorder* trace) {
  const Residency residency(config);
  const auto gradients = std::make_shared<GradientExchange>(config);
  const auto weights = std::make_shared<WeightExchange>(config);
  std::shared_ptr<BlockGradients> block_gradients;
  std::shared_ptr<BlockWeights> block_weights;
  if (config.quantized_gradients) block_gradients = std::make_shared<BlockGradients>(config, device, trace);
  if (config.quantized_weights) block_weights = std::make_shared<BlockWeights>(config, device, trace);
  for (UnitState& unit : layout.units) {
    for (FlatBuffer& flat : unit.buffers) {
      flat.weights = weights;
      if (residency.quantizes(flat)) {
        block_weights->expect(flat.layout.padded_elements());
        flat.weights = block_weights;
      }
      if (residency.over_replicas(flat)) {
        flat.weights = std::make_shared<ReplicatedWeights>(config, flat.weights);
      }
      if (!flat.trainable) continue;
      flat.gradients_over = gradients;
      if (residency.quantizes_gradients(flat)) flat.gradients_over = block_gradients;
      if (flat.replicas != nullptr || residency.gathers_gradients()) {
        flat.gradients_over = std::make_shared<CopiedGradients>(config, flat.gradients_over, arena);
      }
    }
  }
  return layout;
}

}  // namespace tranche::detail
