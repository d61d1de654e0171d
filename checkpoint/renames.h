#pragma once
/// New names for the tensors of a checkpoint or a folder, as its loader requests them.

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tranche::checkpoint {

/// Rules "old name, new name"; the first one that matches a name applies. One `*` in the old name stands for
/// any text, and in the new name for the same text: {"model.*", "transformer.*"}.
class Renames {
 public:
  Renames() = default;
  /// Throws InvalidArgument for an empty name, a second `*`, and a `*` in the new name alone.
  explicit Renames(std::vector<std::pair<std::string, std::string>> rules);

  bool empty() const noexcept { return rules_.empty(); }
  /// The name under which a tensor is looked up.
  std::string apply(std::string_view stored);
  /// Throws CheckpointError, naming `origin` and the closest of `names`, for a rule that matched no name.
  void require_used(std::string_view origin, const std::vector<std::string>& names) const;

 private:
  struct Rule {
    std::string from, to;
    bool used = false;
  };
  std::vector<Rule> rules_;
};

}  // namespace tranche::checkpoint
