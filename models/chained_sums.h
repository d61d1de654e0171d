#pragma once
/// Sums over the ranks of the axis `tensor` in the order of a single rank (Config::tensor_sums chain), for
/// the models of this folder. All functions are collective over the axis.

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

/// A part of a matrix product: a[rows, k] times b[k, n] (or its transpose), where k is this rank's range.
struct ChainedPart {
  ConstTensorView a, b;
};

/// c[rows, n] = the sum of the products over parts, and within a part over ranks, on every rank; with
/// `accumulate` it is added to c. All ranks pass the same number of parts; one with k = 0 adds nothing. The
/// bits are those of a single product (kernels::matmul) whose k goes through the parts and ranks in that
/// order.
void chained_product(const Pass& pass, std::string_view unit, std::span<const ChainedPart> parts,
                     bool transpose_b, bool accumulate, const TensorView& c);

/// The parts of d_out W^T, for this rank's columns of d_out [rows, columns], which consist of equal blocks. A
/// single rank would process one block of all ranks before the next block. `weight` has these columns as its
/// columns (in_out) or as its rows.
class BlocksOfColumns {
 public:
  BlocksOfColumns(Engine& engine, const ConstTensorView& d_out, const ConstTensorView& weight, bool in_out,
                  int blocks);
  std::span<const ChainedPart> list() const { return parts_; }

 private:
  std::vector<ChainedPart> parts_;
  std::vector<StepTensors> memory_;
};

/// Computes the gradients of a norm's input and parameters, from this rank's rows of d_y and x with their
/// statistics. It adds the gradients of weight and bias (negative: no bias, and the norm is an RMSNorm), and
/// writes d_x, or adds to it when `accumulate`. With chained sums the rows are gathered, and only the axis's
/// first rank adds the parameters' gradients, with the same kernel as a single rank.
struct NormTensors {
  int weight = -1, bias = -1;
};
void norm_backward(const Pass& pass, const GatheredUnit& unit, const UnitGradients& gradients,
                   const NormTensors& norm, const ConstTensorView& d_y, const ConstTensorView& x,
                   const ConstTensorView& mean, const ConstTensorView& rstd, bool accumulate,
                   const TensorView& d_x);

/// Selects the columns of a matrix on `count` ranks of the axis: rank `first` and then every `step`-th.
/// gather_columns() returns them as tensor 0 on every rank, side by side in the order of the ranks. All ranks
/// must have equally many columns.
struct ColumnsOf {
  int first = 0, count = 1, step = 1;
};
StepTensors gather_columns(const Pass& pass, std::string_view unit, const ConstTensorView& own,
                           const ColumnsOf& ranks);

/// The backward of an RMSNorm of each head, from this rank's heads of d_y and x [rows, columns] with their
/// statistics. With chained sums the heads are gathered, of which `sharers` neighbouring ranks have the same,
/// and only the axis's first rank adds the weight's gradient.
void head_norm_backward(const Pass& pass, const GatheredUnit& unit, const UnitGradients& gradients,
                        int weight, const TensorView& d_y, const TensorView& x, const TensorView& rstd,
                        int sharers, const TensorView& d_x);

/// Queries, keys and values of this rank's heads, or their gradients.
struct HeadTensors {
  TensorView query, key, value;
};
/// attend_backward() for chained sums if several ranks share a key/value head. The first of these ranks
/// computes all query heads of it, as a single rank does, and has the whole gradients of key and value; those
/// of the other ranks are not used.
void shared_attention_backward(const Pass& pass, const GatheredUnit& unit,
                               const kernels::AttentionOptions& options, int sharers,
                               const ConstTensorView& d_out, const HeadTensors& inputs,
                               const ConstTensorView& out, const ConstTensorView& log_sum_exp,
                               const HeadTensors& gradients);

/// language_head() for chained sums: the blocks of columns are those of a single rank, and each passes
/// through all ranks, one after another. Logits exist for one block at a time, and are computed twice.
void chained_language_head(const LanguageModel& model, const Pass& pass, const GatheredUnit& unit,
                           const UnitGradients* gradients, const ConstTensorView& x,
                           const ConstTensorView& targets, const TensorView& loss_sum,
                           const TensorView& token_count, const TensorView* d_x);

}  // namespace tranche::models
