#pragma once
/// Checkpoints with low-rank adapters (engine/lora.h): what they hold, their base, and the weights of both
/// merged.

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/reader.h"
#include "checkpoint/safetensors.h"
#include "engine/adapter_base.h"
#include "tranche/engine/lora.h"
#include "tranche/engine/model_spec.h"
#include "tranche/models/language_model.h"

namespace tranche::tools {

/// `tranche.lora` in an effective configuration (RunState::config) as JSON text; empty: no adapters.
std::string adapters_text(std::string_view config);
/// The reverse of what adapters_text() found; rank 0 for an empty text. Throws ConfigurationError.
LoraConfig adapters_from_text(const std::string& text);
/// The adapters of a checkpoint.
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

/// The frozen base of a checkpoint of adapters alone: that of its record, or of `base` in place of it.
class OpenedBase {
 public:
  /// Compares the base with the digest that the adapters' checkpoint has of it, which reads all of it, and
  /// adds a line to `notes` where there is no digest. Throws CheckpointError where there is no base, or
  /// another one.
  OpenedBase(checkpoint::Storage storage, const checkpoint::Reader& adapters,
             const models::LanguageModel& model, const std::string& base, std::vector<std::string>& notes);
  OpenedBase(const OpenedBase&) = delete;  // values_ refers to the other members
  OpenedBase& operator=(const OpenedBase&) = delete;
  /// Elements of one of the model's tensors in fp32.
  void read(const std::string& tensor, detail::ElementRange elements, float* values) const {
    values_->read(tensor, elements, values);
  }

 private:
  std::unique_ptr<checkpoint::Reader> reader_;  ///< null: it is drawn
  ModelSpec spec_;
  std::optional<detail::AdapterBase> values_;
};

/// The weights of a checkpoint with adapters, W + scale B A in place of W and A and B, one piece at a time in
/// fp64; A and B are read at once. What is read is valid while this lives.
class MergedWeights {
 public:
  /// `base`: a checkpoint or a folder of them, in place of the one that the manifest names. Throws
  /// CheckpointError where there is no base, or another than the adapters were trained beside.
  MergedWeights(checkpoint::Storage storage, checkpoint::Reader& adapters, const models::LanguageModel& model,
                const std::string& base, std::vector<std::string>& notes);
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
  void read_base(const std::string& tensor, detail::ElementRange elements, float* values) const;

  checkpoint::Reader& adapters_;
  std::optional<OpenedBase> base_;  ///< none: the checkpoint holds it
  ModelSpec spec_;
  std::vector<std::pair<std::string, Adapter>> merged_;  ///< by the base's tensor
  bool unties_head_ = false;
};

}  // namespace tranche::tools
