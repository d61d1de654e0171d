#pragma once
/// The frozen base of adapters by value, whatever an engine holds it in: read from a checkpoint, or drawn
/// again from the seed. Internal to the library.

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "checkpoint/format.h"
#include "checkpoint/reader.h"
#include "tranche/engine/model_spec.h"
#include "tranche/kernels/reduction.h"

namespace tranche::detail {

/// 32 hexadecimal digits, as BaseRecord::digest has them.
std::string to_text(const kernels::Digest& digest);
/// The seed that the drawn base of a checkpoint of adapters came from: as its record says, or, in checkpoints
/// of earlier versions, that of the run. Throws CheckpointError naming `origin` where neither says it.
std::uint64_t seed_of_base(const checkpoint::Manifest& adapters, const std::string& origin);

class AdapterBase {
 public:
  /// Adapters that `model` has are left out. Both outlive it; `from` holds the other tensors.
  AdapterBase(const ModelSpec& model, checkpoint::Reader& from);
  /// The initial weights that an engine draws from this seed.
  AdapterBase(const ModelSpec& model, std::uint64_t seed);

  /// Elements of a tensor in fp32. Throws CheckpointError for what is damaged.
  void read(const std::string& tensor, ElementRange elements, float* values) const;
  /// The digest that an engine finds which holds these values rounded to `dtype` (fp32, bf16 or fp16). With
  /// several parts, the share of one of them; the shares add up. Throws CheckpointError for what is damaged.
  kernels::Digest digest(DataType dtype, int part = 0, int parts = 1) const;

 private:
  void draw(std::uint64_t index, ElementRange elements, float* values) const;

  /// In the order of the units; a tensor's index keys its random numbers and its digest.
  std::vector<const TensorSpec*> tensors_;
  std::unordered_map<std::string, std::uint64_t> indices_;
  checkpoint::Reader* from_ = nullptr;  ///< null: drawn
  std::uint64_t seed_ = 0;
};

}  // namespace tranche::detail
