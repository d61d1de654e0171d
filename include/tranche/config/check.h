#pragma once
/// The outcome of a configuration key by key, without a model, a device or an error.

#include <string>
#include <string_view>
#include <vector>

#include "tranche/config/config.h"

namespace tranche {

struct ConfigCheck {
  struct Honoured {
    std::string key, value;  ///< the value as JSON: as written, or what "auto" became
    bool automatic = false;  ///< it was written "auto"
  };
  int ranks = 1;                    ///< for which the batch was completed
  std::vector<Honoured> honoured;   ///< by key; none of what is refused is among them where it names its key
  std::vector<IgnoredKey> ignored;  ///< as in Config
  std::vector<std::string>
      refused;  ///< a line each: keys that cannot be honoured, wrong values, batches that do not fit
  /// The same as Config::notes: what is taken as something else, and what DeepSpeed would do differently.
  /// If something is refused, only the former are listed.
  std::vector<std::string> notes;

  bool accepted() const { return refused.empty(); }
};

/// Reads as parse_config does, and tells instead of throwing. `ranks` 0: as many as train_batch_size,
/// train_micro_batch_size_per_gpu and gradient_accumulation_steps say together, else 1. Throws
/// ConfigurationError for text that is not JSON or gives a key twice: no key of it can be told.
ConfigCheck check_config(std::string_view json_text, int ranks = 0,
                         const std::vector<std::string>& overrides = {}, bool strict = false,
                         const std::string& origin = "configuration");

}  // namespace tranche
