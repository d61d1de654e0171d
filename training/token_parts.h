#pragma once
/// Files of tokens with the ends of documents, in safetensors format.

#include <cstdint>
#include <string>
#include <vector>

#include "tranche/training/documents.h"
#include "tranche/training/tokenizer.h"

namespace tranche::training {

/// The keys of a TokenizerStamp in the metadata of a safetensors file.
inline constexpr const char *stamp_key = "tokenizer", *stamp_files_key = "tokenizer_files";

/// The counts of a part, or of all parts together.
struct PartSizes {
  std::int64_t tokens = 0, documents = 0;
  std::int64_t targets = 0;        ///< learned tokens
  std::int64_t conversations = 0;  ///< among the documents
  std::int64_t empty = 0;          ///< further documents, without a token
  std::int64_t unlearned = 0;      ///< among the documents: none of their tokens is learned
  std::int64_t not_utf8 = 0;       ///< among the documents: their text is not valid UTF-8
  PartSizes& operator+=(const PartSizes& other);
  friend bool operator==(const PartSizes&, const PartSizes&) = default;
};

/// Writes a part: tokens, ends and targets as 4, 8 and 1 bytes each. A failure leaves no file. Throws
/// IoError.
PartSizes write_part(const std::string& path, const TokenDocuments& documents);
/// The counts of an existing part. Throws ConfigurationError naming the file if it is not one.
PartSizes read_part_sizes(const std::string& path);

/// Write one file of `width` bytes per token by copying the parts, with some hundred KiB in memory at a time.
/// A failure leaves no file. Throws ConfigurationError if the parts' counts differ from `sizes`, which the
/// header contains, and IoError. The safetensors header contains `made_by` too, unless its texts are empty.
void join_as_safetensors(const std::vector<std::string>& parts, const PartSizes& sizes, int width,
                         const TokenizerStamp& made_by, const std::string& path);
void join_as_llmc(const std::vector<std::string>& parts, const PartSizes& sizes, int width,
                  const std::string& path);

}  // namespace tranche::training
