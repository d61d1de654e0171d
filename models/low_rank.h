#pragma once
/// A low-rank adapter in a gathered unit (engine/lora.h), forward and backward, for linear.cpp and the head.

#include <optional>

#include "tranche/engine/handles.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/models/language_model.h"
#include "tranche/models/step_tensors.h"

namespace tranche::models {

/// Nothing is saved for backward: x A^T has few columns and is recomputed, so that models need not save it.
class LowRank {
 public:
  /// The adapter of the linear layer with that weight, if it has one. Valid while `unit` is held.
  static std::optional<LowRank> of(Engine& engine, const GatheredUnit& unit, int weight);

  const LowRankAdapter& adapter() const { return *adapter_; }
  const ConstTensorView& b() const { return b_; }
  /// Restricts the computation to these rows of B, [out, rank], and so to some of the layer's outputs.
  void set_b(const ConstTensorView& rows) { b_ = rows; }
  std::int64_t rank() const { return a_.shape[0]; }
  DataType dtype() const { return a_.dtype; }

  /// inner[rows, rank] = scale * dropout(x) A^T.
  void inner(const ConstTensorView& x, const TensorView& inner) const;
  /// The same for a row layer with chained sums: x and A have this rank's columns, and every rank gets the
  /// whole result.
  void chained_inner(const Pass& pass, const ConstTensorView& x, const TensorView& inner) const;
  /// out += inner(x) B^T; with `by_rows`, for generation, by kernels::matmul_rows and without dropout.
  void forward(const ConstTensorView& x, const TensorView& out, bool by_rows = false) const;
  /// d_inner[rows, rank] = scale * d_out B, the gradient of dropout(x) A^T.
  void inner_gradient(const ConstTensorView& d_out, const TensorView& d_inner) const;
  /// The same for a column layer with chained sums: d_out and B have this rank's outputs, in `blocks` blocks,
  /// and every rank gets the whole result.
  void chained_inner_gradient(const Pass& pass, const ConstTensorView& d_out, int blocks,
                              const TensorView& d_inner) const;
  /// out += inner B^T.
  void add_outputs(const ConstTensorView& inner, const TensorView& out) const;
  /// d_x += dropout(d_inner A).
  void input_gradient(const ConstTensorView& d_inner, const TensorView& d_x) const;

 private:
  void forward_by_rows(const ConstTensorView& x, const TensorView& out) const;
  LowRank(Engine& engine, const GatheredUnit& unit, const LowRankAdapter& adapter)
      : engine_(&engine),
        unit_(&unit.spec()),
        adapter_(&adapter),
        a_(unit.tensor(adapter.a)),
        b_(unit.tensor(adapter.b)) {}

  Engine* engine_;
  const UnitSpec* unit_;
  const LowRankAdapter* adapter_;
  ConstTensorView a_, b_;
};

/// Adds the gradient of A, d_inner^T dropout(x).
void add_a_gradient(Engine& engine, const UnitGradients& gradients, const LowRankAdapter& adapter,
                    const ConstTensorView& x, const ConstTensorView& d_inner);
/// Adds the gradient of B, d_out^T inner.
void add_b_gradient(Engine& engine, const UnitGradients& gradients, const LowRankAdapter& adapter,
                    const ConstTensorView& inner, const ConstTensorView& d_out);

}  // namespace tranche::models
