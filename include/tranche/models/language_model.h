#pragma once
/// Causal language models for the engine: the interface of an architecture, and the training that all share.

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

/// The largest models that a config.json may describe.
inline constexpr std::int64_t most_layers = 65'536;
inline constexpr std::int64_t most_width = std::int64_t{1} << 20;
/// The largest vocabulary and the largest number of positions.
inline constexpr std::int64_t most_rows = std::int64_t{1} << 24;
inline constexpr std::int64_t most_parameters = std::int64_t{1} << 44;

/// The uses of the unit that embedding and head share.
inline constexpr int embedding_use = 0, head_use = 1;

/// A micro-batch of token sequences.
struct TokenBatch {
  ConstTensorView tokens;   ///< int32 [batch, time] in device memory, in [0, vocabulary): not checked
  ConstTensorView targets;  ///< int32 [batch, time] in device memory; kernels::ignored_label is skipped
  std::span<const std::int64_t> samples;  ///< global index of each sequence, host memory; keys dropout
  /// int32 [batch, time] in device memory, for rows with several documents: the index in the row at which
  /// each token's document begins; a token sees nothing before it. Empty: a row is one document.
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
  /// True if head and embedding are one matrix; unit 0 then also holds the final norm and is used twice.
  bool tied_head = false;
  int head_weight = 0;  ///< index of the head's [vocabulary, width] in its unit
};

/// Elements [first, first + count) of a dimension.
struct DimensionPart {
  std::int64_t first = 0, count = 0;
};

/// A micro-batch during its computation: the tokens of all samples, or those of this rank of the mesh axis
/// `context`, which count as twice as many sequences (context_rows.h).
struct Pass {
  Engine& engine;
  ModelShape shape;
  std::int64_t batch = 0;
  std::int64_t time = 0;
  std::span<const std::int64_t> samples;               ///< global sample indices, batch / runs() of them
  bool training = false;                               ///< applies dropout
  std::optional<ConstTensorView> document_begin = {};  ///< [samples, tokens of a sequence]
  std::optional<ConstTensorView> positions = {};       ///< [batch, time]
  StepTensors tables = {};                             ///< LanguageModel::acquire_tables()
  /// In a generation pass, the keys and values of earlier tokens (models::attend()); `positions` must then be
  /// set.
  const CachePlace* cache = nullptr;
  std::int64_t sequence = 0;  ///< tokens of a whole sequence, without padding
  /// The ranks of the mesh axis `tensor`, which divide the residual's rows and layers' dimensions
  /// (tensor_rows.h); null: this rank has all of them.
  Communicator* tensor = nullptr;
  /// The ranks of the axis `context`, which divide the tokens of each sequence; null: this rank has all of
  /// them.
  Communicator* context = nullptr;
  /// With chained sums, for layers that compute only this rank's rows (of_layers()): the pass of all rows,
  /// from which the axis's first rank computes the gradients of their parameters, as one rank does.
  const Pass* all_rows = nullptr;

  std::int64_t rows() const { return batch * time; }
  /// The size of the axis `context`, and this rank's coordinate on it.
  int context_ranks() const;
  int context_rank() const;
  /// True if the ranks of the axis exchange heads (Config::context_exchange ulysses).
  bool exchanges_heads() const;
  /// The number of runs of `time` consecutive tokens that this rank has of each sequence, and a run's first
  /// token.
  int runs() const { return context == nullptr ? 1 : 2; }
  std::int64_t first_of_run(int run) const;
  /// The number of tokens of the sequence in a run. The rest of `time` is padding; a run that begins after
  /// the end of the sequence is all padding.
  std::int64_t tokens_of_run(int run) const;
  /// True if the sequence does not fill the runs of all ranks.
  bool padded() const;
  /// The size of the axis `tensor`, and this rank's coordinate on it.
  int tensor_ranks() const;
  int tensor_rank() const;
  /// True if sums over the axis are chained from rank to rank (Config::tensor_sums chain).
  bool chained() const;
  /// Rows of the residual that this rank holds, including padding; without the axis all of them.
  std::int64_t local_rows() const;
  /// This rank's part of `count` elements that the axis divides, as the engine cuts tensors. If there are
  /// more ranks than elements, neighbouring ranks have the same part.
  DimensionPart part_of(std::int64_t count) const;
  /// The first token of this rank's rows of a [vocabulary, width], for kernels::embedding_forward().
  std::int64_t first_token() const;
  /// This rank's rows of a [vocabulary, width] or of its gradient, which tranche.layout may keep whole.
  template <typename View>
  View own_tokens(const View& table) const {
    if (tensor == nullptr || table.shape[0] != shape.vocabulary) return table;
    const DimensionPart part = part_of(shape.vocabulary);
    const std::int64_t columns = table.shape[1];
    return table.slice(part.first * columns, part.count * columns).reshaped({part.count, columns});
  }
  /// The pass for layers that are cut along `dimension`. If tranche.layout keeps it whole, the layers compute
  /// only this rank's rows, as a separate micro-batch without the axis `tensor`, and the pass has no tables,
  /// positions or documents, and must not outlive this one.
  Pass of_layers(std::string_view dimension) const;
  DataType dtype() const;  ///< of activations and of gathered weights
  /// The dropout options of a site, which keys its random numbers; probability 0 when not training. For rows
  /// of the residual use dropout_rows() (context_rows.h).
  kernels::DropoutOptions dropout(float probability, std::uint32_t site) const;
  bool drops(float probability) const { return training && probability > 0; }
};

