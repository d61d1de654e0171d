// A target with intentional mistakes, which driver_test.py lets the driver find.

#include <unistd.h>

#include <cstdlib>
#include <stdexcept>

#include "tests/fuzz/fuzz_target.h"

namespace tranche::fuzz {

namespace {

void read_planted(std::string_view input) {
  if (input == "refused") throw ConfigurationError("as it may");
  if (input.empty() || input == "accepted") return;
  const char* kind = std::getenv("TRANCHE_PLANTED");
  const std::string_view planted = kind == nullptr ? "" : kind;
  if (planted == "exception") throw std::out_of_range("of a container");
  if (planted == "status") throw InvalidArgument("of the caller, not of the file");
  if (planted == "hang") ::pause();
  if (planted == "crash") std::abort();
  if (planted == "memory") (void)std::vector<char>(std::size_t{1} << 32);
}

std::vector<std::string> planted_seeds() {
  return {"accepted", "refused"};
}

}  // namespace

Target planted_target() {
  return {"planted", read_planted, planted_seeds, {ExitStatus::configuration}};
}

}  // namespace tranche::fuzz
