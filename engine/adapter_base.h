#pragma once
/// The values of the frozen base that adapters were trained with: read from a checkpoint, or drawn again from
/// the seed. Private to engine/.

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "checkpoint/format.h"
#include "checkpoint/reader.h"
#include "tranche/engine/model_spec.h"
#include "tranche/kernels/reduction.h"

namespace tranche::detail {

/// 32 hexadecimal digits, in the format of BaseRecord::digest.
std::string to_text(const kernels::Digest& digest);
/// The seed from which the base of a checkpoint of adapters was drawn: the recorded one, or, in checkpoints
/// of earlier versions, that of the run. Throws CheckpointError naming `origin` if there is neither.
std::uint64_t seed_of_base(const checkpoint::Manifest& adapters, const std::string& origin);

class AdapterBase {
 public:
  /// Uses the base held by `from`; adapters of `model` are left out. Both must outlive this.
  AdapterBase(const ModelSpec& model, checkpoint::Reader& from);
  /// Uses the initial weights that an engine draws from this seed.
  AdapterBase(const ModelSpec& model, std::uint64_t seed);

  /// Reads elements of a tensor as fp32. Throws CheckpointError for damaged data.
  void read(const std::string& tensor, ElementRange elements, float* values) const;
  /// The digest of these values rounded to `dtype` (fp32, bf16 or fp16), as an engine that holds them
  /// computes it. With several parts, it is the share of one of them; the shares must be added. Throws
  /// CheckpointError for damaged data.
  kernels::Digest digest(DataType dtype, int part = 0, int parts = 1) const;

 private:
  void draw(std::uint64_t index, ElementRange elements, float* values) const;

  /// In the order of the units; a tensor's index keys its random numbers and its digest.
  std::vector<const TensorSpec*> tensors_;
  std::unordered_map<std::string, std::uint64_t> indices_;
  checkpoint::Reader* from_ = nullptr;  ///< null: the values are drawn
  std::uint64_t seed_ = 0;
};

}  // namespace tranche::detail
