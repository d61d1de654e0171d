#pragma once
/// Files of a model's folder beside its weights: configuration, generation settings, tokenizer, chat
/// template. They travel with checkpoints as companions, from an import to an export.

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
/// The file that says where the others came from: {"folder": an absolute path}. It stays with checkpoints.
inline constexpr std::string_view origin_name = "origin.json";

/// The files of this folder that travel, and origin.json, which says where they came from. `notes` take a
/// line for each that cannot (too large, no regular file, a link that leads out of the folder and out of the
/// cache that it is a snapshot of) and one that names the files which never do. Throws CheckpointError for a
/// Git LFS pointer in place of a file, and ConfigurationError for end tokens that are none.
checkpoint::Companions read_model_files(detail::FileSystem& files, const std::string& folder,
                                        std::vector<std::string>& notes);
/// The companions that an export writes: the tokenizer's files and the chat template, and with `settings` the
/// generation settings. config.json is not among them.
checkpoint::Companions files_to_export(const checkpoint::Companions& companions, bool settings);
/// True where the companions are a tokenizer that training::load_tokenizer() looks for.
bool have_tokenizer(const checkpoint::Companions& companions);

/// config.json for the model: that of the companions, where it describes this model, with the dtype of the
/// weights and tie_word_embeddings of what is written. `notes` takes a line where it is of another model.
std::string config_to_export(const models::LanguageModel& model, const models::ModelRegistry& models,
                             const checkpoint::Companions& companions, DataType dtype, bool unties_head,
                             std::vector<std::string>& notes);

/// The tokens that end a text: eos_token_id of generation_config.json, or where that names none of
/// config.json; an empty text is a file that is not there. In ascending order. Throws ConfigurationError
/// naming `folder`, file and key for what is no token and no list of tokens.
std::vector<std::int32_t> end_tokens(std::string_view generation_config, std::string_view config,
                                     const std::string& folder);
/// The same of a folder on disk. Throws ConfigurationError for files that cannot be read.
std::vector<std::int32_t> end_tokens_of_folder(const std::string& folder);

}  // namespace tranche::tools
