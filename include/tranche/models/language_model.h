#pragma once
/// Causal language models under the engine: what an architecture defines, and the training that all share.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tranche/core/tensor_view.h"
#include "tranche/engine/model_spec.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/models/step_tensors.h"

namespace tranche {

class Communicator;
class Engine;
class GatheredUnit;
class UnitGradients;

namespace models {

class KeyValueCache;
class WeightGradients;
struct CacheHeads;
struct CachePlace;

/// The largest models that a config.json may ask for.
inline constexpr std::int64_t most_layers = 65'536;
inline constexpr std::int64_t most_width = std::int64_t{1} << 20;
/// The largest vocabulary and the largest number of positions.
inline constexpr std::int64_t most_rows = std::int64_t{1} << 24;
inline constexpr std::int64_t most_parameters = std::int64_t{1} << 44;

/// The uses of a unit that embedding and head share.
inline constexpr int embedding_use = 0, head_use = 1;

/// A micro-batch of token sequences.
struct TokenBatch {
  ConstTensorView tokens;   ///< int32 [batch, time] in device memory, in [0, vocabulary): not checked here
  ConstTensorView targets;  ///< int32 [batch, time] in device memory; kernels::ignored_label is left out
  std::span<const std::int64_t> samples;  ///< global index of each sequence, host memory; keys dropout
  /// int32 [batch, time] in device memory, for rows that hold several documents: the index in its row at
  /// which a token's document begins, before which it sees nothing. Empty: a row is one document.
  std::optional<ConstTensorView> document_begin = {};
  /// int32 [batch, time] in device memory: the position of each token. Empty: its index in its row.
  std::optional<ConstTensorView> positions = {};
};

/// The sizes that all language models have.
struct ModelShape {
  std::int64_t layers = 0;
  std::int64_t width = 0;  ///< of the residual stream
  std::int64_t vocabulary = 0;
  std::int64_t positions = 0;  ///< longest sequence
  /// True where head and embedding are one matrix: unit 0 then holds the final norm too and is used twice.
  bool tied_head = false;
  int head_weight = 0;  ///< index of the head's [vocabulary, width] in its unit
};

/// Elements [first, first + count) of a dimension.
struct DimensionPart {
  std::int64_t first = 0, count = 0;
};

/// A micro-batch while it is computed: the tokens of all samples, or those that this rank of the mesh's axis
/// `context` has of them, which count as twice as many sequences (context_rows.h).
struct Pass {
  Engine& engine;
  ModelShape shape;
  std::int64_t batch = 0;
  std::int64_t time = 0;
  std::span<const std::int64_t> samples;               ///< global sample indices, batch / runs() of them
  bool training = false;                               ///< dropout on
  std::optional<ConstTensorView> document_begin = {};  ///< [samples, tokens of a sequence]
  std::optional<ConstTensorView> positions = {};       ///< [batch, time]
  StepTensors tables = {};                             ///< LanguageModel::acquire_tables()
  /// In a pass that generates, keys and values of tokens before (models::attend()). `positions` are given
  /// then.
  const CachePlace* cache = nullptr;
  /// The ranks of the mesh's axis `tensor`, which share out rows of the residual and layers' dimensions
  /// (tensor_rows.h); null: this rank has all.
  Communicator* tensor = nullptr;
  /// The ranks of the axis `context`, which share out the tokens of each sequence; null: this rank has all.
  Communicator* context = nullptr;
  /// In a chain, for layers that compute this rank's rows alone (of_layers()): the pass of all rows, from
  /// which the axis's first rank computes the gradients of their parameters, as one rank does.
  const Pass* all_rows = nullptr;

