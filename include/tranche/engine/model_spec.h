#pragma once
/// A model as the engine sees it: units of named tensors, in forward order. The engine does not know layers.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "tranche/core/shape.h"

namespace tranche {

struct Config;
class Mesh;

/// How a tensor's fp32 master weights are initialized: by pure functions of (seed, tensor, element), or by
/// the caller.
struct Initializer {
  enum class Kind : std::uint8_t { constant, normal, uniform, custom };
  /// Writes elements first, first + 1 ... of the tensor in row-major order to `values`.
  using Fill = std::function<void(std::int64_t first, std::span<float> values)>;
  Kind kind = Kind::constant;
  float a = 0;            ///< the constant, the mean, or the low end
  float b = 0;            ///< the standard deviation, or the high end
  std::string name = {};  ///< identifies the values that `fill` writes
  Fill fill = {};

  static Initializer zeros() { return {}; }
  static Initializer ones() { return {Kind::constant, 1, 0}; }
  static Initializer constant(float value) { return {Kind::constant, value, 0}; }
  static Initializer normal(float standard_deviation, float mean = 0) {
    return {Kind::normal, mean, standard_deviation};
  }
  static Initializer uniform(float low, float high) { return {Kind::uniform, low, high}; }
  /// Values from the caller. Each rank calls `fill` while its engine is constructed, on the constructing
  /// thread, only for the element ranges that it keeps, each once and at most 262144 elements at a time. A
  /// tensor with aliases is one tensor. On the meta device nothing is called. A value must depend only on its
  /// element, so that the weights are the same at every stage and number of ranks. Ranks cannot compare
  /// functions, so they compare `name` when they agree on the model at the start. Throws InvalidArgument for
  /// an empty name or function. The engine's constructor rethrows an exception of `fill`.
  static Initializer from(std::string name, Fill fill);
};

/// How the weight of a linear layer is stored: [in, out], as GPT-2 has it, or [out, in], as torch.nn.Linear.
enum class LinearLayout : std::uint8_t { none, in_out, out_in };

/// A named dimension of a tensor, which the mesh axis in ModelSpec::tensor_dimensions may cut. Each of
/// `blocks` is cut separately, in multiples of `grain`. "heads" is cut in equal parts; if there are fewer
/// "key_value_heads" than ranks, neighbouring ranks share them; parts of any other dimension may differ by a
/// grain.
struct Dimension {
  std::string name;        ///< "heads", "key_value_heads", "inner", "vocabulary", "width"; empty: never cut
  int blocks = 1;          ///< equal blocks along the dimension (3: fused query, key, value)
  std::int64_t grain = 1;  ///< elements that stay together (the size of a head)
  friend bool operator==(const Dimension&, const Dimension&) = default;
};

struct TensorSpec {
  std::string name;  ///< unique in the model: "h.0.attn.c_attn.weight"
  Shape shape;
  Initializer initializer;
  /// Other names under which people know the same elements ("lm_head.weight"): shown in checkpoints.
  std::vector<std::string> aliases = {};
  /// If not `none`: this is the weight of a linear layer that models/linear.h, or a language model's head,
  /// computes, so that Config::lora can put an adapter beside it.
  LinearLayout linear = LinearLayout::none;
  bool frozen = false;  ///< not trained, as if Config::frozen named it
  /// For the weight of a hidden layer with two dimensions, which Muon updates as matrices: the number of
  /// equal matrices that are stored side by side along its outputs (3: fused query, key and value). `linear`
  /// says which dimension has the outputs; `none` means out_in here. 0: an embedding, a head, a vector, or
  /// anything else.
  int matrices = 0;
  /// The uses of its unit in a forward pass that read this tensor, ascending from 0. A pipeline needs them,
  /// because its stages may have one use each. Empty: all uses. (GPT-2's token table is read by both uses of
  /// its unit, the position table by the first, the final norm by the second.)
  std::vector<int> uses = {};
  /// One for each dimension of `shape`; empty: the tensor is whole on every rank.
  std::vector<Dimension> dimensions = {};
  bool read_by(int use) const {
    return uses.empty() || std::find(uses.begin(), uses.end(), use) != uses.end();
  }
};

/// A low-rank adapter beside a linear layer of its unit, by indices of tensors. It adds scale * (dropout(x)
/// A^T) B^T to the layer's output (lora.h).
struct LowRankAdapter {
  int weight = -1;         ///< of the layer
  int a = -1;              ///< [rank, in]
  int b = -1;              ///< [out, rank]
  float scale = 1;         ///< of the product
  float dropout = 0;       ///< probability, in training
  std::uint32_t site = 0;  ///< keys dropout's random numbers
  friend bool operator==(const LowRankAdapter&, const LowRankAdapter&) = default;
};

/// Tensors gathered, reduced and freed together.
struct UnitSpec {
  std::string name;  ///< unique in the model: "h.0"
  std::vector<TensorSpec> tensors;
  /// How often a micro-batch requests the unit's gradients (2 for a tied embedding); the last of them
  /// launches the reduction.
  int uses_per_micro_batch = 1;
  std::vector<LowRankAdapter> adapters = {};
  /// The adapter of the linear layer with that weight; null if it has none.
  const LowRankAdapter* adapter_of(int weight) const;
};

/// Index of a unit in its ModelSpec.
struct UnitId {
  int index = -1;
  friend bool operator==(UnitId, UnitId) = default;
};

/// One use of a unit in a forward pass.
struct UnitUse {
  UnitId unit;
  int use = 0;            ///< its number among the unit's uses
  double operations = 0;  ///< operations of its forward for one token, from which a pipeline is balanced
};

/// The messages between the ranks of the axis `tensor` in a training micro-batch.
struct TensorMessages {
  int rows = 0;     ///< the number of all-gathers, and of reduce-scatters, of the residual's rows
  int numbers = 0;  ///< fp32 numbers of each token that every rank gathers
};

class ModelSpec {
 public:
  /// Adds a unit after the others. Throws InvalidArgument for a name used twice, a unit without tensors, a
  /// tensor without elements or whose matrices or dimensions do not divide it, or uses_per_micro_batch < 1;
  /// nothing is added then.
  UnitId add_unit(UnitSpec unit);
  const std::vector<UnitSpec>& units() const noexcept { return units_; }
  const UnitSpec& unit(UnitId id) const;
  /// The unit of that name; throws InvalidArgument naming the closest match.
  UnitId find_unit(std::string_view name) const;
  std::int64_t parameters() const;
  /// A copy of everything except the units, for building a modified model.
  ModelSpec without_units() const;

