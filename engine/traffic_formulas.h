#pragma once
/// The traffic of a step between ranks, by the formula of docs/internals/design.md. Private to engine/.

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
  /// The arguments outlive it; they are read when it is asked.
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

  /// Sets how many padded elements stage 3 gathered in the last whole step, and how many of them as int8
  /// blocks.
  void set_gathered(std::int64_t elements, std::int64_t quantized) {
    gathered_ = elements;
    quantized_ = quantized;
  }
  /// Elements and bytes that this rank sends to its group of the axis in a step.
  TrafficCount along(MeshAxis axis) const;
  /// The sum over the axes.
  TrafficCount all() const;
  /// The messages of rows between the ranks of the axis `tensor`, by what the model says of them.
  TrafficCount of_rows() const;
  /// Parts of gradients that ranks of the axis `tensor` add up to measure the noise of a step's gradient.
  TrafficCount of_noise() const;
  /// The messages of attention between the ranks of the axis `context`, likewise.
  TrafficCount of_sequences() const;
  /// JSON text of the report's `traffic` object: the last step's by its meters, beside the formula.
  std::string report(const StepTraffic& traffic, const DataGroups& groups) const;

  /// The stage of the pipeline that this rank computes; 0 without one.
  int stage() const { return runtime_.pipeline() == nullptr ? 0 : runtime_.pipeline()->rank(); }
  /// How often a step reduces a flat buffer's gradients.
  std::int64_t reductions(const FlatBuffer& flat) const;
  /// How often this rank sends gradients of it.
  std::int64_t sent_reductions(const FlatBuffer& flat) const;

 private:
  TrafficCount over_replicas() const;
  /// Tokens of a micro-batch that this rank computes: its part of each sequence.
  std::int64_t tokens_of_rank() const {
    return config_.micro_batch_size * model_.tokens_per_sample / runtime_.mesh().size(MeshAxis::context);
  }
  /// Along another axis than that of the replicas, of the buffers that groups of so many ranks share; 0: of
  /// all.
  TrafficCount in_groups(MeshAxis axis, int group) const;
  /// The sums of two nodes' gradients: elements, over all reductions of a step.
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
