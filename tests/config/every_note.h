#pragma once
#include <string>
#include <vector>

#include "tranche/config/config.h"

namespace tranche::test {

/// The lines that a run prints about a configuration with --verbose: keys without effect, then the notes.
inline std::vector<std::string> every_note(const Config& config) {
  std::vector<std::string> notes;
  for (const IgnoredKey& key : config.ignored) notes.push_back(describe(key));
  notes.insert(notes.end(), config.notes.begin(), config.notes.end());
  return notes;
}

}  // namespace tranche::test
