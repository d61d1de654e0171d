#pragma once
/// Files of tokens with the ends of documents, in the container safetensors.

#include <cstdint>
#include <string>
#include <vector>

#include "tranche/data/documents.h"

namespace tranche::data {

/// One file, whole in memory: tokens, ends and targets as 4, 8 and 1 bytes each.
void write_part(const std::string& path, const TokenDocuments& documents);
/// Throws ConfigurationError naming the file where it is no such part.
TokenDocuments read_part(const std::string& path);

/// Writes files of 2 or 4 bytes a token, part by part.
struct PartSizes {
  std::int64_t tokens = 0, documents = 0, targets = 0;  ///< of all parts; targets: tokens that are learned
};
void join_as_safetensors(const std::vector<std::string>& parts, const PartSizes& sizes, int width,
                         const std::string& path);
void join_as_llmc(const std::vector<std::string>& parts, const PartSizes& sizes, int width,
                  const std::string& path);

}  // namespace tranche::data
