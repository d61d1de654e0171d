#include "engine/exchange.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "engine/quantized_exchange.h"
#include "tranche/kernels/elementwise.h"

namespace tranche::detail {

namespace {

/// Gradients in the communication dtype, over the group.
class PlainGradients final : public GradientExchange {
 public:
  explicit PlainGradients(const Config& config) : config_(config) {}

  /// Nothing is copied when they are in that dtype already, or when the communicator rounds on the way into
  /// the main gradient.
  Bytes bytes(const FlatBuffer& flat, DataType dtype) const override {
    const DataType communication = config_.precision.communication;
    if (flat.group->rounds(dtype, communication)) return {};
    return {flat.layout.padded_elements() * size_of(communication), 0};
  }
  ConstTensorView round(Stream& stream, const FlatBuffer& /*flat*/, const ConstTensorView& gradients,
                        void* memory) const override {
    const TensorView sent{memory, config_.precision.communication, gradients.shape};
    kernels::cast(stream, gradients, sent);
    return sent;
  }
  void reduce(FlatBuffer& flat, const ConstTensorView& sent, void* /*received*/, const TensorView& out,
              const GradientSum& sum, std::vector<Event> ready, const OperationLabel& label) override {
    flat.reduce_done = flat.group->reduce_scatter(sent.data, sent.dtype, out.data, out.dtype, out.elements(),
                                                  options_of(sum, flat, config_), ready, label);
  }

 private:
  const Config& config_;
};

/// What comes behind another exchange.
class GradientsBeyond : public GradientExchange {
 public:
  GradientsBeyond(std::shared_ptr<GradientExchange> inner, const Config& config)
      : inner_(std::move(inner)), config_(config), residency_(config) {}
  Bytes bytes(const FlatBuffer& flat, DataType dtype) const override { return inner_->bytes(flat, dtype); }
  ConstTensorView round(Stream& stream, const FlatBuffer& flat, const ConstTensorView& gradients,
                        void* memory) const override {
    return inner_->round(stream, flat, gradients, memory);
  }
  GradientExchange& in_group() override { return inner_->in_group(); }

 protected:
  const std::shared_ptr<GradientExchange> inner_;
  const Config& config_;
  const Residency residency_;
};

/// The group's sum, in fp32, is added up over the replicas in their order, each of which keeps what it owns;
/// with a reduction group of the group's size these are the bits of one reduction over all of them.
class ReplicatedGradients final : public GradientsBeyond {
 public:
  ReplicatedGradients(std::shared_ptr<GradientExchange> inner, const Config& config, StepArena& arena)
      : GradientsBeyond(std::move(inner), config), arena_(arena) {}

  void reduce(FlatBuffer& flat, const ConstTensorView& sent, void* received, const TensorView& out,
              const GradientSum& sum, std::vector<Event> ready, const OperationLabel& label) override {
    const bool once = residency_.sums_replicas_once(flat);
    StepBuffer of_replica;
    TensorView of_group;
    GradientSum inner = sum;
    if (once) {
      of_group = residency_.gradients(flat, flat.shard());
    } else {
      const std::int64_t elements = flat.layout.shard_elements();
      of_replica = arena_.acquire(elements * size_of(DataType::float32), Category::communication,
                                  flat.name + " replica's sum");
      of_group = {of_replica.data(), DataType::float32, Shape{elements}};
      ready.insert(ready.end(), of_replica.ready().begin(), of_replica.ready().end());
      inner.accumulate = false;
    }
    inner_->reduce(flat, sent, received, of_group, inner, std::move(ready), label);
    if (once && !sum.last) return;
    ReductionOptions options;
    options.group_size = options.givers = flat.replicas->size();
    options.accumulate = sum.accumulate && !once;
    options.bucket_elements = config_.reduce_bucket_elements;
    const std::vector<Event> reduced{flat.reduce_done};
    flat.reduce_done = flat.replicas->reduce_scatter(of_group.data, DataType::float32, out.data, out.dtype,
                                                     out.elements(), options, reduced, label);
    of_replica.release(flat.reduce_done);
    if (!sum.last || residency_.over_replicas(flat)) return;
    // Once the step's gradients are complete, every replica takes the other parts.
    const std::vector<Event> summed{flat.reduce_done};
    flat.reduce_done =
        flat.replicas->all_gather(out.data, residency_.gradients(flat, flat.shard()).data, out.elements(),
                                  out.dtype, config_.allgather_bucket_elements, summed, label);
  }

