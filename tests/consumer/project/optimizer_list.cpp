// A program that links one folder's library lists the optimizers; its own one follows the library's.
#include <tranche/optim/rules.h>

#include <cstdio>

int main() {
  for (const tranche::RuleType& type : tranche::rule_types())
    std::printf("%.*s ", static_cast<int>(type.name.size()), type.name.data());
  std::printf("\n");
  return tranche::find_rule("Adan") == nullptr ? 1 : 0;
}
