#pragma once
/// Runs a program and captures its output, for tests that read it. Only tests on Linux call it.

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <stdexcept>
#include <string>

namespace tranche::test {

/// The path of the running program's executable.
inline std::string own_path() {
  std::array<char, 4096> path{};
  const auto length = readlink("/proc/self/exe", path.data(), path.size() - 1);
  if (length <= 0) throw std::runtime_error("/proc/self/exe cannot be read");
  return {path.data(), static_cast<std::size_t>(length)};
}

/// The path of the file `name` beside the running program, as in a bundle, if it exists; else `otherwise`.
inline std::string beside_program(const std::string& name, const std::string& otherwise) {
  const std::string own = own_path();
  const std::string beside = own.substr(0, own.rfind('/') + 1) + name;
  return access(beside.c_str(), R_OK) == 0 ? beside : otherwise;
}

struct ProgramOutput {
  int status = 0;    ///< its exit status, or 128 + the signal that ended it
  std::string text;  ///< of both streams
};
/// Runs a command of the shell.
inline ProgramOutput output_of(const std::string& command) {
  ProgramOutput result;
  FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) throw std::runtime_error("no shell to run '" + command + "'");
  std::array<char, 4096> part{};
  while (const std::size_t bytes = fread(part.data(), 1, part.size(), pipe)) {
    result.text.append(part.data(), bytes);
  }
  const int status = pclose(pipe);
  result.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return result;
}

}  // namespace tranche::test
