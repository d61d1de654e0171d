#include "engine/stages.h"

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/pipeline_order.h"
#include "engine/tensor_cuts.h"
#include "partition/cuts.h"
#include "tranche/core/error.h"

namespace tranche::detail {

namespace {

/// The parameters of a stage with uses [begin, end) of ModelSpec::forward; tensors that several of these uses
/// read count once.
class ParameterShares {
 public:
  explicit ParameterShares(const ModelSpec& model) {
    for (std::size_t begin = 0; begin < model.forward.size(); ++begin) {
      std::set<std::pair<int, std::size_t>> held;
      std::vector<double>& sums = sums_.emplace_back();
      double sum = 0;
      for (std::size_t i = begin; i < model.forward.size(); ++i) {
        const UnitUse& use = model.forward[i];
        const std::vector<TensorSpec>& tensors = model.unit(use.unit).tensors;
        for (std::size_t t = 0; t < tensors.size(); ++t) {
          if (tensors[t].read_by(use.use) && held.emplace(use.unit.index, t).second) {
            sum += static_cast<double>(tensors[t].shape.elements());
          }
        }
        sums.push_back(sum);
      }
    }
  }
  double operator()(int begin, int end) const {
    return sums_.at(static_cast<std::size_t>(begin)).at(static_cast<std::size_t>(end - begin - 1));
  }

