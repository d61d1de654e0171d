#include "tranche/tools/program_main.h"

int main(int argc, char** argv) {
  return tranche::tools::program_main(argc, argv, tranche::models::ModelRegistry::with_builtin());
}
