// main() of programs that do nothing but register benchmarks.
#include <cstring>

#include "bench/google_program.h"

int main(int argc, char** argv) {
  const char* const slash = std::strrchr(argv[0], '/');
  return tranche::bench::run_google_benchmarks(slash == nullptr ? argv[0] : slash + 1, argc, argv);
}
