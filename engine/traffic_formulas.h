#pragma once
/// Computes a step's traffic between ranks by the formula of docs/internals/arithmetic.md. Private to
/// engine/.

#include <cstdint>
#include <string>

#include "engine/data_groups.h"
#include "engine/formulas.h"
#include "engine/gradient_reducer.h"
#include "engine/stages.h"
#include "engine/whole_matrices.h"
#include "tranche/comm/meter.h"

namespace tranche::detail {

class TrafficFormulas {
 public:
  /// The arguments must outlive it; they are read at each call.
  TrafficFormulas(const Runtime& runtime, const Config& config, const ModelSpec& model, const Stages& stages,
                  const StateStore& store, const StateFormulas& formulas, const WholeMatrices& matrices,
                  const GradientReducer& reducer)
      : runtime_(runtime),
        config_(config),
        model_(model),
        stages_(stages),
        store_(store),
        formulas_(formulas),
        matrices_(matrices),
        reducer_(reducer) {}

  /// Sets how many padded elements stage 3 gathered in the last complete step, and how many of them as int8
  /// blocks.
  void set_gathered(std::int64_t elements, std::int64_t quantized) {
    gathered_ = elements;
    quantized_ = quantized;
  }
  /// False for the axis `tensor` with sums as chains (Config::tensor_sums), for which there is no formula.
  bool knows(MeshAxis axis) const {
    return axis != MeshAxis::tensor || runtime_.tensor() == nullptr ||
           config_.tensor_sums != TensorSums::chain;
  }
  /// Elements and bytes that this rank sends to its group of the axis in a step; without chains' messages.
  TrafficCount along(MeshAxis axis) const;
  /// The sum over the axes.
  TrafficCount all() const;
  /// The messages of residual rows between the ranks of the axis `tensor`, as declared by the model.
  TrafficCount of_rows() const;
  /// Parts of gradients that ranks of the axis `tensor` sum in order to measure the noise of a step's
  /// gradient.
  TrafficCount of_noise() const;
  /// The messages of attention between the ranks of the axis `context`, as declared by the model.
  TrafficCount of_sequences() const;
  /// JSON text of the report's `traffic` object: the last step's measured traffic, beside the formula's.
  std::string report(const StepTraffic& traffic, const DataGroups& groups) const;

  /// The pipeline stage that this rank computes; 0 without a pipeline.
  int stage() const { return runtime_.pipeline() == nullptr ? 0 : runtime_.pipeline()->rank(); }
  /// How often a step reduces a flat buffer's gradients.
  std::int64_t reductions(const FlatBuffer& flat) const;
  /// How often this rank sends gradients of it.
  std::int64_t sent_reductions(const FlatBuffer& flat) const;

 private:
  TrafficCount over_replicas() const;
  /// Tokens of a micro-batch that this rank computes: its part of each sequence.
  std::int64_t tokens_of_rank() const {
    return config_.micro_batch_size * model_.tokens_of_rank(runtime_.mesh().size(MeshAxis::context));
  }
  /// The traffic along an axis other than `replicate`, for buffers whose group has `group` ranks; 0: for all
  /// buffers.
  TrafficCount in_groups(MeshAxis axis, int group) const;
  /// The elements that nodes sum for each other, over all reductions of a step.
  std::int64_t summed_elements(const FlatBuffer& flat) const;

  const Runtime& runtime_;
  const Config& config_;
  const ModelSpec& model_;
  const Stages& stages_;
  const StateStore& store_;
  const StateFormulas& formulas_;
  const WholeMatrices& matrices_;
  const GradientReducer& reducer_;
  std::int64_t gathered_ = 0, quantized_ = 0;
};

}  // namespace tranche::detail
