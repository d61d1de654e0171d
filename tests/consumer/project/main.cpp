// A user's program: what it prints is checked by ../run.cmake.
#include <tranche/core/dtype.h>
#include <tranche/core/error.h>
#include <tranche/version.h>

#include <cstdio>
#include <string>

int main() {
  try {
    tranche::parse_data_type("fp31");
  } catch (const tranche::ConfigurationError& error) {
    const std::string name(tranche::name_of(tranche::parse_data_type("bf16")));
    std::printf("tranche %s reads %s and refuses: %s\n", tranche::version, name.c_str(), error.what());
    return 0;
  }
  return 1;
}
