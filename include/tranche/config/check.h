#pragma once
/// The result of checking a configuration key by key, without a model or a device and without throwing.

#include <string>
#include <string_view>
#include <vector>

#include "tranche/config/config.h"

namespace tranche {

struct ConfigCheck {
  struct Honoured {
    std::string key, value;  ///< the value as JSON: as written, or the value that replaced "auto"
    bool automatic = false;  ///< it was written "auto"
  };
  int ranks = 1;                    ///< the number of ranks for which the batch was completed
  std::vector<Honoured> honoured;   ///< by key; without keys that an entry of `refused` names
  std::vector<IgnoredKey> ignored;  ///< as in Config
  std::vector<std::string>
      refused;  ///< a line for each key that cannot be honoured, wrong value, or batch that does not fit
  /// The same as Config::notes: values that are replaced by others, and differences from DeepSpeed. If
  /// something is refused, only the former are listed.
  std::vector<std::string> notes;

  bool accepted() const { return refused.empty(); }
};

/// Reads like parse_config(), but returns the problems instead of throwing. `ranks` 0: the number of ranks
/// that follows from train_batch_size, train_micro_batch_size_per_gpu and gradient_accumulation_steps, or
/// else 1. Throws ConfigurationError for text that is not JSON or gives a key twice, because its keys cannot
/// be read.
ConfigCheck check_config(std::string_view json_text, int ranks = 0,
                         const std::vector<std::string>& overrides = {}, bool strict = false,
                         const std::string& origin = "configuration");

}  // namespace tranche