 private:
  std::vector<std::vector<double>> sums_;  ///< by begin, then by the number of uses, minus 1
};

/// Cuts the model into `chunks` chunks, an equal number for each stage.
std::vector<int> cuts_of(const ModelSpec& model, const Config& config, int stages, int chunks) {
  const auto uses = static_cast<int>(model.forward.size());
  const std::string mesh = "tranche.mesh \"" + config.mesh + "\"";
  if (uses == 0) {
    throw ConfigurationError(mesh +
                             ": the model does not say in which order its units follow each other "
                             "(ModelSpec::forward), so that it cannot be cut into stages");
  }
  if (stages > uses) {
    throw ConfigurationError(mesh + ": the model has " + std::to_string(uses) + " units to cut, so " +
                             std::to_string(uses) + " stages at most");
  }
  if (chunks > uses) {
    throw ConfigurationError("tranche.pipeline_schedule \"" + config.pipeline_schedule + "\" with " +
                             std::to_string(chunks / stages) + " chunks on each of " +
                             std::to_string(stages) + " stages has " + std::to_string(chunks) +
                             " chunks: the model has " + std::to_string(uses) + " units to cut, so " +
                             std::to_string(uses) + " chunks at most");
  }
  if (config.pipeline_cuts == PipelineCuts::equal) return equal_cuts(uses, chunks);
  if (config.pipeline_cuts == PipelineCuts::listed) {
    try {
      return listed_cuts(config.pipeline_begins, uses, chunks, chunks == stages ? "stage" : "chunk");
    } catch (const InvalidArgument& error) {
      throw ConfigurationError("tranche.pipeline_cuts " + error.message());
    }
  }
  if (config.pipeline_cuts == PipelineCuts::parameters) {
    return balanced_cuts(uses, chunks, ParameterShares(model));
  }
  std::vector<double> work;
  for (const UnitUse& use : model.forward) work.push_back(use.operations);
  return balanced_cuts(work, chunks);
}

/// Throws ConfigurationError unless ModelSpec::forward contains each use of each unit exactly once.
void require_whole_forward(const ModelSpec& model) {
  for (std::size_t u = 0; u < model.units().size(); ++u) {
    const UnitSpec& unit = model.units()[u];
    for (int use = 0; use < unit.uses_per_micro_batch; ++use) {
      const auto times = std::count_if(model.forward.begin(), model.forward.end(), [&](const UnitUse& one) {
        return one.unit.index == static_cast<int>(u) && one.use == use;
      });
      if (times == 1) continue;
      throw ConfigurationError("ModelSpec::forward has use " + std::to_string(use) + " of unit " + unit.name +
                               " " + std::to_string(times) + " times; a pipeline needs each use once");
    }
  }
}

}  // namespace

int Stages::end(const ModelSpec& model, int chunk) const {
  return chunk + 1 == chunks() ? static_cast<int>(model.forward.size())
                               : begins.at(static_cast<std::size_t>(chunk) + 1);
}

std::vector<int> Stages::chunks_of(int stage) const {
  std::vector<int> own;
  for (int chunk = 0; chunk < chunks(); ++chunk) {
    if (stage_of(chunk) == stage) own.push_back(chunk);
  }
  return own;
}

std::string Stages::name_of(const ModelSpec& model, int stage) const {
  std::string text;
  for (const int chunk : chunks_of(stage)) {
    text += (text.empty() ? "" : ", ") + model.name_of_uses(begin(chunk), end(model, chunk));
  }
  return text;
}

int Stages::messages_of(int stage) const {
  int messages = 0;
  for (int chunk = 0; chunk + 1 < chunks(); ++chunk) {
    if (stage_of(chunk) == stage_of(chunk + 1)) continue;
    if (stage_of(chunk) == stage) ++messages;      // a residual
    if (stage_of(chunk + 1) == stage) ++messages;  // its gradient
  }
  return messages;
}

bool Stages::joins_ends() const {
  for (int chunk = 0; count > 2 && chunk + 1 < chunks(); ++chunk) {
    if (std::abs(stage_of(chunk + 1) - stage_of(chunk)) == count - 1) return true;
  }
  return false;
}

std::vector<int> Stages::uses_of(const ModelSpec& model, int unit, int stage) const {
  std::vector<int> uses;
  if (count == 1) {
    for (int use = 0; use < model.unit({unit}).uses_per_micro_batch; ++use) uses.push_back(use);
    return uses;
  }
  for (const int chunk : chunks_of(stage)) {
    for (int i = begin(chunk); i < end(model, chunk); ++i) {
      const UnitUse& use = model.forward[static_cast<std::size_t>(i)];
      if (use.unit.index == unit) uses.push_back(use.use);
    }
  }
  std::sort(uses.begin(), uses.end());
  return uses;
}

Stages divide(const ModelSpec& model, const Config& config, int stages, int tensor_ranks) {
  Stages result;
  result.cuts = tensor_cuts(model, config, tensor_ranks);
  result.count = stages;
  result.stage_of_chunk = stages == 1 ? std::vector<int>{0} : stages_of_chunks(config, stages);
  result.begins = stages == 1
                      ? std::vector<int>{0}
                      : cuts_of(model, config, stages, static_cast<int>(result.stage_of_chunk.size()));
  if (stages == 1 && config.tie_sum != TieSum::by_use) return result;
  if (stages > 1) require_whole_forward(model);
  for (std::size_t u = 0; u < model.units().size(); ++u) {
    const UnitSpec& unit = model.units()[u];
    for (const TensorSpec& tensor : unit.tensors) {
      TensorUses of;
      for (int use = 0; use < unit.uses_per_micro_batch; ++use) {
        if (tensor.read_by(use)) of.uses.push_back(use);
      }
      for (int stage = 0; stage < stages; ++stage) {
        const std::vector<int> here = result.uses_of(model, static_cast<int>(u), stage);
        if (std::any_of(here.begin(), here.end(), [&](int use) { return tensor.read_by(use); })) {
          of.stages.push_back(stage);
        }
      }
      if (of.stages.size() > 1 && of.stages != std::vector<int>{0, stages - 1}) {
        throw ConfigurationError("tranche.mesh \"" + config.mesh + "\": tensor " + tensor.name +
                                 " is read by stages " + std::to_string(of.stages.front()) + " and " +
                                 std::to_string(of.stages.back()) +
                                 "; a tensor can be shared by the first and the last stage alone");
      }
      if (of.uses.size() > 2) {
        throw ConfigurationError("tranche.tie_sum by_use: tensor " + tensor.name + " is read by " +
                                 std::to_string(of.uses.size()) + " uses of its unit; two can be told apart");
      }
      if (of.stages.empty()) {
        throw ConfigurationError("tranche.mesh \"" + config.mesh +
                                 "\": no unit of ModelSpec::forward reads tensor " + tensor.name);
      }
      result.tensors.push_back(std::move(of));
    }
  }
  return result;
}

}  // namespace tranche::detail