/// The pipeline stages that receive logits. The last stage computes them. With every_stage it broadcasts them
/// to the other stages of its data rank (4 bytes for each entry of the vocabulary); with last_stage the other
/// stages get an empty vector.
enum class LogitsOn : std::uint8_t { every_stage, last_stage };

/// Rows after the final norm, and the statistics that its backward reads.
struct FinalNorm {
  TensorView normed;      ///< [rows, width]
  TensorView mean, rstd;  ///< fp32 [rows]; norms without a mean do not write `mean`
};

/// A causal language model: an embedding, equal blocks on a residual stream [rows, width] in the compute
/// dtype, a final norm and a linear head. It holds no weights, which belong to the engine. Units: 0 is the
/// embedding, then the blocks, then, unless the head is tied to the embedding, "head" with final norm and
/// head weight. An architecture overrides the virtual functions. Under stage 3 a block is gathered twice and
/// reduced once a micro-batch (some are gathered three times, see forward_backward()).
class LanguageModel {
 public:
  virtual ~LanguageModel() = default;

  /// The name in config.json's "architectures": "GPT2LMHeadModel".
  virtual std::string architecture() const = 0;
  virtual ModelShape shape() const = 0;
  /// A config.json from which the registry, and its architecture in transformers, read the same model.
  virtual std::string to_json() const = 0;
  /// One line for people: "GPT-2 of 12 layers, ...".
  virtual std::string describe() const = 0;
  /// The model's name of the tensor that Hugging Face's files store as `stored`; empty for a tensor that is
  /// not a weight (a mask, a table) and is skipped.
  virtual std::string tensor_of(std::string_view stored) const { return std::string(stored); }

  /// Operations of a block's forward for one token in a sequence of `sequence`, as the mean over blocks: 2
  /// for each element of a matrix, and those of attention's two matrix products. Norms and activations are
  /// not counted.
  virtual double block_operations(std::int64_t sequence) const = 0;
  /// The part of these that is skipped if only the activations are computed (block_forward() without output).
  virtual double skipped_operations() const = 0;
  /// Operations of forward and backward for one token: three times those of all blocks and of the head.
  double flops_per_token(std::int64_t sequence) const;
  /// Throws ConfigurationError unless 1 <= sequence <= positions.
  void require_sequence(std::int64_t sequence) const;

  /// The specification to make the Engine with. `sequence` is the length of the training sequences, for
  /// tokens_per_sample and flops_per_token. Throws ConfigurationError if it is longer than the model allows.
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

  /// Logits (fp32, one for each entry of the vocabulary) of the token after `tokens`, of which the model sees
  /// at most the last `positions`. Collective; between steps. It opens an InferenceScope, so it must not be
  /// called inside one. Returns zeros on the meta device. All stages of a pipeline call it with the same
  /// tokens, and each computes a part.
  std::vector<float> next_token_logits(Engine& engine, std::span<const std::int32_t> tokens,
                                       LogitsOn where = LogitsOn::every_stage) const;
  /// softmax(logits / temperature) of these logits, in fp64; temperature > 0.
  std::vector<double> next_token_probabilities(Engine& engine, std::span<const std::int32_t> tokens,
                                               double temperature = 1) const;

  /// True if prefill() and decode() are supported: cache_heads() is overridden. Otherwise generation computes
  /// all tokens again for each new one.
  bool has_cache() const;
  /// Computes next_token_logits() of `tokens` with the same bits, and replaces row `row` of the cache by
  /// their keys and values. The tokens must fit in the row.
  std::vector<float> prefill(Engine& engine, KeyValueCache& cache, std::int64_t row,
                             std::span<const std::int32_t> tokens,
                             LogitsOn where = LogitsOn::every_stage) const;
  /// Appends a token to every row of the cache that is not idle, and returns the logits of the next tokens:
  /// [rows, vocabulary], equal to next_token_logits() up to rounding. `tokens` has one entry for each row; a
  /// negative one makes the row idle, and its logits undefined. On a CPU the bits of a row's logits do not
  /// depend on the other rows or their number. Throws InvalidArgument for a row that is empty or full.
  /// Collective; between steps.
  std::vector<float> decode(Engine& engine, KeyValueCache& cache, std::span<const std::int32_t> tokens,
                            LogitsOn where = LogitsOn::every_stage) const;
  /// For a rank that has nothing to compute while other data ranks call next_token_logits(), prefill() or
  /// decode(): gathers the units of its stage in the same order. Collective; between steps.
  void gather_for_others(Engine& engine) const;

  // The functions below are for the training above, and for a caller's own schedules. Their control flow does
  // not depend on data, and block_forward() writes the same bits each time.

