#pragma once
/// Runs the program inside the test's process, as one rank.

#include <algorithm>
#include <sstream>
#include <string>
#include <vector>

#include "tests/tools/temporary.h"
#include "tools/program.h"

namespace tranche::tools::test {

struct ProgramResult {
  int status = -1;
  std::string out, errors;
};

inline ProgramResult run(const std::vector<std::string>& arguments) {
  std::ostringstream out, errors;
  const int status = run_program(arguments, {out, errors, false});
  return {status, out.str(), errors.str()};
}

/// Runs `tranche checkpoint ...`.
inline ProgramResult checkpoint_command(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "checkpoint");
  return run(arguments);
}

/// The arguments of `tranche train` for a tiny model and a text, unless `more` has other --data, followed by
/// `more`.
inline std::vector<std::string> tiny_train(const TemporaryFolder& folder,
                                           const std::vector<std::string>& more) {
  const std::string text = folder.write("tiny.txt", some_text(4000));
  std::vector<std::string> arguments{"train",
                                     "--model",
                                     "gpt-nano",
                                     "--sequence",
                                     "16",
                                     "--steps",
                                     "3",
                                     "--threads",
                                     "1",
                                     "--debug-peak-seconds",
                                     "0.01",
                                     "--set",
                                     "tranche.workspace=8MiB"};
  if (std::find(more.begin(), more.end(), "--data") == more.end())
    arguments.insert(arguments.end(), {"--data", text});
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

}  // namespace tranche::tools::test
