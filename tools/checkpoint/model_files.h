#pragma once
/// Files in a model's folder beside its weights: configuration, generation settings, tokenizer, chat
/// template. They are the companions of checkpoints, from an import to an export.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/companions.h"
#include "tranche/core/dtype.h"
#include "tranche/models/model_registry.h"

namespace tranche::tools {

inline constexpr std::string_view config_name = "config.json";
inline constexpr std::string_view generation_config_name = "generation_config.json";
/// The file that records the source of the others: {"folder": an absolute path}. Exports leave it out.
inline constexpr std::string_view origin_name = "origin.json";

/// Reads the folder's files that become companions, and makes origin.json, which records their source. Adds a
/// line to `notes` for each file that is skipped because it is too large, not a regular file, or a link that
/// leads out of the folder and its download cache. One more line names the files that are never companions.
/// Throws CheckpointError for a Git LFS pointer in place of a file, and ConfigurationError for invalid end
/// tokens.
checkpoint::Companions read_model_files(detail::FileSystem& files, const std::string& folder,
                                        std::vector<std::string>& notes);
/// The companions that an export writes: the tokenizer's files and the chat template, and with `settings` the
/// generation settings. config.json is not among them.
checkpoint::Companions files_to_export(const checkpoint::Companions& companions, bool settings);
/// True if the companions contain a tokenizer that training::load_tokenizer() recognises.
bool have_tokenizer(const checkpoint::Companions& companions);

/// The config.json for the model: the companions' if it describes this model, with the dtype of the weights
/// and the written tie_word_embeddings. `notes` get a line if it describes another model.
std::string config_to_export(const models::LanguageModel& model, const models::ModelRegistry& models,
                             const checkpoint::Companions& companions, DataType dtype, bool unties_head,
                             std::vector<std::string>& notes);

/// The tokens that end a text: eos_token_id of generation_config.json or, if that has none, of config.json;
/// an empty text means that the file does not exist. In ascending order. Throws ConfigurationError naming
/// `folder`, file and key for a value that is neither a token nor a list of tokens.
std::vector<std::int32_t> end_tokens(std::string_view generation_config, std::string_view config,
                                     const std::string& folder);
/// The same for a folder on disk. Throws ConfigurationError for files that cannot be read.
std::vector<std::int32_t> end_tokens_of_folder(const std::string& folder);

}  // namespace tranche::tools
