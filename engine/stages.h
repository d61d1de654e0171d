#pragma once
/// How a model is divided among ranks that see the same samples: the pipeline's stages, and the ranks of the
/// axis `tensor`. Private to engine/.

#include <memory>
#include <string>
#include <vector>

#include "partition/slices.h"
#include "pipeline/schedule/pipeline_schedule.h"
#include "tranche/config/config.h"
#include "tranche/engine/model_spec.h"

namespace tranche::detail {

/// The stages and uses that read a tensor.
struct TensorUses {
  std::vector<int> stages;  ///< the stages that hold it, ascending; empty: there is only one
  std::vector<int> uses;    ///< uses of its unit, ascending, if their gradients are separate; otherwise empty
};

/// The stages of a pipeline, each with one or more chunks of consecutive uses of units. Chunks are numbered
/// over the model.
struct Stages {
  int count = 1;
  std::vector<int> begins;          ///< by chunk: its first use in ModelSpec::forward
  std::vector<int> stage_of_chunk;  ///< by chunk: its stage
  std::vector<TensorUses> tensors;  ///< by tensor, in declared order; empty: one stage holds all tensors, and
                                    ///< uses are not separate
  std::vector<TensorCut> cuts;      ///< by tensor, in declared order; empty: all tensors are whole

  /// The actions of all stages in a step, in order; null without a pipeline. divide() does not set it.
  std::shared_ptr<const pipeline::PipelineSchedule> schedule;

  int chunks() const { return static_cast<int>(begins.size()); }
  /// The range [begin, end) of a chunk in ModelSpec::forward.
  int begin(int chunk) const { return begins.at(static_cast<std::size_t>(chunk)); }
  int end(const ModelSpec& model, int chunk) const;
  int stage_of(int chunk) const { return stage_of_chunk.at(static_cast<std::size_t>(chunk)); }
  /// The chunks of a stage, ascending.
  std::vector<int> chunks_of(int stage) const;
  /// Describes a stage's uses, such as "embedding to h.1, h.4 to h.5".
  std::string name_of(const ModelSpec& model, int stage) const;
  /// The number of residuals and gradients that a stage sends to others in a micro-batch.
  int messages_of(int stage) const;
  /// True when there are messages between the first and the last stage of more than two, which are then
  /// neighbours.
  bool joins_ends() const;
  /// The uses of a unit that a stage computes, ascending.
  std::vector<int> uses_of(const ModelSpec& model, int unit, int stage) const;
};

/// Cuts the model as configured (Config::pipeline_cuts) into the chunks of its schedule (pipeline_order.h).
/// Throws ConfigurationError for more chunks than the model has uses of units, a model without
/// ModelSpec::forward, an invalid list of cuts, and a tensor that is read by two stages other than the first
/// and the last; also like tensor_cuts().
Stages divide(const ModelSpec& model, const Config& config, int stages, int tensor_ranks = 1);

}  // namespace tranche::detail
