// A user's program that needs nothing but the lowest folder.
#include <tranche/core/dtype.h>
#include <tranche/core/error.h>
#include <tranche/version.h>

#include <cstdio>

int main() {
  try {
    std::printf("tranche %s knows %d bytes", tranche::version, static_cast<int>(tranche::size_of(tranche::DataType::bfloat16)));
    tranche::parse_data_type("fp31");
  } catch (const tranche::ConfigurationError& error) {
    std::printf(", refused: %s\n", error.what());
    return 0;
  }
  return 1;
}
