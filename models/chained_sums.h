#pragma once
/// Sums over the ranks of the axis `tensor` in the order of one rank (Config::tensor_sums chain), for the
/// models of this folder. Everything here is collective over the axis.

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "tranche/engine/handles.h"
#include "tranche/kernels/attention.h"
#include "tranche/models/language_model.h"
#include "tranche/models/linear.h"
#include "tranche/models/step_tensors.h"
#include "tranche/models/tensor_rows.h"

namespace tranche::models {

/// A part of a product: a[rows, k] times b[k, n] (or its transpose), where k is this rank's.
struct ChainedPart {
  ConstTensorView a, b;
};

/// c[rows, n] = the sum over parts, and within a part over ranks, of their products, on every rank; with
/// `accumulate` that is added to c. All ranks have as many parts; one whose k is 0 adds nothing. The bits are
/// those of one product (kernels::matmul) whose k runs through the parts and ranks in that order.
void chained_product(const Pass& pass, std::string_view unit, std::span<const ChainedPart> parts,
                     bool transpose_b, bool accumulate, const TensorView& c);

/// The parts of d_out W^T, for this rank's columns of d_out [rows, columns] in equal blocks side by side, of
/// which one rank goes through those of all ranks before it comes to the next block. `weight` has the columns
/// as its own (in_out) or as its rows.
class BlocksOfColumns {
 public:
  BlocksOfColumns(Engine& engine, const ConstTensorView& d_out, const ConstTensorView& weight, bool in_out,
                  int blocks);
  std::span<const ChainedPart> list() const { return parts_; }

 private:
  std::vector<ChainedPart> parts_;
  std::vector<StepTensors> memory_;
};

/// Adds the gradients of a norm's weight and bias (negative: there is none, and the norm is an RMSNorm), and
/// writes d_x, or adds to it when `accumulate`, from this rank's rows of d_y and x with their statistics. In
/// a chain the rows are gathered and the axis's first rank gives the parameters' gradients alone, as one
/// rank's kernel computes them.
struct NormTensors {
  int weight = -1, bias = -1;
};
void norm_backward(const Pass& pass, const GatheredUnit& unit, const UnitGradients& gradients,
                   const NormTensors& norm, const ConstTensorView& d_y, const ConstTensorView& x,
                   const ConstTensorView& mean, const ConstTensorView& rstd, bool accumulate,
                   const TensorView& d_x);

/// The columns that `count` ranks of the axis, from `first` on and then every `step`-th, have of a matrix:
/// side by side in the order of the ranks, on every rank. All ranks have as many columns. Number 0 of the
/// result.
struct ColumnsOf {
  int first = 0, count = 1, step = 1;
};
StepTensors gather_columns(const Pass& pass, std::string_view unit, const ConstTensorView& own,
                           const ColumnsOf& ranks);

/// The backward of an RMSNorm of each head, from this rank's heads of d_y and x [rows, columns] with their
/// statistics. In a chain the heads are gathered, of which `sharers` neighbouring ranks have the same, and
/// the axis's first rank gives the weight's gradient alone.
void head_norm_backward(const Pass& pass, const GatheredUnit& unit, const UnitGradients& gradients,
                        int weight, const TensorView& d_y, const TensorView& x, const TensorView& rstd,
                        int sharers, const TensorView& d_x);

/// Queries, keys and values of this rank's heads, or their gradients.
struct HeadTensors {
  TensorView query, key, value;
};
/// attend_backward() in a chain where several ranks share a key and value head. The first of them computes
/// all query heads of it, as one rank does, and has the whole gradients of key and value; those of the others
/// are no part of any sum.
void shared_attention_backward(const Pass& pass, const GatheredUnit& unit,
                               const kernels::AttentionOptions& options, int sharers,
                               const ConstTensorView& d_out, const HeadTensors& inputs,
                               const ConstTensorView& out, const ConstTensorView& log_sum_exp,
                               const HeadTensors& gradients);

/// language_head() in a chain: the blocks of columns are those of one rank, and each passes through all
/// ranks, one after the other. Logits exist for one block at a time, and are computed twice.
void chained_language_head(const LanguageModel& model, const Pass& pass, const GatheredUnit& unit,
                           const UnitGradients* gradients, const ConstTensorView& x,
                           const ConstTensorView& targets, const TensorView& loss_sum,
                           const TensorView& token_count, const TensorView* d_x);

}  // namespace tranche::models
