#pragma once
/// Checkpoints with low-rank adapters (engine/lora.h): what they hold, their base, and the weights of both
/// merged.

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/reader.h"
#include "checkpoint/safetensors.h"
#include "tranche/engine/lora.h"
#include "tranche/engine/model_spec.h"
#include "tranche/models/language_model.h"

namespace tranche::tools {

/// `tranche.lora` in an effective configuration (RunState::config) as JSON text; empty: no adapters.
std::string adapters_text(std::string_view config);
/// The reverse of what adapters_text() found; rank 0 for an empty text. Throws ConfigurationError.
LoraConfig adapters_from_text(const std::string& text);
/// Those of a checkpoint.
LoraConfig adapters_of(const checkpoint::Manifest& manifest);
/// "rank 8, alpha 16, dropout 0.1 on q_proj, v_proj"
std::string describe(const LoraConfig& lora);

/// Throws ConfigurationError unless a run with `present` can take the adapters `saved` of `checkpoint`.
void require_same_adapters(const LoraConfig& saved, const LoraConfig& present, std::string_view checkpoint);

/// The model's tensors with the adapters of a checkpoint; those that it holds alone, where it has no base.
ModelSpec spec_with_adapters(const models::LanguageModel& model, const checkpoint::Manifest& manifest);
/// Throws CheckpointError, naming both sides, unless a checkpoint with adapters holds those of the model,
/// and, where it has a base of its own, the model too.
void require_adapters(const models::LanguageModel& model, std::string_view model_origin,
                      const checkpoint::Reader& reader);

/// The weights of a checkpoint with adapters, W + scale B A in place of W and A and B, one piece at a time in
/// fp64; A and B are read at once. What is read is valid while this lives.
class MergedWeights {
 public:
  /// `base`: a checkpoint or a folder of them, in place of the one that the manifest names. Throws
  /// CheckpointError where there is no base, or one of another model.
  MergedWeights(checkpoint::Storage storage, checkpoint::Reader& adapters, const models::LanguageModel& model,
                const std::string& base);
  std::vector<checkpoint::ExportTensor> tensors();
  /// True where the head is tied and has an adapter, so that it is no longer the embedding.
  bool unties_head() const { return unties_head_; }

 private:
  struct Adapter {
    std::string name;  ///< of the tensor that is written
    bool in_out = false;
    std::int64_t rank = 0, in = 0, out = 0;
    double scale = 1;
    std::vector<float> a, b;
  };
  void add(const Adapter& adapter, detail::ElementRange elements, float* values) const;

  checkpoint::Reader& adapters_;
  std::unique_ptr<checkpoint::Reader> own_base_;
  checkpoint::Reader* base_ = nullptr;
  ModelSpec spec_;
  std::vector<std::pair<std::string, Adapter>> merged_;  ///< by the base's tensor
  bool unties_head_ = false;
};

}  // namespace tranche::tools