  std::int64_t rows() const { return batch * time; }
  /// Ranks of the axis `context`, and which of them this is.
  int context_ranks() const;
  int context_rank() const;
  /// True where ranks of the axis send each other heads (Config::context_exchange ulysses).
  bool exchanges_heads() const;
  /// Runs of `time` neighbouring tokens that this rank has of each sequence, and the first token of one.
  int runs() const { return context == nullptr ? 1 : 2; }
  std::int64_t first_of_run(int run) const;
  /// Ranks of the axis `tensor`, and which of them this is.
  int tensor_ranks() const;
  int tensor_rank() const;
  /// True where sums over the axis go from rank to rank (Config::tensor_sums chain).
  bool chained() const;
  /// Rows of the residual that this rank holds, padding included: all of them without the axis.
  std::int64_t local_rows() const;
  /// This rank's part of `count` elements that the axis shares out, as the engine cuts tensors. Where there
  /// are more ranks than elements, neighbouring ranks have the same one.
  DimensionPart part_of(std::int64_t count) const;
  /// The first token of this rank's rows of a [vocabulary, width], as kernels::embedding_forward() takes it.
  std::int64_t first_token() const;
  /// This rank's rows of a [vocabulary, width] or of its gradient, which tranche.layout may leave whole.
  template <typename View>
  View own_tokens(const View& table) const {
    if (tensor == nullptr || table.shape[0] != shape.vocabulary) return table;
    const DimensionPart part = part_of(shape.vocabulary);
    const std::int64_t columns = table.shape[1];
    return table.slice(part.first * columns, part.count * columns).reshaped({part.count, columns});
  }
  /// The pass of layers that are cut along `dimension`. Where tranche.layout leaves it whole, they compute
  /// this rank's rows alone, as a micro-batch of its own without the axis `tensor`. It has no tables,
  /// positions or documents, and does not outlive this one.
  Pass of_layers(std::string_view dimension) const;
  DataType dtype() const;  ///< of activations and of gathered weights
  /// Dropout at a site, which keys its random numbers; probability 0 when not training. Rows of the residual
  /// take dropout_rows() (context_rows.h).
  kernels::DropoutOptions dropout(float probability, std::uint32_t site) const;
  bool drops(float probability) const { return training && probability > 0; }
};

/// The stages of a pipeline that get logits. The last stage computes them. With every_stage it broadcasts
/// them to the other stages of its data rank (4 bytes for each of the vocabulary); with last_stage the other
/// stages get an empty vector.
enum class LogitsOn : std::uint8_t { every_stage, last_stage };

/// Rows behind the final norm, and what its backward reads.
struct FinalNorm {
  TensorView normed;      ///< [rows, width]
  TensorView mean, rstd;  ///< fp32 [rows]; a norm without a mean leaves it
};

/// A causal language model: an embedding, equal blocks on a residual stream [rows, width] in the compute
/// dtype, a final norm and a linear head. It holds no weights: those are the engine's. Units: 0 is the
/// embedding, then the blocks, then, unless the head is tied to the embedding, "head" with final norm and
/// head weight. An architecture overrides the virtual functions. Under stage 3 a block is gathered twice and
/// reduced once a micro-batch (some are gathered three times, see forward_backward).
class LanguageModel {
 public:
  virtual ~LanguageModel() = default;

  /// The name in config.json's "architectures": "GPT2LMHeadModel".
  virtual std::string architecture() const = 0;
  virtual ModelShape shape() const = 0;
  /// A config.json that its architecture in transformers, and the registry, read back as this model.
  virtual std::string to_json() const = 0;
  /// One line for people: "GPT-2 of 12 layers, ...".
  virtual std::string describe() const = 0;
  /// The model's name of a tensor that Hugging Face's files may hold under `stored`; empty for one that is
  /// no weight (a mask, a table) and is passed over.
  virtual std::string tensor_of(std::string_view stored) const { return std::string(stored); }

  /// Operations a token in a sequence of `sequence` that a block's forward takes, as the blocks' mean: 2 for
  /// each element of a matrix, and those of attention's two products. Norms and activations do not count.
  virtual double block_operations(std::int64_t sequence) const = 0;
  /// The part of them that is left out where only the activations are wanted (block_forward without output).
  virtual double skipped_operations() const = 0;
  /// Operations of forward and backward of one token: three times those of all blocks and of the head.
  double flops_per_token(std::int64_t sequence) const;
  /// Throws ConfigurationError unless 1 <= sequence <= positions.
  void require_sequence(std::int64_t sequence) const;

  /// The model that the Engine is made with. `sequence` is the length of the training sequences, for
  /// tokens_per_sample and flops_per_token. Throws ConfigurationError when it is longer than the model
  /// allows.
  ModelSpec spec(std::int64_t sequence) const;

