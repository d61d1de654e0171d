// The functions that libFuzzer calls; its main runs the target named like the program.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>

#include "tests/fuzz/fuzz_target.h"

namespace tranche::fuzz {
namespace {

/// A static variable, because libFuzzer passes nothing from LLVMFuzzerInitialize to LLVMFuzzerTestOneInput.
Target& chosen() {
  static Target target;
  return target;
}

}  // namespace
}  // namespace tranche::fuzz

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv);
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  using namespace tranche::fuzz;
  try {
    if (*argc > 1 && std::strcmp((*argv)[1], "--list") == 0) {
      for (const Target& target : all_targets()) std::printf("%s\n", std::string(target.name).c_str());
      std::exit(0);
    }
    chosen() = target_of((*argv)[0]);
    if (*argc > 2 && std::strcmp((*argv)[1], "--corpus") == 0) {
      write_corpus(chosen(), (*argv)[2]);
      std::exit(0);
    }
  } catch (const std::exception& problem) {
    std::fprintf(stderr, "%s\n", problem.what());
    std::exit(2);
  }
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tranche::fuzz;
  (void)accepts(chosen(), {reinterpret_cast<const char*>(data), size});
  return 0;
}
