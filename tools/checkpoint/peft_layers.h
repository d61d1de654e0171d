#pragma once
/// The layers that an adapter_config.json of PEFT's names.

#include <cstdint>
#include <string>
#include <vector>

#include "core/json_node.h"

namespace tranche::tools {

/// `target_modules`, without those of `exclude_modules`, in the layers of `layers_to_transform`, as PEFT
/// finds them among the names of modules ("model.layers.0.self_attn.q_proj").
class NamedLayers {
 public:
  /// Throws what reading the keys of `config` throws, where one is of another type than PEFT writes.
  explicit NamedLayers(const detail::JsonNode& config);

  /// False where the file leaves the choice to PEFT.
  bool any() const { return static_cast<bool>(wanted_); }
  /// The names of the list; empty for a pattern.
  std::vector<std::string> targets() const;
  /// `linear`: "all-linear" stands for the module too. Throws InvalidArgument for a pattern that cannot be
  /// followed here.
  bool has(const std::string& module, bool linear) const;

 private:
  static bool matches(const detail::JsonNode& node, const std::string& module);
  bool is_in_layers(const std::string& module) const;

  detail::JsonNode wanted_, excluded_;
  std::vector<std::int64_t> layers_;  ///< empty: all
  std::vector<std::string> lists_;    ///< names of the lists that layers are counted in; empty: any
};

}  // namespace tranche::tools
