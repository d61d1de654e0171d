#pragma once
/// Files of tokens with the ends of documents, in the container safetensors.

#include <cstdint>
#include <string>
#include <vector>

#include "tranche/training/documents.h"

namespace tranche::training {

/// Counts of a part, or of all of them.
struct PartSizes {
  std::int64_t tokens = 0, documents = 0;
  std::int64_t targets = 0;        ///< tokens that are learned
  std::int64_t conversations = 0;  ///< of the documents
  std::int64_t empty = 0;          ///< further documents, without a token
  std::int64_t unlearned = 0;      ///< of the documents: none of their tokens is learned
  std::int64_t not_utf8 = 0;       ///< of the documents: their text has other bytes than UTF-8
  PartSizes& operator+=(const PartSizes& other);
  friend bool operator==(const PartSizes&, const PartSizes&) = default;
};

/// Writes a part: tokens, ends and targets as 4, 8 and 1 bytes each. A failure leaves no file. Throws
/// IoError.
PartSizes write_part(const std::string& path, const TokenDocuments& documents);
/// The counts of a part that is there. Throws ConfigurationError naming the file where it is no such part.
PartSizes read_part_sizes(const std::string& path);

/// Write one file of `width` bytes a token: copies of the parts, of which some hundred KiB are in memory at a
/// time. A failure leaves no file. Throw ConfigurationError where the parts do not have the counts `sizes`,
/// which the header says, and IoError.
void join_as_safetensors(const std::vector<std::string>& parts, const PartSizes& sizes, int width,
                         const std::string& path);
void join_as_llmc(const std::vector<std::string>& parts, const PartSizes& sizes, int width,
                  const std::string& path);

}  // namespace tranche::training