  /// One whole micro-batch: calls Engine::begin_micro_batch(), forward, backward, reduce() and
  /// end_micro_batch(). Call it Config::accumulation_steps times, then Engine::step(), whose result has the
  /// loss. Dropout is keyed by (Config::seed, engine step, sample, site, element). With
  /// Config::activation_checkpointing only the input of every checkpoint_every-th block is saved and blocks
  /// are recomputed in backward, group by group, with the same bits. A block is gathered twice a micro-batch
  /// when its group is no larger than Config::depth, so that its units stay gathered between recomputation
  /// and backward; in a larger group, three times but for its last block. Throws InvalidArgument on shapes,
  /// ConfigurationError on a sequence that is too long and on a mesh with a pipeline (train_step()). On the
  /// axis `tensor` an error ends the engine, because the other ranks wait.
  void forward_backward(Engine& engine, const TokenBatch& batch) const;
  /// One micro-batch of loss, without dropout, between Engine::begin_evaluation and end_evaluation.
  /// Collective over the stages of a data rank. On a pipeline and on the axis `tensor` an error ends the
  /// engine, because other ranks wait.
  void evaluate(Engine& engine, const TokenBatch& batch) const;

  /// Logits (fp32, one for each of the vocabulary) of the token after `tokens`, at most the last `positions`
  /// of which are seen. Collective; between steps. It opens an InferenceScope itself, so not inside one.
  /// Zeros on the meta device. All stages of a pipeline call it with the same tokens and compute a part each.
  std::vector<float> next_token_logits(Engine& engine, std::span<const std::int32_t> tokens,
                                       LogitsOn where = LogitsOn::every_stage) const;
  /// softmax(logits / temperature) of the same, in fp64; temperature > 0.
  std::vector<double> next_token_probabilities(Engine& engine, std::span<const std::int32_t> tokens,
                                               double temperature = 1) const;

  /// True when prefill() and decode() work: cache_heads() is overridden. Else generation computes all tokens
  /// again for each new one.
  bool has_cache() const;
  /// next_token_logits() of `tokens`, the same bits, which also leaves their keys and values in row `row` of
  /// the cache, in place of what it held. They have to fit.
  std::vector<float> prefill(Engine& engine, KeyValueCache& cache, std::int64_t row,
                             std::span<const std::int32_t> tokens,
                             LogitsOn where = LogitsOn::every_stage) const;
  /// Appends a token to every row of the cache that does not rest and gives the logits of the next ones:
  /// [rows, vocabulary], next_token_logits() but for rounding. `tokens` has one for each row; a negative one
  /// lets the row rest, whose logits mean nothing. On a CPU a row's logits are the same bits whatever the
  /// other rows hold and however many there are. InvalidArgument for a row that is empty or full. Collective;
  /// between steps.
  std::vector<float> decode(Engine& engine, KeyValueCache& cache, std::span<const std::int32_t> tokens,
                            LogitsOn where = LogitsOn::every_stage) const;
  /// For a rank that has nothing to compute while other data ranks call next_token_logits(), prefill() or
  /// decode(): gathers the units of its stage in the same order. Collective; between steps.
  void gather_for_others(Engine& engine) const;

  // These functions are for the training above, and for schedules of a caller's own. None of it depends on
  // data, and block_forward writes the same bits each time.

  /// Names of dimensions (TensorSpec::dimensions) that the axis `tensor` may cut: those whose parts the
  /// passes below compute by Pass::part_of(). None: the model cannot be cut by it.
  virtual std::vector<std::string> tensor_dimensions() const { return {}; }
  /// True when the passes below compute a rank's part of the tokens on the axis `context`: positions by
  /// Pass::first_of_run(), dropout by dropout_rows(), attention by attend() and attend_backward().
  virtual bool sequence_parts() const { return false; }
  /// True when the passes below compute with Config::tensor_sums chain (ModelSpec::chain_sums).
  virtual bool chain_sums() const { return false; }
  /// Names among them that Config::layout may leave whole: "vocabulary", whose parts a rank then takes out of
  /// the whole tables by Pass::own_tokens(), and dimensions of layers that compute with Pass::of_layers().
  virtual std::vector<std::string> whole_dimensions() const { return {}; }
  virtual UnitSpec embedding_unit() const = 0;
  virtual UnitSpec block_unit(std::int64_t block) const = 0;
  /// Only where the head is not tied.
  virtual UnitSpec head_unit() const;
  UnitId unit_of_block(std::int64_t block) const;
  UnitId unit_of_head() const;

