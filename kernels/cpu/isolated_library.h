#pragma once
/// A shared library that the rest of the process does not see, and that does not see the rest: its symbols
/// take no other library's place, and none takes its. LibTorch, say, has an oneDNN and a BLAS of its own,
/// whose exported symbols would stand in for ours or ours for its, by the order of linking.

#include <string>
#include <string_view>
#include <vector>

namespace tranche::kernels::cpu {

/// Never unloaded. Under a sanitizer, which does not allow it, the library does see the rest.
class IsolatedLibrary {
 public:
  /// Takes the first of `names` (paths, or sonames) that loads. Throws ConfigurationError when none does,
  /// with what the loader says of each; `package` is what to install.
  IsolatedLibrary(const std::vector<std::string>& names, std::string_view package);

  /// Throws ConfigurationError naming library and function when it has none of that name.
  template <class Function>
  void find(Function*& function, const char* name) const {
    function = reinterpret_cast<Function*>(address(name));
  }

 private:
  void* address(const char* name) const;
  std::string name_;
  void* handle_ = nullptr;
};

}  // namespace tranche::kernels::cpu
