// compare_with_golden FOLDER: prints the result of compare_with_golden() as a JSON object, for
// scripts/compare_transformers.py.

#include <cstdio>
#include <exception>
#include <nlohmann/json.hpp>

#include "golden.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: compare_with_golden FOLDER\n");
    return 2;
  }
  try {
    const auto found = tranche::models::compare_with_golden(argv[1]);
    const nlohmann::json object = {{"logits", found.logits},     {"cached", found.cached},
                                   {"loss", found.loss},         {"gradients", found.gradients},
                                   {"training", found.training}, {"generated", found.generated},
                                   {"config", found.config},     {"worst_gradient", found.worst_gradient}};
    std::printf("%s\n", object.dump().c_str());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "compare_with_golden: %s\n", error.what());
    return 1;
  }
  return 0;
}
