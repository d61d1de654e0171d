#pragma once
/// The rows of a micro-batch on a mesh with the axis `context`. Its ranks see the same samples, and each
/// computes some tokens of every sample. With c ranks a sequence is cut into 2 c runs of equal length; rank i
/// computes run i and run 2 c - 1 - i, so that all ranks have equal work under a causal mask. A
/// sequence whose length is no multiple of 2 c is padded at its end. Padding has token 0 and no target, no
/// token of the sequence attends to it, and its gradients are zero, so that dropout masks and sums are those
/// of the sequence alone.
///
/// A rank's rows are its first run of all samples, followed by its second run of all samples. A Pass counts
/// them as twice as many sequences of a run's length. Only functions that depend on a token's position in its
/// sequence treat runs specially: positions, dropout (dropout_rows()) and attention (attend(),
/// attend_backward()). Without the axis there is one run, the whole sequence.

#include <cstdint>
#include <vector>

#include "tranche/core/tensor_view.h"
#include "tranche/models/language_model.h"
#include "tranche/models/step_tensors.h"

namespace tranche::models {

/// The number, among a sequence's 2 * ranks runs, of run `which` (0 or 1) of rank `rank`.
constexpr std::int64_t run_of_rank(int which, int rank, int ranks) {
  return which == 0 ? rank : 2 * ranks - 1 - rank;
}

/// The rows of this rank's run `run`; the first dimension of `rows` counts the runs of all samples, or their
/// tokens.
template <typename View>
View rows_of_run(const Pass& pass, const View& rows, int run) {
  const std::int64_t elements = rows.elements() / pass.runs();
  std::vector<std::int64_t> extents(rows.shape.extents().begin(), rows.shape.extents().end());
  extents.front() /= pass.runs();
  return rows.slice(run * elements, elements).reshaped(Shape(extents));
}

/// Neighbouring rows of a run that hold tokens of the sequence: the first `tokens` of each of `samples`
/// samples, one sample where padding follows its tokens.
struct RunPart {
  int run = 0;
  std::int64_t first_sample = 0, samples = 0, tokens = 0;
};
/// This rank's rows without padding, in their order.
std::vector<RunPart> parts_of_runs(const Pass& pass);

/// The rows of such a part. `rows` are [rows, ...], [batch, time] or [batch, time, ...] of the pass.
template <typename View>
View rows_of_part(const Pass& pass, const View& rows, const RunPart& part) {
  const std::int64_t of_token = rows.elements() / pass.rows(), of_sample = pass.time * of_token;
  const std::int64_t first = (part.run * (pass.batch / pass.runs()) + part.first_sample) * of_sample;
  std::vector<std::int64_t> extents(rows.shape.extents().begin(), rows.shape.extents().end());
  if (extents.front() == pass.rows()) {
    extents.front() = part.samples * part.tokens;
  } else {
    extents.at(0) = part.samples;
    extents.at(1) = part.tokens;
  }
  return rows.slice(first, part.samples * part.tokens * of_token).reshaped(Shape(extents));
}

/// Sets the rows of padding among this rank's rows of tokens to zero.
void clear_padding(const Pass& pass, const TensorView& rows);

/// Copies this rank's columns of `whole` [samples, sequence], which has a number for each token of all
/// samples, to `local` [batch, time] of the pass. Padding keeps its values.
void copy_local_tokens(const Pass& pass, const ConstTensorView& whole, const TensorView& local);

/// The part of a micro-batch that this rank reads: tokens, targets and, if the batch has them, positions.
/// Without the axis it is the caller's batch.
class LocalBatch {
 public:
  LocalBatch() = default;
  /// Also sets the positions of `pass`. Uses step memory. Without the axis the batch must outlive this
  /// object.
  LocalBatch(Pass& pass, const TokenBatch& batch);
  const ConstTensorView& tokens() const { return tokens_; }
  const ConstTensorView& targets() const { return targets_; }
  void release() { memory_.release(); }

 private:
  StepTensors memory_;
  ConstTensorView tokens_, targets_;
};

/// y = dropout(x) of this rank's rows of the residual, or of their gradient, with the masks of the whole
/// micro-batch; padding rows become zero. x and y may be the same memory. `probability` and `site`: see
/// Pass::dropout().
void dropout_rows(const Pass& pass, float probability, std::uint32_t site, const ConstTensorView& x,
                  const TensorView& y);

}  // namespace tranche::models