  /// True when the model can use TokenBatch::document_begin and TokenBatch::positions; else a batch with
  /// them is refused.
  virtual bool takes_documents() const { return false; }
  /// The keys and values that a block keeps of a token, for models whose block_forward attends through
  /// models::attend() and whose embedding and tables honour Pass::positions; nothing: there is no cache.
  virtual std::optional<CacheHeads> cache_heads() const;
  /// Checks a batch against model and engine. Its tables are acquired inside the micro-batch. On the axis
  /// `context` the pass is of this rank's tokens, which LocalBatch (context_rows.h) takes out of the batch.
  Pass pass_of(Engine& engine, const TokenBatch& batch, bool training) const;
  /// The same for all tokens of the batch on this rank, whatever the mesh.
  Pass whole_pass_of(Engine& engine, const TokenBatch& batch, bool training) const;
  /// Tables that all blocks of a micro-batch read (rotary positions, say), filled.
  virtual StepTensors acquire_tables(const Pass& /*pass*/) const { return {}; }

  // A residual, its gradient and rows of the final norm are of Pass::local_rows() rows: all of the
  // micro-batch unless the axes `context` and `tensor` share them out.

  /// out[rows, width]; tokens [batch, time] of the pass.
  virtual void embedding_forward(const Pass& pass, const GatheredUnit& unit, const ConstTensorView& tokens,
                                 const TensorView& out) const = 0;
  /// Adds to the unit's gradients; needs no weights. `gradient` [rows, width] may be overwritten.
  virtual void embedding_backward(const Pass& pass, const UnitGradients& gradients,
                                  const ConstTensorView& tokens, const TensorView& gradient) const = 0;

  /// Memory for what a block's forward saves for its backward.
  virtual StepTensors acquire_block_activations(const Pass& pass) const = 0;
  /// *output = block(input), not the same memory. Without output only the activations are computed, for a
  /// backward that follows.
  virtual void block_forward(const Pass& pass, std::int64_t block, const GatheredUnit& unit,
                             const ConstTensorView& input, const StepTensors& activations,
                             const TensorView* output) const = 0;
  /// Turns `gradient`, that of the output, into that of the input, in place; hands the weights' gradients
  /// to `weights`, which may compute them later. Activations and input are forward's.
  virtual void block_backward(const Pass& pass, std::int64_t block, const GatheredUnit& unit,
                              WeightGradients& weights, const ConstTensorView& input,
                              const StepTensors& activations, const TensorView& gradient) const = 0;

  /// Final norm of x [rows, width], with the head's unit.
  virtual void final_norm_forward(const Pass& pass, const GatheredUnit& unit, const ConstTensorView& x,
                                  const FinalNorm& norm) const = 0;
  /// d_x = its input gradient; adds to the unit's gradients.
  virtual void final_norm_backward(const Pass& pass, const GatheredUnit& unit, const UnitGradients& gradients,
                                   const TensorView& d_normed, const ConstTensorView& x,
                                   const FinalNorm& norm, const TensorView& d_x) const = 0;
};

/// This rank's micro-batches of a step by their number, from 0 on. Each is asked for once, when its forward
/// begins, and its memory stays as it is until the step has ended.
using MicroBatches = std::function<TokenBatch(std::int64_t micro_batch)>;

/// The micro-batches of one step: forward and backward of all of them, for Engine::step() to follow. On a
/// mesh with a pipeline this rank computes its own stage (pipeline/executor.h); without one it is a loop over
/// LanguageModel::forward_backward(). Collective over the ranks that see the same samples. Throws as that
/// does; on a pipeline an error, of `batches` too, ends the engine, because other stages wait.
void train_step(const LanguageModel& model, Engine& engine, const MicroBatches& batches);

}  // namespace models
}  // namespace tranche