  /// Names of dimensions (TensorSpec::dimensions) that the axis `tensor` may cut: those whose parts the
  /// functions below compute, using Pass::part_of(). Empty: the model does not support the axis.
  virtual std::vector<std::string> tensor_dimensions() const { return {}; }
  /// True if the functions below compute a rank's part of the tokens on the axis `context`: positions with
  /// Pass::first_of_run(), dropout with dropout_rows(), attention with attend() and attend_backward().
  virtual bool sequence_parts() const { return false; }
  /// True if the functions below support Config::tensor_sums chain (ModelSpec::chain_sums).
  virtual bool chain_sums() const { return false; }
  /// Names among these dimensions that Config::layout may keep whole: "vocabulary", whose parts a rank then
  /// takes from the whole tables with Pass::own_tokens(), and dimensions of layers that use
  /// Pass::of_layers().
  virtual std::vector<std::string> whole_dimensions() const { return {}; }
  virtual UnitSpec embedding_unit() const = 0;
  virtual UnitSpec block_unit(std::int64_t block) const = 0;
  /// Only called if the head is not tied.
  virtual UnitSpec head_unit() const;
  UnitId unit_of_block(std::int64_t block) const;
  UnitId unit_of_head() const;

  /// True if the model supports TokenBatch::document_begin and TokenBatch::positions; otherwise a batch with
  /// them is refused.
  virtual bool takes_documents() const { return false; }
  /// The sizes of the keys and values that a block stores for a token, for models whose block_forward() uses
  /// models::attend() and whose embedding and tables use Pass::positions; nullopt: no cache.
  virtual std::optional<CacheHeads> cache_heads() const;
  /// Makes a pass, after checking the batch against model and engine. Its tables are acquired inside the
  /// micro-batch. On the axis `context` the pass has this rank's tokens, which LocalBatch (context_rows.h)
  /// takes from the batch.
  Pass pass_of(Engine& engine, const TokenBatch& batch, bool training) const;
  /// The same for all tokens of the batch on this rank, on any mesh.
  Pass whole_pass_of(Engine& engine, const TokenBatch& batch, bool training) const;
  /// Makes tables that all blocks of a micro-batch read, such as rotary positions.
  virtual StepTensors acquire_tables(const Pass& /*pass*/) const { return {}; }

  // A residual, its gradient and rows of the final norm have Pass::local_rows() rows: all rows of the
  // micro-batch, unless the axes `context` and `tensor` divide them.

  /// Computes out[rows, width]; tokens [batch, time] of the pass.
  virtual void embedding_forward(const Pass& pass, const GatheredUnit& unit, const ConstTensorView& tokens,
                                 const TensorView& out) const = 0;
  /// Adds to the unit's gradients; needs no weights. `gradient` [rows, width] may be overwritten.
  virtual void embedding_backward(const Pass& pass, const UnitGradients& gradients,
                                  const ConstTensorView& tokens, const TensorView& gradient) const = 0;

  /// Memory for the values that a block's forward saves for its backward.
  virtual StepTensors acquire_block_activations(const Pass& pass) const = 0;
  /// *output = block(input), in different memory. Without output it computes only the activations, for a
  /// following backward.
  virtual void block_forward(const Pass& pass, std::int64_t block, const GatheredUnit& unit,
                             const ConstTensorView& input, const StepTensors& activations,
                             const TensorView* output) const = 0;
  /// Replaces `gradient` of the output by the gradient of the input, in place; adds the weights' gradients
  /// through `weights`, which may compute them later. Activations and input are those of forward.
  virtual void block_backward(const Pass& pass, std::int64_t block, const GatheredUnit& unit,
                              WeightGradients& weights, const ConstTensorView& input,
                              const StepTensors& activations, const TensorView& gradient) const = 0;

  /// The final norm of x [rows, width]; `unit` is the head's unit.
  virtual void final_norm_forward(const Pass& pass, const GatheredUnit& unit, const ConstTensorView& x,
                                  const FinalNorm& norm) const = 0;
  /// d_x = the gradient of the norm's input; also adds to the unit's gradients.
  virtual void final_norm_backward(const Pass& pass, const GatheredUnit& unit, const UnitGradients& gradients,
                                   const TensorView& d_normed, const ConstTensorView& x,
                                   const FinalNorm& norm, const TensorView& d_x) const = 0;
};

/// This rank's micro-batches of a step by number, from 0. Each is requested once, when its forward begins,
/// and its memory must not change until the step has ended.
using MicroBatches = std::function<TokenBatch(std::int64_t micro_batch)>;

/// Runs forward and backward of all micro-batches of one step; call Engine::step() afterwards. On a mesh with
/// a pipeline this rank computes its own stage (pipeline/executor.h); without one it calls
/// LanguageModel::forward_backward() for each. Collective over the ranks that see the same samples. Throws
/// like that function; on a pipeline any error, also of `batches`, ends the engine, because other stages
/// wait.
void train_step(const LanguageModel& model, Engine& engine, const MicroBatches& batches);

}  // namespace models
}  // namespace tranche
