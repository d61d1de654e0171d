#include "kernels/cpu/isolated_library.h"

#include <dlfcn.h>

#include "tranche/core/error.h"

namespace tranche::kernels::cpu {

namespace {

// Sanitizers do not support RTLD_DEEPBIND, and some systems lack it.
#if !defined(RTLD_DEEPBIND) || defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TRANCHE_NO_DEEP_BINDING
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define TRANCHE_NO_DEEP_BINDING
#endif
#endif
#ifdef TRANCHE_NO_DEEP_BINDING
constexpr int flags = RTLD_NOW | RTLD_LOCAL;
#else
constexpr int flags = RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND;
#endif

std::string last_error() {
  const char* text = dlerror();
  return text != nullptr ? text : "no reason given";
}

}  // namespace

IsolatedLibrary::IsolatedLibrary(const std::vector<std::string>& names, std::string_view package) {
  std::string reasons;
  for (const std::string& name : names) {
    handle_ = dlopen(name.c_str(), flags);
    if (handle_ != nullptr) {
      name_ = name;
      return;
    }
    reasons += "\n  " + last_error();
  }
  throw ConfigurationError("a library that Tranche multiplies matrices with is not there; install " +
                           std::string(package) + ", or build with TRANCHE_PLAIN_KERNELS:" + reasons);
}

void* IsolatedLibrary::address(const char* name) const {
  void* found = dlsym(handle_, name);
  if (found == nullptr) {
    throw ConfigurationError(name_ + " has no function " + name +
                             ", so it is not of the version that Tranche was built for: " + last_error());
  }
  return found;
}

}  // namespace tranche::kernels::cpu
