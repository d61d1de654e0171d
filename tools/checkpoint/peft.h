#pragma once
/// Adapters in the format of Hugging Face's PEFT: adapter_config.json and adapter_model.safetensors.

#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "checkpoint/companions.h"
#include "checkpoint/reader.h"
#include "checkpoint/safetensors.h"
#include "core/json_node.h"
#include "tranche/engine/lora.h"
#include "tranche/models/language_model.h"

namespace tranche::tools {

inline constexpr const char* peft_stem = "adapter_model";
inline constexpr const char* peft_config_name = "adapter_config.json";

/// True for a folder with an adapter_config.json.
bool is_peft(detail::FileSystem& files, const std::string& path);

/// The adapters of a checkpoint under PEFT's names. `reader` must outlive the returned tensors.
std::vector<checkpoint::ExportTensor> peft_tensors(checkpoint::Reader& reader);
/// The text of adapter_config.json. If the companions come from imported adapters it is theirs, with the
/// dropout of `lora`; the folder from which the base was imported takes the place of no base, and of a path
/// to another one. Otherwise it names that folder. `notes` get a line if no base is known, or two are.
std::string peft_config(const models::LanguageModel& model, const LoraConfig& lora,
                        const checkpoint::Companions& companions, std::vector<std::string>& notes);

/// A text if the `base_model_name_or_path` of the adapters in `folder` names another model than the one that
/// the base with these companions was imported from; empty if it is the same, or one of the two is unknown.
/// A name of a hub is the same if the folder is that of its download, or has its last part as a name.
std::string other_base(const checkpoint::Companions& own, const checkpoint::Companions& base,
                       const std::string& folder);

/// The `tranche.lora` for an adapter_config.json; `file` is named in errors. Targets are copied unchanged.
/// Throws ConfigurationError naming the key of any unsupported setting that would change numbers: methods
/// other than LoRA, DoRA, ranks by pattern, biases, trained embeddings, initial weights that change the base,
/// and unknown keys with an effective value.
LoraConfig lora_from_peft(std::string_view text, std::string_view file);

/// A PEFT folder that was compared with its base.
class PeftAdapters {
 public:
  /// Throws as lora_from_peft() does; CheckpointError for tensors that are missing, additional or have other
  /// shapes or dtypes, for layers named in the configuration without an adapter, and for a copy of a base
  /// weight with other values.
  PeftAdapters(detail::FileSystem& files, const std::string& path, const models::LanguageModel& model,
               checkpoint::Reader& base);
  const LoraConfig& lora() const noexcept { return lora_; }
  /// Notes about properties that could not be compared.
  const std::vector<std::string>& notes() const noexcept { return notes_; }
  /// Reads elements of an adapter's tensor, by our name.
  void read(const std::string& tensor, detail::ElementRange elements, void* fp32) const;

 private:
  /// Checks that the layers with adapters are those named in the configuration.
  void require_named(const detail::JsonNode& config, const std::set<std::string>& layers,
                     const ModelSpec& model);
  void require_equal(const checkpoint::SafeTensor& copy, const std::string& name,
                     checkpoint::Reader& base) const;

  std::string path_;
  checkpoint::SafetensorsFolder folder_;
  LoraConfig lora_;
  std::vector<std::string> notes_;
  std::unordered_map<std::string, const checkpoint::SafeTensor*> tensors_;  ///< by our names
};

}  // namespace tranche::tools
