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

/// The adapters of a checkpoint under PEFT's names. `reader` must outlive what is read.
std::vector<checkpoint::ExportTensor> peft_tensors(checkpoint::Reader& reader);
/// Text of adapter_config.json. With the companions of adapters that were imported it is theirs, with the
/// dropout of `lora`; else it names the folder that the base was imported from, and `notes` take a line where
/// none is known.
std::string peft_config(const models::LanguageModel& model, const LoraConfig& lora,
                        const checkpoint::Companions& companions, std::vector<std::string>& notes);

/// `tranche.lora` of an adapter_config.json; `file` is named in errors. Targets are as they are written.
/// Throws ConfigurationError naming the key of whatever would change numbers and is not supported: other
/// methods than LoRA, DoRA, ranks by pattern, biases, trained embeddings, initial weights that change the
/// base, and keys that are not known and ask for something.
LoraConfig lora_from_peft(std::string_view text, std::string_view file);

/// A folder of PEFT's, held against the base that it is for.
class PeftAdapters {
 public:
  /// Throws as lora_from_peft() does; CheckpointError for tensors that are missing, too many or of other
  /// shapes or dtypes, for layers that the configuration names and that have no adapter, and for a copy of a
  /// weight of the base with other values.
  PeftAdapters(detail::FileSystem& files, const std::string& path, const models::LanguageModel& model,
               checkpoint::Reader& base);
  const LoraConfig& lora() const noexcept { return lora_; }
  /// Notes on what could not be compared.
  const std::vector<std::string>& notes() const noexcept { return notes_; }
  /// Elements of an adapter's tensor by our name.
  void read(const std::string& tensor, detail::ElementRange elements, void* fp32) const;

 private:
  /// The layers with adapters are those that the configuration names.
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