  std::string name = {};  ///< for messages: "GPT2LMHeadModel"; not part of hash()
  /// Tokens (or other items that the loss is averaged over) in one sample. Multiplied by train_batch_size it
  /// gives the nominal tokens of a step, which determine the loss gradient's power of two.
  std::int64_t tokens_per_sample = 1;
  /// Tokens of a sample that each of so many ranks of the axis `context` computes: two runs of equal length.
  /// They hold padding where the length of a sample is no multiple of twice the ranks.
  std::int64_t tokens_of_rank(int context_ranks) const;
  /// Names of dimensions that the mesh axis `tensor` cuts; the model then computes with parts. Empty: the
  /// model does not support the axis.
  std::vector<std::string> tensor_dimensions;
  /// Names among them that Config::layout may keep whole: the model then computes with whole tensors in such
  /// a way that the sum of the ranks' gradients is still the whole gradient.
  std::vector<std::string> whole_dimensions = {};
  /// True when the model supports Config::tensor_sums chain: it uses the functions of models/ for sums over
  /// the axis, and submits the gradients of whole tensors only on the axis's first rank, and those of heads
  /// that several ranks share only on the first of these.
  bool chain_sums = false;
  /// True when the model computes a rank's part of every sequence on a mesh with the axis `context`, and
  /// gives the loss sum and the number of tokens of that part.
  bool sequence_parts = false;
  /// The messages of uses [begin, end) of `forward` under a configuration, for the formula of traffic.
  /// `frozen` returns whether the tensor of that name is frozen. Empty: unknown.
  std::function<TensorMessages(const Config& config, int begin, int end,
                               const std::function<bool(std::string_view)>& frozen)>
      tensor_messages;
  /// The elements of the compute dtype that a rank of the axis `context` sends to the others in a training
  /// micro-batch for uses [begin, end) of `forward`. Empty: unknown.
  std::function<std::int64_t(const Config& config, const Mesh& mesh, int begin, int end)> context_elements;
  /// Operations for forward and backward of one token, for reports; 0 when unknown.
  double flops_per_token = 0;
  /// How often a training micro-batch gathers each unit when parameters are sharded, for tables that are
  /// printed before the first step has recorded it. Empty: unknown.
  std::function<std::vector<int>(const Config& config)> gathers_per_micro_batch;
  /// The same on a pipeline whose chunks begin at these uses of `forward`, for a model whose gathers depend
  /// on that. Empty: they do not.
  std::function<std::vector<int>(const Config& config, const std::vector<int>& begins)> gathers_with_chunks =
      {};
  /// The uses of units in forward order, between which a pipeline can be cut. Empty: the model cannot be cut.
  std::vector<UnitUse> forward;
  /// Describes uses [begin, end) of `forward`: "embedding to h.2", "h.3 to the last use of embedding", "h.4".
  std::string name_of_uses(int begin, int end) const;
  /// Elements of one token that pass from one use of a unit to the next, and so between the stages of a
  /// pipeline.
  std::int64_t residual_width = 0;
  /// True when the model recomputes activations in backward if Config::activation_checkpointing is set. The
  /// engine cannot do it for the model; if the model does not support it, the start-up table says so.
  bool recomputes_activations = false;
  /// Hash of names, shapes, dimensions, initializers, matrices, order, uses, adapters and tokens_per_sample.
  /// It must be equal on all ranks, which the engine checks at the start.
  std::uint64_t hash() const;
  /// The contents of hash() as text: a line for the samples, and one for each unit and tensor, in order.
  std::vector<std::string> describe() const;

 private:
  std::vector<UnitSpec> units_;
  std::unordered_set<std::string> unit_names_, aliases_;
  std::unordered_map<std::string, std::size_t> tensor_units_;  ///< the unit's number, by tensor name
};

}  // namespace tranche
