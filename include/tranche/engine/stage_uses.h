#pragma once
/// The part of a model that a stage of a pipeline computes.

#include <vector>

namespace tranche {

/// Consecutive uses [begin, end) of ModelSpec::forward that one stage computes: chunk `number` of `chunks` of
/// the whole model.
struct StageChunk {
  int number = 0, chunks = 1;
  int begin = 0, end = 0;
  bool first() const { return number == 0; }
  bool last() const { return number + 1 == chunks; }
};

/// The chunks of stage `stage` of `stages`. Without a pipeline there is one stage, with one chunk of all
/// uses.
struct StageUses {
  int stage = 0, stages = 1;
  std::vector<StageChunk> chunks;  ///< ascending; one, or several (Config::pipeline_chunks)
  int last_stage = 0;              ///< the stage with the last chunk, which computes loss and logits
  bool first() const { return chunks.front().first(); }
  bool last() const { return chunks.back().last(); }
};

}  // namespace tranche
