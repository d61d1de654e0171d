#pragma once
/// A model as the engine knows it: units of named tensors, in forward order. It never sees layers.

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

/// How a tensor's fp32 master weights are born: pure functions of (seed, tensor, element), or the caller's.
struct Initializer {
  enum class Kind : std::uint8_t { constant, normal, uniform, custom };
  /// Writes elements first, first + 1 ... of the tensor in row-major order to `values`.
  using Fill = std::function<void(std::int64_t first, std::span<float> values)>;
  Kind kind = Kind::constant;
  float a = 0;            ///< the constant, the mean, or the low end
  float b = 0;            ///< the standard deviation, or the high end
  std::string name = {};  ///< of what `fill` writes
  Fill fill = {};

  static Initializer zeros() { return {}; }
  static Initializer ones() { return {Kind::constant, 1, 0}; }
  static Initializer constant(float value) { return {Kind::constant, value, 0}; }
  static Initializer normal(float standard_deviation, float mean = 0) {
    return {Kind::normal, mean, standard_deviation};
  }
  static Initializer uniform(float low, float high) { return {Kind::uniform, low, high}; }
  /// Values of the caller's own. Each rank calls `fill` while its engine is made, on the thread that makes
  /// it, for the element ranges that it keeps and no others, each once and at most 262144 elements at a time;
  /// a tensor with aliases is one tensor; on the meta device nothing is called. For the same weights at every
  /// stage and number of ranks a value depends on its element alone. Ranks cannot compare functions: in the
  /// agreement of models at the start `name` stands for it. Throws InvalidArgument for an empty name or
  /// function. An exception of `fill` is one of the engine's constructor.
  static Initializer from(std::string name, Fill fill);
};

/// How the weight of a linear layer is stored: [in, out], as GPT-2 has it, or [out, in], as torch.nn.Linear.
enum class LinearLayout : std::uint8_t { none, in_out, out_in };

/// A dimension of a tensor by its name, for the axis of a mesh that cuts it (ModelSpec::tensor_dimensions).
/// Each of `blocks` is cut by itself, in whole grains. "heads" is cut in equal parts; fewer "key_value_heads"
/// than ranks are shared by neighbouring ranks; parts of any other dimension may differ by a grain.
struct Dimension {
  std::string name;        ///< "heads", "key_value_heads", "inner", "vocabulary", "width"; empty: never cut
  int blocks = 1;          ///< equal blocks side by side (3: fused query, key, value)
  std::int64_t grain = 1;  ///< elements that stay together (the size of a head)
  friend bool operator==(const Dimension&, const Dimension&) = default;
};

struct TensorSpec {
  std::string name;  ///< unique in the model: "h.0.attn.c_attn.weight"
  Shape shape;
  Initializer initializer;
  /// Other names under which people know the same elements ("lm_head.weight"): shown in checkpoints.
  std::vector<std::string> aliases = {};
  /// Not `none`: the weight of a linear layer that models/linear.h, or a language model's head, computes, so
  /// that Config::lora can put an adapter beside it.
  LinearLayout linear = LinearLayout::none;
  bool frozen = false;  ///< not trained, as if Config::frozen named it
  /// A hidden layer's weight of two dimensions, which Muon takes whole: the number of matrices of equal size
  /// that lie side by side along its outputs (3: fused query, key and value). `linear` says which side these
  /// are; `none` is out_in here. 0: an embedding, a head, a vector, or anything else.
  int matrices = 0;
  /// Uses of its unit in a forward pass that read it, ascending from 0 on: for a pipeline, whose stages may
  /// have one use each. Empty: all of them. (GPT-2's token table is read by both uses of its unit, the
  /// position table by the first, the final norm by the second.)
  std::vector<int> uses = {};
  /// One for each dimension of `shape`; or none: the tensor is whole on every rank.
  std::vector<Dimension> dimensions = {};
  bool read_by(int use) const {
    return uses.empty() || std::find(uses.begin(), uses.end(), use) != uses.end();
  }
};

/// A low-rank adapter beside a linear layer of its unit, by indices of tensors: the layer's output has
/// scale * (dropout(x) A^T) B^T added to it (lora.h).
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
  /// How often a micro-batch asks for the unit's gradients (2 for a tied embedding); the reduction is
  /// launched by the last.
  int uses_per_micro_batch = 1;
  std::vector<LowRankAdapter> adapters = {};
  /// The adapter of the linear layer with that weight; null: it has none.
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
  int use = 0;            ///< which of the unit's uses it is
  double operations = 0;  ///< of forward, a token: by these a pipeline is cut
};

