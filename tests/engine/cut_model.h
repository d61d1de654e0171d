#pragma once
/// A model for tests of the axes `tensor` and `context`. It has heads, fused heads, shared key and value
/// heads, uneven parts, whole tensors, frozen tensors, and hidden matrices among all of these except the
/// frozen. Its gradients are multiples of 1/64 that depend only on tensor, sample and element. So their sums
/// are exact, and every mesh has the bits of one rank.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tranche/comm/backends.h"
#include "tranche/engine/engine.h"

namespace tranche::test {

ModelSpec cut_model();

struct CutRun {
  int ranks = 1;
  std::string mesh = {};
  int stage = 0;
  std::string optimizer = "AdamW";
  DataType dtype = DataType::float32;
  DataType moments =
      DataType::float32;  ///< block8: only for the tensor `even`, which is cut into whole blocks
  bool stochastic_rounding = false;
  OffloadConfig offload = {};
  double clipping = 1;
  Replicate replicate = Replicate::all;
  std::vector<std::string> whole = {};  ///< dimensions that tranche.layout leaves whole
};

inline constexpr std::int64_t cut_samples = 8;  ///< samples of a step

/// Runs all micro-batches of a step; `bad` names a tensor whose last element gets an infinite gradient.
void cut_step(Engine& engine, Runtime& runtime, std::int64_t step, const std::string& bad = {});

/// Runs body(engine, runtime) on thread ranks.
void on_cut_ranks(const CutRun& run, const std::function<void(Engine&, Runtime&)>& body,
                  const std::function<void(Config&)>& adjust = {}, const ModelSpec& model = cut_model());

}  // namespace tranche::test
