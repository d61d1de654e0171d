#pragma once
/// Loads a shared library in isolation: its symbols do not replace those of other libraries, nor theirs its
/// own. For example, LibTorch has its own oneDNN and BLAS, and depending on link order its exported symbols
/// would replace ours, or ours its.

#include <string>
#include <string_view>
#include <vector>

namespace tranche::kernels::cpu {

/// It is never unloaded. Sanitizers do not allow the isolation; under them the library sees the others.
class IsolatedLibrary {
 public:
  /// Loads the first of `names` (paths, or sonames) that can be loaded. Throws ConfigurationError with the
  /// loader's message for each when none can; `package` is the package to install.
  IsolatedLibrary(const std::vector<std::string>& names, std::string_view package);

  /// Throws ConfigurationError naming library and function when the library lacks it.
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