 private:
  StepArena& arena_;
};

/// Every rank takes the whole sum, in the accumulation dtype, behind the rest of backward.
class WholeGradients final : public GradientsBeyond {
 public:
  using GradientsBeyond::GradientsBeyond;

  void reduce(FlatBuffer& flat, const ConstTensorView& sent, void* received, const TensorView& out,
              const GradientSum& sum, std::vector<Event> ready, const OperationLabel& label) override {
    inner_->reduce(flat, sent, received, out, sum, std::move(ready), label);
    if (!sum.last) return;
    const std::vector<Event> summed{flat.reduce_done};
    flat.reduce_done = flat.group->all_gather(
        residency_.gradients(flat, flat.shard()).data, flat.gradients_data(), flat.layout.shard_elements(),
        out.dtype, config_.allgather_bucket_elements, summed, {flat.name, "reduce", Traffic::data});
  }
};

/// Parts of a shard that its replicas have updated are gathered first.
class ReplicatedWeights final : public PlainWeights {
 public:
  ReplicatedWeights(std::shared_ptr<WeightExchange> inner, const Config& config)
      : PlainWeights(config), inner_(std::move(inner)) {}

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
    inner_->gather(flat, shard, residency_.parameters(flat, residency_.parameters_range(flat)), ready,
                   training, label);
  }

 private:
  const std::shared_ptr<WeightExchange> inner_;
};

}  // namespace

ReductionOptions options_of(const GradientSum& sum, const FlatBuffer& flat, const Config& config) {
  ReductionOptions options;
  options.group_size = sum.group_size;
  options.accumulate = sum.accumulate;
  options.bucket_elements = config.reduce_bucket_elements;
  if (!flat.sums_uses()) options.round_to = config.precision.communication;  // else of what was rounded
  options.givers = config.ranks_with_samples(sum.micro_batch, flat.data_ranks()) * flat.stages;
  return options;
}

void PlainWeights::gather(FlatBuffer& flat, const ConstTensorView& own, const TensorView& whole,
                          std::span<const Event> ready, bool /*training*/, const OperationLabel& label) {
  if (own.elements() == whole.elements()) return;
  flat.gather_done = flat.group->all_gather(own.data, whole.data, own.elements(), own.dtype,
                                            config_.allgather_bucket_elements, ready, label);
  if (!config_.overlap) flat.gather_done.wait();
}

void PlainWeights::gather_updated(FlatBuffer& flat, bool training, const OperationLabel& label) {
  if (!residency_.whole_parameters(flat)) return;
  const std::vector<Event> ready{flat.shard_ready};
  gather(flat, residency_.parameters(flat, residency_.optimizer_range(flat)),
         residency_.parameters(flat, residency_.parameters_range(flat)), ready, training, label);
}

StateLayout with_exchanges(StateLayout layout, const Config& config, Device& device, StepArena& arena,
                           TraceRecorder* trace) {
  const Residency residency(config);
  const auto plain_gradients = std::make_shared<PlainGradients>(config);
  const auto plain_weights = std::make_shared<PlainWeights>(config);
  std::shared_ptr<GradientExchange> block_gradients;
  std::shared_ptr<BlockWeights> block_weights;
  for (UnitState& unit : layout.units) {
    for (FlatBuffer& flat : unit.buffers) {
      flat.weights = plain_weights;
      if (residency.quantizes(flat)) {
        if (!block_weights) block_weights = std::make_shared<BlockWeights>(config, device, trace);
        block_weights->expect(flat.layout.padded_elements());
        flat.weights = block_weights;
      }
      if (residency.over_replicas(flat))
        flat.weights = std::make_shared<ReplicatedWeights>(flat.weights, config);
      if (!flat.trainable) continue;
      flat.gradients_over = plain_gradients;
      if (residency.quantizes_gradients(flat)) {
        if (!block_gradients) block_gradients = std::make_shared<BlockGradients>(config, device, trace);
        flat.gradients_over = block_gradients;
      }
      if (flat.replicas != nullptr) {
        flat.gradients_over = std::make_shared<ReplicatedGradients>(flat.gradients_over, config, arena);
      }
      if (residency.gathers_gradients()) {
        flat.gradients_over = std::make_shared<WholeGradients>(flat.gradients_over, config);
      }
    }
  }
  return layout;
}

}  // namespace tranche::detail
