#pragma once
/// The layers named in a PEFT adapter_config.json.

#include <cstdint>
#include <string>
#include <vector>

#include "core/json_node.h"

namespace tranche::tools {

/// The modules in `target_modules` but not in `exclude_modules`, within the layers of `layers_to_transform`,
/// by PEFT's rules for module names ("model.layers.0.self_attn.q_proj").
class NamedLayers {
 public:
  /// Rethrows the errors of reading `config`, if a key's type differs from PEFT's.
  explicit NamedLayers(const detail::JsonNode& config);

  /// False if the file leaves the choice to PEFT.
  bool any() const { return static_cast<bool>(wanted_); }
  /// The names of the list; empty for a pattern.
  std::vector<std::string> targets() const;
  /// `linear`: true if "all-linear" includes the module. Throws InvalidArgument for a pattern that is not
  /// supported here.
  bool has(const std::string& module, bool linear) const;

 private:
  static bool matches(const detail::JsonNode& node, const std::string& module);
  bool is_in_layers(const std::string& module) const;

  detail::JsonNode wanted_, excluded_;
  std::vector<std::int64_t> layers_;  ///< empty: all
  std::vector<std::string> lists_;    ///< names of the lists in which layers are counted; empty: any
};

}  // namespace tranche::tools
