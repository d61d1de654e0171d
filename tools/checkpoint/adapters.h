#pragma once
/// Checkpoints with low-rank adapters (engine/lora.h): their contents, their base, and the merged weights of
/// both.

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

/// `tranche.lora` of an effective configuration (RunState::config) as JSON text; empty: no adapters.
std::string adapters_text(std::string_view config);
/// The inverse of adapters_text(); rank 0 for an empty text. Throws ConfigurationError.
LoraConfig adapters_from_text(const std::string& text);
/// The adapters of a checkpoint.
LoraConfig adapters_of(const checkpoint::Manifest& manifest);
/// "rank 8, alpha 16, dropout 0.1 on q_proj, v_proj"
std::string describe(const LoraConfig& lora);

/// Throws ConfigurationError unless a run with `present` can load the adapters `saved` in `checkpoint`.
void require_same_adapters(const LoraConfig& saved, const LoraConfig& present, std::string_view checkpoint);

/// The model's tensors with the adapters of a checkpoint; only the adapters if it has no base.
ModelSpec spec_with_adapters(const models::LanguageModel& model, const checkpoint::Manifest& manifest);
/// Throws CheckpointError, naming both sides, unless the adapters in a checkpoint are those of the model, and
/// so is its base if it has one.
void require_adapters(const models::LanguageModel& model, std::string_view model_origin,
                      const checkpoint::Reader& reader);

/// The frozen base of a checkpoint that contains only adapters: the one in its record, or `base` instead.
class OpenedBase {
 public:
  /// Compares the base with the digest in the adapters' checkpoint, which reads all of it; adds a line to
  /// `notes` if there is no digest. Throws CheckpointError if there is no base, or a different one.
  OpenedBase(checkpoint::Storage storage, const checkpoint::Reader& adapters,
             const models::LanguageModel& model, const std::string& base, std::vector<std::string>& notes);
  OpenedBase(const OpenedBase&) = delete;  // values_ refers to the other members
  OpenedBase& operator=(const OpenedBase&) = delete;
  /// Reads elements of one of the model's tensors in fp32.
  void read(const std::string& tensor, detail::ElementRange elements, float* values) const {
    values_->read(tensor, elements, values);
  }

 private:
  std::unique_ptr<checkpoint::Reader> reader_;  ///< null: the base is drawn from its seed
  ModelSpec spec_;
  std::optional<detail::AdapterBase> values_;
};

/// The weights of a checkpoint with adapters: W + scale B A replaces W, A and B. The sum is computed in fp64,
/// a range at a time; A and B are read once as a whole. The tensors are valid during this object's lifetime.
class MergedWeights {
 public:
  /// `base` is a checkpoint or a folder of them, which replaces the one in the manifest. Throws
  /// CheckpointError if there is no base, or another one than the adapters were trained with.
  MergedWeights(checkpoint::Storage storage, checkpoint::Reader& adapters, const models::LanguageModel& model,
                const std::string& base, std::vector<std::string>& notes);
  std::vector<checkpoint::ExportTensor> tensors();
  /// True if the head is tied and has an adapter, so that it is no longer equal to the embedding.
  bool unties_head() const { return unties_head_; }

 private:
  struct Adapter {
    std::string name;  ///< of the written tensor
    bool in_out = false;
    std::int64_t rank = 0, in = 0, out = 0;
    double scale = 1;
    std::vector<float> a, b;
  };
  void add(const Adapter& adapter, detail::ElementRange elements, float* values) const;
  void read_base(const std::string& tensor, detail::ElementRange elements, float* values) const;

  checkpoint::Reader& adapters_;
  std::optional<OpenedBase> base_;  ///< nullopt: the checkpoint contains it
  ModelSpec spec_;
  std::vector<std::pair<std::string, Adapter>> merged_;  ///< by the base's tensor
  bool unties_head_ = false;
};

}  // namespace tranche::tools
