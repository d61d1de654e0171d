#pragma once
/// How a model is divided among ranks that see the same samples: the stages of a pipeline, and the ranks of
/// the axis `tensor`. Private to engine/.

#include <memory>
#include <string>
#include <vector>

#include "partition/slices.h"
#include "pipeline/schedule/pipeline_schedule.h"
#include "tranche/config/config.h"
#include "tranche/engine/model_spec.h"

namespace tranche::detail {

/// The stages and the uses that read a tensor.
struct TensorUses {
  std::vector<int> stages;  ///< that hold it, ascending; empty: there is one
  std::vector<int> uses;    ///< of its unit, ascending, where gradients are told apart by use; else empty
};

/// The stages of a pipeline, each with one chunk of consecutive uses of units, or with several. Chunks are
/// numbered over the model.
struct Stages {
  int count = 1;
  std::vector<int> begins;          ///< by chunk: the first of ModelSpec::forward that it computes
  std::vector<int> stage_of_chunk;  ///< by chunk: the stage that holds it
  std::vector<TensorUses> tensors;  ///< by tensor, in declared order; empty: all is on one stage, together
  std::vector<TensorCut> cuts;      ///< by tensor, in declared order; empty: all tensors are whole

  /// The actions of all stages in a step, in order; null without a pipeline. divide() leaves it empty.
  std::shared_ptr<const pipeline::PipelineSchedule> schedule;

  int chunks() const { return static_cast<int>(begins.size()); }
  /// ModelSpec::forward of a chunk: [begin, end).
  int begin(int chunk) const { return begins.at(static_cast<std::size_t>(chunk)); }
  int end(const ModelSpec& model, int chunk) const;
  int stage_of(int chunk) const { return stage_of_chunk.at(static_cast<std::size_t>(chunk)); }
  /// The chunks of a stage, ascending.
  std::vector<int> chunks_of(int stage) const;
  /// "embedding to h.1, h.4 to h.5".
  std::string name_of(const ModelSpec& model, int stage) const;
  /// Residuals and gradients that a stage sends to others in a micro-batch.
  int messages_of(int stage) const;
  /// True when messages go between the first and the last stage, which are no neighbours otherwise.
  bool joins_ends() const;
  /// The uses of a unit that a stage computes, ascending.
  std::vector<int> uses_of(const ModelSpec& model, int unit, int stage) const;
};

/// Cuts the model as the configuration says (Config::pipeline_cuts) into the chunks of its schedule
/// (pipeline_order.h). Throws ConfigurationError for more chunks than the model has uses of units, a model
/// that does not say how its units follow each other (ModelSpec::forward), a list of cuts that is none, and a
/// tensor that is read by two stages which are not the first and the last; and as tensor_cuts() does.
Stages divide(const ModelSpec& model, const Config& config, int stages, int tensor_ranks = 1);

}  // namespace tranche::detail
