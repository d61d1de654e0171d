#pragma once
/// Tells where files of tokens were made with another tokenizer than that of the model that reads them.

#include <string>
#include <vector>

#include "tranche/training/token_file.h"

namespace tranche::tools {

/// Throws ConfigurationError if some files hold bytes and others tokens: the same numbers mean other text.
void require_one_kind(const std::vector<const training::TokenFile*>& files);

/// A line for each file whose tokens another tokenizer made than the one in `folders`, of which the first
/// counts that has one. If none has, or it cannot be read, files are compared with the first that names its
/// tokenizer. Files that name none are passed over.
std::vector<std::string> notes_on_tokenizers(const std::vector<const training::TokenFile*>& files,
                                             const std::vector<std::string>& folders);

/// A line if `given`, which was read from `folder`, has other tokens than the tokenizer in the folder `own`;
/// empty if it has the same, or `own` has none that can be read.
std::string note_on_tokenizer(const training::Tokenizer& given, const std::string& folder,
                              const std::string& own);

}  // namespace tranche::tools
