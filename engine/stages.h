#pragma once
/// How a model is divided among ranks that see the same samples: the stages of a pipeline, and the ranks of
/// the axis `tensor`. Private to engine/.

#include <vector>

#include "partition/slices.h"
#include "tranche/config/config.h"
#include "tranche/engine/model_spec.h"

namespace tranche::detail {

/// The stages and the uses that read a tensor.
struct TensorUses {
  std::vector<int> stages;  ///< that hold it, ascending; empty: there is one
  std::vector<int> uses;    ///< of its unit, ascending, where gradients are told apart by use; else empty
};

/// The stages of a pipeline, each with consecutive uses of units.
struct Stages {
  int count = 1;
  std::vector<int> begins;          ///< by stage: the first of ModelSpec::forward that it computes
  std::vector<TensorUses> tensors;  ///< by tensor, in declared order; empty: all is on one stage, together
  std::vector<TensorCut> cuts;      ///< by tensor, in declared order; empty: all tensors are whole

  /// ModelSpec::forward of a stage: [begin, end).
  int begin(int stage) const { return begins.at(static_cast<std::size_t>(stage)); }
  int end(const ModelSpec& model, int stage) const;
  /// The uses of a unit that a stage computes, ascending.
  std::vector<int> uses_of(const ModelSpec& model, int unit, int stage) const;
};

/// Cuts the model as the configuration says (Config::pipeline_cuts). Throws ConfigurationError for more
/// stages than the model has uses of units, a model that does not say how its units follow each other
/// (ModelSpec::forward), a list of cuts that is none, and a tensor that is read by two stages which are not
/// the first and the last; and as tensor_cuts() does.
Stages divide(const ModelSpec& model, const Config& config, int stages, int tensor_ranks = 1);

}  // namespace tranche::detail