/// The messages between the ranks of the axis `tensor` in a micro-batch of training.
struct TensorMessages {
  int rows = 0;     ///< gathers, and reduce-scatters, of the rows of the residual
  int numbers = 0;  ///< fp32 numbers of each token that every rank gathers
};

class ModelSpec {
 public:
  /// Adds a unit after the others. Throws InvalidArgument on a name used twice, a unit without tensors, a
  /// tensor without elements or whose matrices or dimensions do not divide it, or uses_per_micro_batch < 1;
  /// nothing is added then.
  UnitId add_unit(UnitSpec unit);
  const std::vector<UnitSpec>& units() const noexcept { return units_; }
  const UnitSpec& unit(UnitId id) const;
  /// The unit of that name; throws InvalidArgument naming the closest match.
  UnitId find_unit(std::string_view name) const;
  std::int64_t parameters() const;
  /// All that the model says but its units, which a model that is made of this one adds again.
  ModelSpec without_units() const;

  std::string name = {};  ///< for messages: "GPT2LMHeadModel"; not part of hash()
  /// Tokens (or whatever the loss is averaged over) in one sample; with train_batch_size it gives the nominal
  /// tokens of a step, from which the loss gradient's power of two is taken.
  std::int64_t tokens_per_sample = 1;
  /// Names of dimensions that the axis `tensor` of a mesh cuts, which the model then computes in parts.
  /// Empty: the model cannot be cut so.
  std::vector<std::string> tensor_dimensions;
  /// Names among them that Config::layout may leave whole: the model then computes with whole tensors so that
  /// the sum of the ranks' gradients is still the whole gradient.
  std::vector<std::string> whole_dimensions = {};
  /// True when the model computes with Config::tensor_sums chain, by the functions of models/ that take sums
  /// over the axis, and gives the gradients of whole tensors on the axis's first rank alone, and those of
  /// heads that several ranks share on the first of these.
  bool chain_sums = false;
  /// True when the model computes a rank's part of every sequence on a mesh with the axis `context`, and
  /// gives the loss sum and the number of tokens of that part.
  bool sequence_parts = false;
  /// The messages of uses [begin, end) of `forward` under a configuration, for the formula of traffic;
  /// `frozen` says of a tensor, by name, whether it is frozen. Empty: it is not known.
  std::function<TensorMessages(const Config& config, int begin, int end,
                               const std::function<bool(std::string_view)>& frozen)>
      tensor_messages;
  /// Elements of the compute dtype that a rank of the axis `context` sends the others in a micro-batch of
  /// training for uses [begin, end) of `forward`, on ranks of a mesh. Empty: it is not known.
  std::function<std::int64_t(const Config& config, const Mesh& mesh, int begin, int end)> context_elements;
  /// Operations for forward and backward of one token, for reports; 0 when unknown.
  double flops_per_token = 0;
  /// How often a micro-batch of training under a configuration gathers each unit when parameters are sharded,
  /// for tables that are wanted before the first step has shown it. Empty: not known.
  std::function<std::vector<int>(const Config& config)> gathers_per_micro_batch;
  /// The same on a pipeline whose chunks begin with these uses of `forward`, for a model whose gathers depend
  /// on that. Empty: they do not.
  std::function<std::vector<int>(const Config& config, const std::vector<int>& begins)> gathers_with_chunks =
      {};
  /// The uses of units in forward order, between which a pipeline can be cut. Empty: the model cannot be cut.
  std::vector<UnitUse> forward;
  /// Uses [begin, end) of `forward` in words: "embedding to h.2", "h.3 to the last use of embedding", "h.4".
  std::string name_of_uses(int begin, int end) const;
  /// Elements of a token that go from one use of a unit to the next: what crosses the cuts of a pipeline.
  std::int64_t residual_width = 0;
  /// True when the model recomputes activations in backward where Config::activation_checkpointing asks for
  /// it. The engine cannot do that for it; where it is asked for and not done, the table of the start says
  /// so.
  bool recomputes_activations = false;
  /// Hash of names, shapes, dimensions, initializers, matrices, order, uses, adapters and tokens_per_sample;
  /// equal on all ranks, checked at start.
  std::uint64_t hash() const;
  /// The contents of hash() in words: a line for the samples, and one for each unit and tensor, in order.
  std::vector<std::string> describe() const;

 private:
  std::vector<UnitSpec> units_;
  std::unordered_set<std::string> unit_names_, aliases_;
  std::unordered_map<std::string, std::size_t> tensor_units_;  ///< by tensor: the number of its unit
};

}  // namespace tranche
