#pragma once
/// One micro-batch of a language model on a pipeline's stage, or on the only one.

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "tranche/engine/host_copy.h"
#include "tranche/models/context_rows.h"
#include "tranche/models/language_model.h"
#include "tranche/models/weight_gradients.h"
#include "tranche/pipeline/executor.h"

namespace tranche::models {

inline constexpr UnitId embedding{0};

/// True if a group of blocks that are recomputed together stays gathered from recomputation to backward,
/// because so many units may be gathered at once; otherwise all except its last block are gathered again.
bool group_stays_gathered(const Config& config, std::int64_t blocks);

/// Blocks [begin, end) in a chunk of a model with `layers` blocks: all blocks without a pipeline, and none in
/// a chunk that has only the embedding or the head.
struct BlockRange {
  std::int64_t begin = 0, end = 0;
};
BlockRange blocks_of_chunk(const Engine::Chunk& chunk, std::int64_t layers);

/// Throws ConfigurationError on a mesh with a pipeline, naming the call and its replacement.
void require_whole(const Engine& engine, std::string_view call, std::string_view instead);

/// Runs work that the ranks of the axes `context` and `tensor` do together: an error ends the engine, because
/// the others wait for this rank's messages. Without these axes an error does not end it.
void in_parts(Engine& engine, const std::function<void()>& work);

/// A micro-batch of a language model on this rank.
class LanguageMicroBatch : public pipeline::MicroBatchWork {
 public:
  /// alone: the only open micro-batch of a step. beside: others of the step may be open. evaluation: without
  /// backward.
  enum class Kind : std::uint8_t { alone, beside, evaluation };
  /// Begins the micro-batch. All arguments, and the memory of the batch, must outlive it. Throws like
  /// LanguageModel::pass_of().
  LanguageMicroBatch(const LanguageModel& model, Engine& engine, const TokenBatch& batch, Kind kind);

  std::unique_ptr<pipeline::ChunkWork> begin(const Engine::Chunk& chunk) override;
  void end() override;

 private:
  friend class LanguageChunk;
  const LanguageModel& model_;
  Engine& engine_;
  Pass pass_;
  bool training_;
  StepTensors totals_;  ///< loss and token count
  LocalBatch local_;
};

/// Computes a chunk's uses of units: embedding, blocks, and head with the loss. Between forward and backward
/// it keeps the values that backward reads, or with activation checkpointing only the input of each group of
/// blocks; a group ends at the chunk's end.
class LanguageChunk : public pipeline::ChunkWork {
 public:
  /// `micro_batch` must outlive all calls except input_gradient_sent().
  LanguageChunk(LanguageMicroBatch& micro_batch, const Engine::Chunk& chunk);

  TensorView input() override;
  void forward() override;
  ConstTensorView output() override;
  void output_sent(const Event& sent) override;
  TensorView output_gradient() override;
  void backward() override { backward(WeightGradients::When::now); }
  void input_gradients() override { backward(WeightGradients::When::later); }
  void weight_gradients() override;
  ConstTensorView input_gradient() override;
  void input_gradient_sent(const Event& sent) override;

 private:
  /// A block's delayed weight gradients.
  struct PutOff {
    PutOff(std::int64_t of_block, UnitGradients of_unit) : block(of_block), unit(std::move(of_unit)) {}
    std::int64_t block;
    UnitGradients unit;
    WeightGradients weights{unit, WeightGradients::When::later};
  };
  bool has_embedding() const { return chunk_.first(); }
  bool has_head() const { return chunk_.last(); }
  StepTensors& residual(std::int64_t block) { return residuals_[static_cast<std::size_t>(block)]; }
  /// First block of the group of blocks that ends before block `end`.
  std::int64_t group_begin(std::int64_t end) const;
  void forward_block(std::int64_t block, const GatheredUnit& unit, const TensorView& input, bool save);
  void recompute_block(std::int64_t block, const GatheredUnit& unit);
  void prefetch_input(std::int64_t end);
  void fetch_input(std::int64_t block);
  void backward(WeightGradients::When weights);
  void backward_head();
  void backward_blocks(const TensorView& gradient, WeightGradients::When weights);
  void backward_block(std::int64_t block, const GatheredUnit& unit, const TensorView& gradient,
                      WeightGradients::When weights);
  void release_block(std::int64_t block);

  LanguageMicroBatch& of_;
  const LanguageModel& model_;
  Engine& engine_;
  Pass& pass_;
  Engine::Chunk chunk_;
  std::int64_t first_block_, end_block_;
  bool training_, recompute_;
  std::int64_t save_every_ = 0;  ///< 0: only the last output is kept, 1: everything that backward reads
  /// Index i has the input of block i and its activations, if they are kept; the last entry has the last
  /// output.
  std::vector<StepTensors> residuals_, activations_;
  std::vector<HostCopy> inputs_;  ///< of groups that are recomputed; in host memory if configured
  /// The output is kept until this event. Its memory is released once the gradient has arrived; otherwise an
  /// earlier allocation on this stage could wait for the next stage to receive the residual, and both stages
  /// could wait for each other.
  Event output_sent_;
  StepTensors gradient_;
  std::list<PutOff> put_off_;  ///< in the order of backward
};

}  // namespace tranche::models
